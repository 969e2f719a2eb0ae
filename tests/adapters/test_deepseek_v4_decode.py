"""Decoding in fixed memory against the functional forward, and what a step leaves behind."""

import asyncio

import attrs
import pytest
import torch
from gguf import GGMLQuantizationType
from model_runs import Recorder, cut_at, go_on, load, run

from tieredmoe.adapters.deepseek_v4.static_state import static_state_nbytes
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.rows import Rows
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, TypeMix, make_deepseek_v4

SHAPE = DeepSeekV4Shape(
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    hc_sinkhorn_iters=2,  # what they are is tested elsewhere, and they take most of the time
)
N_TOKENS = 310
FLOATS = TypeMix.uniform(GGMLQuantizationType.F32)  # nothing to dequantise for each token


class StepRecorder(Recorder):
    """Keeps the routing of steps, too."""

    async def run(self, layer, x, routing, activation, *, meanwhile):
        kept = type(routing)(*(part.clone() for part in routing))  # a step's lie in fixed memory
        self._routed.setdefault(layer, []).append(kept)
        return await self._experts.run(layer, x, routing, activation, meanwhile=meanwhile)

    def stepper(self, step):
        return EagerStepper(step, self)


def make(tmp_path_factory, seed, types=None):
    path = tmp_path_factory.mktemp("decode") / "tiny.gguf"
    make_deepseek_v4(path, shape=SHAPE, types=types, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.vocab_size, (N_TOKENS,), generator=generator)
    model, experts = load(path)
    recorder = Recorder(experts)
    return model, experts, tokens, run(model, recorder, tokens), recorder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model, its experts, tokens, and the logits and the routing of a functional forward."""
    return make(tmp_path_factory, 11, FLOATS)


def after(model, experts, tokens, n, *, lengths=None):
    """The functional state after the first n tokens."""
    state = model.new_state(N_TOKENS)
    if n:
        go_on(model, experts, tokens[:n], state, lengths)
    return state


def seated(model, experts, tokens, n, *, n_capacity=512):
    """A step with the first n tokens in it."""
    step = model.new_decode_step(n_capacity)
    step.load(after(model, experts, tokens, n).layers, n_tokens=n)
    return step


def step_on(step, experts, tokens):
    """The logits of ``tokens``, step by step."""

    async def main():
        rows = []
        for token in tokens.tolist():
            await EagerStepper(step, experts)(token)
            rows.append(step.logits.clone())
        return torch.cat(rows)

    return asyncio.run(main())


def close(got, want):
    """Within 1e-5 of the largest logit."""
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("seed", "n_first", "types"), [(11, 1, FLOATS), (12, 90, FLOATS), (13, 290, None)]
)
def test_every_token_gets_the_logits_and_the_experts_of_the_functional_forward(
    tiny, tmp_path_factory, seed, n_first, types
):
    model, experts, tokens, want, wanted = (
        tiny if seed == 11 else make(tmp_path_factory, seed, types)
    )
    recorder = StepRecorder(experts)
    in_steps = DeviceModel(model)
    lengths = [n_first] + [1] * (N_TOKENS - n_first)
    close(go_on(in_steps, recorder, tokens, in_steps.new_state(N_TOKENS), lengths), want)
    for layer in range(SHAPE.num_hidden_layers):
        for got, expected in zip(recorder.routing(layer), wanted.routing(layer), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256])
def test_decoding_goes_on_from_a_prompt_of_any_length(tiny, n):
    model, experts, tokens, want, _ = tiny
    step = seated(model, experts, tokens, n)
    close(step_on(step, experts, tokens[n : n + 5]), want[n : n + 5])


def test_decoding_goes_on_from_a_prompt_in_any_chunks(tiny):
    model, experts, tokens, want, _ = tiny
    state = after(model, experts, tokens, 140, lengths=cut_at(140, 1, 4, 30, 127))
    step = model.new_decode_step(512)
    step.load(state.layers, n_tokens=140)
    close(step_on(step, experts, tokens[140:145]), want[140:145])


def test_all_rows_are_seen_where_the_capacity_has_no_more_than_the_indexer_picks(tiny):
    model, experts, tokens, want, _ = tiny
    step = seated(model, experts, tokens, 50, n_capacity=64)
    close(step_on(step, experts, tokens[50:64]), want[50:64])


def test_a_functional_forward_goes_on_from_decoded_tokens(tiny):
    model, experts, tokens, want, _ = tiny
    in_steps = DeviceModel(model)
    lengths = [61, *[1] * 8, 60, *[1] * 3, 20, 1]
    n = sum(lengths)
    close(go_on(in_steps, experts, tokens[:n], in_steps.new_state(n), lengths), want[:n])


@pytest.mark.parametrize("layer", range(3))
def test_a_token_that_failed_half_way_can_be_entered_again_with_the_same_bits(tiny, layer):
    model, experts, tokens, _, _ = tiny
    want = step_on(seated(model, experts, tokens, 125), experts, tokens[125:131])
    step = seated(model, experts, tokens, 125)

    class Broken:
        async def run(self, number, *args, **kwargs):
            if number == layer:
                raise OSError("the disk is gone")
            return await experts.run(number, *args, **kwargs)

    got = []
    for n in range(125, 131):
        for token in (int(tokens[n]), 5):  # the token, then another one
            with pytest.raises(OSError, match="the disk is gone"):
                asyncio.run(EagerStepper(step, Broken())(token))
        assert step.n_tokens == n
        got.append(step_on(step, experts, tokens[n : n + 1]))
    assert torch.equal(torch.cat(got), want)


def test_a_token_that_failed_leaves_no_trace_in_what_is_unloaded(tiny):
    model, experts, tokens, _, _ = tiny
    step = seated(model, experts, tokens, 127)
    before = tensors(step.unload(n_context=N_TOKENS))
    step.enter(7)
    for i in range(3):
        step.segment(i)
        step.meanwhile(i)
    assert all(map(torch.equal, tensors(step.unload(n_context=N_TOKENS)), before))


def test_a_segment_may_run_twice(tiny):
    model, experts, tokens, _, _ = tiny
    want = step_on(seated(model, experts, tokens, 126), experts, tokens[126:130])
    step = seated(model, experts, tokens, 126)

    class Twice:
        def __init__(self):
            self.streamed = step.streamed
            self.layers = step.layers
            self.enter, self.leave = step.enter, step.leave

        def segment(self, i):
            step.segment(i)
            step.segment(i)

        def meanwhile(self, i):
            step.meanwhile(i)
            step.meanwhile(i)

    got = []
    for token in tokens[126:130].tolist():
        asyncio.run(EagerStepper(Twice(), experts)(token))
        got.append(step.logits.clone())
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("n", [0, 1, 4, 31, 33, 127, 128, 133, 257])
def test_what_is_loaded_is_unloaded_bit_for_bit(tiny, n):
    model, experts, tokens, _, _ = tiny
    state = after(model, experts, tokens, n)
    step = model.new_decode_step(512)
    step.load(after(model, experts, tokens, 300).layers, n_tokens=300)  # what is to be replaced
    step.load(state.layers, n_tokens=n)
    got, want = tensors(step.unload(n_context=N_TOKENS)), tensors(state.layers)
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_nothing_of_an_undefined_sequence_is_left_for_the_next_one(tiny):
    model, experts, tokens, _, _ = tiny
    step = seated(model, experts, tokens, 10)
    for buffer in buffers(step):
        buffer.fill_(float("nan"))
    step.load(after(model, experts, tokens, 30).layers, n_tokens=30)
    want = step_on(seated(model, experts, tokens, 30), experts, tokens[30:36])
    assert torch.equal(step_on(step, experts, tokens[30:36]), want)


@pytest.mark.parametrize("n_capacity", [64, 4096])
def test_the_memory_of_a_sequence_is_what_the_plan_counts(tiny, n_capacity):
    model = tiny[0]
    made = sum(buffer.nbytes for buffer in buffers(model.new_decode_step(n_capacity)))
    assert static_state_nbytes(model.config, n_capacity) == made


def buffers(step):
    """Everything that a step holds of its sequence."""
    for layer in (attention.state for attention in step._attentions):
        yield layer.keys
        for part in layer.compressors:
            yield from (part.values, part.gates)
        yield from (part.rows for part in layer.compressors[1:])  # the first ones' are keys


def tensors(part):
    """Every tensor in a functional state, rows without the room behind them."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, Rows):
        return [part.first(part.n)]
    items = part if isinstance(part, tuple) else attrs.astuple(part, recurse=False)
    return [tensor for item in items for tensor in tensors(item)]
