import itertools

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.moe import RoutedBatch, clamped_swiglu, expert_matrices
from tieredmoe.spec import ExpertLayout

HIDDEN, WIDTH, N_EXPERTS = 64, 32, 7
N_WEIGHTS = HIDDEN * WIDTH
LAYOUT = ExpertLayout.build(
    {
        "gate": (T.F16, (WIDTH, HIDDEN), 2 * N_WEIGHTS),
        "up": (T.F32, (WIDTH, HIDDEN), 4 * N_WEIGHTS),
        "down": (T.MXFP4, (HIDDEN, WIDTH), 17 * N_WEIGHTS // 32),
    }
)


def make_record(seed, layout=LAYOUT):
    rng = np.random.default_rng(seed)
    record = np.zeros(layout.stride, np.uint8)
    gate, up, down = layout.roles
    for role, dtype in ((gate, np.float16), (up, np.float32)):
        values = (rng.standard_normal(role.shape) / 4).astype(dtype)
        record[role.offset : role.offset + role.nbytes] = values.view(np.uint8).ravel()
    blocks = rng.integers(0, 256, (down.nbytes // 17, 17), dtype=np.uint8)
    blocks[:, 0] = rng.integers(122, 126, len(blocks))
    record[down.offset : down.offset + down.nbytes] = blocks.ravel()
    return record


RECORDS = [make_record(seed) for seed in range(N_EXPERTS)]


def routing(n_tokens, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(N_EXPERTS, generator=generator)[:k] for _ in range(n_tokens)])
    return x, ids, torch.rand(n_tokens, k, generator=generator)


def run(x, ids, weights, order=None, records=RECORDS):
    batch = RoutedBatch(x, ids, weights, clamped_swiglu(1.0))
    for expert in order or batch.experts:
        batch.add(expert, *expert_matrices(records[expert], LAYOUT))
    return batch.finish()


@given(st.data())
def test_the_order_of_arrival_never_changes_a_bit(data):
    x, ids, weights = routing(
        data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 99))
    )
    experts = RoutedBatch(x, ids, weights, clamped_swiglu(1.0)).experts
    order = data.draw(st.permutations(experts))
    assert torch.equal(run(x, ids, weights, order), run(x, ids, weights))


def test_the_sum_over_k_runs_in_routing_order():
    """1e8 + 1 - 1e8 tells orders apart in float32: 0 if summed as written, 1 in other orders."""
    x = torch.ones(1, 1)
    big, one = torch.full((1, 1), 1e8), torch.ones(1, 1)
    values = {0: big, 1: one, 2: -big}
    for order in itertools.permutations(range(3)):
        batch = RoutedBatch(x, torch.tensor([order]), torch.ones(1, 3), lambda g, _: g)
        for expert in (2, 0, 1):
            batch.add(expert, lambda v, e=expert: v * values[e], lambda v: v, lambda v: v)
        want = (values[order[0]] + values[order[1]]) + values[order[2]]
        assert torch.equal(batch.finish(), want)


def test_it_computes_the_weighted_sum_of_the_chosen_experts():
    x, ids, weights = routing(6, 3)
    want = torch.zeros(6, HIDDEN, dtype=torch.float64)
    activation = clamped_swiglu(1.0)
    for t, k in itertools.product(range(6), range(3)):
        gate, up, down = expert_matrices(RECORDS[ids[t, k]], LAYOUT)
        row = x[t : t + 1]
        want[t] += (weights[t, k] * down(activation(gate(row), up(row)))[0]).double()
    torch.testing.assert_close(run(x, ids, weights), want.float())


def test_an_expert_that_a_token_names_twice_counts_twice():
    x, _, _ = routing(1, 1)
    once = run(x, torch.tensor([[4]]), torch.tensor([[0.75]]))
    twice = run(x, torch.tensor([[4, 4]]), torch.tensor([[0.25, 0.5]]))
    torch.testing.assert_close(twice, once)


def test_the_working_set_is_the_distinct_experts_in_ascending_order():
    x, _, _ = routing(3, 2)
    ids = torch.tensor([[6, 2], [2, 0], [6, 2]])
    assert RoutedBatch(x, ids, torch.ones(3, 2), clamped_swiglu(None)).experts == (0, 2, 6)


def test_finishing_before_every_chosen_expert_was_executed_is_an_error():
    x, ids, weights = routing(4, 2)
    batch = RoutedBatch(x, ids, weights, clamped_swiglu(None))
    for expert in batch.experts[1:]:
        batch.add(expert, *expert_matrices(RECORDS[expert], LAYOUT))
    with pytest.raises(AssertionError, match=rf"experts \[{batch.experts[0]}\] were chosen"):
        batch.finish()


@pytest.mark.parametrize("expert", [5, 1], ids=["not chosen", "executed before"])
def test_an_expert_that_is_not_wanted_is_an_error(expert):
    x, _, _ = routing(1, 1)
    batch = RoutedBatch(x, torch.tensor([[1, 2]]), torch.ones(1, 2), clamped_swiglu(None))
    batch.add(1, *expert_matrices(RECORDS[1], LAYOUT))
    with pytest.raises(AssertionError, match=f"expert {expert} was not chosen, or is here again"):
        batch.add(expert, *expert_matrices(RECORDS[expert], LAYOUT))


@pytest.mark.parametrize("wrap", [np.asarray, memoryview, torch.from_numpy])
def test_a_record_of_any_kind_is_viewed_in_place(wrap):
    record = RECORDS[3].copy()
    gate, _, _ = expert_matrices(wrap(record), LAYOUT)
    x = torch.ones(1, HIDDEN)
    before = gate(x)
    record[: 2 * N_WEIGHTS] = 0
    assert before.abs().sum() > 0
    assert torch.equal(gate(x), torch.zeros(1, WIDTH))


def test_where_a_record_lies_does_not_change_a_bit():
    x, ids, weights = routing(6, 3)
    shifted = []
    for n_skew, record in enumerate(RECORDS):
        buffer = torch.zeros(4 * n_skew + record.size, dtype=torch.uint8)
        buffer[4 * n_skew :] = torch.from_numpy(record)
        shifted.append(buffer[4 * n_skew :])
    assert torch.equal(run(x, ids, weights, records=shifted), run(x, ids, weights))


def test_a_record_shorter_than_its_payload_is_refused():
    with pytest.raises(ValueError, match="record of 100 bytes cannot hold a payload"):
        expert_matrices(np.zeros(100, np.uint8), LAYOUT)


def test_the_gate_is_clamped_from_above_and_the_up_from_both_sides_before_silu():
    gate = torch.tensor([5.0, -5.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 9.0, -9.0])
    silu = torch.nn.functional.silu
    want = torch.stack([silu(gate[2]) * 2, silu(gate[1]), 2 * silu(gate[2]), -2 * silu(gate[2])])
    want[0] = silu(torch.tensor(2.0))
    torch.testing.assert_close(clamped_swiglu(2.0)(gate, up), want)


def test_without_a_limit_nothing_is_clamped():
    gate, up = torch.randn(2, 50) * 100
    assert torch.equal(clamped_swiglu(None)(gate, up), torch.nn.functional.silu(gate) * up)
