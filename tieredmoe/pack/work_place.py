"""The directory in which a pack (or a restored source) grows, and from which it can go on.

``DEST.partial`` beside the destination, owned by whoever holds the lock in it, with the journal of
what is done. Data files are written, synced, noted; at the end the directory is renamed. Whatever
stops the work in between leaves it to be gone on with; if nothing was finished, nothing is left.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tieredmoe.errors import PackError
from tieredmoe.pack.aligned_files import AlignedWriter
from tieredmoe.pack.holes import reserve
from tieredmoe.pack.journal import JOURNAL_NAME, Journal
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.partial import (
    LOCK_NAME,
    allocated_nbytes,
    partial_path,
    remove_files,
    sync_directory,
    take_lock,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from tieredmoe.pack.layout import DataFile

_UNFINISHED_MANIFEST_NAME = f"{MANIFEST_NAME}.partial"
_ROOM_NBYTES = 32 << 20
"""What journal and manifest of the largest models take, and is not counted one by one."""

_OUR_FILES = frozenset({LOCK_NAME, JOURNAL_NAME, MANIFEST_NAME, _UNFINISHED_MANIFEST_NAME})


class WorkPlace:
    """Exclusive use of ``DEST.partial``; a context manager.

    ``journal`` is that of earlier work, or None. Every refusal of the file system ends in a
    ``PackError`` with what is needed to go on. ``final_nbytes`` is the most that its files
    will take, for those messages.
    """

    def __init__(self, dest: Path) -> None:
        self.path = partial_path(dest)
        self.dest = dest
        self.journal: Journal | None = None
        self.final_nbytes = 0
        self.written_nbytes = 0
        self._counting = threading.Lock()
        self._writers: list[AlignedWriter] = []
        self._settled = False

    def __enter__(self) -> Self:
        with self.doing(f"making {self.path.name}"):
            self.path.mkdir(exist_ok=True)
            self._lock = take_lock(self.path)
        try:
            with self.doing(f"going on with what is in {self.path.name}"):
                self._look()
        except BaseException:
            if self.journal is not None:
                self.journal.close()
            os.close(self._lock)
            raise
        return self

    def _look(self) -> None:
        """Learn what was done before, or make room if it was nothing."""
        self.journal = Journal.open(self.path / JOURNAL_NAME)
        if self.journal is not None and len(self.journal.records) == 1:
            # Nothing was finished, so other work may begin.
            self._forget()
        if self.journal is None:
            remove_files(self.path)

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        try:
            if not self._settled and (self.journal is None or len(self.journal.records) == 1):
                self.remove()
        finally:
            if self.journal is not None:
                self.journal.close()
            os.close(self._lock)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why files are written through the page cache, if any are."""
        return tuple(writer.fallback for writer in self._writers if writer.fallback is not None)

    def begin(self, head: Mapping[str, Any], files: Sequence[DataFile]) -> Journal:
        """Start a journal for data files of these names, durable with the directory it is in."""
        with self.doing(f"writing {JOURNAL_NAME}"):
            names = [file.name for file in files]
            self.journal = Journal.create(self.path / JOURNAL_NAME, {**head, "files": names})
            sync_directory(self.path)
            sync_directory(self.dest.parent)
        return self.journal

    def withdraw_manifest(self) -> None:
        """Let nobody take what is in here for a whole pack, be it one until now or not."""
        with self.doing(f"removing {MANIFEST_NAME}"):
            names = (MANIFEST_NAME, _UNFINISHED_MANIFEST_NAME)
            if there := [name for name in names if (self.path / name).exists()]:
                for name in there:
                    (self.path / name).unlink()
                sync_directory(self.path)

    def open_files(self, files: Sequence[DataFile], *, finished: Container[int]) -> None:
        """Open or make the data files; ``write`` counts in ``files``. Refuses what is not ours.

        Those that hold ``finished`` work must be there with all their bytes.
        """
        expected = _OUR_FILES | {file.name for file in files}
        with self.doing(f"looking into {self.path.name}"):
            unknown = sorted(entry.name for entry in self.path.iterdir())
        if unknown := [name for name in unknown if name not in expected]:
            raise PackError(self.path, f"holds {unknown[0]!r}, which is not ours; move it away")
        for index, file in enumerate(files):
            if index in finished:
                self._check_there(file)
            with self.doing(f"making {file.name} of {file.nbytes:,} bytes"):
                self._writers.append(AlignedWriter(self.path / file.name, file.nbytes))
        with self.doing(f"syncing {self.path.name}"):
            sync_directory(self.path)

    def _check_there(self, file: DataFile) -> None:
        try:
            nbytes = (self.path / file.name).stat().st_size
        except OSError as error:
            fact = f"cannot be looked at ({error.strerror})"
        else:
            fact = f"has {nbytes:,} of {file.nbytes:,} bytes"
            if nbytes >= file.nbytes:
                return
        raise PackError(
            self.path,
            f"{file.name} {fact}, but work in it was finished by the journal: bring it back, or "
            f"start anew: `tieredmoe pack rollback`, or for a restore, remove {self.path}",
        )

    def reserve(self, file_index: int, offset: int, nbytes: int) -> None:
        """Have the space for bytes that come next."""
        writer = self._writers[file_index]
        with self.doing(f"reserving {nbytes:,} bytes at byte {offset:,} of {writer.path.name}"):
            if nbytes:
                reserve(writer.fd, offset, nbytes)

    def write(self, file_index: int, data: memoryview, offset: int) -> None:
        """Write whole pages; in any thread."""
        writer = self._writers[file_index]
        with self.doing(f"writing {len(data):,} bytes at byte {offset:,} of {writer.path.name}"):
            writer.write(data, offset)
        with self._counting:
            self.written_nbytes += len(data)

    def sync(self, file_index: int) -> None:
        """Return when a data file is on stable storage."""
        writer = self._writers[file_index]
        with self.doing(f"syncing {writer.path.name}"):
            writer.sync()

    def note(self, record: Mapping[str, Any]) -> None:
        """Add a record to the journal; it is durable on return."""
        assert self.journal is not None, "work begins with a journal"
        with self.doing(f"writing {JOURNAL_NAME}"):
            self.journal.append(record)

    def write_manifest(self, data: bytes) -> None:
        """Write the manifest, last and atomically: a pack with a manifest is a whole one."""
        with self.doing(f"writing {MANIFEST_NAME}"):
            unfinished = self.path / _UNFINISHED_MANIFEST_NAME
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                view, done = memoryview(data), 0
                while done < len(view):
                    done += os.pwrite(fd, view[done:], done)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            unfinished.rename(self.path / MANIFEST_NAME)
            sync_directory(self.path)
        self.written_nbytes += len(data)

    def rename_files(self, names: Mapping[str, str]) -> None:
        """Give those of the data files that are there other names, durably."""
        with self.doing(f"naming files in {self.path.name}"):
            if there := [name for name in names if (self.path / name).exists()]:
                for name in there:
                    (self.path / name).rename(self.path / names[name])
                sync_directory(self.path)

    def publish(self) -> None:
        """Give the whole directory its name. From here on it stays; ``tidy`` is what is left."""
        with self.doing(f"renaming {self.path.name} to {self.dest.name}"):
            if os.path.lexists(self.dest):
                raise PackError(self.dest, "already exists; name a new directory")
            self.path.rename(self.dest)
            self._settled = True
            sync_directory(self.dest.parent)

    def tidy(self) -> None:
        """Remove journal and lock from what was published."""
        with self.doing("removing the journal"):
            tidy(self.dest)

    def remove(self) -> None:
        """Remove the whole directory: data first, the journal last."""
        with self.doing(f"removing {self.path.name}"):
            self._forget()
            remove_files(self.path)
            (self.path / LOCK_NAME).unlink(missing_ok=True)
            self.path.rmdir()
            self._settled = True

    def _forget(self) -> None:
        """Remove the journal, after the files that only it knows to be ours."""
        if self.journal is not None:
            # The files go one by one: from now on, nothing in them is to be gone on with.
            self.journal.clear()
            for name in self.journal.head["files"]:
                if name == Path(name).name:
                    (self.path / name).unlink(missing_ok=True)
            sync_directory(self.path)
            self.journal.close()
            self.journal = None
        (self.path / JOURNAL_NAME).unlink(missing_ok=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Whatever the file system refuses in here is a ``PackError`` that says what to do."""
        try:
            yield
        except OSError as error:
            raise PackError(self.dest, f"{what} failed: {self._way_out(error)}") from error

    def _way_out(self, error: OSError) -> str:
        reason = os.strerror(error.errno or 0)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            with suppress(OSError):
                status = os.statvfs(self.dest.parent)
                free = status.f_bavail * status.f_frsize
                left = max(0, self.final_nbytes - allocated_nbytes(self.path)) + _ROOM_NBYTES
                way_out = f"make room for {left - free:,} more"
                if left <= free:
                    way_out = (
                        "that would do, so raise the quota, or whatever it is that limits you,"
                    )
                reason += (
                    f"; {left:,} bytes are still to be written and {free:,} are free in "
                    f"{self.dest.parent}: {way_out} and run the same command again, it goes on "
                    "after what is finished"
                )
        elif error.errno == errno.EFBIG:
            reason += "; choose another file system, or smaller files with file_nbytes_max"
        elif self.journal is not None and len(self.journal.records) > 1:
            reason += "; run the same command again to go on after what is finished"
        return reason


def tidy(published: Path) -> None:
    """Remove what only unfinished work needs from a published directory; raises ``OSError``."""
    (published / LOCK_NAME).unlink(missing_ok=True)
    (published / JOURNAL_NAME).unlink(missing_ok=True)  # last: as long as it is there, go on
    sync_directory(published)
