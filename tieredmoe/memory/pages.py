"""One pool of huge host pages, cut into regions for arenas and staging.

The page size of the memory that reads land in matters more than the read API: 2 MiB pages against
4 KiB pages gave 2.1 to 2.5 times the bandwidth at a fifth of the CPU time on a virtio disk, and
copies to a device ran at 55 against 33 GB/s. So the pool is a private anonymous mapping, aligned to
2 MiB, advised, touched and collapsed before anyone registers or reads into it.

Rejected: ``torch.empty(pin_memory=True)`` (no huge pages, rounds sizes up to powers of two);
``mmap.mmap(-1, n)`` with its default flags (shared memory, for which the advice does nothing);
hugetlbfs (needs the administrator).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.budget import available_host_nbytes, format_size
from tieredmoe.errors import BudgetError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    Madvise = Callable[[int, int, int], None]
    """``madvise(address, nbytes, advice)``; raises ``OSError``."""

HUGE_PAGE_NBYTES = 2 << 20

MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1


@attrs.frozen(eq=False)
class HostRegion:
    """A run of bytes: a writable view, the address where it starts, the pool it is of, if any."""

    view: memoryview
    address: int
    pool: HostPool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.view.nbytes

    def give_back(self, start: int) -> None:
        """Give the pages from byte ``start`` (a multiple of 4096) on back to the kernel.

        They are zero when touched again. What a device has registered stays: the device would go on
        reading the old pages.
        """
        if self.pool is None or not self.pool.registered:
            kernel_madvise(self.address + start, self.nbytes - start, MADV_DONTNEED)

    def take_again(self, start: int, end: int) -> None:
        """Have pages for the bytes from ``start`` to ``end`` again.

        Raises ``BudgetError`` if the kernel does not give them; one that is too old to be asked
        (before Linux 5.14) gives them when they are touched.
        """
        try:
            kernel_madvise(self.address + start, end - start, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOSYS}:
                raise _no_memory(end - start, error) from error


class HostPool:
    """Private anonymous memory, 2 MiB aligned and resident from ``allocate`` to ``close``."""

    __slots__ = (
        "_carved_nbytes",
        "_mapping",
        "_view",
        "address",
        "huge_share",
        "nbytes",
        "registered",
    )

    address: int
    nbytes: int
    huge_share: float | None
    """Share of the pool that the kernel backs by huge pages; None where it does not say."""
    registered: bool
    """Whether its pages are, or are to be, known to a device."""

    def __init__(self, mapping: mmap.mmap, *, start: int, nbytes: int) -> None:
        """Take ``nbytes`` of ``mapping`` from byte ``start`` on; ``allocate`` is the way in."""
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)[start : start + nbytes]
        self._carved_nbytes = 0
        self.address = _address_of(mapping) + start
        self.nbytes = nbytes
        self.huge_share = None
        self.registered = False

    @classmethod
    def allocate(cls, nbytes: int, *, madvise: Madvise | None = None) -> HostPool:
        """A pool of ``nbytes``, rounded up to 2 MiB, every page of it touched and zero.

        Touching takes up to seconds per GiB (measured: 1.5 to 5 on a loaded virtual machine) and
        drops the GIL: call it in a thread where an event loop must keep running. Huge pages are
        asked for, not required; see ``huge_share``. Raises ``BudgetError`` when the kernel does not
        give the memory.
        """
        assert nbytes > 0
        madvise = madvise or kernel_madvise
        nbytes = -(-nbytes // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        # Part of a huge page stays unadvised on either side. The kernel then never merges the pool
        # with a neighbouring mapping, and what smaps says of it is about the pool alone.
        mapping = _map(nbytes + 2 * HUGE_PAGE_NBYTES)
        base = _address_of(mapping)
        start = (base // HUGE_PAGE_NBYTES + 1) * HUGE_PAGE_NBYTES - base
        pool = cls(mapping, start=start, nbytes=nbytes)
        try:
            pool._make_resident(madvise)
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def free_nbytes(self) -> int:
        """Bytes not carved yet."""
        return self.nbytes - self._carved_nbytes

    def carve(self, nbytes: int) -> HostRegion:
        """The next ``nbytes`` (a multiple of 4096) of the pool; regions never overlap.

        Raises ``BudgetError`` when fewer are left.
        """
        assert self._mapping is not None, "carve from a closed pool"
        assert nbytes > 0
        assert nbytes % PAGE_NBYTES == 0
        if nbytes > self.free_nbytes:
            raise BudgetError(
                f"the host pool of {format_size(self.nbytes)} has {format_size(self.free_nbytes)} "
                f"left and {format_size(nbytes)} were asked of it; allocate a larger pool"
            )
        start = self._carved_nbytes
        self._carved_nbytes += nbytes
        return HostRegion(self._view[start : start + nbytes], self.address + start, self)

    def whole(self) -> HostRegion:
        """All of the pool, carved or not, for whoever registers it; a view like any other."""
        assert self._mapping is not None, "the whole of a closed pool"
        self.registered = True
        return HostRegion(self._view[:], self.address, self)

    def close(self) -> None:
        """Give the memory back; idempotent. The caller has drained all reads and copies before.

        A view that someone still holds (an arena that is open, an array made from a slot) keeps the
        mapping until it dies, so nothing ever points to unmapped memory.
        """
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        self._view.release()
        with contextlib.suppress(BufferError):  # views are alive: the last one unmaps
            mapping.close()

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else f"{format_size(self.free_nbytes)} free"
        share = "unknown" if self.huge_share is None else f"{self.huge_share:.0%}"
        return f"<HostPool {format_size(self.nbytes)}, {state}, huge pages {share}>"

    def _make_resident(self, madvise: Madvise) -> None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still right
            madvise(self.address, self.nbytes, MADV_HUGEPAGE)
        try:
            madvise(self.address, self.nbytes, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOSYS}:
                raise _no_memory(self.nbytes, error) from error
            np.frombuffer(self._view, np.uint8)[::PAGE_NBYTES] = 0
        self._measure()
        if self.huge_share is not None and self.huge_share < 1:
            with contextlib.suppress(OSError):  # advice: what it achieved is measured next
                madvise(self.address, self.nbytes, MADV_COLLAPSE)
            self._measure()

    def _measure(self) -> None:
        huge_nbytes = huge_page_nbytes(self.address, self.nbytes)
        self.huge_share = None if huge_nbytes is None else huge_nbytes / self.nbytes


def huge_page_nbytes(
    address: int, nbytes: int, *, smaps: Path = Path("/proc/self/smaps")
) -> int | None:
    """Bytes of huge pages in the mappings inside the range; None where smaps cannot be read."""
    try:
        lines = smaps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    huge_nbytes, inside = 0, False
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = address <= first and last <= address + nbytes
        elif inside and name == "AnonHugePages:":
            huge_nbytes += int(rest[0]) * 1024
    return huge_nbytes


def kernel_madvise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2) without the GIL: ``mmap.madvise`` would hold it while gigabytes are touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _map(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise _no_memory(nbytes, error) from error


def _no_memory(nbytes: int, error: BaseException) -> BudgetError:
    return BudgetError(
        f"the kernel refused {format_size(nbytes)} ({nbytes} bytes) of host memory ({error}); "
        f"{format_size(available_host_nbytes())} are available: set a smaller budget, or raise the "
        "limit (ulimit -v, overcommit, container)"
    )
