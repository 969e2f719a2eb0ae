"""The work of a conversion: every unit copied, synced, noted, and if asked given up in the source.

Without giving up, the next unit is being read while one is synced and noted. With it, one unit is
finished before the next begins: two layers that are in the source and in the pack are two too many
for a disk that is almost full.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, wait
from itertools import islice
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError
from tieredmoe.pack.conversion_state import state_record, written_record
from tieredmoe.pack.reclaim import GivenUp, peak_nbytes
from tieredmoe.pack.record_copy import find_damage
from tieredmoe.pack.stream_copy import StreamCopy, first_failure
from tieredmoe.pack.units import (
    runs_in_source,
    segment_starts,
    unit_digests,
    unit_runs,
    unit_streams,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Any

    from tieredmoe.pack.conversion_state import ConversionState
    from tieredmoe.pack.layout import PackLayout
    from tieredmoe.pack.progress import Reporter
    from tieredmoe.pack.record_copy import Run
    from tieredmoe.pack.source_files import SourceFiles
    from tieredmoe.pack.units import Unit
    from tieredmoe.pack.work_place import WorkPlace

N_DAMAGE_NAMED = 3


class Conversion:
    """Brings every unit of a pack to its last state; ``state`` is where they are now."""

    def __init__(
        self,
        layout: PackLayout,
        units: Sequence[Unit],
        *,
        source: SourceFiles,
        place: WorkPlace,
        state: ConversionState,
        reporter: Reporter,
    ) -> None:
        self.reclaimed_nbytes = 0
        self._layout = layout
        self._units = units
        self._source = source
        self._place = place
        self._state = state
        self._reporter = reporter
        self._starts = segment_starts(layout)
        self._given = GivenUp(layout, source)
        self._lock = threading.Lock()
        self.resumed_nbytes = sum(units[index].nbytes for index in state.units)
        self._done_nbytes = self.resumed_nbytes
        self._verified_nbytes = 0

    def run(self, *, reclaim_source: bool, source_shrinks: bool) -> None:
        """Copy what is to be copied, and with ``reclaim_source`` give up what may be given up.

        ``source_shrinks`` says that this makes room for the pack. Raises what the files raise; all
        that is finished by then is noted.
        """
        left = [i for i in range(len(self._units)) if i not in self._state.units]
        for index, state in self._state.units.items():
            if state == "given":
                self._given.add(self._units[index])
                self._verified_nbytes += self._units[index].nbytes
        self._advance(0)
        with StreamCopy(
            self._source.readers,
            self._place.write,
            self._advance,
            stream_nbytes=max((self._units[index].nbytes for index in left), default=1),
        ) as copy:
            if reclaim_source:
                self._copy_and_give_up(copy, shrinks=source_shrinks)
            else:
                self._copy_ahead(copy, left)

    def _copy_and_give_up(self, copy: StreamCopy, *, shrinks: bool) -> None:
        for index in range(len(self._units)):
            if index not in self._state.units:
                self._place.final_nbytes = self._final_nbytes(shrinks=shrinks)
                self._end_unit(index, self._start_unit(copy, index), ())
            if self._state.units[index] != "given":
                self._give_up(copy, index)
        total = self._layout.data_nbytes
        self._reporter.report("verify", done_nbytes=total, total_nbytes=total)

    def _copy_ahead(self, copy: StreamCopy, left: Sequence[int]) -> None:
        ahead: deque[tuple[int, list[Future[list[bytes]]]]] = deque()
        for index in left:
            try:
                ahead.append((index, self._start_unit(copy, index)))
            except PackError:
                # No room for one more, but there is for what has been started.
                for started, copies in ahead:
                    self._end_unit(started, copies, ())
                raise
            if len(ahead) > 1:
                self._end_unit(*ahead.popleft(), ahead[0][1])
        while ahead:
            self._end_unit(*ahead.popleft(), ())

    def _final_nbytes(self, *, shrinks: bool) -> int:
        """The most that the pack takes while the rest is written."""
        left = [unit for index, unit in enumerate(self._units) if index not in self._state.units]
        written_nbytes = sum(self._units[index].nbytes for index in self._state.units)
        return written_nbytes + peak_nbytes(self._layout, left, source_shrinks=shrinks)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            # Reported under the lock: several threads copy, and progress never goes back.
            self._done_nbytes += nbytes
            done, total = self._done_nbytes, self._layout.data_nbytes
            self._reporter.report("copy", done_nbytes=done, total_nbytes=total)

    def _start_unit(self, copy: StreamCopy, index: int) -> list[Future[list[bytes]]]:
        unit = self._units[index]
        self._place.reserve(unit.file_index, unit.start, unit.nbytes)
        streams = unit_streams(self._layout, unit, self._starts, stream_nbytes=copy.window_nbytes)
        return [copy.start(stream) for stream in streams]

    def _end_unit(
        self,
        index: int,
        copies: Sequence[Future[list[bytes]]],
        ahead: Sequence[Future[list[bytes]]],
    ) -> None:
        """Wait for a unit, put it on stable storage and say so; ``ahead`` is started already."""
        wait(copies, return_when=FIRST_EXCEPTION)
        if any(each.done() and each.exception() for each in copies):
            wait((*copies, *ahead))
            failure = first_failure((*copies, *ahead))
            assert failure is not None, "one that failed first is among those that were started"
            raise failure
        unit = self._units[index]
        digests = [digest for each in copies for digest in each.result()]
        self._place.sync(unit.file_index)
        self._source.check_unchanged()
        by_segment = unit_digests(self._layout, unit, digests)
        self._note(written_record(index, [by_segment[key] for key in unit.segments]))

    def _give_up(self, copy: StreamCopy, index: int) -> None:
        """Take a unit out of the source, if the disk has it and it is right."""
        unit = self._units[index]
        named = self._damage(index)
        if named and self._state.units[index] == "giving" and not self._source_damage(index):
            # It was given back, or not taken yet: then the source has it, and it is copied again.
            self._note(state_record(index, "returned"))
            self._advance(-unit.nbytes)
            self._end_unit(index, self._start_unit(copy, index), ())
            named = self._damage(index)
        if named:
            was_giving = self._state.units[index] == "giving"
            if not was_giving:
                self._note(state_record(index, "returned"))
            kept = "some of it may be gone already" if was_giving else "all of it is still there"
            raise PackError(
                self._packed(unit),
                f"did not keep what was written: {'; '.join(named)}. Nothing more of {unit.name} "
                f"is taken from the source, {kept}; have the disk looked at before you go on",
            )
        self._verified_nbytes += unit.nbytes
        self._note(state_record(index, "giving"))
        self.reclaimed_nbytes += self._given.take(unit, self._given.add(unit))
        self._note(state_record(index, "given"))

    def _packed(self, unit: Unit) -> Path:
        return self._place.path / self._layout.files[unit.file_index].name

    def _damage(self, index: int) -> list[str]:
        """What is wrong with a unit in the pack."""
        unit = self._units[index]
        runs = unit_runs(self._layout, unit, self._starts, self._state.digests[index])
        return self._named((run._replace(source_index=0) for run in runs), [self._packed(unit)])

    def _source_damage(self, index: int) -> list[str]:
        """What the source has no more of a unit."""
        unit = self._units[index]
        runs = unit_runs(self._layout, unit, self._starts, self._state.digests[index])
        paths = [reader.shard.path for reader in self._source.readers]
        return self._named(runs_in_source(runs), paths)

    def _named(self, runs: Iterable[Run], paths: Sequence[Path]) -> list[str]:
        damage = find_damage(
            runs,
            paths,
            self._reporter,
            total_nbytes=self._layout.data_nbytes,
            done_nbytes=self._verified_nbytes,
        )
        return [str(each) for each in islice(damage, N_DAMAGE_NAMED)]

    def _note(self, record: Mapping[str, Any]) -> None:
        self._place.note(record)
        self._state.apply(record)
