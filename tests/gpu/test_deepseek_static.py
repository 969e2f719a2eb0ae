"""DeepSeek-V4 on a GPU: recorded is eager, and both product paths keep a bound to the CPU.

The fixture model has the real files' types and every kind of layer. Its weights are random, which
multiplies rounding errors, and a router or indexer that falls the other way at a near tie changes
whatever comes after it. So each choice is compared, then the CPU's is taken.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from forced_choices import Choices, watched

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.adapters.deepseek_v4.load import DeepSeekV4Adapter
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.dense_tiers import DenseTiers
from tieredmoe.adapters.device_batches import DeviceBatches
from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.gguf import open_inventory
from tieredmoe.moe.kernels import Workspace

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "data" / "deepseek_v4"

LOGITS_BOUND = 0.05
"""Largest error of any logit on a GPU; the largest logit is 9.2."""

SCORES_BOUND = 5e-3
"""Largest error of a router's biased score or of an indexer's."""

N_TOKENS = 300


class Fixture(NamedTuple):
    tokens: torch.Tensor
    logits: torch.Tensor
    choices: Choices


class Eager:
    """``experts`` for steps that run as they are."""

    def __init__(self, experts):
        self.run = experts.run

    def stepper(self, step):
        return EagerStepper(step, self)


@pytest.fixture(scope="module")
def source():
    return open_inventory(DATA / "tiny_mx.gguf")


@pytest.fixture(scope="module")
def reference(source):
    """The functional forward in float32 on the CPU, which the stored oracle run confirms."""
    with np.load(DATA / "oracle_mx.npz") as arrays:
        tokens, stored = (torch.from_numpy(arrays[name]) for name in ("tokens", "logits"))
    model = DeepSeekV4Adapter().load(source, device=torch.device("cpu"))
    with watched(model, Choices()) as choices:
        logits = forward(model, DenseExperts.load(source), tokens.long(), [N_TOKENS])
    assert (logits - stored).abs().max() < 1e-3
    return Fixture(tokens.long(), logits, choices)


def forward(model, experts, tokens, lengths):
    async def main():
        state = model.new_state(len(tokens))
        chunks = tokens.split(lengths)
        return torch.cat([await model.forward(c, state, experts, logits="all") for c in chunks])

    return asyncio.run(main()).cpu()


@pytest.fixture(scope="module")
def on_device(source):
    """A model and its experts on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    model = DeepSeekV4Adapter().load(source, device=device)
    dense = DenseExperts.load(source)
    tiers, spec = DenseTiers(dense, device), dense.spec
    workspace = Workspace(spec.layouts.values(), n_tokens=64, top_k=spec.top_k, device=device)
    return model, DeviceExperts(tiers, DeviceBatches(spec, tiers, workspace))


PATHS = {
    "decode": [1] * N_TOKENS,
    "prefill": [N_TOKENS],
    "prefill, then decode": [150] + [1] * (N_TOKENS - 150),
    "prefill in chunks": [1, 30, 97, N_TOKENS - 128],
}


@pytest.mark.parametrize("path", PATHS)
def test_logits_and_choices_keep_the_bounds_to_the_reference(on_device, reference, path):
    model, experts = on_device
    with watched(model, Choices(reference.choices)) as choices:
        logits = forward(DeviceModel(model), Eager(experts), reference.tokens, PATHS[path])

    assert (logits - reference.logits).abs().max() < LOGITS_BOUND
    top = reference.logits.topk(2, dim=1)
    clear = top.values[:, 0] - top.values[:, 1] > 2 * LOGITS_BOUND
    assert clear.sum() > 0.8 * N_TOKENS
    assert torch.equal(logits.argmax(1)[clear], top.indices[clear, 0])
    assert choices.made.keys() == reference.choices.made.keys()
    assert reference.choices.n_clear(SCORES_BOUND) > 0.8 * len(choices.made)
    assert not reference.choices.differences(choices, SCORES_BOUND)


def test_recorded_tokens_equal_eager_ones_bit_for_bit(on_device, reference):
    model, experts = on_device
    got, want = (
        forward(DeviceModel(model), provider, reference.tokens, [1] * N_TOKENS)
        for provider in (experts, Eager(experts))
    )
    assert torch.equal(got, want)


def test_a_token_repeated_after_a_failure_has_the_same_bits(on_device, reference):
    model, experts = on_device
    tokens = reference.tokens[:132].tolist()

    class GoneError(RuntimeError):
        pass

    async def main(*, failing):
        step = model.new_decode_step(512)
        step.load(model.new_state(1).layers, n_tokens=0)
        stepper, rows = experts.stepper(step), []
        acquire = experts.tiers.acquire

        async def refuse(layer, ids):
            if layer == len(step.layers) - 1:
                raise GoneError
            return await acquire(layer, ids)

        for token in tokens:
            if failing:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(experts.tiers, "acquire", refuse)
                    with pytest.raises(GoneError):
                        await stepper(tokens[0])
            await stepper(token)
            rows.append(step.logits.clone())
        return torch.cat(rows)

    assert torch.equal(asyncio.run(main(failing=True)), asyncio.run(main(failing=False)))


def test_a_snapshot_of_a_decoded_sequence_goes_on_as_the_sequence_does(on_device, reference):
    model, experts = on_device
    device, tokens = DeviceModel(model), reference.tokens

    async def main():
        state = device.new_state(N_TOKENS)
        await device.forward(tokens[:60], state, experts, logits="none")
        for at in range(60, 70):
            await device.forward(tokens[at : at + 1], state, experts, logits="none")
        copy = state.copy()
        rows = [  # taking turns in one step
            await device.forward(tokens[70:71], one, experts, logits="last")
            for one in (state, copy)
        ]
        chunk = await device.forward(tokens[71:140], state.copy(), experts, logits="all")
        return rows, chunk.cpu()

    rows, chunk = asyncio.run(main())
    assert torch.equal(*rows)
    assert (chunk - reference.logits[71:140]).abs().max() < LOGITS_BOUND
