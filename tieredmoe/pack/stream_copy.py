"""Copies bytes from many places into whole pages of files: read, digested and written side by side.

What a data file holds is a stream of parts, each under one digest, that lie elsewhere in the files
read. A stream is put together window by window: its parts are read in as few runs as they lie in,
moved to their places, digested while they are in the cache, and written while the next windows
are being read. Reads and writes are whole pages whatever the parts' own alignment, so both bypass
the page cache; the price is one move in memory per byte. Memory is a fixed number of windows.

Rejected: reading in the source's order and writing each part by itself (parts are not aligned, so
every write goes through the page cache: 0.55 of the speed), and a task per part.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import xxhash

from tieredmoe.pack.aligned_files import page_buffers, pages_to
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from tieredmoe.memory import HostRegion

WINDOW_NBYTES = 8 << 20
"""Pages put together before they are written. Four reads of 4 MiB or more keep a disk busy."""

N_READERS = 4
N_WRITERS = 4
N_WINDOWS = 10
"""Windows being filled, waiting or being written. In all: 4 × 8 + 10 × 8 = 112 MiB."""


class Part(NamedTuple):
    """Bytes under one digest, in file ``file_index``; of no file: zeros, under no digest."""

    file_index: int | None
    offset: int
    nbytes: int


class Stream(NamedTuple):
    """Parts end to end from byte ``start`` (a page's beginning) of a target on."""

    target_index: int
    start: int
    parts: Sequence[Part]


class Reads(Protocol):
    """A file that a copy reads."""

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> memoryview:
        """See ``AlignedReader.read``; called in several threads."""


class _Cut(NamedTuple):
    """Bytes ``[begin, end)`` of a window come from ``offset`` of a file; ``last`` ends a part."""

    file_index: int | None
    offset: int
    begin: int
    end: int
    last: bool


class StreamCopy:
    """Copies streams, several at a time; a context manager that ends when nothing runs any more.

    ``write(target_index, data, offset)`` puts whole pages where they belong, ``advance`` hears of
    every byte that was read; both are called in other threads, and what they raise ends the copy.
    ``stream_nbytes`` is the most that is ever copied at once, should it be less than a window.
    """

    def __init__(
        self,
        readers: Sequence[Reads],
        write: Callable[[int, memoryview, int], None],
        advance: Callable[[int], None],
        *,
        stream_nbytes: int,
    ) -> None:
        self._readers = readers
        self._write = write
        self._advance = advance
        self.window_nbytes = min(WINDOW_NBYTES, pages_to(stream_nbytes))
        n_windows = max(2, min(N_WINDOWS, 2 * -(-stream_nbytes // WINDOW_NBYTES) + 1))
        n_readers = min(N_READERS, n_windows - 1)
        read_nbytes = self.window_nbytes + 2 * PAGE_NBYTES
        self._windows = _queue(page_buffers(n_windows, self.window_nbytes))
        self._buffers = _queue(page_buffers(n_readers, read_nbytes))
        self._stopped = threading.Event()
        self._reading = ThreadPoolExecutor(n_readers, "tieredmoe-pack-read")
        self._writing = ThreadPoolExecutor(N_WRITERS, "tieredmoe-pack-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._reading.shutdown(cancel_futures=True)
        self._writing.shutdown()

    def start(self, stream: Stream) -> Future[list[bytes]]:
        """Begin to copy ``stream``; its result, when all of it was written, is its digests.

        One for each part that is not zeros, in their order.
        """
        return self._reading.submit(self._copy, stream)

    def _copy(self, stream: Stream) -> list[bytes]:
        digests: list[bytes] = []
        writes: list[Future[None]] = []
        failures: list[BaseException] = []
        buffer = self._buffers.get()
        try:
            self._read(stream, buffer, digests, writes)
        except BaseException as error:  # noqa: BLE001 (raised below, unless it came of another)
            self._stopped.set()
            failures.append(error)
        finally:
            self._buffers.put(buffer)
        failures += [failure for write in writes if (failure := write.exception())]
        if failures:
            raise _told(failures) or failures[0]
        return digests

    def _read(
        self, stream: Stream, buffer: HostRegion, digests: list[bytes], writes: list[Future[None]]
    ) -> None:
        hasher = xxhash.xxh3_128()
        for start, nbytes, cuts in _windows(stream, self.window_nbytes):
            self._check()
            window = self._windows.get()
            try:
                self._fill(window, buffer, cuts)
                _zero(window, nbytes, pages_to(nbytes))
                for cut in cuts:
                    if cut.file_index is not None:
                        hasher.update(window.view[cut.begin : cut.end])
                        if cut.last:
                            digests.append(hasher.digest())
                            hasher.reset()
            except BaseException:
                self._windows.put(window)
                raise
            work = (stream.target_index, window, pages_to(nbytes), start)
            writes.append(self._writing.submit(self._put, *work))
            self._advance(nbytes)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _EndedError

    def _fill(self, window: HostRegion, buffer: HostRegion, cuts: Sequence[_Cut]) -> None:
        for run in _runs(cuts):
            first = run[0]
            if first.file_index is None:
                for cut in run:
                    _zero(window, cut.begin, cut.end)
                continue
            nbytes = run[-1].offset + run[-1].end - run[-1].begin - first.offset
            read = self._readers[first.file_index].read(first.offset, nbytes, buffer.view)
            source = buffer.address + first.offset % PAGE_NBYTES
            assert len(read) == nbytes
            for cut in run:
                target = window.address + cut.begin
                ctypes.memmove(target, source + cut.offset - first.offset, cut.end - cut.begin)

    def _put(self, target_index: int, window: HostRegion, nbytes: int, start: int) -> None:
        try:
            # What is left out must fail: its stream would pass for one that was written.
            self._check()
            self._write(target_index, window.view[:nbytes], start)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            self._windows.put(window)


class _EndedError(Exception):
    """Another stream has failed: this one ends, and nobody hears of it before that one."""


def first_failure(copies: Sequence[Future[list[bytes]]]) -> BaseException | None:
    """Why copies ended, once all have: the failure that ended the others; None if all are done."""
    failures = [copy.exception() for copy in copies if not copy.cancelled()]
    return _told([error for error in failures if error])


def _told(failures: Sequence[BaseException]) -> BaseException | None:
    """The first that did not come of another."""
    return next((error for error in failures if not isinstance(error, _EndedError)), None)


def _queue(regions: Iterable[HostRegion]) -> queue.SimpleQueue[HostRegion]:
    free: queue.SimpleQueue[HostRegion] = queue.SimpleQueue()
    for region in regions:
        free.put(region)
    return free


def _zero(window: HostRegion, begin: int, end: int) -> None:
    ctypes.memset(window.address + begin, 0, end - begin)


def _windows(stream: Stream, window_nbytes: int) -> Iterator[tuple[int, int, list[_Cut]]]:
    """Where each window of a stream begins in its target, its length, and what is in it."""
    start, filled, cuts = stream.start, 0, list[_Cut]()
    for file_index, offset, nbytes in stream.parts:
        done = 0
        while done < nbytes:
            taken = min(nbytes - done, window_nbytes - filled)
            last = done + taken == nbytes
            cuts.append(_Cut(file_index, offset + done, filled, filled + taken, last))
            done += taken
            filled += taken
            if filled == window_nbytes:
                yield start, filled, cuts
                start, filled, cuts = start + filled, 0, []
    if filled:
        yield start, filled, cuts


def _runs(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """Cuts that lie end to end in their file, together, whatever is between them in the window."""
    run: list[_Cut] = []
    for cut in sorted(
        cuts, key=lambda cut: (cut.file_index is None, cut.file_index or 0, cut.offset)
    ):
        if run:
            before = run[-1]
            end = before.offset + before.end - before.begin
            if cut.file_index != before.file_index or (
                cut.file_index is not None and cut.offset != end
            ):
                yield run
                run = []
        run.append(cut)
    if run:
        yield run
