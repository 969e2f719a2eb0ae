"""The GGUF files of a conversion: open, locked, and known to be what their headers told.

Read directly, so the page cache is left to others. A file that has been partly given up is marked:
it has other first bytes than GGUF's, so that no program takes its holes for weights; here it reads
as it was.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from tieredmoe.backends.file_locks import lock_exclusive, lock_shared, refuse_if_open
from tieredmoe.errors import GGUFError
from tieredmoe.gguf.header import GIVEN_UP_MAGIC, MAGIC
from tieredmoe.pack.aligned_files import AlignedReader, page_buffers, pages_to
from tieredmoe.pack.manifest import digest_of
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.gguf import ShardInfo


class ShardReader:
    """Reads one shard as it was before anything of it was given up."""

    def __init__(self, shard: ShardInfo) -> None:
        self.shard = shard
        self._file = AlignedReader(shard.path, GGUFError)
        self.expected = (shard.file_nbytes, shard.mtime_ns)

    @property
    def file(self) -> AlignedReader:
        """The file as it is."""
        return self._file

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> memoryview:
        """See ``AlignedReader.read``."""
        data = self._file.read(offset, nbytes, buffer)
        if offset == 0 and data[: len(MAGIC)] == GIVEN_UP_MAGIC:
            data[: len(MAGIC)] = MAGIC
        return data

    def is_marked(self) -> bool:
        """Whether the file says that it is being given up."""
        (buffer,) = page_buffers(1, 3 * PAGE_NBYTES)
        return self._file.read(0, len(MAGIC), buffer.view) == GIVEN_UP_MAGIC

    def check_unchanged(self) -> None:
        """Raise ``GGUFError`` if the file is not as it was when its header was read."""
        status = os.fstat(self._file.fd)
        if (status.st_size, status.st_mtime_ns) != self.expected:
            raise GGUFError(
                self.shard.path,
                f"changed since it was opened (it had {self.expected[0]} bytes, now "
                f"{status.st_size}); convert it when nothing writes to it",
            )

    def accept_change(self) -> None:
        """What happened to the file until now was our own doing."""
        status = os.fstat(self._file.fd)
        self.expected = (status.st_size, status.st_mtime_ns)


class SourceFiles:
    """All shards of a model, open; a context manager.

    They are locked: shared, or with ``to_change`` exclusively and opened for writing as well.
    ``GGUFError`` if one is in use then, was changed, or cannot be opened.
    """

    def __init__(self, shards: Sequence[ShardInfo], *, to_change: bool = False) -> None:
        self._shards = shards
        self._to_change = to_change
        self._stack = ExitStack()
        self.readers: list[ShardReader] = []
        self.fds: list[int] = []

    def __enter__(self) -> Self:
        with self._stack:
            for shard in self._shards:
                if self._to_change:
                    self.fds.append(self._open_to_change(shard))
                reader = ShardReader(shard)
                self._stack.callback(reader.file.close)
                self.readers.append(reader)
                if self._to_change:
                    self._check_same(len(self.fds) - 1)
                else:
                    lock_shared(reader.file.fd, shard.path, GGUFError)
            self.check_unchanged()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def read_nbytes(self) -> int:
        """Bytes read so far, not counting what lies around them in their pages."""
        return sum(reader.file.read_nbytes for reader in self.readers)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why files are read through the page cache, if any are."""
        fallbacks = [reader.file.fallback for reader in self.readers]
        return tuple(fallback for fallback in fallbacks if fallback is not None)

    def check_unchanged(self) -> None:
        """Raise ``GGUFError`` if a shard is not as it was when its header was read."""
        for reader in self.readers:
            reader.check_unchanged()

    @property
    def marked(self) -> set[int]:
        """The files that say that they are being given up."""
        return {index for index, reader in enumerate(self.readers) if reader.is_marked()}

    def mark(self, shard_index: int) -> None:
        """Say on the disk that a file is being given up; nothing may be reading it.

        Who opens it from now on is refused by its first bytes; who has opened it between our lock
        and now is found here, before there is a hole: ``GGUFError``, and the file is as it was.
        """
        fd, reader = self.fds[shard_index], self.readers[shard_index]
        if os.pread(fd, len(MAGIC), 0) != MAGIC:
            return
        write_magic(fd, GIVEN_UP_MAGIC, reader.shard.path)
        try:
            with reader.file.let_go():
                refuse_if_open(fd, reader.shard.path, GGUFError)
            self._check_same(shard_index)
        except GGUFError:
            write_magic(fd, MAGIC, reader.shard.path)
            raise

    def header_digest(self, shard_index: int) -> bytes:
        """The digest of a shard's header, which says what lies where in it."""
        shard = self._shards[shard_index]
        nbytes = min(shard.data_offset, shard.file_nbytes)
        (buffer,) = page_buffers(1, pages_to(nbytes) + 2 * PAGE_NBYTES)
        return digest_of(self.readers[shard_index].read(0, nbytes, buffer.view))

    def _check_same(self, shard_index: int) -> None:
        """Raise ``GGUFError`` if what is read is not what would be changed."""
        path, reader = self._shards[shard_index].path, self.readers[shard_index]
        if not os.path.samestat(os.fstat(self.fds[shard_index]), os.fstat(reader.file.fd)):
            raise GGUFError(path, "was replaced by another file while it was opened; start again")

    def _open_to_change(self, shard: ShardInfo) -> int:
        try:
            fd = os.open(shard.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            fact = f"cannot be opened for writing: {os.strerror(error.errno or 0)}"
            raise GGUFError(shard.path, fact) from error
        self._stack.callback(os.close, fd)
        lock_exclusive(fd, shard.path, GGUFError)
        return fd


def write_magic(fd: int, magic: bytes, path: Path) -> None:
    """Make a file's first bytes ``magic``, durably; ``GGUFError`` if that fails."""
    try:
        if os.pwrite(fd, magic, 0) != len(magic):
            raise GGUFError(path, "its first bytes could not be written")
        os.fdatasync(fd)
    except OSError as error:
        raise GGUFError(path, f"cannot be marked: {error.strerror}") from error
