"""What tiers and their chain have counted, as frozen snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.stats import Stats, TierStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieredmoe.prefetching import Prefetching
    from tieredmoe.tier import Tier


def tier_stats(tier: Tier) -> TierStats:
    """A snapshot of the counters of ``tier``; in any thread."""
    residency, keeper = tier.residency, tier.keeper
    return TierStats(
        name=tier.name,
        policy=tier.policy_name,
        slots=residency.n_slots,
        resident=len(residency.entries),
        hits=residency.hits,
        misses=residency.misses,
        joins=residency.joins,
        evictions=residency.evictions,
        copied_up_bytes=tier.copied_nbytes,
        copied_back=0 if keeper is None else keeper.copied_back,
        copied_back_bytes=0 if keeper is None else keeper.copied_back_nbytes,
    )


def hierarchy_stats(
    tiers: Sequence[Tier], prefetching: Prefetching, *, executed_experts: Mapping[int, int]
) -> Stats:
    """A snapshot of all counters of a chain, its tiers from the top down; in any thread."""
    top = tiers[0]
    residency = top.residency
    disk = top.source.counters
    read_errors = dict(disk.read_errors)  # in one step: the loop counts on
    return Stats(
        cache_hits=residency.hits,
        cache_misses=residency.misses,
        cache_joins=residency.joins,
        cache_evictions=residency.evictions,
        pack_reads=disk.pack_reads,
        pack_read_bytes=disk.pack_read_bytes,
        pack_payload_bytes=disk.pack_payload_bytes,
        h2d_bytes=tiers[1].copied_nbytes if len(tiers) > 1 else 0,
        fallback_count=len(disk.fallbacks),
        io_errors=sum(read_errors.values()),
        read_errors=read_errors,
        retries=disk.retries,
        digest_mismatches=disk.digest_mismatches,
        repaired=disk.repaired,
        executed_experts=executed_experts,
        cache_policy=top.policy_name,
        policy_reason=top.policy_reason,
        cache_capacity_experts=residency.n_slots,
        cache_capacity_bytes=residency.n_slots * top.arena.slot_nbytes,
        resident_experts=len(residency.entries),
        prefetch=prefetching.stats(disk),
        backend=disk.backend,
        direct_io=disk.direct_io,
        fallbacks=disk.fallbacks,
        drives=disk.drives,
        tiers=tuple(map(tier_stats, tiers)),
    )
