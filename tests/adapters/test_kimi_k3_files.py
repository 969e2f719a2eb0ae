"""The same Kimi-K3 in every form in which its files come computes the same, bit for bit."""

import asyncio

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.kimi_k3 import KimiK3Adapter
from tieredmoe.gguf import open_inventory
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

SHAPE = KimiK3Shape(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=3,
    kda_num_heads=5,
    kda_head_dim=16,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=28,
    intermediate_size=96,
    num_experts=8,
    num_experts_per_token=3,
    routed_expert_hidden_size=32,
    moe_intermediate_size=80,
    attn_res_block_size=2,
)
IDS = [(i * 7919 + 13) % SHAPE.vocab_size for i in range(12)]


def logits(path, **form):
    types = KimiK3Types.uniform(Q.F32)
    made = make_kimi_k3(path, shape=SHAPE, types=types, seed=5, **form)
    source, adapter = open_inventory(made.paths[-1]), KimiK3Adapter()
    adapter.check(source)
    model = adapter.load(source, device=torch.device("cpu"))
    experts = DenseExperts.load(source)
    state = model.new_state(len(IDS))
    return asyncio.run(model.forward(torch.tensor(IDS), state, experts, logits="all"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return logits(tmp_path_factory.mktemp("usual") / "m.gguf")


def test_logits_are_of_the_size_of_a_trained_models(usual):
    assert 0.7 < usual.std() < 1.4


@pytest.mark.parametrize(
    "form",
    [
        {"n_shards": 38},
        {"early": True},
        {"conv_axes": 3},
        {"alignment": 4096},
        {"n_shards": 38, "early": True, "conv_axes": 3, "n_tensors_claimed": 2760},
    ],
    ids=str,
)
def test_every_form_of_file_gives_the_same_logits(usual, tmp_path, form):
    assert torch.equal(logits(tmp_path / "m.gguf", **form), usual)
