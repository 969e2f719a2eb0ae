"""How many slots each tier of the usual chain gets, decided before anything is allocated.

Rejected: a RAM tier as large as happens to fit where a size was asked for (who names a size relies
on it), and one too small to read into (each read would wait for a slot).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.opening import WINDOW_NBYTES
from tieredmoe.budget import available_host_nbytes, format_size, parse_size, slots_for_budget
from tieredmoe.config import AUTO, STAGE_SLOTS_MAX
from tieredmoe.errors import BudgetError

if TYPE_CHECKING:
    from tieredmoe.config import HierarchyConfig
    from tieredmoe.spec import MoESpec

_STAGE_SLOTS_MIN = 8


@attrs.frozen
class Plan:
    """What a chain will take, decided before anything is allocated.

    The slots right above the disk, staging or top, have room for the reads of any expert, which is
    more than a record where roles are read in the pages around them. ``keeps``: those of staging
    are a RAM tier.
    """

    n_slots: int
    slot_nbytes: int
    stage_slots: int
    stage_slot_nbytes: int
    on_device: bool = False
    keeps: bool = False

    @property
    def top_nbytes(self) -> int:
        """Bytes of the top tier's slots."""
        return self.n_slots * self.slot_nbytes

    @property
    def stage_nbytes(self) -> int:
        """Bytes of the slots of staging, or of the RAM tier."""
        return self.stage_slots * self.stage_slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the host's pool."""
        return self.stage_nbytes if self.on_device else self.top_nbytes + self.stage_nbytes


def stage_slots_before_device(config: HierarchyConfig, read_nbytes: int, *, n_drives: int) -> int:
    """Staging slots in front of a GPU for experts whose reads take ``read_nbytes`` of room.

    As ``config`` says; by default a drive's window (the most there is by default, where none is
    set) for each of ``n_drives`` and two for copies that run, at least 8.
    """
    if config.stage_slots is not None:
        return config.stage_slots
    window_nbytes = config.window_nbytes or WINDOW_NBYTES
    per_drive = -(-window_nbytes // read_nbytes)
    return min(max(_STAGE_SLOTS_MIN, n_drives * per_drive + 2), STAGE_SLOTS_MAX)


def plan(
    spec: MoESpec,
    config: HierarchyConfig,
    *,
    read_nbytes: int | None = None,
    free_nbytes: int | None = None,
    host_free_nbytes: int | None = None,
    n_drives: int = 1,
) -> Plan:
    """The slots that ``config`` gets out of ``free_nbytes`` (default: what the host has free).

    With a GPU, these are its free bytes, and must be given; ``host_free_nbytes`` (default: what the
    host has free) are for the RAM tier. ``read_nbytes`` is the room that the reads of an expert
    take, by default a record's. Raises ``BudgetError`` with the numbers when a layer's top-k does
    not fit, or the RAM tier does not.
    """
    on_device = config.device != "host"
    assert free_nbytes is not None or not on_device, "how much is free on a GPU, its owner knows"
    free = available_host_nbytes() if free_nbytes is None else free_nbytes
    host_free = free
    if on_device:
        host_free = available_host_nbytes() if host_free_nbytes is None else host_free_nbytes
    read = read_nbytes or spec.slot_nbytes
    stage_slots = config.stage_slots or 0
    if on_device:
        stage_slots = stage_slots_before_device(config, read, n_drives=n_drives)
        if config.stage_slots is None:
            stage_slots = min(stage_slots, spec.n_records)
    ram_slots = _ram_slots(
        spec, config, read_nbytes=read, free=host_free, n_least=max(spec.top_k, stage_slots)
    )
    stage_slots = ram_slots or stage_slots
    slot = spec.slot_nbytes if stage_slots else read
    staging_nbytes = 0 if on_device else stage_slots * read  # there it is other memory
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
        what = "slots of the RAM tier" if ram_slots else "staging slots"
        staging = f"{stage_slots} {what} take {format_size(staging_nbytes)} first"
        raise BudgetError(f"{error} ({staging})") from error
    return Plan(n_slots, slot, stage_slots, read, on_device, keeps=ram_slots > 0)


def _ram_slots(
    spec: MoESpec, config: HierarchyConfig, *, read_nbytes: int, free: int, n_least: int
) -> int:
    """Slots of the RAM tier, ``n_least`` at least; 0 for none, or none that "auto" has room for."""
    if config.ram is None:
        return 0
    reserve = config.ram_reserve_nbytes(free)
    if config.ram == AUTO:
        n_slots = min(spec.n_records, max(0, free - reserve) // read_nbytes)
        return n_slots if n_slots >= n_least else 0
    asked = parse_size(config.ram, whole_nbytes=free)
    n_slots = min(spec.n_records, asked // read_nbytes)
    if n_slots < n_least:
        raise BudgetError(
            f"the RAM tier would have {n_slots} slots and needs {n_least} to read into: ram is "
            f"{format_size(asked)}, a slot {format_size(read_nbytes)}; set ram to at least "
            f"{n_least * read_nbytes} bytes, or leave it out"
        )
    if n_slots * read_nbytes > free - reserve:
        raise BudgetError(
            f"the RAM tier's {n_slots} slots of {format_size(read_nbytes)} do not fit: the host "
            f"has {format_size(free)} free, of which ram_reserve keeps {format_size(reserve)}; set "
            f"ram to at most {max(0, free - reserve)} bytes, or a smaller ram_reserve"
        )
    return n_slots
