"""Counters and their frozen snapshots, under the names that published systems use.

Counters are plain ints bumped where things happen; nothing here is on the hit path. A snapshot is
what leaves the library: frozen, comparable, and one JSON object on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import aiofiles
import attrs
from aiofiles.os import remove, replace
from aiofiles.ospath import exists, isfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.backends.drives import DriveStats


def _per_layer(counts: Mapping[int, int]) -> Mapping[int, int]:
    return MappingProxyType(dict(counts))


def _per_kind(counts: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(counts))


@attrs.define(eq=False)
class SourceCounters:
    """What a leaf source asked of its disk, and how. One read here is one expert."""

    backend: str
    direct_io: bool
    pack_reads: int = 0
    pack_read_bytes: int = 0
    pack_payload_bytes: int = 0
    read_errors: Counter[str] = attrs.field(factory=Counter)
    digest_mismatches: int = 0
    repaired: int = 0
    retries: int = 0
    demand_delay_s: float = 0.0
    ahead_s: float = 0.0
    fallbacks: tuple[str, ...] = ()
    drives: tuple[DriveStats, ...] = ()


@attrs.frozen(kw_only=True)
class TierStats:
    """One tier of a chain, counted as the top tier is, but per expert that was asked of it.

    ``copied_up_bytes`` went from it into the tier above; ``copied_back`` experts, which the tier
    above had evicted, came back, as ``copied_back_bytes``.
    """

    name: str
    policy: str
    slots: int
    resident: int
    hits: int
    misses: int
    joins: int
    evictions: int
    copied_up_bytes: int
    copied_back: int
    copied_back_bytes: int

    def since(self, earlier: TierStats) -> TierStats:
        """What has been counted between the snapshot ``earlier`` and this one."""
        counters = (
            "hits",
            "misses",
            "joins",
            "evictions",
            "copied_up_bytes",
            "copied_back",
            "copied_back_bytes",
        )
        differences = {name: getattr(self, name) - getattr(earlier, name) for name in counters}
        return attrs.evolve(self, **differences)


@attrs.frozen(kw_only=True)
class PrefetchStats:
    """What was asked for ahead of demand, in experts, and what became of it.

    ``issued`` is the sum of the others and of the experts that are in the ``slots`` set apart for
    them now. ``useful``: had landed when demand came, which was a hit; ``late``: were on their way,
    a join; ``wasted``: were read, or half, for nobody; ``dropped`` on their way; ``failed``, which
    nobody was told. Bytes are those of the experts (in ``pack_payload_bytes``,
    too, as far as they were read).

    ``demand_delay_s`` is the time, per drive, from when a demand read found reads of prefetch in
    flight until those had ended or were wanted themselves: they have delayed it by that at most.
    ``ahead_s`` is the time in which nothing but prefetch was in flight: what it can have won.
    """

    slots: int = 0
    issued: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    dropped: int = 0
    failed: int = 0
    useful_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0
    dropped_bytes: int = 0
    demand_delay_s: float = 0.0
    ahead_s: float = 0.0

    def since(self, earlier: PrefetchStats) -> PrefetchStats:
        """What has been counted between the snapshot ``earlier`` and this one."""
        names = [a.name for a in attrs.fields(PrefetchStats) if a.name != "slots"]
        differences = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return attrs.evolve(self, **differences)


@attrs.frozen(kw_only=True)
class Stats:
    """A snapshot of one hierarchy.

    * ``cache_hits``, ``cache_misses``, ``cache_joins``: top tier, per distinct key per acquire, at
      the grant. A join (the expert was already on its way) is counted as a miss too.
    * ``pack_read_bytes`` counts bytes asked of the disk, alignment included; ``pack_payload_bytes``
      and ``pack_reads`` the experts. A record that had to be read again counts again.
    * ``io_errors`` counts expert reads that failed for good; ``read_errors`` says how many of each
      kind: an errno name, "eof", "changed" (the file, under us) or "digest".
    * ``retries`` counts the backend's second tries of reads; ``digest_mismatches`` the records that
      arrived and were not what was packed, those that came right when read again included;
      ``repaired`` the experts that were read from the source GGUF instead.
    * ``h2d_bytes`` counts bytes copied into the top tier's arena, ``d2h_bytes`` those copied back
      out of it, of ``copied_back`` experts. ``ram_hits`` counts the experts that were in the RAM
      tier when the top tier missed them, which the disk was spared.
    * ``fallback_count`` counts the better kinds of I/O that were asked for at open and could not be
      had; ``fallbacks`` says which, and why. Nothing falls back in mid-run.
    * ``drives`` is empty unless the experts lie on several; their reads and bytes add up.
    * ``executed_experts`` counts, per layer, the (token, expert) pairs that were computed: always
      tokens × top-k.
    """

    cache_hits: int
    cache_misses: int
    cache_joins: int
    cache_evictions: int
    pack_reads: int
    pack_read_bytes: int
    pack_payload_bytes: int
    h2d_bytes: int
    fallback_count: int
    io_errors: int
    read_errors: Mapping[str, int] = attrs.field(converter=_per_kind)
    retries: int
    digest_mismatches: int
    repaired: int
    executed_experts: Mapping[int, int] = attrs.field(converter=_per_layer)
    cache_policy: str
    policy_reason: str
    cache_capacity_experts: int
    cache_capacity_bytes: int
    resident_experts: int
    backend: str
    direct_io: bool
    fallbacks: tuple[str, ...] = ()
    drives: tuple[DriveStats, ...] = ()
    tiers: tuple[TierStats, ...] = ()
    """each tier, the top one first"""
    prefetch: PrefetchStats = PrefetchStats()

    @property
    def ram_hits(self) -> int:
        """Misses of the top tier that the RAM tier served."""
        return sum(tier.hits for tier in self.tiers[1:])

    @property
    def copied_back(self) -> int:
        """Experts that the top tier evicted and the tier below kept by a copy."""
        return self.tiers[1].copied_back if len(self.tiers) > 1 else 0

    @property
    def d2h_bytes(self) -> int:
        """Bytes of those copies."""
        return self.tiers[1].copied_back_bytes if len(self.tiers) > 1 else 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 if there were none."""
        lookups = self.cache_hits + self.cache_misses
        return self.cache_hits / lookups if lookups else 0.0

    def since(self, earlier: Stats) -> Stats:
        """What has been counted between the snapshot ``earlier`` and this one."""
        counters = (
            "cache_hits",
            "cache_misses",
            "cache_joins",
            "cache_evictions",
            "pack_reads",
            "pack_read_bytes",
            "pack_payload_bytes",
            "h2d_bytes",
            "io_errors",
            "retries",
            "digest_mismatches",
            "repaired",
        )
        return attrs.evolve(
            self,
            read_errors=Counter(self.read_errors) - Counter(earlier.read_errors),
            prefetch=self.prefetch.since(earlier.prefetch),
            executed_experts={
                layer: n - earlier.executed_experts[layer]
                for layer, n in self.executed_experts.items()
            },
            drives=tuple(
                now.since(then) for now, then in zip(self.drives, earlier.drives, strict=True)
            ),
            tiers=tuple(
                now.since(then) for now, then in zip(self.tiers, earlier.tiers, strict=True)
            ),
            **{name: getattr(self, name) - getattr(earlier, name) for name in counters},
        )

    def as_dict(self) -> dict[str, object]:
        """Plain types, ready for JSON; layers become strings there."""
        values = {a.name: getattr(self, a.name) for a in attrs.fields(Stats)}
        return values | {
            "executed_experts": dict(self.executed_experts),
            "read_errors": dict(self.read_errors),
            "drives": [attrs.asdict(drive) for drive in self.drives],
            "tiers": [attrs.asdict(tier) for tier in self.tiers],
            "ram_hits": self.ram_hits,
            "copied_back": self.copied_back,
            "d2h_bytes": self.d2h_bytes,
            "prefetch": attrs.asdict(self.prefetch),
            "hit_rate": self.hit_rate,
        }

    async def write(self, path: Path) -> None:
        """Replace the file ``path`` by this snapshot at once; no reader sees half of one.

        A link is followed, and what is no regular file (a device, a pipe) is written to instead.
        Raises ``OSError``. Cancelled, it leaves the old file or the new one.
        """
        # Not Path.resolve, for which a link to itself is a RuntimeError until Python 3.13.
        path = Path(await asyncio.to_thread(os.path.realpath, path))
        if await exists(path) and not await isfile(path):
            async with aiofiles.open(path, "w", opener=_open_at_once) as file:
                await file.write(json.dumps(self.as_dict()) + "\n")
            return
        # Nobody else's: another hierarchy, or another process, may write to the same path now.
        partial = path.with_name(f"{path.name}.{os.getpid()}-{id(self):x}.partial")
        try:
            async with aiofiles.open(partial, "w") as file:
                await file.write(json.dumps(self.as_dict(), indent=1) + "\n")
            await replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):  # it may not be there
                await remove(partial)
            raise


def _open_at_once(path: str, flags: int) -> int:
    """Open a pipe that nobody reads with an error (ENXIO) instead of waiting for a reader."""
    return os.open(path, flags | os.O_NONBLOCK)
