"""Files read and written in whole pages past the page cache, or through it with the reason told.

A conversion moves a terabyte: through the page cache that costs a copy per byte, the memory of
everybody else, and half the speed of the disk. Where a file system does not take O_DIRECT (at open,
or at the first transfer) the same calls go through the cache, and ``fallback`` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

from tieredmoe.memory import HostRegion
from tieredmoe.memory.pages import HUGE_PAGE_NBYTES
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tieredmoe.errors import GGUFError, PackError


def page_of(offset: int) -> int:
    """The first byte of the page that ``offset`` is in."""
    return offset // PAGE_NBYTES * PAGE_NBYTES


def pages_to(offset: int) -> int:
    """The end of the last page that the bytes before ``offset`` are in."""
    return -(-offset // PAGE_NBYTES) * PAGE_NBYTES


def page_buffers(n: int, nbytes: int) -> list[HostRegion]:
    """``n`` buffers of ``nbytes`` (whole pages), page aligned, on huge pages if the kernel has any.

    Private anonymous memory, which a read touches first: unlike a ``HostPool`` it is neither
    measured nor pinned, since it lives for one piece of work.
    """
    span = n * nbytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, span + HUGE_PAGE_NBYTES, flags=flags)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -base % HUGE_PAGE_NBYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still right
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    starts = range(start, start + span, nbytes)
    return [HostRegion(view[at : at + nbytes], base + at) for at in starts]


class _AlignedFile:
    """A descriptor that stops being direct at the first refusal; used by several threads."""

    def __init__(self, path: Path, flags: int) -> None:
        """Raises ``OSError`` if the file cannot be opened at all."""
        self.path = path
        self.fallback: str | None = None
        self._flags = flags | os.O_CLOEXEC
        self._lock = threading.Lock()
        self._refused: list[int] = []
        try:
            self.fd = os.open(path, self._flags | os.O_DIRECT, 0o666)
        except OSError as error:
            self.fd = os.open(path, self._flags, 0o666)
            self.fallback = f"{path}: no direct I/O ({error.strerror})"

    def go_through_cache(self, refused: int, fact: str) -> None:
        """Open the file again without O_DIRECT, unless another thread has done so."""
        with self._lock:
            if self.fd == refused:
                self.fd = os.open(self.path, self._flags & ~(os.O_CREAT | os.O_EXCL))
                # Others may still be at work with the old one, so it is closed at the end.
                self._refused.append(refused)
                self.fallback = f"{self.path}: no direct I/O ({fact})"

    def close(self) -> None:
        """Close what is open. What was to be durable has been synced before, so no news here."""
        for fd in (*self._refused, self.fd):
            with contextlib.suppress(OSError):
                os.close(fd)


class AlignedReader:
    """Any bytes of one file, read as the whole pages around them."""

    def __init__(self, path: Path, error: type[GGUFError | PackError]) -> None:
        """Whatever fails is raised as ``error``, which names the file, the byte and the reason."""
        self.path = path
        self.read_nbytes = 0
        self._counting = threading.Lock()
        self._error = error
        self._file = self._opened()

    @property
    def fallback(self) -> str | None:
        """Why the reads go through the page cache; None if they do not."""
        return self._file.fallback

    @property
    def fd(self) -> int:
        """The descriptor, for looking at the file and for locks."""
        return self._file.fd

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> memoryview:
        """The bytes from ``offset`` on, in ``buffer``: whole pages of it, two more than needed."""
        start, end = page_of(offset), pages_to(offset + nbytes)
        done, needed = 0, offset + nbytes - start
        while done < needed:
            fd = self._file.fd
            is_direct = self._file.fallback is None
            try:
                count = os.preadv(fd, [buffer[done : end - start]], start + done)
            except OSError as error:
                if is_direct and error.errno == errno.EINVAL:
                    self._file.go_through_cache(fd, os.strerror(errno.EINVAL))
                    continue
                reason = os.strerror(error.errno or 0)
                fact = f"cannot be read at byte {start + done}: {reason}"
                raise self._error(self.path, fact) from error
            done += count
            if count % 512 and is_direct and done < needed:
                # Past the end of the file, as a rule; the next read tells, wherever it begins.
                self._file.go_through_cache(fd, f"a read ended after {count} bytes")
            if count == 0:
                fact = f"ends at byte {start + done}, {needed - done} bytes short of a read"
                raise self._error(self.path, f"{fact} of {nbytes} bytes at {offset}")
        with self._counting:
            self.read_nbytes += nbytes
        return buffer[offset - start : needed]

    def drop_cached(self) -> None:
        """Let the next reads come from the disk, where they go through the page cache."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        """Meanwhile the file is closed; nothing reads it. Afterwards it is open again."""
        self._file.close()
        try:
            yield
        finally:
            self._file = self._opened()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _opened(self) -> _AlignedFile:
        try:
            return _AlignedFile(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as refusal:
            reason = os.strerror(refusal.errno or 0)
            raise self._error(self.path, f"cannot be opened: {reason}") from refusal


class AlignedWriter:
    """A file of ``nbytes``, written in whole pages; raises ``OSError`` as the system does."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open or make the file; what it holds is left alone, its size is made ``nbytes``."""
        self.path = path
        self.nbytes = nbytes
        self._file = _AlignedFile(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(self._file.fd).st_size != nbytes:
                os.ftruncate(self._file.fd, nbytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def fallback(self) -> str | None:
        """Why the writes go through the page cache; None if they do not."""
        return self._file.fallback

    @property
    def fd(self) -> int:
        """The descriptor, for reserving space and punching holes."""
        return self._file.fd

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, whole pages at a page's beginning; ``sync`` cuts the last one.

        Short writes are continued.
        """
        done = 0
        while done < len(data):
            fd = self._file.fd
            is_direct = self._file.fallback is None
            try:
                count = os.pwrite(fd, data[done:], offset + done)
            except OSError as error:
                if not (is_direct and error.errno == errno.EINVAL):
                    raise
                self._file.go_through_cache(fd, os.strerror(errno.EINVAL))
                continue
            if count <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += page_of(count) if is_direct else count
            if is_direct and count < min(PAGE_NBYTES, len(data)):
                self._file.go_through_cache(fd, f"a write ended after {count} bytes")

    def sync(self) -> None:
        """Return when what was written is on stable storage, and the file has its size."""
        if os.fstat(self._file.fd).st_size != self.nbytes:
            os.ftruncate(self._file.fd, self.nbytes)
        os.fdatasync(self._file.fd)
        if self._file.fallback is not None:
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
