"""An open data file: what its reads are, whether it is still the file that was opened.

A descriptor can be lost while its file is fine (closed by somebody's wrong number, stale after an
NFS server restarted), so a file can be opened again, but only as what it was: same device and
inode, size and time of modification. Rejected: looking at the file before every read (a system call
per expert, and it misses the write that comes after the look).
"""

from __future__ import annotations

import contextlib
import os
import threading
from errno import EBADF
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@attrs.define(eq=False)
class DataFile:
    """An open file and what its reads are. Whoever holds it calls ``close``.

    ``reason`` says how ``direct`` is known: ``statx`` (the kernel states the alignment), ``proven``
    (a read left the page cache empty), ``empty``; not direct are ``tmpfs`` and ``asked``.
    """

    path: Path
    fd: int
    direct: bool
    reason: str
    flags: int = attrs.field(default=os.O_RDONLY, kw_only=True)
    opener: Callable[[Path, int], int] = attrs.field(default=os.open, kw_only=True, repr=False)
    opened_as: os.stat_result = attrs.field(init=False, repr=False)
    _stale: list[int] = attrs.field(init=False, factory=list, repr=False)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock, repr=False)

    @opened_as.default
    def _status(self) -> os.stat_result:
        return os.fstat(self.fd)

    @property
    def device(self) -> int:
        """The number of the device that the file is on."""
        return self.opened_as.st_dev

    @property
    def truncated(self) -> bool:
        """Whether the open file is known to be shorter than it was when it was opened."""
        with contextlib.suppress(OSError):
            return os.fstat(self.fd).st_size < self.opened_as.st_size
        return False

    def change(self) -> str | None:
        """What happened to the file since it was opened, as a predicate; None if nothing is seen.

        Looks at size, time of modification and what the name now stands for; a write within one
        tick of the file system's clock cannot be seen so, nor what a file will not tell (its own
        error says why).
        """
        then = self.opened_as
        with contextlib.suppress(OSError):
            now = os.fstat(self.fd)
            if (then.st_size, then.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
                how = "truncated" if now.st_size < then.st_size else "changed"
                sizes = f"it had {then.st_size} bytes, now {now.st_size}"
                return f"was {how} after it was opened: {sizes}"
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return "was deleted or moved after it was opened"
        except OSError:
            return None
        if (then.st_dev, then.st_ino) != (named.st_dev, named.st_ino):
            return "was replaced by another after it was opened"
        return None

    def reopen(self, lost: int, *, code: int) -> bool:
        """Whether ``fd`` is good again after a read through ``lost`` failed with errno ``code``.

        Another thread may have seen to it already. False if the file cannot be opened or is no
        longer the one that was opened; nothing has changed then. In any thread.
        """
        with self._lock:
            if self.fd != lost:
                return True
            try:
                fd = self.opener(self.path, self.flags)
            except OSError:
                return False
            if _identity(os.fstat(fd)) != _identity(self.opened_as):
                os.close(fd)
                return False
            if code != EBADF:
                # Others may be reading through it, and its number must not go to another file.
                self._stale.append(self.fd)
            self.fd = fd
            return True

    def close(self) -> None:
        """Close what is ours: not a number that was closed under us and is another file's now."""
        for fd in self._stale:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._stale.clear()
        with contextlib.suppress(OSError):
            now, then = os.fstat(self.fd), self.opened_as
            if (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino):
                os.close(self.fd)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
