"""Who may use a file: many readers, or one that changes it. Locks die with their process.

A running model and a conversion lock its GGUF shared; giving it up, or back, takes an exclusive
lock. A program that knows nothing of these locks is found by a write lease, which the kernel grants
only where nobody else has the file open. Rejected: lock files with process numbers (stale after a
crash, and numbers come back).
"""

from __future__ import annotations

import fcntl
import logging
import signal
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError

if TYPE_CHECKING:
    from pathlib import Path

    from tieredmoe.errors import GGUFError

logger = logging.getLogger(__name__)


def lock_shared(fd: int, path: Path, error: type[GGUFError | PackError]) -> None:
    """Keep others from changing the file behind ``fd`` until it is closed.

    Raises ``error`` if somebody is changing it. A file system without locks is a warning.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as held:
        fact = "is being given up for a pack by another process; wait for its end"
        raise error(path, fact) from held
    except OSError as refusal:
        logger.warning(
            "%s cannot be locked (%s): let nothing change it or give it up meanwhile",
            path,
            refusal.strerror,
        )


def lock_exclusive(fd: int, path: Path, error: type[GGUFError | PackError]) -> None:
    """Be the only one to use the file behind ``fd``, opened for writing, until it is closed.

    Raises ``error`` if it is in use, by whatever program, or if its file system has no locks.
    """
    refuse_if_open(fd, path, error)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as held:
        raise error(path, _IN_USE) from held
    except OSError as refusal:
        raise error(path, _cannot_lock(refusal)) from refusal


def lock_place(fd: int, place: Path) -> None:
    """Own ``place`` by its lock file ``fd``; ``PackError`` if another does or it has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as held:
        fact = "is being written by another conversion; wait for its end"
        raise PackError(place, fact) from held
    except OSError as refusal:
        raise PackError(place, _cannot_lock(refusal)) from refusal


_IN_USE = "is in use: a model runs from it, or another program has it open; end that, then go on"


def _cannot_lock(refusal: OSError) -> str:
    return (
        f"cannot be locked ({refusal.strerror}), so nothing would keep others away; network file "
        "systems need their lock service (NFS: nolock must not be set), or use a local disk"
    )


def refuse_if_open(fd: int, path: Path, error: type[GGUFError | PackError]) -> None:
    """Raise ``error`` if the file is open elsewhere than behind ``fd``, as far as can be known."""
    try:
        # The signal of a lease that is broken would end the process, but for one that is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError as busy:
        raise error(path, _IN_USE) from busy
    except OSError:
        # Leases are for a file's owner, on local file systems; the lock still keeps ours away.
        logger.debug("%s: whether others have it open cannot be known", path, exc_info=True)
