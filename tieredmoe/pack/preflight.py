"""Everything that forbids a conversion, found before a byte is written, and told all at once.

Source and destination are looked at independently, so a missing shard, a disk that is too full and
a name that is taken are one message and one round of repairs. Nothing is changed. What only costs
speed is a note. Rejected: raising at the first problem, whose second is found when the first has
been mended, perhaps by a download of hours.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import GGUFError, MetadataError, PackError
from tieredmoe.gguf import GGUFInventory, open_inventory
from tieredmoe.gguf.shards import shard_paths
from tieredmoe.pack.conversion_state import ConversionState
from tieredmoe.pack.filesystem import direct_note, size_problem
from tieredmoe.pack.journal import JOURNAL_NAME, read_journal
from tieredmoe.pack.partial import free_nbytes, partial_path, target_problems
from tieredmoe.pack.planning import pack_nbytes, plan_inventory
from tieredmoe.pack.reclaim import peak_nbytes, reclaim_problems
from tieredmoe.pack.units import units_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieredmoe.pack.layout import PackLayout
    from tieredmoe.pack.units import Unit


@attrs.frozen(kw_only=True)
class Preflight:
    """What a conversion would meet. It may begin if ``problems`` is empty.

    ``needed_nbytes`` is the most that the pack takes while it grows (what an interrupted run has
    written included, the margin not), ``free_nbytes`` what it can have; None where that could not
    be learnt. ``inventory``, ``layout`` and ``units`` are there unless the source has a problem.
    ``source_shrinks`` says that what is given up of the source is space for the pack.
    """

    dest: Path
    source_error: GGUFError | MetadataError | None
    dest_problems: tuple[str, ...]
    notes: tuple[str, ...]
    inventory: GGUFInventory | None = None
    layout: PackLayout | None = None
    units: tuple[Unit, ...] = ()
    needed_nbytes: int | None = None
    free_nbytes: int | None = None
    source_shrinks: bool = False

    @property
    def source_problems(self) -> tuple[str, ...]:
        """All that is wrong with the source, each with the path that it is about."""
        error = self.source_error
        if isinstance(error, GGUFError):
            return tuple(f"{error.path}: {fact}" for fact in error.facts)
        return () if error is None else (str(error),)

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that forbids the conversion; each is a sentence with its way out."""
        return (*self.source_problems, *(f"{self.dest}: {fact}" for fact in self.dest_problems))

    def raise_problems(self) -> None:
        """Raise one error with all problems: the source's own if it has all of them."""
        if self.source_error is not None and not self.dest_problems:
            raise self.source_error
        if self.problems:
            facts = "; ".join((*self.dest_problems, *self.source_problems))
            raise PackError(self.dest, facts) from self.source_error


def check_conversion(
    source: Path | str | GGUFInventory,
    dest: Path | str,
    *,
    file_nbytes_max: int | None = None,
    reclaim_source: bool = False,
    safety_margin_nbytes: int = 0,
) -> Preflight:
    """What ``create_pack`` with the same arguments would meet; blocks, and writes nothing.

    What an interrupted conversion left at ``dest`` is taken into account. Raises nothing for
    problems, they are in the result; a journal that is damaged is one of them.
    """
    wish = _Wish(
        source if isinstance(source, GGUFInventory) else Path(source).absolute(),
        Path(dest).absolute(),
        file_nbytes_max,
        reclaim_source,
        safety_margin_nbytes,
    )
    dest_problems = list(_place_problems(wish))
    state = ConversionState()
    try:
        records, _ = read_journal(partial_path(wish.dest) / JOURNAL_NAME)
        state = ConversionState.of(records)
    except PackError as error:
        dest_problems.append(f"an interrupted conversion cannot be gone on with: {error}")
    except (OSError, ValueError) as error:
        # As a rule, whatever keeps the journal from being read is a problem of the place itself.
        dest_problems = dest_problems or [f"cannot be examined: {error}"]
    # The journal's last record may be the one that was lost, and the first that tells of holes.
    may_be_marked = state.touched or (wish.reclaim_source and bool(state.units))
    inventory, layout, source_error = _source(wish, given_up=may_be_marked)
    found = Preflight(
        dest=wish.dest,
        source_error=source_error,
        dest_problems=(),
        notes=(),
        inventory=inventory,
        layout=layout,
        units=() if layout is None else units_of(layout),
    )
    if inventory is not None and layout is not None:
        found = _sized(found, wish, state)
        dest_problems += _space_problems(found, wish, state)
        dest_problems += _reclaim_problems(wish, inventory, state)
    elif not wish.reclaim_source:
        dest_problems += _least_space_problems(wish)
    notes = _notes(wish, inventory)
    return attrs.evolve(found, dest_problems=tuple(dest_problems), notes=tuple(notes))


@attrs.frozen
class _Wish:
    """What was asked for; paths are absolute."""

    source: Path | GGUFInventory
    dest: Path
    file_nbytes_max: int | None
    reclaim_source: bool
    safety_margin_nbytes: int


def _source(
    wish: _Wish, *, given_up: bool
) -> tuple[GGUFInventory | None, PackLayout | None, GGUFError | MetadataError | None]:
    """The source and the pack that it would become, or all that is wrong with it."""
    inventory = wish.source
    try:
        if not isinstance(inventory, GGUFInventory):
            inventory = open_inventory(inventory, given_up=given_up)
        layout = plan_inventory(inventory, file_nbytes_max=wish.file_nbytes_max)
    except (GGUFError, MetadataError) as error:
        return None, None, error
    return inventory, layout, None


def _source_files(wish: _Wish) -> Sequence[Path]:
    """The files that the source is, whether they can be read or not."""
    if isinstance(wish.source, GGUFInventory):
        return [shard.path for shard in wish.source.shards]
    try:
        return shard_paths(wish.source)
    except GGUFError:
        return [wish.source]


def _place_problems(wish: _Wish) -> Iterator[str]:
    """What is wrong with the destination whatever the source holds."""
    dest, files = wish.dest, _source_files(wish)
    inside = [file for file in files if file in (dest, *dest.parents)]
    if dest == wish.source or inside:
        yield "is the source itself; name a new directory"
        return
    if dest.suffix == ".gguf" and any(dest.parent == file.parent for file in files):
        yield (
            "is a name that would pass for one of the source's files; let it end in another way "
            f"than .gguf: {dest.with_suffix('.pack').name}"
        )
    yield from target_problems(dest, 0, goes_on=True)


def _sized(found: Preflight, wish: _Wish, state: ConversionState) -> Preflight:
    assert found.inventory is not None
    assert found.layout is not None
    shrinks, free = False, None
    with contextlib.suppress(OSError, ValueError):  # then the destination's own problems say so
        if wish.dest.parent.is_dir():
            shrinks = wish.reclaim_source and _on_one_disk(wish.dest, found.inventory)
            free = free_nbytes(wish.dest)
    needed = _needed_nbytes(found, state, source_shrinks=shrinks)
    return attrs.evolve(found, needed_nbytes=needed, free_nbytes=free, source_shrinks=shrinks)


def _needed_nbytes(found: Preflight, state: ConversionState, *, source_shrinks: bool) -> int:
    assert found.layout is not None
    left = [unit for index, unit in enumerate(found.units) if index not in state.units]
    written = sum(unit.nbytes for unit in found.units) - sum(unit.nbytes for unit in left)
    manifest_nbytes = pack_nbytes(found.layout) - found.layout.data_nbytes
    peak = peak_nbytes(found.layout, left, source_shrinks=source_shrinks)
    return written + peak + manifest_nbytes


def _on_one_disk(dest: Path, inventory: GGUFInventory) -> bool:
    """Whether what is given up of the source is space for the pack."""
    devices = {shard.path.stat().st_dev for shard in inventory.shards}
    return devices == {dest.parent.stat().st_dev}


def _space_problems(found: Preflight, wish: _Wish, state: ConversionState) -> Iterator[str]:
    """What the pack's size forbids: too little space, or files larger than there can be."""
    assert found.layout is not None
    assert found.inventory is not None
    assert found.needed_nbytes is not None
    parent, margin = wish.dest.parent, wish.safety_margin_nbytes
    if found.free_nbytes is None:
        return
    missing = found.needed_nbytes + margin - found.free_nbytes
    if missing > 0:
        needs = f"needs {found.needed_nbytes:,} bytes"
        needs += f" and {margin:,} of margin" if margin else ""
        way_out = f"make room for {missing:,} more or choose another drive"
        if not wish.reclaim_source and _on_one_disk(wish.dest, found.inventory):
            enough = _needed_nbytes(found, state, source_shrinks=True) + margin
            if enough <= found.free_nbytes:
                way_out += f", or give the source up meanwhile (--reclaim-source: {enough:,} do)"
        yield f"{needs}, but {parent} has {found.free_nbytes:,} free; {way_out}"
    largest = max(found.layout.files, key=lambda file: file.nbytes)
    problem = size_problem(parent, largest.nbytes)
    if problem is not None:
        if largest in found.layout.expert_files:
            problem += f", or smaller files (--max-file-gib) than {largest.name}"
        yield problem


def _least_space_problems(wish: _Wish) -> Iterator[str]:
    """Too little space even for what is there of a source that cannot be read whole."""
    try:
        files = [file for file in _source_files(wish) if file.is_file()]
        least, free = sum(file.stat().st_size for file in files), free_nbytes(wish.dest)
    except (OSError, ValueError):
        return  # the destination's own problems say so
    missing = least + wish.safety_margin_nbytes - free
    if missing > 0:
        margin = (
            f" and {wish.safety_margin_nbytes:,} of margin" if wish.safety_margin_nbytes else ""
        )
        yield (
            f"needs at least {least:,} bytes{margin}, but {wish.dest.parent} has {free:,} free; "
            f"make room for {missing:,} more or choose another drive"
        )


def _reclaim_problems(
    wish: _Wish, inventory: GGUFInventory, state: ConversionState
) -> Sequence[str]:
    if wish.reclaim_source:
        return reclaim_problems(inventory)
    if state.touched:
        fact = "its source is partly given up by now"
        way_out = "go on with --reclaim-source (reclaim_source)"
        return [f"{fact}: {way_out}, or get it back by `tieredmoe pack rollback`"]
    return []


def _notes(wish: _Wish, inventory: GGUFInventory | None) -> Iterator[str]:
    shards = () if inventory is None else inventory.shards
    places = {shard.path.parent: None for shard in shards} | {wish.dest.parent: None}
    for place in places:
        if os.access(place, os.W_OK | os.X_OK) and (note := direct_note(place)) is not None:
            yield note
