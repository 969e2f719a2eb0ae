"""Whatever is guessed, a model computes the same: bit for bit, at any cache size."""

import asyncio
import random

import numpy as np
import pytest

from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.prefetch import HashTable, MarkovPredictor, Prefetcher
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import SimDisk, host_arena, sim_run
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(0, 1, 3), n_experts=8, top_k=2, role_nbytes=1360)
PACK = TinyPack(SPEC)
N_WORDS = SPEC.layouts[0].payload_nbytes // 8
FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
TABLE = [[token % 8, (token * 3 + 1) % 8] for token in range(64)]


class Garbage:
    """Guesses of any kind, also such as are none."""

    width = 3

    def __init__(self, seed):
        self.luck = random.Random(seed)

    def observe(self, layer, experts):
        if self.luck.random() < 0.002:
            raise RuntimeError("a foreign predictor is broken")

    def predict(self, layer, signal=None):
        return self.luck.choice(
            [
                [ExpertKey(self.luck.randrange(-1, 9), self.luck.randrange(-3, 99))] * 5,
                [ExpertKey(layer, self.luck.randrange(8)) for _ in range(1000)],
                (),
            ]
        )


def opened(slots, seed):
    source = PackSource(PACK, SimDisk([PACK.image], seed=seed, queue_depth=2))
    for i, n_slots in enumerate(slots):
        name = "lfu_lru" if i + 1 == len(slots) else "lru"
        policy = make_policy(name, n_slots=n_slots, layers=SPEC.layers, top_k=SPEC.top_k)
        source = Tier(name=f"tier {i}", source=source, arena=host_arena(n_slots), policy=policy)
    return Hierarchy(source, SPEC)


async def run_model(hierarchy, hooks):
    """A state that each expert's bytes change, and that chooses the next experts."""
    state, outputs, token = 7, [], 5
    for _ in range(12):
        if hooks:
            hooks.on_tokens([token])
        for layer in SPEC.layers:
            router = (np.arange(8, dtype=np.uint64) + np.uint64(state)) * FIBONACCI
            experts = TABLE[token] if layer == 0 else np.argsort(router)[:2].tolist()
            if hooks:
                hooks.on_routed(layer, experts)
            async with hierarchy.acquire(layer, experts) as lease:
                if hooks:
                    hooks.on_hidden(3 if layer == 1 else 1, router.astype(float))
                await lease.ready()
                for expert in experts:
                    words = np.frombuffer(lease.slots[expert].view, np.uint64, N_WORDS)
                    digest = int(np.bitwise_xor.reduce(words))
                    state = (digest * (2 * state + 1) + state) % 2**64
            await asyncio.sleep(1e-4)
            outputs.append(state)
        token = state % 64
    return outputs


def outputs(slots, make_hooks):
    async def main():
        async with opened(slots, seed=1) as hierarchy:
            asyncio.get_running_loop().on_step(lambda: hierarchy.closed or hierarchy.check())
            hooks = make_hooks(hierarchy)
            result = await run_model(hierarchy, hooks)
            return result, hierarchy.stats().prefetch

    return sim_run(main())


@pytest.mark.parametrize("slots", [(2,), (8,), (1, 8), (3, 12)])
def test_outputs_are_equal_whatever_is_guessed(slots):
    right, none = outputs(slots, lambda _: None)
    assert none.issued == 0
    markov = MarkovPredictor(layers=SPEC.layers, n_experts=8, top_k=2)
    table = HashTable({0: TABLE}, n_experts=8)
    makers = [
        lambda hierarchy: Prefetcher(hierarchy, table=table, predictors=[markov]),
        *(
            lambda hierarchy, seed=seed: Prefetcher(hierarchy, predictors=[Garbage(seed)], width=8)
            for seed in range(2)
        ),
    ]
    for make in makers:
        same, prefetch = outputs(slots, make)
        assert same == right
        assert (prefetch.issued > 0) == (prefetch.slots > 0)
