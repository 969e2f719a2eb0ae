"""What the probes ask of the operating system, one field per question.

A test refuses, lies or runs out of files by replacing a field; the library uses the defaults. The
calls that Python does not wrap (statx, cachestat, mincore, fstatfs) go through libc, since no
package gives them without a compiler. A call that a kernel or a container's filter does not have
answers None, "not known", which the probe never takes for a yes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.backends.device import queue_window_nbytes
from tieredmoe.backends.ring import Ring, find_liburing

if TYPE_CHECKING:
    from collections.abc import Callable

    Preadv = Callable[[int, list[memoryview], int], int]
    """``preadv(fd, [target], offset)`` returns the bytes read or raises ``OSError``."""

_STATX_NUMBERS = MappingProxyType({"x86_64": 332, "aarch64": 291})
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_STATX_DIO_READ_ALIGN = 0x20000  # Linux 6.14
_AT_EMPTY_PATH = 0x1000
_IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")  # Linux 6.6
_CACHESTAT_NUMBER = 451  # Linux 6.5, the same on every architecture
_IN_MEMORY_MAGICS = frozenset({0x01021994, 0x858458F6})  # tmpfs, ramfs: linux/magic.h
_OVERLAY_MAGIC = 0x794C7630  # likewise


def direct_alignment(fd: int) -> int | None:
    """Alignment that direct reads of ``fd`` need; 0 if it has none to offer, None if not known.

    The larger of memory and offset alignment, from statx(2) with STATX_DIOALIGN.
    """
    number = _STATX_NUMBERS.get(platform.machine())
    if number is None:
        return None
    result = ctypes.create_string_buffer(256)
    wanted = ctypes.c_uint(_STATX_DIOALIGN | _STATX_DIO_READ_ALIGN)
    path, flags = ctypes.c_char_p(b""), ctypes.c_int(_AT_EMPTY_PATH)
    if not _syscall(number, ctypes.c_int(fd), path, flags, wanted, result):
        return None
    (mask,) = struct.unpack_from("=I", result, 0)
    memory, offset = struct.unpack_from("=2I", result, 0x98)
    if not mask & _STATX_DIOALIGN:
        return None
    if mask & _STATX_DIO_READ_ALIGN:
        (offset,) = struct.unpack_from("=I", result, 0xB4)
    return max(memory, offset) if memory and offset else 0


def cached_nbytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Bytes of the range that the page cache holds, in whole pages; None if not known."""
    # On an overlay, the pages are those of the file below: cachestat sees none, a mapping does.
    is_overlay = _file_system(fd) == _OVERLAY_MAGIC
    n_pages = None if is_overlay else _cachestat(fd, offset, nbytes)
    if n_pages is None:
        n_pages = _mincore(fd, offset, nbytes)
    return None if n_pages is None else n_pages * mmap.PAGESIZE


def lives_in_memory(fd: int) -> bool:
    """Whether the file is on tmpfs or ramfs, that is, has no disk under it."""
    return _file_system(fd) in _IN_MEMORY_MAGICS


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to forget its clean cached pages of the range."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def system_and_machine() -> tuple[str, str]:
    """The operating system and the processor's architecture."""
    return platform.system(), platform.machine()


def io_uring_disabled(path: Path = _IO_URING_DISABLED) -> int:
    """The sysctl: 0 for nobody, 1 for all but one group and the privileged, 2 for everybody."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0  # a kernel without the switch disables nothing


@attrs.frozen(eq=False)
class Kernel:
    """The system calls of opening and probing a file and a ring."""

    open: Callable[[Path, int], int] = os.open
    preadv: Preadv = os.preadv
    direct_alignment: Callable[[int], int | None] = direct_alignment
    cached_nbytes: Callable[[int, int, int], int | None] = cached_nbytes
    drop_cached: Callable[[int, int, int], None] = drop_cached
    lives_in_memory: Callable[[int], bool] = lives_in_memory
    queue_window_nbytes: Callable[[int], int | None] = queue_window_nbytes
    system_and_machine: Callable[[], tuple[str, str]] = system_and_machine
    release: Callable[[], str] = platform.release
    find_liburing: Callable[[], Path | None] = find_liburing
    make_ring: Callable[[Path], Ring] = Ring
    io_uring_disabled: Callable[[], int] = io_uring_disabled


def _file_system(fd: int) -> int | None:
    """The magic number of the file system; None if not known."""
    result = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(ctypes.c_int(fd), result) != 0:
        return None
    (magic,) = struct.unpack_from("@l", result, 0)
    return int(magic & 0xFFFFFFFF)


def _cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    extent = struct.pack("=2Q", offset, nbytes)
    result = ctypes.create_string_buffer(5 * 8)
    if not _syscall(_CACHESTAT_NUMBER, ctypes.c_uint(fd), extent, result, ctypes.c_uint(0)):
        return None
    (n_pages,) = struct.unpack_from("=Q", result, 0)
    return int(n_pages)


def _mincore(fd: int, offset: int, nbytes: int) -> int | None:
    """Count resident pages of a mapping; kernels that will not tell say that all are."""
    try:
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):
        return None
    with mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        resident = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        pages = ctypes.c_void_p(resident.ctypes.data)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) != 0:
            return None
        return int(np.count_nonzero(resident & 1))


def _syscall(number: int, *arguments: object) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return bool(libc.syscall(ctypes.c_long(number), *arguments) == 0)
