"""Converts a GGUF model to a pack: source bytes are read once, pack bytes written once.

Layer by layer, each noted in a journal once it is on stable storage, so that a conversion goes on
after whatever stopped it: a kill, a full disk, Ctrl-C. With ``reclaim_source`` each layer is then
read again from the pack, and its bytes in the source are given up. Memory is a fixed number of
buffers, whatever the size of the model.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tieredmoe.errors import ConfigError, GGUFError, PackError
from tieredmoe.gguf import GGUFInventory, open_inventory
from tieredmoe.pack.conversion import Conversion
from tieredmoe.pack.conversion_state import ConversionState, check_head, conversion_head
from tieredmoe.pack.document import dump_manifest
from tieredmoe.pack.journal import JOURNAL_NAME, read_journal
from tieredmoe.pack.partial import take_lock
from tieredmoe.pack.planning import plan_digest
from tieredmoe.pack.preflight import check_conversion
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import open_pack
from tieredmoe.pack.reclaim import check_marks, remove_remains, shards_of
from tieredmoe.pack.source_files import SourceFiles
from tieredmoe.pack.work_place import WorkPlace, tidy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tieredmoe.pack.preflight import Preflight


@attrs.frozen
class ConversionReport:
    """What a conversion did. ``source_read_nbytes`` does not count the headers' first reading.

    ``resumed_nbytes`` of the pack had been written by an earlier run, ``reclaimed_nbytes`` of the
    source were given up by this one. ``fallbacks`` say which files went through the page cache.
    """

    path: Path
    source_read_nbytes: int
    written_nbytes: int
    resumed_nbytes: int
    reclaimed_nbytes: int
    fallbacks: tuple[str, ...]


async def create_pack(
    source: Path | str | GGUFInventory,
    dest: Path | str,
    *,
    progress: Callable[[PackProgress], None] | None = None,
    file_nbytes_max: int | None = None,
    reclaim_source: bool = False,
    safety_margin_nbytes: int = 0,
) -> ConversionReport:
    """Make a pack of the GGUF model ``source`` at ``dest``: it is there whole, or not at all.

    ``source`` is a file, any of its shards, their directory, or an inventory; it is only read.
    ``file_nbytes_max`` splits the expert data into files of at most that size, but of at least one
    layer each. ``progress`` is called in the running loop, a few times a second.

    What was interrupted goes on where it was, with the same arguments: finished layers are kept in
    ``DEST.partial`` by a kill, a full disk, a failing disk or a cancellation, which returns when
    all is at rest. If no layer was finished, nothing is kept.

    ``reclaim_source`` gives the source up while the pack grows: each layer is taken out of the
    source files once it was found right in the pack, and at the end they are removed; the pack has
    all their bytes (``restore_pack``). In between the model is in both, and in neither alone.

    At least ``safety_margin_nbytes`` stay free. Raises ``GGUFError`` for a source and ``PackError``
    for a destination that will not do, with every problem found before the first byte is written.
    """
    for name, value, least in (
        ("file_nbytes_max", file_nbytes_max, 1),
        ("safety_margin_nbytes", safety_margin_nbytes, 0),
    ):
        if value is not None and not (isinstance(value, int) and value >= least):
            raise ConfigError(f"{name} is {value!r}, it must be {least} or more bytes")
    wish = _Wish(
        _settled(source),
        _settled(Path(dest)),
        file_nbytes_max,
        reclaim_source,
        safety_margin_nbytes,
    )
    return await run_in_thread(partial(_convert, wish), progress)


def _settled(place: Path | str | GGUFInventory) -> Any:
    """A path as it is now: the work goes on elsewhere while the working directory may change."""
    return place if isinstance(place, GGUFInventory) else Path(place).absolute()


@attrs.frozen
class _Wish:
    """What was asked for; paths as they were when it was."""

    source: Path | GGUFInventory
    dest: Path
    file_nbytes_max: int | None
    reclaim_source: bool
    safety_margin_nbytes: int


def _convert(wish: _Wish, reporter: Reporter) -> ConversionReport:
    if report := _finished(wish):
        return report
    found = check_conversion(
        wish.source,
        wish.dest,
        file_nbytes_max=wish.file_nbytes_max,
        reclaim_source=wish.reclaim_source,
        safety_margin_nbytes=wish.safety_margin_nbytes,
    )
    found.raise_problems()
    assert found.inventory is not None, "without problems all is known"
    assert found.layout is not None, "without problems all is known"
    layout, units, inventory = found.layout, found.units, found.inventory
    with (
        SourceFiles(inventory.shards, to_change=wish.reclaim_source) as source,
        WorkPlace(wish.dest) as place,
    ):
        looked_at_nbytes, state = _begin(wish, found, source, place)
        conversion = Conversion(
            layout, units, source=source, place=place, state=state, reporter=reporter
        )
        conversion.run(reclaim_source=wish.reclaim_source, source_shrinks=found.source_shrinks)
        manifest = state.manifest(layout, units)
        place.write_manifest(dump_manifest(manifest))
        # The last check before others can see it: what was written is what will be opened.
        open_pack(place.path)
        place.publish()
        if wish.reclaim_source:
            remove_remains([shard.path for shard in inventory.shards], manifest)
        place.tidy()
        return ConversionReport(
            wish.dest,
            source.read_nbytes - looked_at_nbytes,
            place.written_nbytes,
            conversion.resumed_nbytes,
            conversion.reclaimed_nbytes,
            (*source.fallbacks, *place.fallbacks),
        )


def _begin(
    wish: _Wish, found: Preflight, source: SourceFiles, place: WorkPlace
) -> tuple[int, ConversionState]:
    """Make ``place`` ready to go on; returns the bytes read for that, and how far it is."""
    assert found.inventory is not None
    assert found.layout is not None
    layout, units = found.layout, found.units
    head = conversion_head(found.inventory, source, plan_digest(layout), wish.file_nbytes_max)
    place.final_nbytes = layout.data_nbytes
    journal = place.journal or place.begin(head, layout.files)
    state = ConversionState.of(journal.records)
    touched = shards_of(units, state.gone) | (source.marked if journal.lost_its_end else set())
    check_head(journal.head, head, place.path, touched=touched)
    check_marks(source, units, state, place)
    place.withdraw_manifest()
    finished = {units[index].file_index for index in state.units}
    place.open_files(layout.files, finished=finished)
    return source.read_nbytes, state


def _finished(wish: _Wish) -> ConversionReport | None:
    """Do what is left of this very conversion, if it was killed after the pack had got its name."""
    dest = wish.dest
    try:
        records, _ = read_journal(dest / JOURNAL_NAME)
    except (OSError, ValueError):
        return None  # the preflight says why nothing can be there
    state = ConversionState.of(records)
    if not state.units:
        return None
    paths = _paths_now(wish.source, records[0]["shards"], is_touched=state.touched)
    if paths is None:
        return None
    try:
        fd = take_lock(dest)
        try:
            manifest = open_pack(dest).manifest
            if state.touched:
                remove_remains(paths, manifest)
            tidy(dest)
        finally:
            os.close(fd)
    except OSError as error:
        raise PackError(dest, f"tidying up failed: {error.strerror}") from error
    return ConversionReport(dest, 0, 0, manifest.layout.data_nbytes, 0, ())


def _paths_now(
    source: Path | GGUFInventory, began: Sequence[Mapping[str, Any]], *, is_touched: bool
) -> list[Path] | None:
    """Where the files are of a conversion that began with these; None if ``source`` is another."""
    paths = [Path(shard["path"]) for shard in began]
    named = [] if isinstance(source, Path) else [shard.path for shard in source.shards]
    try:
        if isinstance(source, Path):
            source = open_inventory(source, given_up=True)
        with SourceFiles(source.shards) as files:
            now = [
                (shard.file_nbytes, files.header_digest(index).hex(), shard.mtime_ns)
                for index, shard in enumerate(source.shards)
            ]
    except GGUFError:
        # Gone, or some of it, as it should be when it was given up: there are but names to compare.
        is_there = paths == named or source in paths or {source} == {path.parent for path in paths}
        return paths if is_there else None
    then = [(shard["nbytes"], shard["header"], shard["mtime_ns"]) for shard in began]
    n_compared = 2 if is_touched else 3
    if [each[:n_compared] for each in now] != [each[:n_compared] for each in then]:
        return None
    return [shard.path for shard in source.shards]
