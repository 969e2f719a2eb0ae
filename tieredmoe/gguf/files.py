"""Opening and reading model files: every way in which the file system can refuse ends in GGUFError.

Buffered positioned reads, for headers and dense tensors. Experts take the direct path of the read
backends instead. ``mmap`` was rejected: a file that shrinks while it is mapped kills the process
with SIGBUS, a file that shrinks under ``pread`` is a short read and one clear error.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tieredmoe.errors import GGUFError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor and the status of a regular file, closed at the end; ``GGUFError`` otherwise."""
    try:
        # Without O_NONBLOCK the open of a FIFO would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise GGUFError(path, f"cannot be opened: {os.strerror(error.errno or 0)}") from error
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise GGUFError(path, "is a directory, not a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError(path, "is not a regular file")
        yield fd, status
    finally:
        os.close(fd)


def read_exactly(fd: int, target: memoryview, *, offset: int, path: Path) -> None:
    """Fill ``target`` from ``offset`` on; GGUFError if the file ends early or fails."""
    n_done = 0
    while n_done < len(target):
        try:
            n_read = os.preadv(fd, [target[n_done:]], offset + n_done)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise GGUFError(path, f"cannot be read at byte {offset + n_done}: {reason}") from error
        if n_read == 0:
            raise GGUFError(
                path,
                f"ends at byte {offset + n_done}, {len(target) - n_done} bytes short of a read of "
                f"{len(target)} bytes at {offset}; it was truncated after it had been opened",
            )
        n_done += n_read
