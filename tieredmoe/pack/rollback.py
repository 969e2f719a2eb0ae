"""Gives an interrupted conversion up: the source gets back what was taken, the pack goes.

Unit by unit, backwards: its bytes are written where they were, synced, read again from the disk and
found right; then the journal says so, and only then the pack's own copy of them may go. At the end
the source gets its first bytes and its time of change back. A crash in between changes nothing of
that: rolling back, or the conversion, goes on.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.file_locks import lock_exclusive
from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.gguf.header import MAGIC
from tieredmoe.pack.conversion_state import (
    WORK,
    ConversionState,
    check_head,
    conversion_head,
    state_record,
)
from tieredmoe.pack.holes import UNSUPPORTED, punch
from tieredmoe.pack.journal import JOURNAL_NAME, read_journal
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.partial import partial_path
from tieredmoe.pack.planning import plan_digest, plan_inventory
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reclaim import check_marks, shards_of
from tieredmoe.pack.record_copy import copy_runs, find_damage
from tieredmoe.pack.source_files import SourceFiles, write_magic
from tieredmoe.pack.units import runs_in_source, segment_starts, unit_runs, units_of
from tieredmoe.pack.work_place import WorkPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from tieredmoe.gguf import GGUFInventory
    from tieredmoe.pack.layout import PackLayout
    from tieredmoe.pack.record_copy import Run
    from tieredmoe.pack.units import Unit

N_DAMAGE_NAMED = 3


@attrs.frozen
class RollbackReport:
    """What rolling back did: ``returned_nbytes`` went back into ``files``, the pack is gone."""

    files: tuple[Path, ...]
    returned_nbytes: int


async def rollback_pack(
    dest: Path | str,
    *,
    source: Path | str | None = None,
    progress: Callable[[PackProgress], None] | None = None,
) -> RollbackReport:
    """Undo the interrupted conversion to ``dest``: the source is as it was, nothing else is left.

    ``source`` says where its files are, should they have been moved. Raises ``PackError`` if there
    is no such conversion or its copy of the bytes is damaged, and ``GGUFError`` for the source.
    Cancelling returns when all is at rest; the same call goes on.
    """
    return await run_in_thread(partial(_rollback, *_settled(dest, source)), progress)


def _settled(dest: Path | str, source: Path | str | None) -> tuple[Path, Path | None]:
    return Path(dest).absolute(), None if source is None else Path(source).absolute()


def _rollback(dest: Path, source: Path | None, reporter: Reporter) -> RollbackReport:
    _check_place(dest)
    with WorkPlace(dest) as place:
        if place.journal is None:
            return RollbackReport((), 0)
        head = place.journal.head
        if head.get("work") != WORK:
            raise PackError(place.path, "is no conversion; remove it if you need it no more")
        state = ConversionState.of(place.journal.records)
        paths = [Path(shard["path"]) for shard in head["shards"]]
        returned_nbytes = 0
        if state.touched or (place.journal.lost_its_end and _are_marked(source or paths[0])):
            inventory = open_inventory(source or paths[0], given_up=True)
            paths = [shard.path for shard in inventory.shards]
            with SourceFiles(inventory.shards, to_change=True) as files:
                layout = plan_inventory(inventory, file_nbytes_max=head["file_nbytes_max"])
                returned_nbytes = _give_back(
                    inventory, layout, files=files, place=place, state=state, reporter=reporter
                )
        place.remove()
        return RollbackReport(tuple(paths), returned_nbytes)


def _check_place(dest: Path) -> None:
    """Raise ``PackError`` unless there is something to be rolled back."""
    try:
        if partial_path(dest).is_dir():
            read_journal(partial_path(dest) / JOURNAL_NAME)  # one of a newer version is left alone
            return
        if (dest / MANIFEST_NAME).exists():
            raise PackError(
                dest,
                "is a whole pack, its conversion is over; `tieredmoe pack restore` writes the "
                "source's files again",
            )
    except (OSError, ValueError) as error:
        raise PackError(dest, f"cannot be looked into: {error}") from error
    raise PackError(dest, f"has no interrupted conversion: {partial_path(dest)} is not there")


def _are_marked(source: Path) -> bool:
    """Whether a source says that it is being given up."""
    try:
        inventory = open_inventory(source, given_up=True)
        with SourceFiles(inventory.shards) as files:
            return bool(files.marked)
    except GGUFError:
        return False


def _give_back(
    inventory: GGUFInventory,
    layout: PackLayout,
    *,
    files: SourceFiles,
    place: WorkPlace,
    state: ConversionState,
    reporter: Reporter,
) -> int:
    """Make the source what it was; returns the bytes that were written to it."""
    assert place.journal is not None, "what gives something up has a journal"
    head, units = place.journal.head, units_of(layout)
    now = conversion_head(inventory, files, plan_digest(layout), head["file_nbytes_max"])
    touched = shards_of(units, state.gone) | (files.marked if place.journal.lost_its_end else set())
    check_head(head, now, place.path, touched=touched)
    check_marks(files, units, state, place)
    place.withdraw_manifest()
    with ExitStack() as stack:
        for file_index in {units[index].file_index for index in state.given}:
            _lock(place.path / layout.files[file_index].name, stack)
        giving_back = _GivingBack(
            layout, inventory, files=files, place=place, state=state, reporter=reporter
        )
        return giving_back.run(head["shards"])


def _lock(path: Path, stack: ExitStack) -> None:
    """Keep others from reading a file of the pack that is taken apart."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        fact = f"cannot be opened: {os.strerror(error.errno or 0)}; the source needs its bytes"
        raise PackError(path, fact) from error
    stack.callback(os.close, fd)
    lock_exclusive(fd, path, PackError)


class _SourceTarget:
    """The source's files as the target of a copy."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files

    def write(self, file_index: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` where it was; ``GGUFError`` if that fails."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._files.fds[file_index], data[done:], offset + done)
        except OSError as error:
            path = self._files.readers[file_index].shard.path
            reason = os.strerror(error.errno or 0)
            raise GGUFError(
                path,
                f"giving back {len(data):,} bytes at {offset:,} failed: {reason}; the pack still "
                "has them, so make room or mend it, and roll back again",
            ) from error

    def sync(self, file_index: int) -> None:
        """Return when a file is on stable storage; ``GGUFError`` if that fails."""
        try:
            os.fdatasync(self._files.fds[file_index])
        except OSError as error:
            path = self._files.readers[file_index].shard.path
            raise GGUFError(path, f"syncing failed: {os.strerror(error.errno or 0)}") from error


class _GivingBack:
    """One rollback under way."""

    def __init__(
        self,
        layout: PackLayout,
        inventory: GGUFInventory,
        *,
        files: SourceFiles,
        place: WorkPlace,
        state: ConversionState,
        reporter: Reporter,
    ) -> None:
        self._layout = layout
        self._units = units_of(layout)
        self._starts = segment_starts(layout)
        self._inventory = inventory
        self._files = files
        self._place = place
        self._state = state
        self._reporter = reporter
        self._target = _SourceTarget(files)
        self._done_nbytes = 0
        self._total_nbytes = sum(
            run.nbytes for index in state.given for run in runs_in_source(self._runs(index))
        )
        self._packed = [place.path / file.name for file in layout.files]

    def run(self, shards: Sequence[Mapping[str, Any]]) -> int:
        """Give all back, then make the files what ``shards`` says they were; returns the bytes."""
        returned_nbytes = 0
        for index in reversed(self._state.given):
            returned_nbytes += self._give_back(index)
        for index in sorted(shards_of(self._units, self._state.gone)):
            path, fd = self._inventory.shards[index].path, self._files.fds[index]
            write_magic(fd, MAGIC, path)
            try:
                mtime_ns = shards[index]["mtime_ns"]
                os.utime(fd, ns=(mtime_ns, mtime_ns))
                os.fsync(fd)
            except OSError as error:
                raise GGUFError(path, f"syncing failed: {error.strerror}") from error
        return returned_nbytes

    def _runs(self, index: int) -> Iterator[Run]:
        return unit_runs(self._layout, self._units[index], self._starts, self._state.digests[index])

    def _give_back(self, index: int) -> int:
        """Returns the bytes that were written, none if the source has them already."""
        unit = self._units[index]
        # A file's header never went, and its first bytes stay another magic until the end.
        runs = [run for run in self._runs(index) if run.target_offset]
        nbytes = sum(run.nbytes for run in runs)
        written_nbytes = 0
        if self._damage(unit, runs):
            copy_runs(
                runs,
                self._packed,
                self._target,
                self._reporter,
                total_nbytes=self._total_nbytes,
                done_nbytes=self._done_nbytes,
            )
            written_nbytes = nbytes
            if named := self._damage(unit, runs):
                raise PackError(
                    self._place.dest,
                    f"was not rolled back: the source's disk did not keep what was written: "
                    f"{'; '.join(named)}; the pack still has it",
                )
        record = state_record(index, "returned")
        self._place.note(record)
        self._state.apply(record)
        self._done_nbytes += nbytes
        self._drop(unit)
        return written_nbytes

    def _damage(self, unit: Unit, runs: Sequence[Run]) -> list[str]:
        """What the source's disk has not of a unit."""
        for shard_index in sorted({key.shard_index for key in unit.segments}):
            self._target.sync(shard_index)
        damage = find_damage(
            runs_in_source(runs),
            [shard.path for shard in self._inventory.shards],
            self._reporter,
            total_nbytes=self._total_nbytes,
            done_nbytes=self._done_nbytes,
        )
        return [str(each) for each in islice(damage, N_DAMAGE_NAMED)]

    def _drop(self, unit: Unit) -> None:
        """Free the pack's copy of a unit that is back; where no hole can be made, it stays."""
        try:
            fd = os.open(self._packed[unit.file_index], os.O_RDWR | os.O_CLOEXEC)
            try:
                punch(fd, unit.start, unit.nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                with self._place.doing(f"freeing {unit.name}"):
                    raise
