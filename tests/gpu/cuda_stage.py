"""Tiny experts on a real GPU: tiers over a file in memory, and kernels that say what they saw."""

import torch

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostPool
from tieredmoe.memory.cuda import CudaArena
from tieredmoe.memory.pinning import PinnedHost
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(3, 4, 7), n_experts=8, top_k=2, role_nbytes=1 << 17)
PACK = TinyPack(SPEC)
WORDS = {
    key: torch.frombuffer(bytearray(PACK.payload(key)), dtype=torch.int64) for key in SPEC.keys()
}
"""What each expert's bytes are, as 8-byte words."""

SLOW_CYCLES = 2_000_000
"""A kernel of about a millisecond."""


def pinned_arena(n_slots, device):
    """A host arena in registered memory, and the registration, which outlives it."""
    pool = HostPool.allocate(n_slots * SPEC.slot_nbytes)
    pinned = PinnedHost.register(pool, device=device, record_nbytes=SPEC.slot_nbytes)
    assert pinned.refused is None
    region = pool.carve(n_slots * SPEC.slot_nbytes)
    pool.close()
    return HostArena(region, n_slots=n_slots, slot_nbytes=SPEC.slot_nbytes), pinned


def cuda_arena(n_slots, device, **options):
    return CudaArena(
        n_slots=n_slots,
        slot_nbytes=SPEC.slot_nbytes,
        layers=SPEC.layers,
        n_experts=SPEC.n_experts,
        device=device,
        **options,
    )


async def open_tiers(n_slots, stage_slots, device, **options):
    """A hierarchy whose top tier is on ``device``."""
    staging, pinned = pinned_arena(stage_slots, device)
    arena = cuda_arena(n_slots, device, pinned=pinned)
    source = PackSource(PACK, MemoryBackend([PACK.image], alignment=4096))
    for name, each in (("staging", staging), ("top", arena)):
        policy = make_policy("lru", n_slots=each.n_slots, layers=SPEC.layers, top_k=SPEC.top_k)
        source = Tier(name=name, source=source, arena=each, policy=policy)
    return Hierarchy(source, SPEC, **options)


class Looks:
    """What kernels found in slots, gathered through the device's table, to be judged later."""

    def __init__(self, arena):
        self._arena = arena
        self._words = arena.tensor.view(torch.int64)
        self._found = []

    def look(self, stream, layer, experts, *, slowly=True):
        """Enqueue on ``stream``: read the experts' slots, take a while, read them again."""
        with torch.cuda.stream(stream):
            ids = torch.tensor(list(experts), device=self._words.device)
            before = self._sums(layer, ids)
            if slowly:
                torch.cuda._sleep(SLOW_CYCLES)
            after = self._sums(layer, ids)
        self._found.append((layer, list(experts), before, after))

    def _sums(self, layer, ids):
        slots = self._arena.slot_of(layer)[ids].long()
        words = self._words[slots][:, : SPEC.layouts[layer].payload_nbytes // 8]
        places = torch.arange(words.shape[1], device=words.device)
        # The sum alone would not see bytes at the wrong place, nor the other all of one expert.
        return torch.stack([words.sum(1), (words * (places % 1009)).sum(1), slots])

    def judge(self):
        """Assert that every look saw the right bytes in one slot, twice; returns how many did."""
        torch.cuda.synchronize()
        for layer, experts, before, after in self._found:
            for column, expert in enumerate(experts):
                words = WORDS[ExpertKey(layer, expert)]
                places = torch.arange(words.numel())
                right = [words.sum().item(), (words * (places % 1009)).sum().item()]
                for what, seen in (("first", before), ("then", after)):
                    assert seen[:2, column].tolist() == right, f"{what} of {layer}.{expert}"
                assert before[2, column] == after[2, column]
        n, self._found = len(self._found), []
        return n
