"""A token in static buffers is the functional forward's: logits, routing, state, after failures."""

import asyncio

import numpy as np
import pytest
import torch
from failing_experts import Interrupted
from gguf import GGMLQuantizationType as T
from kimi_k3_reference import K3Shape, random_weights
from kimi_k3_source import source_of
from model_runs import CPU, Recorder, load, load_source
from torch.utils._python_dispatch import TorchDispatchMode

from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.kimi_k3.static_state import StaticState, static_nbytes
from tieredmoe.adapters.routing import Routing
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.errors import ExpertLoadError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

ODD = K3Shape(
    n_layers=5, mla_layers=(1, 4), block=2, hidden=64, vocab=90, kernel=3, n_experts=8, top_k=2
)
ALL_ROUTED = K3Shape(
    n_layers=3, mla_layers=(1,), block=5, hidden=48, vocab=70, n_dense=0, kernel=1, kda_dim=24
)
MADE = KimiK3Shape(
    num_hidden_layers=4,
    full_attn_layers=(3, 4),
    first_k_dense_replace=2,
    attn_res_block_size=3,
    hidden_size=64,
    q_lora_rank=32,
    kv_lora_rank=32,
    intermediate_size=96,
    kda_num_heads=3,
    kda_head_dim=32,
    routed_expert_hidden_size=48,
    moe_intermediate_size=64,
    routed_scaling_factor=2.0,
)
SHAPES = {"odd": ODD, "all routed": ALL_ROUTED, "made": MADE}
N_TOKENS, N_CAPACITY = 200, 256


@pytest.fixture(scope="module", params=SHAPES)
def tiny(request, tmp_path_factory):
    """A model, its experts, and tokens."""
    rng = np.random.default_rng(len(request.param))
    if request.param == "made":
        path = tmp_path_factory.mktemp("kimi") / "tiny.gguf"
        make_kimi_k3(path, shape=MADE, types=KimiK3Types.uniform(T.F32), seed=4)
        return *load(path), torch.from_numpy(rng.integers(0, MADE.vocab_size, N_TOKENS))
    shape = SHAPES[request.param]
    loaded = load_source(source_of(shape, random_weights(shape, 5)))
    return *loaded, torch.from_numpy(rng.integers(0, shape.vocab, N_TOKENS))


class Copying(Recorder):
    """Remembers routings that are overwritten in place."""

    async def run(self, layer, x, routing, activation, *, meanwhile):
        kept = Routing(routing.ids.clone(), routing.weights.clone())
        return await super().run(layer, x, kept, activation, meanwhile=meanwhile)


@pytest.fixture(scope="module")
def functional(tiny):
    """What the functional forward makes of the tokens one by one: logits, routing, last state."""
    return prefilled(*tiny, [1] * N_TOKENS)


def prefilled(model, experts, tokens, lengths):
    """The functional forward over chunks of these lengths: logits, routing, and the state."""
    recorder, state = Recorder(experts), model.new_state(N_CAPACITY)

    async def main():
        chunks = tokens[: sum(lengths)].split(lengths)
        return torch.cat([await model.forward(c, state, recorder, logits="all") for c in chunks])

    return asyncio.run(main()), recorder, state


def loaded(model, state):
    """A step that holds the sequence of ``state``."""
    step = model.new_decode_step(N_CAPACITY)
    step.load(state.layers, n_tokens=state.n_tokens)
    return step


def decoded(step, experts, tokens):
    """Logits of ``tokens``, one by one through ``step``."""

    async def main():
        stepper, rows = EagerStepper(step, experts), []
        for token in tokens.tolist():
            await stepper(token)
            rows.append(step.logits.clone())
        return torch.cat(rows)

    return asyncio.run(main())


def relative(got, want):
    """The largest relative error of any position."""
    assert got.shape == want.shape
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def tensors(layers):
    return [
        part.clone()
        for layer in layers
        for part in (
            (layer.first(layer.n),) if hasattr(layer, "first") else (layer.memory, layer.window)
        )
    ]


def assert_states_close(got, want):
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_every_position_has_the_functional_forwards_logits_routing_and_state(tiny, functional):
    model, experts, tokens = tiny
    logits, recorder, state = functional
    step, own = loaded(model, model.new_state(1)), Copying(experts)
    assert relative(decoded(step, own, tokens), logits) < 1e-5
    assert step.n_tokens == N_TOKENS
    for layer in step.layers:
        ids, weights = own.routing(layer.layer)
        assert torch.equal(ids, recorder.routing(layer.layer)[0])
        assert relative(weights, recorder.routing(layer.layer)[1]) < 1e-5
    assert_states_close(step.unload(n_context=N_CAPACITY), state.layers)


@pytest.mark.parametrize("lengths", [[1], [2], [3, 1], [7, 20], [30]], ids=str)
def test_it_goes_on_from_a_prompt_in_any_chunks(tiny, functional, lengths):
    model, experts, tokens = tiny
    start = sum(lengths)
    step = loaded(model, prefilled(model, experts, tokens, lengths)[2])
    got = decoded(step, experts, tokens[start : start + 9])
    assert relative(got, functional[0][start : start + 9]) < 1e-4  # chunks round otherwise


@pytest.mark.parametrize("i", [0, -1])
def test_a_token_that_failed_half_way_can_be_repeated_with_the_same_bits(tiny, i):
    model, experts, tokens = tiny
    state = prefilled(model, experts, tokens, [20])[2]
    want = decoded(loaded(model, state), experts, tokens[20:26])
    step, before = loaded(model, state), tensors(state.layers)
    layer = step.layers[i].layer
    broken = Interrupted(experts, layer, ExpertLoadError(ExpertKey(layer, 0), OSError("gone")))
    got = []
    for token in tokens[20:26]:
        for other in (token, tokens[0]):  # nor does it matter which token failed
            with pytest.raises(ExpertLoadError):
                asyncio.run(EagerStepper(step, broken)(int(other)))
        now = tensors(step.unload(n_context=N_CAPACITY))
        assert all(map(torch.equal, now, before))
        got.append(decoded(step, experts, token[None]))
        before = tensors(step.unload(n_context=N_CAPACITY))
    assert torch.equal(torch.cat(got), want)


def test_a_whole_token_that_was_not_left_can_be_repeated_with_the_same_bits(tiny):
    model, experts, tokens = tiny
    state = prefilled(model, experts, tokens, [17])[2]
    want = decoded(loaded(model, state), experts, tokens[17:19])
    step = loaded(model, state)
    decoded(step, experts, tokens[17:18])
    step._n_tokens -= 1
    assert torch.equal(decoded(step, experts, tokens[17:19]), want)


def test_a_sequence_taken_out_goes_on_in_the_functional_forward(tiny, functional):
    model, experts, tokens = tiny

    async def main():
        device = DeviceModel(model)
        state = device.new_state(N_CAPACITY)
        for at in range(12):
            await device.forward(tokens[at : at + 1], state, experts, logits="none")
        copy = state.copy(n_context=40)
        chunk = await device.forward(tokens[12:30], copy, experts, logits="all")
        rows = [
            await device.forward(tokens[at : at + 1], either, experts, logits="last")
            for either, at in ((copy, 30), (state, 12), (copy, 31), (state, 13))
        ]
        return chunk, torch.cat(rows)

    chunk, rows = asyncio.run(main())
    logits = functional[0]
    assert relative(chunk, logits[12:30]) < 1e-4
    assert relative(rows, logits[[30, 12, 31, 13]]) < 1e-4


def test_a_step_forgets_the_sequence_that_it_held_before(tiny):
    model, experts, tokens = tiny
    state = prefilled(model, experts, tokens, [5])[2]
    want = decoded(loaded(model, state), experts, tokens[5:9])
    step = loaded(model, prefilled(model, experts, tokens, [60])[2])
    decoded(step, experts, tokens[60:64])
    for layer in step._state.layers:  # a broken sequence must not shine through either
        for buffer in (layer.rows,) if hasattr(layer, "rows") else (layer.memory, layer.ring):
            buffer.fill_(torch.nan)
    step.load(state.layers, n_tokens=5)
    assert torch.equal(decoded(step, experts, tokens[5:9]), want)


def test_a_layers_states_taken_out_are_memory_of_their_own(tiny):
    model, experts, tokens = tiny
    step = loaded(model, prefilled(model, experts, tokens, [6])[2])
    taken = step.unload(n_context=N_CAPACITY)
    before = tensors(taken)
    decoded(step, experts, tokens[6:9])
    assert all(map(torch.equal, tensors(taken), before))
    for layer in taken:
        kept = (layer.first(6),) if hasattr(layer, "first") else (layer.memory, layer.window)
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept)


def test_the_last_place_of_the_capacity_is_used(tiny):
    model, experts, tokens = tiny
    state = prefilled(model, experts, tokens, [7])[2]
    step = model.new_decode_step(8)
    step.load(state.layers, n_tokens=7)
    got = decoded(step, experts, tokens[7:8])
    torch.testing.assert_close(got, decoded(loaded(model, state), experts, tokens[7:8]))
    with pytest.raises(AssertionError):
        step.enter(0)


def test_a_state_takes_the_bytes_that_are_said_beforehand(tiny):
    config = tiny[0].config
    for n_capacity in (64, 128):
        nbytes = StaticState(config, n_capacity, device=CPU).nbytes
        assert static_nbytes(config, n_capacity) == nbytes


def test_no_segment_allocates_what_outlives_it_or_looks_at_the_position(tiny):
    """Addresses stay, and a token's work is the same list of operations at every position."""
    model, _, tokens = tiny
    step = loaded(model, model.new_state(1))
    traces = []
    for token in tokens[:3].tolist():
        step.enter(token)
        with Operations() as trace:
            for i in range(len(step.layers)):
                step.segment(i)
                step.meanwhile(i)
            step.segment(len(step.layers))
        step.leave()
        traces.append((trace.seen, step.logits.data_ptr(), step.layers[0].x.data_ptr()))
    assert all(trace == traces[0] for trace in traces)
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & set(traces[0][0])


class Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
