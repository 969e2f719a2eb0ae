"""Opens a data file and proves, before anyone relies on it, what kind of reads it will get.

O_DIRECT may be refused at open or at the first read, may need a larger alignment than a pack has,
or be accepted and ignored (btrfs takes the flag and fills the page cache). Each case has a reason
and a way out in the error; none falls back by itself.

Rejected: a list of error numbers that mean "no direct I/O" (such lists in the field lacked one).
What O_DIRECT cannot do and a plain open of the same file can is a refusal, whatever its number.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from tieredmoe.backends.datafile import DataFile
from tieredmoe.errors import DirectIOUnavailableError, ReadError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tieredmoe.backends.kernel import Kernel

PROBE_NBYTES = 1 << 20
_DIRECT = os.O_RDONLY | os.O_DIRECT
_WAY_OUT = (
    "move it to a file system with direct I/O (ext4, xfs), or choose the backend 'buffered' "
    "(allow_buffered=True: only where nothing better can be had)"
)
_FACTS = MappingProxyType(
    {
        "align": "direct reads of it need a larger alignment than the 4096 bytes of a record",
        "unsupported": "its file system offers none for this file (encrypted or compressed?)",
        "cache_filled": "its file system accepts O_DIRECT and reads through the page cache",
        "dio_unproven": "the kernel does not say whether its reads bypass the page cache",
    }
)


def open_direct(path: Path, kernel: Kernel) -> DataFile:
    """Open ``path`` for direct reads, proven by one; never for reads through the page cache.

    A file on tmpfs that takes O_DIRECT is accepted and marked as not direct: it has no disk, so
    there is nothing to bypass. Raises ``DirectIOUnavailableError``, whose reason is
    ``open_<errno>``, ``read_<errno>``, ``align``, ``unsupported``, ``cache_filled`` or
    ``dio_unproven``, and ``ReadError`` for a file that cannot be read at all.
    """
    _refuse_what_is_no_file(path)
    try:
        fd = kernel.open(path, _DIRECT)
    except OSError as error:
        with _plainly_opened(path, kernel):
            raise _refused(path, "open", error) from error
    try:
        return _probed(path, fd, kernel)
    except BaseException:
        os.close(fd)
        raise


def open_buffered(path: Path, kernel: Kernel) -> DataFile:
    """Open ``path`` for reads through the page cache. Raises ``ReadError`` if that fails."""
    fd = _open_plainly(path, kernel)
    return DataFile(path, fd, direct=False, reason="asked", opener=kernel.open)


def _probed(path: Path, fd: int, kernel: Kernel) -> DataFile:
    nbytes = _regular_file_nbytes(path, fd)
    opened = partial(DataFile, path, fd, flags=_DIRECT, opener=kernel.open)
    with mmap.mmap(-1, PROBE_NBYTES) as buffer, memoryview(buffer) as target:
        _read_directly(path, fd, target, 0, kernel)
        if kernel.lives_in_memory(fd):
            return opened(direct=False, reason="tmpfs")
        alignment = kernel.direct_alignment(fd)
        if alignment is None and nbytes == 0:
            return opened(direct=True, reason="empty")
        if alignment is None:
            _prove(path, fd, nbytes, target, kernel)
            return opened(direct=True, reason="proven")
    if alignment == 0:
        raise _unavailable(path, "unsupported")
    if alignment > PAGE_NBYTES:
        raise _unavailable(path, "align")
    return opened(direct=True, reason="statx")


def _prove(path: Path, fd: int, nbytes: int, target: memoryview, kernel: Kernel) -> None:
    """Return if a direct read leaves the page cache as empty as it was.

    Pages that are dirty or mapped cannot be dropped and prove nothing, so up to three places of the
    file are tried.
    """
    last = max(0, nbytes - 1) // PROBE_NBYTES * PROBE_NBYTES
    middle = nbytes // 2 // PROBE_NBYTES * PROBE_NBYTES
    for offset in sorted({0, middle, last}):
        kernel.drop_cached(fd, offset, PROBE_NBYTES)
        if kernel.cached_nbytes(fd, offset, min(PROBE_NBYTES, nbytes - offset)) != 0:
            continue
        _read_directly(path, fd, target, offset, kernel)
        if kernel.cached_nbytes(fd, offset, min(PROBE_NBYTES, nbytes - offset)) != 0:
            raise _unavailable(path, "cache_filled")
        return
    raise _unavailable(path, "dio_unproven")


def _read_directly(path: Path, fd: int, target: memoryview, offset: int, kernel: Kernel) -> None:
    """Raise ``DirectIOUnavailableError`` if a plain read can what the direct one cannot."""
    try:
        kernel.preadv(fd, [target], offset)
    except OSError as error:
        with _plainly_opened(path, kernel) as plain_fd:
            _read_plainly(path, plain_fd, target, offset, kernel)
            raise _refused(path, "read", error) from error


def _open_plainly(path: Path, kernel: Kernel) -> int:
    _refuse_what_is_no_file(path)
    try:
        fd = kernel.open(path, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(path, error, "the file cannot be opened") from error
    try:
        _regular_file_nbytes(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _plainly_opened(path: Path, kernel: Kernel) -> Iterator[int]:
    fd = _open_plainly(path, kernel)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_plainly(path: Path, fd: int, target: memoryview, offset: int, kernel: Kernel) -> None:
    try:
        kernel.preadv(fd, [target], offset)
    except OSError as error:
        raise _unreadable(path, error, "the file cannot be read", offset=offset) from error


def _refuse_what_is_no_file(path: Path) -> None:
    """Before it is opened: the open of a pipe waits until somebody writes to it."""
    try:
        status = path.stat()
    except OSError:
        return  # the open says what is wrong
    _require_regular(path, status)


def _regular_file_nbytes(path: Path, fd: int) -> int:
    status = os.fstat(fd)
    _require_regular(path, status)
    return status.st_size


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ReadError(
            path=path, offset=0, nbytes=0, errno=errno.EINVAL, fact="this is not a regular file"
        )


def _unreadable(path: Path, error: OSError, fact: str, *, offset: int = 0) -> ReadError:
    code = error.errno or errno.EIO
    if code in {errno.EMFILE, errno.ENFILE}:
        fact += "; raise `ulimit -n`"
    return ReadError(path=path, offset=offset, nbytes=0, errno=code, fact=fact)


def _refused(path: Path, stage: str, error: OSError) -> DirectIOUnavailableError:
    code = error.errno or errno.EIO
    name = errno.errorcode.get(code, str(code)).lower()
    fact = f"the kernel refused O_DIRECT at {stage}: {os.strerror(code)}"
    return DirectIOUnavailableError(path, f"{stage}_{name}", f"{fact}; {_WAY_OUT}")


def _unavailable(path: Path, reason: str) -> DirectIOUnavailableError:
    return DirectIOUnavailableError(path, reason, f"{_FACTS[reason]}; {_WAY_OUT}")
