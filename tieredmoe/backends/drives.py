"""Files on several drives behind one backend: each read goes to the drive that holds its file.

Every drive has a backend of its own, and so a window, threads and counters of its own: a slow drive
cannot fill the window of a fast one, and what each did can be told. Rejected: one backend over all
files, whose threads would all wait for the slowest drive, and which counts them as one.

Drives that hold the *same* files are a mirror: see ``backends.mirror``.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from tieredmoe.backends.batch import check_batch, check_process, fail_read
from tieredmoe.backends.protocol import BackendInfo, ReadStats
from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tieredmoe.backends.protocol import ReadBackend, ReadOp


@attrs.frozen(eq=False)
class Drive:
    """A directory and the backend that has opened ``n_files`` files of it."""

    directory: Path | str
    backend: ReadBackend
    n_files: int = 1


@attrs.frozen
class DriveStats:
    """What one drive did; the drives' ``reads`` and ``read_nbytes`` add up to the backend's.

    ``errors`` counts by ``ReadError.kind`` the reads that failed here, those included that another
    copy then served. ``nbytes_per_s`` is the rate measured for choosing among copies, if any;
    ``failing`` says that the drive is avoided at present.
    """

    directory: str
    reads: int
    read_nbytes: int
    errors: Mapping[str, int]
    retries: int
    in_flight: int
    queued: int
    nbytes_per_s: float | None = None
    failing: bool = False

    def since(self, earlier: DriveStats) -> DriveStats:
        """What was counted between the snapshot ``earlier`` of this drive and this one."""
        return attrs.evolve(
            self,
            reads=self.reads - earlier.reads,
            read_nbytes=self.read_nbytes - earlier.read_nbytes,
            errors=dict(Counter(self.errors) - Counter(earlier.errors)),
            retries=self.retries - earlier.retries,
        )


@runtime_checkable
class DrivesBackend(Protocol):
    """What a ``ReadBackend`` over several drives can tell beyond the sums."""

    def drive_stats(self) -> tuple[DriveStats, ...]:
        """A snapshot of each drive's counters, in their order; in any thread."""


class SplitBackend:
    """A ``ReadBackend`` over disjoint files; it owns the drives' backends.

    Files are counted drive by drive, in the order of ``drives``. Futures are the drives' own, so a
    read costs no more than with one drive.
    """

    def __init__(self, drives: Sequence[Drive]) -> None:
        assert drives
        self.info = combined_info("split", drives)
        self._drives = tuple(drives)
        self._places = [(drive, i) for drive in drives for i in range(drive.n_files)]
        self._pid = os.getpid()
        self._closed = False

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Start all reads, one submission per drive concerned; see ``ReadBackend.submit``."""
        if self._closed:
            raise ClosedError("this backend is closed; it takes no more reads")
        check_process(self._pid)
        check_batch(batch, n_files=len(self._places), alignment=self.info.alignment)
        shares: dict[Drive, list[int]] = {}
        for i, op in enumerate(batch):
            shares.setdefault(self._places[op.file_index][0], []).append(i)
        started: dict[int, asyncio.Future[None]] = {}
        for drive, numbers in shares.items():
            ops = [
                attrs.evolve(batch[i], file_index=self._places[batch[i].file_index][1])
                for i in numbers
            ]
            try:
                reads = drive.backend.submit(ops, priority=priority)
            except Exception as error:
                if not started:
                    raise
                # Reads of other drives are on their way, so the batch can no longer be refused.
                reads = [_failed(error) for _ in ops]
            started.update(zip(numbers, reads, strict=True))
        return [started[i] for i in range(len(batch))]

    def promote(self, read: asyncio.Future[None]) -> None:
        """See ``ReadBackend.promote``; a drive ignores what is not its own."""
        for drive in self._drives:
            drive.backend.promote(read)

    def drop(self, read: asyncio.Future[None]) -> bool:
        """See ``ReadBackend.drop``."""
        return any(drive.backend.drop(read) for drive in self._drives)

    async def drain(self) -> None:
        """Return when no drive has a read queued or in flight. Cancelling it changes nothing."""
        while True:
            for drive in self._drives:
                await drive.backend.drain()
            stats = self.stats()
            if not stats.in_flight + stats.queued:
                return

    async def close(self) -> None:
        """Refuse new reads, then close all drives at once; see ``ReadBackend.close``."""
        if os.getpid() != self._pid:
            return  # all of it is the parent's
        self._closed = True
        await close_all(self._drives)

    def stats(self) -> ReadStats:
        """The sum over the drives."""
        return summed([drive.backend.stats() for drive in self._drives])

    def drive_stats(self) -> tuple[DriveStats, ...]:
        """What each drive did, in their order."""
        return tuple(drive_stats(drive) for drive in self._drives)

    def __repr__(self) -> str:
        return f"<SplitBackend of {', '.join(str(drive.directory) for drive in self._drives)}>"


async def open_split(
    drives: Mapping[Path, Sequence[Path]], open_files: Callable[[Sequence[Path]], ReadBackend]
) -> SplitBackend:
    """Open the files of each directory by ``open_files``, which says how, and whose errors pass.

    If one drive cannot be opened, none stays open.
    """
    opened: list[Drive] = []
    try:
        for directory, files in drives.items():
            opened.append(Drive(directory, open_files(files), len(files)))
        return SplitBackend(opened)
    except BaseException:
        await close_all(opened)
        raise


async def close_all(drives: Sequence[Drive]) -> None:
    """Close the backends together: each refuses and drops its queue before any is waited for."""
    async with asyncio.TaskGroup() as closing:
        for drive in drives:
            closing.create_task(drive.backend.close())


def combined_info(how: str, drives: Sequence[Drive]) -> BackendInfo:
    """What reads through all of ``drives`` are: direct if all are, aligned for the strictest."""
    infos = [drive.backend.info for drive in drives]
    return BackendInfo(
        name="+".join(dict.fromkeys(info.name for info in infos)),
        direct=all(info.direct for info in infos),
        alignment=max(info.alignment for info in infos),
        window_nbytes=min(info.window_nbytes for info in infos),
        reason=f"{how} of {len(infos)}: " + ", ".join(sorted({info.reason for info in infos})),
        fallbacks=tuple(dict.fromkeys(step for info in infos for step in info.fallbacks)),
    )


def summed(stats: Sequence[ReadStats]) -> ReadStats:
    """Counters added; of the longest submissions, the longest."""
    return ReadStats(
        reads=sum(each.reads for each in stats),
        read_nbytes=sum(each.read_nbytes for each in stats),
        short_reads=sum(each.short_reads for each in stats),
        retries=sum(each.retries for each in stats),
        errors=dict(sum((Counter(each.errors) for each in stats), Counter())),
        in_flight=sum(each.in_flight for each in stats),
        queued=sum(each.queued for each in stats),
        submit_ns_max=max(each.submit_ns_max for each in stats),
        demand_delay_s=sum(each.demand_delay_s for each in stats),
        ahead_s=sum(each.ahead_s for each in stats),
    )


def drive_stats(drive: Drive) -> DriveStats:
    """The counters of a drive's backend, under the drive's name."""
    stats = drive.backend.stats()
    return DriveStats(
        directory=str(drive.directory),
        reads=stats.reads,
        read_nbytes=stats.read_nbytes,
        errors=stats.errors,
        retries=stats.retries,
        in_flight=stats.in_flight,
        queued=stats.queued,
    )


def _failed(error: BaseException) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fail_read(future, error)
    return future
