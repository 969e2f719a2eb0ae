"""Gives a source's bytes up, layer by layer, once the pack holds them for certain.

A byte is given up only after its unit was written, synced, read again from the disk and found
right, and after the journal says so. The source is marked before its first hole: its magic number
becomes another, so no program reads zeros as weights. Its header stays until the very end. Holes
are whole pages; a page that two units share goes when both may.

Rejected: truncating shards from their end (layers are not in that order), and removing each shard
when all of it is packed (a layer's tensors may be in several, and a terabyte in one).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.header import GIVEN_UP_MAGIC, MAGIC
from tieredmoe.pack.aligned_files import page_of, pages_to
from tieredmoe.pack.conversion_state import state_record
from tieredmoe.pack.holes import punch, punch_problem
from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.units import SourceRange, Unit, ranges_of, segment_starts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tieredmoe.gguf import GGUFInventory
    from tieredmoe.pack.conversion_state import ConversionState
    from tieredmoe.pack.layout import PackLayout, ShardLayout
    from tieredmoe.pack.manifest import Manifest
    from tieredmoe.pack.source_files import SourceFiles
    from tieredmoe.pack.work_place import WorkPlace


def reclaim_problems(inventory: GGUFInventory) -> list[str]:
    """Everything that forbids giving this source up; nothing is changed."""
    problems = []
    places = {shard.path.resolve().parent for shard in inventory.shards}
    folders = places | {shard.path.parent for shard in inventory.shards}
    problems += [
        f"{folder} is not writable, so nothing can be removed from it in the end"
        for folder in sorted(folders)
        if not os.access(folder, os.W_OK | os.X_OK)
    ]
    for shard in inventory.shards:
        if not os.access(shard.path, os.R_OK | os.W_OK):
            problems.append(f"{shard.path} is not writable, so it cannot be given up")
        if shard.path.stat().st_nlink > 1:
            problems.append(f"{shard.path} has another name (a hard link), which would lose it too")
    for place in sorted(places):
        problem = punch_problem(place) if os.access(place, os.W_OK | os.X_OK) else None
        if problem:
            problems.append(f"{problem}; --reclaim-source needs ext4, xfs, btrfs or the like")
    return problems


def peak_nbytes(layout: PackLayout, units: Sequence[Unit], *, source_shrinks: bool) -> int:
    """The most that writing ``units``, in their order, takes beyond what is taken now."""
    starts = segment_starts(layout)
    taken = peak = 0
    for unit in units:
        taken += unit.nbytes
        peak = max(peak, taken)
        if source_shrinks:
            for _, begin, end in ranges_of(layout, unit, starts):
                taken -= max(0, page_of(end) - pages_to(begin))
    return peak


class GivenUp:
    """Which bytes of the source have been given up: those of ``units``, headers never."""

    def __init__(self, layout: PackLayout, source: SourceFiles) -> None:
        self._layout = layout
        self._source = source
        self._starts = segment_starts(layout)
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in layout.shards]

    def add(self, unit: Unit) -> list[SourceRange]:
        """Count the bytes of ``unit`` among those that are given up; returns their holes."""
        added = ranges_of(self._layout, unit, self._starts)
        for shard_index, begin, end in added:
            self._ranges[shard_index].append((begin, end))
        for shard_index in {each.shard_index for each in added}:
            self._ranges[shard_index] = list(_merged(self._ranges[shard_index]))
        return [hole for each in added for hole in self._holes(each)]

    def take(self, unit: Unit, holes: Iterable[SourceRange]) -> int:
        """Mark the files concerned and make the holes; returns their bytes.

        Raises ``GGUFError``.
        """
        concerned = sorted({key.shard_index for key in unit.segments})
        for shard_index in concerned:
            self._source.mark(shard_index)
        n_given = 0
        for shard_index, begin, end in holes:
            path = self._source.readers[shard_index].shard.path
            try:
                punch(self._source.fds[shard_index], begin, end - begin)
            except OSError as error:
                fact = f"giving up {end - begin:,} bytes at {begin:,} failed: {error.strerror}"
                raise GGUFError(path, fact) from error
            n_given += end - begin
        for shard_index in concerned:
            self._source.readers[shard_index].accept_change()
        return n_given

    def _holes(self, added: SourceRange) -> Iterator[SourceRange]:
        """The whole pages that ``added`` completes, or a part of them if its neighbours wait."""
        shard_index, begin, end = added
        around = next(
            (first, last)
            for first, last in self._ranges[shard_index]
            if first <= begin and end <= last
        )
        # The last page of a file is whole where the file ends.
        is_last = around[1] == self._layout.shards[shard_index].nbytes
        first = max(page_of(begin), pages_to(around[0]))
        last = pages_to(end) if pages_to(end) <= around[1] or is_last else page_of(end)
        if first < last:
            yield SourceRange(shard_index, first, last)


def shards_of(units: Sequence[Unit], indices: Iterable[int]) -> set[int]:
    """The files that have bytes of these units."""
    known = [units[index] for index in indices if index < len(units)]
    return {key.shard_index for unit in known for key in unit.segments}


def check_marks(
    source: SourceFiles, units: Sequence[Unit], state: ConversionState, place: WorkPlace
) -> None:
    """Raise ``GGUFError`` unless the source's files are marked as the journal says.

    Others in their place are refused before a byte is read from or written to them. Units of which
    a journal that lost its end may say too little are noted as being given, which is looked into.
    """
    assert place.journal is not None, "marks are compared with a journal"
    marked = source.marked
    if place.journal.lost_its_end and (marked or state.given):
        for index in state.doubtful():
            record = state_record(index, "giving")
            place.note(record)
            state.apply(record)
    given = [index for index, each in state.units.items() if each == "given"]
    for shard_index in sorted(shards_of(units, given) - marked):
        raise GGUFError(
            source.readers[shard_index].shard.path,
            f"is not the file that bytes were taken from: put that one back, or, if the whole "
            f"source is here again, remove {place.path}",
        )
    for shard_index in sorted(marked - shards_of(units, state.gone)):
        raise GGUFError(
            source.readers[shard_index].shard.path,
            f"is being given up for another pack than {place.dest}; go on with that one",
        )


def remove_remains(paths: Sequence[Path], manifest: Manifest) -> None:
    """Remove what is left of files that were given up for the pack of ``manifest``.

    Headers and edges, all in the pack. Only files that are marked and have its headers are touched.
    Raises ``GGUFError``.
    """
    for path, shard, digests in zip(paths, manifest.layout.shards, manifest.digests, strict=True):
        real = path.resolve()
        try:
            with suppress(FileNotFoundError):
                if not _is_given_up(real, shard, digests[0]):
                    continue
                real.unlink()
            if path.is_symlink():
                path.unlink()
        except OSError as error:
            fact = f"is given up, but what is left of it cannot be removed: {error.strerror}"
            raise GGUFError(path, fact) from error


def _is_given_up(path: Path, shard: ShardLayout, header_digest: bytes) -> bool:
    with path.open("rb") as file:
        header = file.read(shard.segments[0].nbytes)
        nbytes = os.fstat(file.fileno()).st_size
    mark, rest = header[: len(MAGIC)], header[len(MAGIC) :]
    is_same = nbytes == shard.nbytes and digest_of(MAGIC + rest) == header_digest
    return mark == GIVEN_UP_MAGIC and is_same


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    ranges = sorted(ranges)
    begin, end = ranges[0]
    for first, last in ranges[1:]:
        if first > end:
            yield begin, end
            begin, end = first, last
        else:
            end = max(end, last)
    yield begin, end
