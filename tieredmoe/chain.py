"""The usual chain over a model: disk → staging → top tier, all memory from one pool of huge pages.

Tiers compose by their constructors, so another chain (a RAM cache between disk and staging, no
staging) is a few lines of its owner's; this is the one that fits most.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import attrs

from tieredmoe.backends import open_backend
from tieredmoe.budget import available_host_nbytes, format_size, parse_size, slots_for_budget
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import BudgetError, ConfigError
from tieredmoe.gguf import GGUFInventory
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostPool
from tieredmoe.pack import (
    Digested,
    DrivesPack,
    Pack,
    PackSource,
    VerifiedSource,
    VerifyThreads,
    open_checkpoint,
    open_repair,
    spec_as_read,
)
from tieredmoe.pack.foreign import ForeignPack, open_foreign_repair
from tieredmoe.policies import make_policy
from tieredmoe.snapshots import check_snapshot_path
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from tieredmoe.backends import ReadBackend
    from tieredmoe.pack import Checkpoint
    from tieredmoe.pack.repair import Repair
    from tieredmoe.pack.verified import VerifyMode
    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec


@attrs.frozen
class Plan:
    """What a chain will take, decided before anything is allocated.

    The slots right above the disk, staging or top, have room for the reads of any expert, which is
    more than a record where roles are read in the pages around them.
    """

    n_slots: int
    slot_nbytes: int
    stage_slots: int
    stage_slot_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.n_slots * self.slot_nbytes + self.stage_slots * self.stage_slot_nbytes


def plan(
    spec: MoESpec,
    config: HierarchyConfig,
    *,
    read_nbytes: int | None = None,
    free_nbytes: int | None = None,
) -> Plan:
    """The slots that ``config`` gets out of ``free_nbytes`` (default: what the host has free).

    ``read_nbytes`` is the room that the reads of an expert take, by default a record's. Raises
    ``BudgetError`` with the numbers when a layer's top-k does not fit.
    """
    free = available_host_nbytes() if free_nbytes is None else free_nbytes
    read = read_nbytes or spec.slot_nbytes
    stage_slots = config.stage_slots or 0
    slot = spec.slot_nbytes if stage_slots else read
    staging_nbytes = stage_slots * read
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
        staging = f"{stage_slots} staging slots take {format_size(staging_nbytes)} first"
        raise BudgetError(f"{error} ({staging})") from error
    return Plan(n_slots, slot, stage_slots, read)


async def open_hierarchy(
    model: Checkpoint | GGUFInventory | Path | str, config: HierarchyConfig | None = None
) -> Hierarchy:
    """A hierarchy over ``model``, ready to serve; the caller closes it (``async with``).

    ``model`` is a pack, a GGUF (a file, any shard, their directory: it is read where it is), or
    either of them opened. Without staging, roles stay where the reads of a GGUF's experts put them
    (``Hierarchy.spec`` says where), or are moved within the slot if that differs from expert to
    expert. Cancelled, it closes what it has opened. Raises ``PackError``, ``GGUFError``,
    ``MetadataError``, ``BudgetError``, ``DirectIOUnavailableError``, ``BackendUnavailableError``,
    ``ReadError``, and ``ConfigError`` where ``stats_path`` holds something else, or where
    ``verify`` or ``repair_from`` ask for digests that the model does not have; nothing stays open
    then.
    """
    config = config or HierarchyConfig()
    if isinstance(model, Path | str | GGUFInventory):
        model = await asyncio.to_thread(open_checkpoint, model)
    planned = plan(model.spec, config, read_nbytes=model.slot_nbytes)
    repair = await asyncio.to_thread(_checks, model, config)
    unchecked = config.verify == "off"
    # What was read is arranged by the copy upwards, or not at all where it can be used as it lies,
    # unless it has to be checked before.
    later = unchecked and planned.stage_slots > 0
    as_read: MoESpec | None = None
    if unchecked and not planned.stage_slots:
        as_read = await asyncio.to_thread(spec_as_read, model)
    spec = as_read or model.spec
    open_files = partial(
        open_backend,
        config.backend,
        allow_buffered=config.allow_buffered,
        strict=config.strict,
        read_splits=config.read_splits,
        record_nbytes=model.slot_nbytes,
        window_nbytes=config.window_nbytes,
    )
    backend: ReadBackend
    if isinstance(model, DrivesPack):
        backend = await model.open_backend(open_files)
    else:
        backend = open_files(model.data_files)
    source: Source = PackSource(model, backend, arranged=as_read is None and not later)
    try:
        if not unchecked:
            source = _verified(source, model, config, repair)
        await asyncio.to_thread(model.check_unchanged)
        pool = await asyncio.to_thread(HostPool.allocate, planned.nbytes)
    except BaseException:
        await source.close()
        raise
    top = compose(source, spec, planned, pool, policy=config.policy)
    # Arenas hold views of the pool: its memory goes when the last of them is closed.
    pool.close()
    return Hierarchy(
        top,
        spec,
        waiting_max=config.waiting_max,
        stats_path=config.stats_path,
        stats_every=config.stats_every,
        trace_events=config.trace_events,
    )


def _checks(model: Checkpoint, config: HierarchyConfig) -> Repair | None:
    """Where damaged experts are to come from, once digests are known to be there if asked for."""
    if config.stats_path is not None:
        check_snapshot_path(config.stats_path)
    if config.verify == "off":
        return None
    if not isinstance(model, Digested) or not model.has_digests:
        asked = f"verify={config.verify!r}"
        if config.repair_from is not None:
            asked += " with repair_from"
        raise ConfigError(
            f"{asked}: {model.path} carries no digests to check reads against; use verify='off', "
            "or make a pack of its GGUF with `tieredmoe pack create`"
        )
    if config.repair_from is None:
        return None
    if isinstance(model, ForeignPack):
        return open_foreign_repair(model, config.repair_from)
    if isinstance(model, DrivesPack):
        model = model.pack
    if not isinstance(model, Pack):
        raise ConfigError(
            f"repair_from: {model.path} is not a pack of tieredmoe's, the only form that can be "
            "repaired from its source; leave repair_from out"
        )
    return open_repair(model, config.repair_from)


def _verified(
    source: Source, model: Checkpoint, config: HierarchyConfig, repair: Repair | None
) -> VerifiedSource:
    mode = cast("VerifyMode", config.verify)
    return VerifiedSource(source, model, mode=mode, worker=VerifyThreads(), repair=repair)


def compose(source: Source, spec: MoESpec, planned: Plan, pool: HostPool, *, policy: str) -> Tier:
    """The chain ``source`` → staging (if planned) → top, its arenas carved from ``pool``."""
    if planned.stage_slots:
        source = Tier(
            name="staging",
            source=source,
            arena=_carve(pool, planned.stage_slots, planned.stage_slot_nbytes),
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
