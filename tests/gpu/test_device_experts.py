"""Routed experts on the device against the reference, in every type, and what must not matter."""

import random

import pytest
import torch
from gguf import GGMLQuantizationType as T
from kernel_experts import Experts, relative_error, routing

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.moe.kernels import DeviceRoutedBatch, SiTU, SwiGLU, Workspace, execute_resident

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-4
"""‖out - reference‖ / ‖reference‖ with activations in 16-bit fixed point, rounded twice."""

FLOAT_TOLERANCE = 2e-6
"""The same where activations stay float32."""

SMALL = (T.MXFP4, T.Q4_0, T.Q8_0)
K_QUANTS = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K)

HIDDEN, WIDTH, K = 512, 256, 4
"""What most tests have in common: each size is compiled anew, for seconds."""

of_both_models = pytest.mark.parametrize(
    "types", [(T.MXFP4,) * 3, (T.Q2_K, T.Q2_K, T.Q3_K)], ids=["deepseek", "kimi"]
)


def slow(*values):
    """Cases beyond those that show each type in each kind of launch."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Run:
    """Batches over one set of experts with one workspace."""

    def __init__(self, experts, activation, *, n_tokens, top_k):
        self.experts = experts
        self.activation = activation
        self.workspace = Workspace(
            [experts.layout], n_tokens=n_tokens, top_k=top_k, device=experts.arena.device
        )

    def __call__(self, x, ids, weights, portions=None):
        batch = DeviceRoutedBatch(
            x,
            ids,
            weights,
            self.activation,
            host_ids=ids.tolist(),
            layout=self.experts.layout,
            arena=self.experts.arena,
            slot_of=self.experts.slot_of,
            workspace=self.workspace,
        )
        for portion in portions or [batch.experts]:
            batch.add(portion)
        assert batch.n_executed == ids.numel()
        return batch.finish().clone()


def check(types, device, *, hidden, width, n_tokens, activation, n_experts=5, top_k=3):
    experts = Experts.random(types, hidden, width, n_experts, device)
    run = Run(experts, activation, n_tokens=n_tokens + 1, top_k=top_k)
    inputs = routing(n_tokens, top_k, n_experts, hidden, device)
    error = relative_error(run(*inputs), experts.reference(*inputs, activation))
    assert error < (FLOAT_TOLERANCE if set(types) <= {T.F16, T.BF16, T.IQ4_NL} else TOLERANCE)


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("kind", [*SMALL, T.F16, T.BF16], ids=lambda kind: f"small-{kind.name}")
def test_types_of_small_blocks_match_the_reference(kind, n_tokens, device):
    check(
        (kind, kind, kind),
        device,
        hidden=96,
        width=32,
        n_tokens=n_tokens,
        activation=SwiGLU(1.0),
    )


@pytest.mark.parametrize("n_tokens", [1, *slow(2, 8)])
@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_match_the_reference(kind, n_tokens, cuda):
    check((kind, kind, kind), cuda, hidden=768, width=512, n_tokens=n_tokens, activation=SiTU())


@pytest.mark.parametrize("n_tokens", range(1, 9))
@of_both_models
def test_every_decode_size_matches_the_reference(types, n_tokens, cuda):
    check(
        types,
        cuda,
        hidden=HIDDEN,
        width=WIDTH,
        n_tokens=n_tokens,
        activation=SwiGLU(10.0),
        top_k=K,
    )


@pytest.mark.parametrize(
    "types",
    [(T.Q8_0, T.MXFP4, T.F16), (T.MXFP4, T.Q4_0, T.Q8_0), (T.IQ4_NL, T.MXFP4, T.F16)],
    ids=["small-two-orders", "small-two-types", "small-no-kernel"],
)
def test_roles_of_different_types_match_the_reference(types, device):
    check(types, device, hidden=64, width=32, n_tokens=2, activation=SiTU())


@of_both_models
def test_prefill_matches_the_reference_with_few_and_with_many_tokens_of_an_expert(types, cuda):
    experts = Experts.random(types, HIDDEN, WIDTH, 6, cuda)
    run = Run(experts, SwiGLU(10.0), n_tokens=200, top_k=K)
    x, ids, weights = routing(200, K, 5, HIDDEN, cuda)
    ids[:3, 1] = 5
    wanted = experts.reference(x, ids, weights, run.activation)
    assert relative_error(run(x, ids, weights), wanted) < TOLERANCE


@of_both_models
@pytest.mark.parametrize("n_tokens", [1, 5, 90])
def test_order_and_company_of_arrivals_never_change_a_bit(types, n_tokens, cuda):
    experts = Experts.random(types, HIDDEN, WIDTH, 6, cuda)
    run = Run(experts, SwiGLU(10.0), n_tokens=n_tokens, top_k=K)
    inputs = routing(n_tokens, K, 6, HIDDEN, cuda)
    at_once = run(*inputs)
    wanted = sorted(set(inputs[1].flatten().tolist()))
    for seed in range(4):
        order = random.Random(seed).sample(wanted, len(wanted))
        cut = seed % len(order)
        portions = [order[:cut], *([expert] for expert in order[cut:])]
        assert torch.equal(run(*inputs, portions), at_once)


def test_order_of_arrivals_never_changes_a_bit_tiny(device):
    experts = Experts.random((T.MXFP4,) * 3, 64, 32, 4, device)
    run = Run(experts, SwiGLU(10.0), n_tokens=2, top_k=2)
    inputs = routing(2, 2, 4, 64, device)
    wanted = sorted(set(inputs[1].flatten().tolist()))
    first, second = (
        run(*inputs, [[expert] for expert in order]) for order in (wanted, wanted[::-1])
    )
    assert torch.equal(first, second)


@of_both_models
def test_where_records_lie_never_changes_a_bit(types, cuda):
    inputs = routing(4, K, 6, HIDDEN, cuda)
    results = []
    for placement in range(3):
        experts = Experts.random(types, HIDDEN, WIDTH, 6, cuda)
        moved = torch.full_like(experts.arena, 255 if placement else 0)
        slots = torch.randperm(8, generator=torch.Generator().manual_seed(placement))[:6]
        moved[slots] = experts.arena[experts.slot_of.long()]
        experts = experts._replace(arena=moved, slot_of=slots.int().to(cuda))
        results.append(Run(experts, SwiGLU(10.0), n_tokens=4, top_k=K)(*inputs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_expert_that_a_token_names_twice_counts_twice_small(device):
    experts = Experts.random((T.MXFP4,) * 3, 64, 32, 3, device)
    run = Run(experts, SwiGLU(1.0), n_tokens=1, top_k=2)
    x, _, _ = routing(1, 2, 3, 64, device)
    twice = torch.tensor([[2, 2]], device=device)
    halves = run(x, twice, torch.tensor([[0.25, 0.5]], device=device))
    wanted = experts.reference(x, twice, torch.tensor([[0.75, 0.0]]), run.activation)
    assert relative_error(halves, wanted) < TOLERANCE


def test_inputs_that_are_not_finite_show_in_the_output(cuda):
    experts = Experts.random((T.MXFP4,) * 3, 64, 32, 3, cuda)
    run = Run(experts, SwiGLU(10.0), n_tokens=1, top_k=2)
    x, ids, weights = routing(1, 2, 3, 64, cuda)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[0, 7] = bad
        assert not run(broken, ids, weights).isfinite().any()


def resident(run, x, ids, weights, out=None):
    return execute_resident(
        x,
        ids,
        weights,
        run.activation,
        layout=run.experts.layout,
        arena=run.experts.arena,
        slot_of=run.experts.slot_of,
        workspace=run.workspace,
        out=out,
    )


def test_a_resident_token_gives_the_bits_of_a_batch_small(device):
    experts = Experts.random((T.MXFP4,) * 3, 64, 32, 3, device)
    run = Run(experts, SwiGLU(10.0), n_tokens=1, top_k=2)
    inputs = routing(1, 2, 3, 64, device)
    out = torch.full((1, 64), torch.nan, device=device)
    assert resident(run, *inputs, out) is out
    assert torch.equal(out, run(*inputs))


@of_both_models
def test_a_captured_token_serves_other_tokens_other_experts_and_other_slots(types, cuda):
    experts = Experts.random(types, HIDDEN, WIDTH, 6, cuda)
    run = Run(experts, SwiGLU(10.0), n_tokens=1, top_k=K)
    x, ids, weights = routing(1, K, 6, HIDDEN, cuda)
    resident(run, x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = resident(run, x, ids, weights)
    others = routing(1, K, 6, HIDDEN, cuda, seed=9)
    for mine, other in zip((x, ids, weights), others, strict=True):
        mine.copy_(other)
    order = torch.randperm(8, device=cuda)
    experts.arena.copy_(experts.arena[order.argsort()])
    experts.slot_of.copy_(order.int()[experts.slot_of.long()])
    graph.replay()
    assert torch.equal(out.clone(), run(*others))


def test_a_decode_batch_allocates_nothing_and_never_waits_for_the_device(cuda):
    experts = Experts.random((T.MXFP4,) * 3, HIDDEN, WIDTH, 6, cuda)
    run = Run(experts, SwiGLU(10.0), n_tokens=4, top_k=K)
    x, ids, weights = routing(4, K, 6, HIDDEN, cuda)
    run(x, ids, weights)
    host_ids = ids.tolist()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = DeviceRoutedBatch(
            x,
            ids,
            weights,
            run.activation,
            host_ids=host_ids,
            layout=experts.layout,
            arena=experts.arena,
            slot_of=experts.slot_of,
            workspace=run.workspace,
        )
        for expert in batch.experts:
            batch.add([expert])
        batch.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_finishing_early_is_an_error_small(device):
    experts = Experts.random((T.MXFP4,) * 3, 64, 32, 3, device)
    workspace = Workspace([experts.layout], n_tokens=1, top_k=2, device=device)
    x, ids, weights = routing(1, 2, 3, 64, device)
    batch = DeviceRoutedBatch(
        x,
        ids,
        weights,
        SwiGLU(None),
        host_ids=ids.tolist(),
        layout=experts.layout,
        arena=experts.arena,
        slot_of=experts.slot_of,
        workspace=workspace,
    )
    batch.add(batch.experts[:1])
    with pytest.raises(AssertionError, match="were chosen but not executed"):
        batch.finish()


def test_real_dimensions_of_deepseek_match_the_reference(cuda):
    check((T.MXFP4,) * 3, cuda, hidden=4096, width=2048, n_tokens=1, activation=SwiGLU(10.0))


def test_real_dimensions_of_kimi_match_the_reference(cuda):
    check((T.Q2_K, T.Q2_K, T.Q3_K), cuda, hidden=3584, width=3072, n_tokens=1, activation=SiTU())
