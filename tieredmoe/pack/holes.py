"""Space of a file, reserved ahead or given back from its middle: fallocate(2), which Python lacks.

Reserving tells a full disk before the first byte of a layer is written, and lets direct writes of
several threads go on side by side (ext4 takes its lock for writes into holes, not into reserved
space). Rejected: ``os.posix_fallocate``, which writes zeros where a file system cannot reserve.
"""

from __future__ import annotations

import ctypes
import os
from errno import EINTR, ENOSYS, EOPNOTSUPP
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
UNSUPPORTED = frozenset({EOPNOTSUPP, ENOSYS})


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Have space for these bytes of a file, if its file system can reserve; ``OSError`` if full."""
    try:
        fallocate(fd, 0, offset, nbytes)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give the space of these bytes back to the file system; they read as zeros afterwards."""
    fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)


def fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    """Call the system without the GIL, again when a signal came; raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while libc.fallocate(fd, mode, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code != EINTR:
            raise OSError(code, os.strerror(code))


def punch_problem(directory: Path) -> str | None:
    """Why holes cannot be made in files of ``directory``, tried on one of its own; None if so."""
    try:
        # A file without a name: nothing is left of it, whatever happens.
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"\1" * 8192, 0)
            punch(fd, 0, 4096)
            kept = os.pread(fd, 8192, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return f"no hole can be made in a file of {directory}: {error.strerror}"
    if kept != bytes(4096) + b"\1" * 4096:
        return f"a hole made in a file of {directory} is none"
    return None
