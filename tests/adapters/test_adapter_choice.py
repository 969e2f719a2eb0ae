"""Which adapter opens a model, and what a conversation may ask of it."""

import asyncio

import pytest
import torch

from tieredmoe import ConfigError, HierarchyConfig, open_model
from tieredmoe.adapters.kimi_k3 import KimiK3Adapter
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.testing import KimiK3Shape, make_deepseek_v4, make_kimi_k3

SMALL = HierarchyConfig(vram="1GiB", reserve=0)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    shape = KimiK3Shape(num_hidden_layers=4)
    return make_kimi_k3(tmp_path_factory.mktemp("k3") / "m.gguf", shape=shape, seed=3).paths[0]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return make_deepseek_v4(tmp_path_factory.mktemp("ds") / "m.gguf", seed=3).paths[0]


def with_model(path, use, adapter=None):
    async def main():
        async with await open_model(path, SMALL, adapter=adapter) as model:
            return await use(model)

    return asyncio.run(main())


async def logits(model):
    tokens = torch.tensor([3, 4, 5])
    experts = TieredExperts(model.hierarchy)
    return await model.model.forward(tokens, model.model.new_state(3), experts, logits="all")


def test_an_adapter_given_replaces_the_default_one(kimi):
    default = with_model(kimi, logits)
    assert torch.equal(with_model(kimi, logits, KimiK3Adapter()), default)
    other = with_model(kimi, logits, KimiK3Adapter(latent_eps=0.1))
    assert (other - default).abs().max() > 1e-3


def test_an_adapter_of_another_architecture_is_refused(deepseek):
    with pytest.raises(ConfigError, match=r"'deepseek4'.*'kimi-k3'"):
        with_model(deepseek, logits, KimiK3Adapter())


def test_the_effort_of_thinking_reaches_the_prompt(kimi):
    async def prompts(model):
        return [
            model.prompt_ids("Hi", thinking=True, effort=effort) for effort in (None, "max", "low")
        ]

    default, most, least = with_model(kimi, prompts)
    assert default == most != least


def test_an_effort_that_the_format_has_not_is_refused(kimi, deepseek):
    async def ask(model):
        model.generate("Hi", thinking=True, effort="some")

    with pytest.raises(ConfigError, match="'some', not one of low, high, max"):
        with_model(kimi, ask)
    with pytest.raises(ConfigError, match="no place for it"):
        with_model(deepseek, ask)
