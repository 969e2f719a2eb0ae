"""The directory in which a pack grows, beside its destination: it is renamed when it is whole.

``DEST.partial`` belongs to the one process that holds the lock on the file ``conversion.lock`` in
it. A kill leaves it behind; the next one to the same place recognises it by that file, takes the
lock and starts over. (A conversion goes on instead, see ``work_place``: what holds its journal is
refused here.) Nothing that we did not write is ever removed: an unknown name in there is a refusal.
Rejected: recognising a leftover by its name alone.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from tieredmoe.backends.file_locks import lock_place
from tieredmoe.errors import PackError
from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from tieredmoe.pack.layout import DataFile

LOCK_NAME = "conversion.lock"
_ENDING = ".partial"
_UNFINISHED_MANIFEST_NAME = f"{MANIFEST_NAME}.partial"
_OUR_NAMES = re.compile(
    rf"(experts|dense)-\d{{5,}}\.bin|{re.escape(MANIFEST_NAME)}(\.partial)?|{re.escape(LOCK_NAME)}"
)
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def partial_path(dest: Path) -> Path:
    """Where a pack for ``dest`` grows: on the same file system, so that a rename is atomic."""
    return dest.parent / f"{dest.name}{_ENDING}"


def target_problems(dest: Path, nbytes: int, *, goes_on: bool = False) -> list[str]:
    """Everything that forbids writing ``nbytes`` bytes to ``dest``; changes nothing.

    With ``goes_on``, work that was interrupted there is no obstacle.
    """
    try:
        problems = _name_problems(dest)
        if not dest.parent.is_dir():
            return [*problems, f"cannot be made: {dest.parent} is not a directory"]
        if not os.access(dest.parent, os.W_OK | os.X_OK):
            return [*problems, f"cannot be made: {dest.parent} is not writable"]
        leftover = partial_path(dest)
        if (leftover / JOURNAL_NAME).is_file() and not goes_on:
            how = (
                "go on with it by `tieredmoe pack create`, or drop it by `tieredmoe pack rollback`"
            )
            return [*problems, f"{leftover} holds an interrupted conversion; {how}"]
        if os.path.lexists(leftover) and not _is_ours(leftover, goes_on=goes_on):
            problems.append(f"{leftover} is in the way and not a leftover of ours; move it away")
            return problems
        free = free_nbytes(dest)
    except (OSError, ValueError) as error:
        return [f"cannot be examined: {error}"]
    if free < nbytes:
        problems.append(
            f"needs {nbytes:,} bytes, but {dest.parent} has {free:,} free; "
            f"make room for {nbytes - free:,} more or choose another drive"
        )
    return problems


def _name_problems(dest: Path) -> list[str]:
    try:
        dest.lstat()
        problems = ["already exists; name a new directory"]
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            partial_path(dest).lstat()  # a name may be too long only with its ending
        problems = []
    if dest.name.endswith(_ENDING):
        problems.append(f"a name that ends in {_ENDING} is for unfinished work; choose another")
    return problems


class PartialPack:
    """Exclusive use of ``DEST.partial``, from ``with`` to either ``publish`` or removal.

    Every refusal of the file system ends in a ``PackError`` that says what is needed, and nothing
    is left of the attempt. ``nbytes`` is the size of the whole pack, for those messages.
    """

    def __init__(self, dest: Path, nbytes: int) -> None:
        self.path = partial_path(dest)
        self.written_nbytes = 0
        self._dest = dest
        self._nbytes = nbytes
        self._fds: list[int] = []
        self._names: list[str] = []
        self._published = False

    def __enter__(self) -> Self:
        with self._doing(f"making {self.path.name}"):
            self.path.mkdir(exist_ok=True)
            self._lock = take_lock(self.path)
            try:
                remove_files(self.path)
            except BaseException:
                os.close(self._lock)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for fd in self._fds:
            # Files of a published pack have been synced, so closing them has no news to tell.
            with suppress(OSError):
                os.close(fd)
        try:
            if not self._published:
                with self._doing(f"removing {self.path.name}"):
                    remove_files(self.path)
                    (self.path / LOCK_NAME).unlink()
                    self.path.rmdir()
        finally:
            os.close(self._lock)

    def create(self, files: Sequence[DataFile]) -> None:
        """Make the data files, all zeros and of their final size; ``write`` counts in ``files``."""
        for file in files:
            with self._doing(f"making {file.name} of {file.nbytes:,} bytes"):
                self._fds.append(os.open(self.path / file.name, _NEW_FILE, 0o666))
                self._names.append(file.name)
                os.ftruncate(self._fds[-1], file.nbytes)

    def write(self, file_index: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset`` of a data file."""
        with self._doing(f"writing {self._names[file_index]}"):
            self._write(self._fds[file_index], data, offset)

    def sync(self, file_index: int) -> None:
        """Return when a data file is on stable storage."""
        with self._doing(f"syncing {self._names[file_index]}"):
            os.fsync(self._fds[file_index])

    def write_manifest(self, data: bytes) -> None:
        """Write the manifest, last and atomically: a pack with a manifest is a whole one."""
        with self._doing(f"writing {MANIFEST_NAME}"):
            unfinished = self.path / _UNFINISHED_MANIFEST_NAME
            fd = os.open(unfinished, _NEW_FILE, 0o666)
            try:
                self._write(fd, memoryview(data), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            unfinished.rename(self.path / MANIFEST_NAME)
            sync_directory(self.path)

    def publish(self) -> None:
        """Give the whole pack its name. From here on it stays, whatever follows."""
        with self._doing(f"renaming {self.path.name} to {self._dest.name}"):
            self.path.rename(self._dest)
            self._published = True
            (self._dest / LOCK_NAME).unlink()
            sync_directory(self._dest)
            sync_directory(self._dest.parent)

    def take_back(self) -> None:
        """Remove what was published, if it came to that: a name that is taken is not ours.

        Raises ``OSError``.
        """
        if self._published:
            for name in (MANIFEST_NAME, *self._names, LOCK_NAME):
                (self._dest / name).unlink(missing_ok=True)
            self._dest.rmdir()

    def _write(self, fd: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        self.written_nbytes += done

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PackError(self._dest, f"{what} failed: {self._way_out(error)}") from error

    def _way_out(self, error: OSError) -> str:
        reason = os.strerror(error.errno or 0)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return (
                f"{reason}; the pack needs {self._nbytes:,} bytes, and "
                f"{free_nbytes(self._dest):,} are free in {self._dest.parent} without this attempt"
            )
        if error.errno == errno.EFBIG:
            return f"{reason}; choose another file system, or smaller files with file_nbytes_max"
        return reason


def take_lock(partial: Path) -> int:
    """The open lock file of ``partial``, ours now; ``PackError`` if it is somebody else's."""
    name = partial / LOCK_NAME
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        lock_place(fd, partial)
        # The holder may have published or removed the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), name.stat()):
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise PackError(partial, "is being written by another conversion; wait for its end")


def _is_ours(leftover: Path, *, goes_on: bool) -> bool:
    """Whether a directory holds only what a conversion leaves behind (or nothing)."""
    if leftover.is_symlink() or not leftover.is_dir():
        return False
    names = [entry.name for entry in leftover.iterdir()]
    if goes_on and JOURNAL_NAME in names:
        return LOCK_NAME in names
    return not names or (LOCK_NAME in names and all(map(_OUR_NAMES.fullmatch, names)))


def remove_files(partial: Path) -> None:
    """Remove everything of ours but the lock, which goes last."""
    for entry in partial.iterdir():
        if entry.name != LOCK_NAME and _OUR_NAMES.fullmatch(entry.name):
            entry.unlink()


def free_nbytes(dest: Path) -> int:
    """Bytes that a new attempt could use: what is free, and what a leftover takes."""
    status = os.statvfs(dest.parent)
    free = status.f_bavail * status.f_frsize
    return free + allocated_nbytes(partial_path(dest))


def allocated_nbytes(partial: Path) -> int:
    """Bytes of the disk that the files in ``partial`` take; none if it is not there."""
    with suppress(FileNotFoundError):
        return sum(512 * entry.stat().st_blocks for entry in partial.iterdir())
    return 0


def sync_directory(path: Path) -> None:
    """Put a directory's entries on stable storage; raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
