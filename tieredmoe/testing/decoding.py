"""Decoding in virtual time: the production tiers under a model that is nothing but its timing.

Layers, experts and routing are made up so that a cache hits as often, and a look-ahead is right as
often, as asked for; reads take a simulated disk's time, copies a simulated device's, computing
sleeps. So the time of a step can be compared with its floor, the slowest of the three, and with
other ways to schedule the same step, on any machine and to the microsecond.

Records are pages, and all rates are scaled by that: times are those of records of real size, as
long as latencies are left alone. Rejected: a formula for the step time, which knows no queue.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Literal

import attrs

from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.prefetch import Prefetcher
from tieredmoe.spec import PAGE_NBYTES
from tieredmoe.testing.arena import LateArena
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.loop import SimLoop
from tieredmoe.testing.stream import SimStream
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_spec
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from tieredmoe.lease import Lease
    from tieredmoe.stats import Stats

Flow = Literal["serial", "overlapped", "prefetching"]
"""How a layer runs: all reads, then all copies and all computing (the published flow); each expert
computed as it lands; the same with the next layer's experts guessed."""

MAX_STEPS = 10**8


@attrs.frozen(kw_only=True)
class Decoding:
    """A model, a machine, and how well things go; the defaults are DeepSeek-V4-Flash's sizes.

    ``gpu_s`` is the computing of one token, ``attention_share`` of it before the router. ``recall``
    is the chance that an expert of the next layer is among the guesses.
    """

    n_layers: int = 43
    n_experts: int = 256
    top_k: int = 6
    record_nbytes: int = 13_370_000
    ssd_nbytes_per_s: float = 12e9
    h2d_nbytes_per_s: float = 50e9
    gpu_s: float = 0.040
    attention_share: float = 0.4
    hit_rate: float = 0.54
    recall: float = 0.75
    n_hot: int = 32
    """Experts per layer that a cache keeps: hits are these."""
    n_slots_spare: int = 24
    """Slots beyond those: what is read once, and the ring."""
    stage_slots: int = 24
    n_warm: int = 3
    """Tokens decoded before time is taken: a governor learns from them."""
    n_tokens: int = 6
    seed: int = 0


@attrs.frozen(kw_only=True)
class Timing:
    """Seconds per token, and the floor: the slowest of disk, copies and computing alone.

    ``n_missed`` is how many experts of a token were not in the cache, prefetched ones included.
    """

    step_s: float
    n_missed: float
    ssd_s: float
    h2d_s: float
    gpu_s: float
    stats: Stats

    @property
    def floor_s(self) -> float:
        """No step can be faster."""
        return max(self.ssd_s, self.h2d_s, self.gpu_s)


def decode(decoding: Decoding, flow: Flow) -> Timing:
    """Decode some tokens in ``flow``; the same each time."""
    return SimLoop(max_steps=MAX_STEPS, collect_garbage=False).run(_Decoder(decoding, flow).run())


class _Decoder:
    def __init__(self, decoding: Decoding, flow: Flow) -> None:
        self._d = decoding
        self._flow = flow
        self._spec = tiny_spec(
            layers=range(decoding.n_layers),
            n_experts=decoding.n_experts,
            top_k=decoding.top_k,
            role_nbytes=1360,
        )
        self._rng = random.Random(decoding.seed)  # noqa: S311 (a scenario, not a secret)
        self._stream = SimStream()

    async def run(self) -> Timing:
        d = self._d
        n_tokens = d.n_warm + d.n_tokens
        routes = [[self._route() for _ in range(d.n_layers)] for _ in range(n_tokens)]
        async with self._open() as hierarchy:
            await self._warm_up(hierarchy)
            clock = asyncio.get_running_loop().time
            prefetcher = Prefetcher(hierarchy, clock=clock)
            for i, token in enumerate(routes):
                if i == d.n_warm:
                    before, begin = hierarchy.stats(), clock()
                following = routes[(i + 1) % n_tokens]
                for layer, experts in enumerate(token):
                    after = token[layer + 1] if layer + 1 < d.n_layers else following[0]
                    await self._layer(hierarchy, prefetcher, layer, experts, after)
            step_s = (clock() - begin) / d.n_tokens
            return self._timing(step_s, routes[d.n_warm :], hierarchy.stats().since(before))

    def _timing(self, step_s: float, routes: list[list[list[int]]], stats: Stats) -> Timing:
        d = self._d
        n_missed = sum(e >= d.n_hot for token in routes for layer in token for e in layer)
        nbytes = n_missed / d.n_tokens * d.record_nbytes
        return Timing(
            step_s=step_s,
            n_missed=n_missed / d.n_tokens,
            ssd_s=nbytes / d.ssd_nbytes_per_s,
            h2d_s=nbytes / d.h2d_nbytes_per_s,
            gpu_s=d.gpu_s,
            stats=stats,
        )

    def _open(self) -> Hierarchy:
        d = self._d
        pack = TinyPack(self._spec)
        scale = PAGE_NBYTES / d.record_nbytes
        disk = SimDisk(
            [pack.image],
            nbytes_per_s=d.ssd_nbytes_per_s * scale,
            queue_depth=32,
            window_nbytes=20 * PAGE_NBYTES,
            seed=d.seed,
        )
        staging = Tier(
            name="staging",
            source=PackSource(pack, disk),
            arena=host_arena(d.stage_slots),
            policy=make_policy(
                "lru", n_slots=d.stage_slots, layers=self._spec.layers, top_k=d.top_k
            ),
        )
        n_slots = d.n_layers * d.n_hot + d.n_slots_spare
        device = LateArena(n_slots, PAGE_NBYTES, nbytes_per_s=d.h2d_nbytes_per_s * scale)
        policy = make_policy("lfu_lru", n_slots=n_slots, layers=self._spec.layers, top_k=d.top_k)
        top = Tier(name="top", source=staging, arena=device, policy=policy)
        return Hierarchy(top, self._spec, prefetch_slots=2 * d.top_k)

    async def _warm_up(self, hierarchy: Hierarchy) -> None:
        """Fill the cache with the hot experts, used so often that nothing displaces them."""
        for layer in self._spec.layers:
            for _ in range(8):
                async with hierarchy.acquire(layer, range(self._d.n_hot)) as lease:
                    await lease.ready()

    # ---- routing

    def _route(self) -> list[int]:
        experts: dict[int, None] = {}
        while len(experts) < self._d.top_k:
            experts[self._expert()] = None
        return list(experts)

    def _expert(self) -> int:
        d = self._d
        if self._rng.random() < d.hit_rate:
            return self._rng.randrange(d.n_hot)
        return self._rng.randrange(d.n_hot, d.n_experts)

    def _guess(self, right: list[int]) -> list[int]:
        guess = [e if self._rng.random() < self._d.recall else self._expert() for e in right]
        self._rng.shuffle(guess)
        return guess

    # ---- one layer

    async def _layer(
        self,
        hierarchy: Hierarchy,
        prefetcher: Prefetcher,
        layer: int,
        experts: list[int],
        following: list[int],
    ) -> None:
        d = self._d
        of_layer_s = d.gpu_s / d.n_layers
        await asyncio.sleep(of_layer_s * d.attention_share)
        if self._flow == "prefetching":
            prefetcher.on_routed(layer, experts)
        async with hierarchy.acquire(layer, experts) as lease:
            if self._flow == "prefetching":
                prefetcher.on_hidden((layer + 1) % d.n_layers, self._guess(following))
            moe_s = of_layer_s * (1 - d.attention_share)
            if self._flow == "serial":
                await lease.ready()
                await self._copied(lease)
                await asyncio.sleep(moe_s)
                return
            async for _ in lease.as_completed():
                await self._copied(lease)
                await asyncio.sleep(moe_s / d.top_k)

    async def _copied(self, lease: Lease) -> None:
        """Wait until the copies of all that has landed have passed, as a kernel would."""
        lease.wait_on(self._stream)
        await self._stream.synchronize()
