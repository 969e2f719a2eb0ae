"""The usual chain over a model: disk → staging or RAM → top tier, all host memory from one pool.

The top tier is host memory or one GPU's. A machine with several GPUs has a hierarchy per GPU, each
with staging, backend and copy stream of its own: nothing is shared that one could block.

The RAM tier is staging with as many slots as memory allows, which keeps what the top tier evicts:
reads land in its slots, so there is no staging beside it. Tiers compose by their constructors, so
another chain is a few lines of its owner's; this is the one that fits most.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tieredmoe.backends import open_backend
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import ConfigError
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
from tieredmoe.policies import choose_policy, make_policy
from tieredmoe.policy_file import load_use_counts
from tieredmoe.snapshots import check_snapshot_path
from tieredmoe.tier import Tier
from tieredmoe.tier_plan import plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.backends import ReadBackend
    from tieredmoe.memory.cuda_device import CudaDevice
    from tieredmoe.memory.protocol import Arena
    from tieredmoe.pack import Checkpoint
    from tieredmoe.pack.repair import Repair
    from tieredmoe.pack.verified import VerifyMode
    from tieredmoe.policies import UseCounts
    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec
    from tieredmoe.tier_plan import Plan


async def open_hierarchy(
    model: Checkpoint | GGUFInventory | Path | str, config: HierarchyConfig | None = None
) -> Hierarchy:
    """A hierarchy over ``model``, ready to serve; the caller closes it (``async with``).

    ``model`` is a pack, a GGUF (a file, any shard, their directory: it is read where it is), or
    either of them opened. Without staging, roles stay where the reads of a GGUF's experts put them
    (``Hierarchy.spec`` says where), or are moved within the slot if that differs from expert to
    expert. Cancelled, it closes what it has opened. Raises ``PackError``, ``GGUFError``,
    ``MetadataError``, ``BudgetError``, ``DirectIOUnavailableError``, ``BackendUnavailableError``,
    ``ReadError``, ``DeviceError``, and ``ConfigError`` for a GPU that is not there, where
    ``stats_path`` holds something else, or where ``verify`` or ``repair_from`` ask for digests that
    the model does not have; nothing stays open then.
    """
    config = config or HierarchyConfig()
    if isinstance(model, Path | str | GGUFInventory):
        model = await asyncio.to_thread(open_checkpoint, model)
    device = None if config.device == "host" else await asyncio.to_thread(_device, config.device)
    planned = plan(
        model.spec,
        config,
        read_nbytes=model.slot_nbytes,
        free_nbytes=None if device is None else await asyncio.to_thread(device.free_nbytes),
        n_drives=len(model.drives) if isinstance(model, DrivesPack) else 1,
    )
    repair = await asyncio.to_thread(_checks, model, config)
    recalled: UseCounts | None = None
    if config.policy_path is not None:
        recalled = await asyncio.to_thread(load_use_counts, config.policy_path, model.spec)
    unchecked = config.verify == "off"
    # What was read is arranged by the copy upwards, or not at all where it can be used as it lies,
    # unless it has to be checked before.
    later = unchecked and planned.stage_slots > 0
    as_read: MoESpec | None = None
    if unchecked and not planned.stage_slots:
        as_read = await asyncio.to_thread(spec_as_read, model)
    spec = as_read or model.spec
    arranged = as_read is None and not later
    source: Source = await _open_source(model, config, arranged=arranged)
    try:
        if not unchecked:
            source = _verified(source, model, config, repair)
        await asyncio.to_thread(model.check_unchanged)
        top = await _stack(source, spec, planned, config, device)
    except BaseException:
        await source.close()
        raise
    return Hierarchy(
        top,
        spec,
        waiting_max=config.waiting_max,
        stats_path=config.stats_path,
        stats_every=config.stats_every,
        trace_events=config.trace_events,
        prefetch_slots=config.prefetch_slots,
        policy_path=config.policy_path,
        recalled=recalled,
    )


async def _open_source(model: Checkpoint, config: HierarchyConfig, *, arranged: bool) -> PackSource:
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
    return PackSource(model, backend, arranged=arranged)


async def _stack(
    source: Source,
    spec: MoESpec,
    planned: Plan,
    config: HierarchyConfig,
    device: CudaDevice | None,
) -> Tier:
    """The tiers on ``source``, in memory taken now; if this raises, all of it is given back."""
    pool = await asyncio.to_thread(HostPool.allocate, planned.nbytes)
    try:
        arena: Arena | None = None
        if device is not None:
            make = partial(device.arena_over, pool, planned, spec, strict=config.strict)
            arena, refused = await _arena(make)
            source.counters.fallbacks += refused
        return compose(source, spec, planned, pool, policy=config.policy, arena=arena)
    finally:
        # Arenas hold views of the pool: its memory goes when the last of them is closed.
        pool.close()


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


def _device(name: str) -> CudaDevice:
    # Here and nowhere above: whoever has no GPU needs no torch.
    from tieredmoe.memory.cuda_device import open_device  # noqa: PLC0415

    return open_device(name)


async def _arena(
    make: Callable[[], tuple[Arena, tuple[str, ...]]],
) -> tuple[Arena, tuple[str, ...]]:
    """What ``make`` makes in a thread; cancelled, it closes the arena once that is made."""
    making = asyncio.get_running_loop().run_in_executor(None, make)
    cancelled: asyncio.CancelledError | None = None
    while not making.done():
        try:
            await asyncio.wait({making})
        except asyncio.CancelledError as error:
            cancelled = error
    arena, refused = making.result()
    if cancelled is not None:
        arena.close()
        raise cancelled
    return arena, refused


def compose(
    source: Source,
    spec: MoESpec,
    planned: Plan,
    pool: HostPool,
    *,
    policy: str,
    arena: Arena | None = None,
) -> Tier:
    """The chain ``source`` → staging or RAM (if planned) → top, in arenas carved from ``pool``.

    The top tier is in ``arena`` if one is given.
    """
    if planned.stage_slots:
        source = Tier(
            name="ram" if planned.keeps else "staging",
            source=source,
            arena=_carve(pool, planned.stage_slots, planned.stage_slot_nbytes),
            policy=make_policy(
                "lru", n_slots=planned.stage_slots, layers=spec.layers, top_k=spec.top_k
            ),
            policy_name="lru",
            keeps=planned.keeps,
        )
    choice = choose_policy(
        policy,
        n_slots=planned.n_slots,
        layers=spec.layers,
        top_k=spec.top_k,
        n_experts=spec.n_experts,
    )
    return Tier(
        name="top",
        source=source,
        arena=arena or _carve(pool, planned.n_slots, planned.slot_nbytes),
        policy=choice.policy,
        policy_name=choice.name,
        policy_reason=choice.reason,
    )


def _carve(pool: HostPool, n_slots: int, slot_nbytes: int) -> HostArena:
    return HostArena(pool.carve(n_slots * slot_nbytes), n_slots=n_slots, slot_nbytes=slot_nbytes)
