"""Both models decode in fixed memory over tiers as over memory, whatever happens to a token."""

import asyncio
import errno

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from model_runs import CPU
from toy_step import ReferenceBatches

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.errors import ExpertLoadError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, open_virtual_pack
from tieredmoe.policies import make_policy
from tieredmoe.testing import (
    DeepSeekV4Shape,
    KimiK3Shape,
    KimiK3Types,
    TypeMix,
    make_deepseek_v4,
    make_kimi_k3,
)
from tieredmoe.testing.faulty import FaultySource
from tieredmoe.testing.tiny_pack import host_arena
from tieredmoe.tier import Tier

N_PROMPT, N_DECODED = 7, 9


def deepseek(path):
    shape = DeepSeekV4Shape(
        num_hidden_layers=3,
        compress_ratios=(0, 4, 128),
        num_hash_layers=1,
        hc_sinkhorn_iters=2,
    )
    make_deepseek_v4(path, shape=shape, types=TypeMix.uniform(Q.F32), seed=3)


def kimi(path):
    shape = KimiK3Shape(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        kda_head_dim=32,
        intermediate_size=64,
        attn_res_block_size=2,
    )
    make_kimi_k3(path, shape=shape, types=KimiK3Types.uniform(Q.F32), seed=3)


class Made:
    """A model, its experts in a file, tokens, and the logits of its steps with all in memory."""

    def __init__(self, make, folder):
        make(folder / "m.gguf")
        self.records = open_virtual_pack(folder / "m.gguf")
        self.model = adapter_for(self.records.metadata).load(self.records, device=CPU)
        generator = torch.Generator().manual_seed(8)
        n_ids = self.model.config.vocab_size
        self.tokens = torch.randint(0, n_ids, (N_PROMPT + N_DECODED,), generator=generator)
        self.wanted = asyncio.run(self.logits(DenseExperts.load(self.records)))

    def hierarchy(self, n_slots, failure):
        spec = self.records.spec
        backend = MemoryBackend([path.read_bytes() for path in self.records.data_files])
        source = FaultySource(
            PackSource(self.records, backend, arranged=True), failure=lambda key: failure()
        )
        policy = make_policy("lru", n_slots=n_slots, layers=spec.layers, top_k=spec.top_k)
        arena = host_arena(n_slots, self.records.slot_nbytes)
        tier = Tier(name="top", source=source, arena=arena, policy=policy, policy_name="lru")
        return Hierarchy(tier, spec)

    async def logits(self, experts, forward=None):
        """Of the last prompt token and all behind it, each step by ``forward`` if given."""
        model = DeviceModel(self.model)
        forward = forward or model.forward
        state, chunks = model.new_state(64), self.tokens.split([N_PROMPT, *[1] * N_DECODED])
        rows = [await model.forward(chunks[0], state, experts, logits="last")]
        rows += [await forward(chunk, state, experts, logits="last") for chunk in chunks[1:]]
        return torch.cat(rows)


@pytest.fixture(scope="module", params=[deepseek, kimi], ids=lambda make: make.__name__)
def made(request, tmp_path_factory):
    return Made(request.param, tmp_path_factory.mktemp("model"))


def providers(hierarchy):
    return TieredExperts(hierarchy), DeviceExperts(hierarchy, ReferenceBatches(hierarchy))


@pytest.mark.parametrize("n", [0, 1], ids=["host", "device"])
@pytest.mark.parametrize("room", [0, 3, 99])
def test_steps_over_tiers_equal_steps_over_memory(made, room, n):
    async def main():
        spec = made.records.spec
        n_slots = min(spec.top_k + room, len(spec.layers) * spec.n_experts)
        async with made.hierarchy(n_slots, lambda: None) as hierarchy:
            assert torch.equal(await made.logits(providers(hierarchy)[n]), made.wanted)

    asyncio.run(main())


@pytest.mark.parametrize("n", [0, 1], ids=["host", "device"])
def test_tokens_that_fail_or_are_cancelled_are_repeated_as_if_nothing_had_been(made, n):
    """Each is cancelled a little later than the one before, and then meets an error."""
    left = []

    def failure():
        return OSError(errno.EIO, "made to fail") if left and left.pop() == 0 else None

    async def main():
        async with made.hierarchy(made.records.spec.top_k, failure) as hierarchy:
            model, ended = DeviceModel(made.model), []

            async def forward(*arguments, logits):
                task = asyncio.create_task(model.forward(*arguments, logits=logits))
                for _ in range(1 + len(ended) // 2):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    return await task
                except asyncio.CancelledError:
                    ended.append("cancelled")
                assert not any(e.pins for e in hierarchy.top.residency.entries.values())
                left.extend([0, *[1] * (len(ended) % 4)])
                try:
                    return await model.forward(*arguments, logits=logits)
                except ExpertLoadError:
                    ended.append("failed")
                left.clear()
                assert not any(e.pins for e in hierarchy.top.residency.entries.values())
                return await model.forward(*arguments, logits=logits)

            logits = await made.logits(providers(hierarchy)[n], forward)
            assert torch.equal(logits, made.wanted)
            assert ended.count("cancelled") >= 4
            assert ended.count("failed") >= 4

    asyncio.run(main())
