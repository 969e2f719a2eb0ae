"""What a file system will refuse, asked of it before it is needed, and nothing is left behind.

A conversion that learns after half an hour that no file may pass 4 GiB has wasted the half hour.
Asked on a file without a name in the very directory, since what is told of a mount (``statfs``'s
kind, ``pathconf``) is a table in libc that does not know most of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def size_problem(directory: Path, nbytes: int) -> str | None:
    """Why ``directory`` cannot hold one file of ``nbytes``; None if it can, or cannot be asked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and nbytes > limit:
        return (
            f"its largest file would have {nbytes:,} bytes, and this process may write {limit:,} "
            "to one (ulimit -f): raise that"
        )
    with _scratch(directory) as fd:
        if fd is None:
            return None
        try:
            # No file system lets one seek past what it can ever store.
            os.lseek(fd, nbytes, os.SEEK_SET)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EFBIG, errno.EOVERFLOW}:
                return None
            return (
                f"its largest file would have {nbytes:,} bytes, more than the file system of "
                f"{directory} takes: choose another one (ext4, xfs, btrfs)"
            )
    return None


def direct_note(directory: Path) -> str | None:
    """Why files in ``directory`` go through the page cache; None if they do not."""
    with _scratch(directory) as fd:
        if fd is None:
            return None
        try:
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.EINVAL:
                return None
            return f"{directory}: no direct I/O, so its files go through the page cache"
    return None


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[int | None]:
    """An empty file that has no name, or none any more; None where no file can be made."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        try:
            fd, name = tempfile.mkstemp(dir=directory, prefix=".tieredmoe-")
            os.unlink(name)  # noqa: PTH108 (mkstemp's name is a text)
        except OSError:
            fd = -1
    if fd < 0:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
