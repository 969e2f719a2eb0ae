"""The usual chain over a pack: disk → staging → top tier, all memory from one pool of huge pages.

Tiers compose by their constructors, so another chain (a RAM cache between disk and staging, no
staging) is a few lines of its owner's; this is the one that fits most.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import attrs

from tieredmoe.backends import open_backend
from tieredmoe.budget import available_host_nbytes, format_size, parse_size, slots_for_budget
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import BudgetError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostPool
from tieredmoe.pack import (
    Pack,
    PackSource,
    VerifiedSource,
    VerifyThreads,
    open_pack,
    open_repair,
)
from tieredmoe.policies import make_policy
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from tieredmoe.pack.verified import VerifyMode
    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec


@attrs.frozen
class Plan:
    """What a chain will take, decided before anything is allocated."""

    n_slots: int
    stage_slots: int
    slot_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return (self.n_slots + self.stage_slots) * self.slot_nbytes


def plan(spec: MoESpec, config: HierarchyConfig, *, free_nbytes: int | None = None) -> Plan:
    """The slots that ``config`` gets out of ``free_nbytes`` (default: what the host has free).

    Raises ``BudgetError`` with the numbers when a layer's top-k does not fit.
    """
    free = available_host_nbytes() if free_nbytes is None else free_nbytes
    slot = spec.slot_nbytes
    staging_nbytes = config.stage_slots * slot
    try:
        n_slots = slots_for_budget(
            requested_nbytes=parse_size(config.vram, whole_nbytes=free),
            free_nbytes=free - staging_nbytes,
            reserve_nbytes=config.reserve_nbytes(free),
            slot_nbytes=slot,
            top_k=spec.top_k,
            n_records=spec.n_records,
        )
    except BudgetError as error:
        if not staging_nbytes:
            raise
        staging = f"{config.stage_slots} staging slots take {format_size(staging_nbytes)} first"
        raise BudgetError(f"{error} ({staging})") from error
    return Plan(n_slots, config.stage_slots, slot)


async def open_hierarchy(
    pack: Pack | Path | str, config: HierarchyConfig | None = None
) -> Hierarchy:
    """A hierarchy over ``pack``, ready to serve; the caller closes it (``async with``).

    Raises ``PackError``, ``BudgetError``, ``DirectIOUnavailableError``, ``GGUFError`` (for
    ``repair_from``); nothing stays open then.
    """
    config = config or HierarchyConfig()
    if not isinstance(pack, Pack):
        pack = await asyncio.to_thread(open_pack, Path(pack))
    planned = plan(pack.spec, config)
    repair = None
    if config.repair_from is not None:
        repair = await asyncio.to_thread(open_repair, pack, config.repair_from)
    backend = open_backend(config.backend, pack.data_files)
    source: Source = PackSource(pack, backend)
    try:
        if config.verify != "off":
            mode = cast("VerifyMode", config.verify)
            source = VerifiedSource(source, pack, mode=mode, worker=VerifyThreads(), repair=repair)
        pool = await asyncio.to_thread(HostPool.allocate, planned.nbytes)
    except BaseException:
        await source.close()
        raise
    top = compose(source, pack.spec, planned, pool, policy=config.policy)
    # Arenas hold views of the pool: its memory goes when the last of them is closed.
    pool.close()
    return Hierarchy(top, pack.spec, stats_path=config.stats_path, stats_every=config.stats_every)


def compose(source: Source, spec: MoESpec, planned: Plan, pool: HostPool, *, policy: str) -> Tier:
    """The chain ``source`` → staging (if planned) → top, its arenas carved from ``pool``."""
    if planned.stage_slots:
        source = Tier(
            name="staging",
            source=source,
            arena=_carve(pool, planned.stage_slots, planned.slot_nbytes),
            policy=make_policy(
                "lru", n_slots=planned.stage_slots, layers=spec.layers, top_k=spec.top_k
            ),
            policy_name="lru",
        )
    return Tier(
        name="top",
        source=source,
        arena=_carve(pool, planned.n_slots, planned.slot_nbytes),
        policy=make_policy(policy, n_slots=planned.n_slots, layers=spec.layers, top_k=spec.top_k),
        policy_name=policy,
    )


def _carve(pool: HostPool, n_slots: int, slot_nbytes: int) -> HostArena:
    return HostArena(pool.carve(n_slots * slot_nbytes), n_slots=n_slots, slot_nbytes=slot_nbytes)
