"""What splitting and mirroring do alike to directories: claim, publish, take back, point to.

The index is written last and at once, so whatever happens before it there is a whole pack without
drives, and after it one with them. A failure or a cancellation takes back what was published; a
kill in the moment between leaves finished directories that no index names, which `attach_drives`
takes up. Nothing that we did not write is ever removed.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError
from tieredmoe.pack.drive_index import INDEX_NAME
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.partial import target_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tieredmoe.pack.partial import PartialPack


@contextmanager
def exclusive(pack: Path) -> Iterator[None]:
    """Nobody else changes where the experts of ``pack`` are; ``PackError`` if somebody does."""
    path = pack / MANIFEST_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PackError(pack, f"is not a pack: {MANIFEST_NAME}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fact = f"its manifest cannot be locked: {error.strerror}"
            if isinstance(error, BlockingIOError):
                fact = "is being split or mirrored by another process; wait for its end"
            raise PackError(pack, fact) from error
        yield
    finally:
        os.close(fd)


def drive_problems(pack: Path, sizes: Mapping[Path, int]) -> list[str]:
    """All that forbids making these directories, of so many bytes each, drives of ``pack``."""
    problems = []
    if not os.access(pack, os.W_OK | os.X_OK):
        problems.append(f"{pack} is not writable, and {INDEX_NAME} must go there")
    on_device: dict[int, int] = {}
    for directory, nbytes in sizes.items():
        if directory.parent.is_dir():
            device = directory.parent.stat().st_dev
            on_device[device] = on_device.get(device, 0) + nbytes
    for directory, nbytes in sizes.items():
        whole = nbytes
        if directory.parent.is_dir():
            whole = on_device[directory.parent.stat().st_dev]
        problems += [f"{directory} {problem}" for problem in target_problems(directory, whole)]
    return problems


@contextmanager
def taken_back_on_failure() -> Iterator[list[PartialPack]]:
    """What those put in the list have published goes if the body fails."""
    made: list[PartialPack] = []
    try:
        yield made
    except BaseException as error:
        for each in made:
            try:
                each.take_back()
            except OSError as obstacle:
                error.add_note(f"and what was made could not be removed: {obstacle}")
        raise


def write_index(pack: Path, data: bytes) -> None:
    """Make ``data`` the pack's index, at once and durably but for the directory's own entry."""
    path = pack / INDEX_NAME
    unfinished = pack / f"{INDEX_NAME}.partial"
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise PackError(path, f"cannot be written: {os.strerror(error.errno or 0)}") from error


def sync_directory(path: Path) -> None:
    """Put a directory's entries on stable storage; ``PackError`` if that fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        fact = f"syncing the directory failed: {os.strerror(error.errno or 0)}"
        raise PackError(path, fact) from error
