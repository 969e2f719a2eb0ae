"""Tiny experts whose bytes say who they are, and chains of tiers over a simulated disk.

Every 8 bytes of a record name layer, expert and position, so a slot with the wrong expert, half an
expert or a torn one cannot pass for the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostRegion
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.records import Extents, whole_record
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import PAGE_NBYTES, ROLES, ExpertKey, ExpertLayout, MoESpec
from tieredmoe.testing.disk import SimDisk
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.policies.protocol import EvictionPolicy
    from tieredmoe.source import Source
    from tieredmoe.testing.faults import FaultPlan


def tiny_spec(
    *,
    layers: Sequence[int] = (0, 1, 2),
    n_experts: int = 8,
    top_k: int = 2,
    role_nbytes: int | Sequence[int] = 800,
) -> MoESpec:
    """A spec of F32 roles of ``role_nbytes`` each, or of one size per layer."""
    sizes = [role_nbytes] * len(layers) if isinstance(role_nbytes, int) else list(role_nbytes)
    assert len(sizes) == len(layers), "one role size per layer"
    assert all(size % 8 == 0 for size in sizes), "role sizes are multiples of 8 bytes"
    layouts = {
        layer: ExpertLayout.build(dict.fromkeys(ROLES, (0, (size // 8, 2), size)))
        for layer, size in zip(layers, sizes, strict=True)
    }
    return MoESpec("tiny", n_experts, top_k, layouts)


class TinyPack:
    """A pack of ``spec`` in memory: what ``PackSource`` needs of one, and the right answers."""

    def __init__(self, spec: MoESpec) -> None:
        self.spec = spec
        self._starts: dict[int, int] = {}
        nbytes = 0
        for layer, layout in spec.layouts.items():
            self._starts[layer] = nbytes
            nbytes += layout.stride * spec.n_experts
        self.image = bytearray(nbytes)
        for key in spec.keys():
            where = self.locate(key)
            payload = self.payload(key)
            self.image[where.offset : where.offset + len(payload)] = payload

    def locate(self, key: ExpertKey) -> Extent:
        """Where the record of ``key`` lies; ``KeyError`` for an unknown one."""
        stride = self.spec.layouts[key.layer].stride
        return Extent(0, self._starts[key.layer] + key.expert * stride, stride)

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``: its record."""
        return whole_record(self.locate(key), self.spec.layouts[key.layer])

    def payload(self, key: ExpertKey) -> bytes:
        """The right bytes of ``key``."""
        n_words = self.spec.layouts[key.layer].payload_nbytes // 8
        words = np.arange(n_words, dtype=np.uint64)
        words |= np.uint64((key.layer + 1) << 48 | (key.expert + 1) << 32)
        return words.tobytes()


def host_arena(n_slots: int, slot_nbytes: int = PAGE_NBYTES, *, poison: int = 0xA5) -> HostArena:
    """An arena in ordinary memory, filled with ``poison``: what was never written shows."""
    nbytes = n_slots * slot_nbytes
    memory = np.full(nbytes + PAGE_NBYTES, poison, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    region = HostRegion(memory.data[start : start + nbytes], memory.ctypes.data + start)
    return HostArena(region, n_slots=n_slots, slot_nbytes=slot_nbytes)


def tiny_hierarchy(
    pack: TinyPack,
    slots: Sequence[int],
    *,
    policy: str | EvictionPolicy = "lfu_lru",
    seed: int = 0,
    faults: FaultPlan | None = None,
    disk: SimDisk | None = None,
) -> tuple[Hierarchy, SimDisk]:
    """A chain over a simulated disk; ``slots`` from the disk up: ``(2, 8)`` is staging, top."""
    disk = disk or SimDisk([pack.image], seed=seed, faults=faults)
    source: Source = PackSource(pack, disk)
    spec = pack.spec
    for i, n_slots in enumerate(slots):
        top = i == len(slots) - 1
        name = policy if top else "lru"
        chosen = (
            make_policy(name, n_slots=n_slots, layers=spec.layers, top_k=spec.top_k)
            if isinstance(name, str)
            else name
        )
        source = Tier(
            name="top" if top else f"tier {i}",
            source=source,
            arena=host_arena(n_slots, spec.slot_nbytes),
            policy=chosen,
            policy_name=name if isinstance(name, str) else "custom",
        )
    assert isinstance(source, Tier), "a chain has at least one tier"
    return Hierarchy(source, spec), disk
