"""What watches a model's choices notes each under its own position, however the tokens come."""

import asyncio
from pathlib import Path

import pytest
import torch
from forced_choices import Choices, watched

from tieredmoe.adapters.deepseek_v4.load import DeepSeekV4Adapter
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.gguf import open_inventory

FILE = Path(__file__).parents[1] / "data" / "deepseek_v4" / "tiny_mx.gguf"
TOKENS = torch.arange(3, 27)


def logits_of(model, experts, lengths):
    async def main():
        state = model.new_state(len(TOKENS))
        chunks = TOKENS.split(lengths)
        return torch.cat([await model.forward(c, state, experts, logits="all") for c in chunks])

    return asyncio.run(main())


@pytest.fixture(scope="module")
def loaded():
    source = open_inventory(FILE)
    model = DeepSeekV4Adapter().load(source, device=torch.device("cpu"))
    return model, DenseExperts.load(source)


@pytest.fixture(scope="module")
def reference(loaded):
    model, experts = loaded
    with watched(model, Choices()) as choices:
        return choices, logits_of(model, experts, [len(TOKENS)])


@pytest.mark.parametrize("lengths", [[18, *[1] * 6], [1, 7, 16], [5, 1, 1, 9, 1, 7]], ids=str)
def test_steps_and_chunks_in_any_order_are_watched_at_their_positions(loaded, reference, lengths):
    model, experts = loaded
    wanted, logits = reference
    with watched(model, Choices(wanted)) as choices:
        got = logits_of(DeviceModel(model), experts, lengths)
    assert choices.made.keys() == wanted.made.keys()
    assert not wanted.differences(choices, 1e-4)
    torch.testing.assert_close(got, logits, atol=1e-3, rtol=0)
