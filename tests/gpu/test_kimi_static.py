"""Kimi-K3 on a GPU: recorded is eager, and both product paths keep a bound to the CPU's reference.

The fixture model has the real files' types and every structure of the real model. Its weights are
random, which multiplies rounding errors: float32 against float64 on the CPU is off by up to 1e-3.
"""

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels are written in Triton")
sys.path.append(str(Path(__file__).parents[1] / "adapters"))

from kimi_k3_reference import random_weights
from kimi_k3_source import source_of
from test_kimi_k3_oracle import BLOCKS_SEED, BLOCKS_SHAPE, DATA

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.dense_tiers import DenseTiers
from tieredmoe.adapters.device_batches import DeviceBatches
from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.kimi_k3 import KimiK3Adapter
from tieredmoe.adapters.kimi_k3.feed_forward import SigmoidRouter
from tieredmoe.adapters.routing import Routing
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.moe.kernels import Workspace

pytestmark = pytest.mark.gpu

LOGITS_BOUND = 2e-2
"""Largest error of any logit on a GPU; logits have a standard deviation of about 1."""

SCORES_BOUND = 1e-3
"""Largest error of a router's biased score, which is between 0 and 1 and a bias."""

N_PROMPT = 17


class Fixture(NamedTuple):
    tokens: torch.Tensor
    logits: torch.Tensor
    scores: dict
    """Biased scores [tokens, experts] of each routed layer on the CPU."""
    ids: dict


class Watch:
    """``experts``, and copies of what the routers chose."""

    def __init__(self, experts, *, recorded=True):
        self._experts, self._recorded, self.ids = experts, recorded, {}

    async def run(self, layer, x, routing, activation, *, meanwhile):
        kept = Routing(routing.ids.clone(), routing.weights.clone())
        self.ids.setdefault(layer, []).append(kept.ids.cpu())
        return await self._experts.run(layer, x, kept, activation, meanwhile=meanwhile)

    def stepper(self, step):
        return self._experts.stepper(step) if self._recorded else EagerStepper(step, self)

    def chosen(self, layer):
        return torch.cat(self.ids[layer]).sort(dim=1).values


@pytest.fixture(scope="module")
def source():
    weights = random_weights(BLOCKS_SHAPE, BLOCKS_SEED)
    return source_of(BLOCKS_SHAPE, weights, blocks=np.random.default_rng(BLOCKS_SEED))


@pytest.fixture(scope="module")
def reference(source):
    """The functional forward in float32 on the CPU, which the stored oracle run confirms."""
    with np.load(DATA / "oracle_blocks.npz") as arrays:
        tokens, stored = (torch.from_numpy(arrays[name]) for name in ("tokens", "logits"))
    model = KimiK3Adapter().load(source, device=torch.device("cpu"))
    watch, scores = Watch(DenseExperts.load(source)), []
    with pytest.MonkeyPatch.context() as patched:
        choose = SigmoidRouter.choose

        def watched(router, logits):
            scores.append(logits.sigmoid() + router.bias)
            return choose(router, logits)

        patched.setattr(SigmoidRouter, "choose", watched)
        logits = forward(model, watch, tokens, [len(tokens)])
    assert (logits - stored).abs().max() < 1e-3
    layers = list(watch.ids)
    ids = {layer: watch.chosen(layer) for layer in layers}
    return Fixture(tokens, logits, dict(zip(layers, scores, strict=True)), ids)


def forward(model, experts, tokens, lengths):
    async def main():
        state = model.new_state(len(tokens))
        chunks = tokens.split(lengths)
        rows = [await model.forward(chunk, state, experts, logits="all") for chunk in chunks]
        return torch.cat(rows).cpu()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def on_device(source):
    """A model and its experts on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    model = KimiK3Adapter().load(source, device=device)
    dense = DenseExperts.load(source)
    tiers, spec = DenseTiers(dense, device), dense.spec
    workspace = Workspace(spec.layouts.values(), n_tokens=64, top_k=spec.top_k, device=device)
    return model, DeviceExperts(tiers, DeviceBatches(spec, tiers, workspace))


def paths(n_tokens):
    rest = [1] * (n_tokens - N_PROMPT)
    return {
        "decode": [1] * n_tokens,
        "prefill": [n_tokens],
        "prefill, then decode": [N_PROMPT, *rest],
        "prefill in chunks": [9, 2, n_tokens - 11],
    }


@pytest.mark.parametrize("path", paths(20))
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
def test_logits_and_routing_keep_the_bound_to_the_reference(on_device, reference, path, recorded):
    model, experts = on_device
    watch = Watch(experts, recorded=recorded)
    lengths = paths(len(reference.tokens))[path]
    logits = forward(DeviceModel(model), watch, reference.tokens, lengths)

    error = (logits - reference.logits).abs()
    assert error.max() < LOGITS_BOUND
    top = reference.logits.topk(2, dim=1)
    clear = top.values[:, 0] - top.values[:, 1] > 2 * LOGITS_BOUND
    assert clear.sum() > len(clear) / 2
    assert torch.equal(logits.argmax(1)[clear], top.indices[clear, 0])
    if not recorded:
        for layer, want in reference.ids.items():
            ordered = reference.scores[layer].sort(dim=1, descending=True).values
            k = want.shape[1]
            clear = ordered[:, k - 1] - ordered[:, k] > 2 * SCORES_BOUND
            assert clear.sum() > len(clear) / 2
            assert torch.equal(watch.chosen(layer)[clear], want[clear])


def test_recorded_tokens_equal_eager_ones_bit_for_bit(on_device, reference):
    model, experts = on_device
    lengths = paths(len(reference.tokens))["prefill, then decode"]
    got, want = (
        forward(DeviceModel(model), Watch(experts, recorded=how), reference.tokens, lengths)
        for how in (True, False)
    )
    assert torch.equal(got, want)


def test_a_token_repeated_after_a_failure_has_the_same_bits(on_device, reference):
    model, experts = on_device
    tokens = reference.tokens.tolist()

    async def main(*, failing):
        step = model.new_decode_step(64)
        step.load(model.new_state(1).layers, n_tokens=0)
        stepper, rows = experts.stepper(step), []
        acquire = experts.tiers.acquire

        async def refuse(layer, ids):
            if layer == step.layers[3].layer:
                raise ConnectionError
            return await acquire(layer, ids)

        for token in tokens[:12]:
            if failing:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(experts.tiers, "acquire", refuse)
                    with pytest.raises(ConnectionError):
                        await stepper(tokens[0])
            await stepper(token)
            rows.append(step.logits.clone())
        return torch.cat(rows)

    assert torch.equal(asyncio.run(main(failing=True)), asyncio.run(main(failing=False)))


def test_a_snapshot_of_a_decoded_sequence_goes_on_as_the_sequence_does(on_device, reference):
    model, experts = on_device
    device, tokens = DeviceModel(model), reference.tokens

    async def main():
        state = device.new_state(64)
        await device.forward(tokens[:9], state, experts, logits="none")
        for at in range(9, 14):
            await device.forward(tokens[at : at + 1], state, experts, logits="none")
        copy = state.copy()
        rows = [  # taking turns in one step
            await device.forward(tokens[14:15], one, experts, logits="last")
            for one in (state, copy)
        ]
        chunk = await device.forward(tokens[15:20], state.copy(), experts, logits="all")
        return rows, chunk.cpu()

    rows, chunk = asyncio.run(main())
    assert torch.equal(*rows)
    assert (chunk - reference.logits[15:20]).abs().max() < LOGITS_BOUND
