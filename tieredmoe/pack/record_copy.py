"""Copies parts of a pack to other files, or reads them again, each compared with its digest.

A part is a run of bytes under one digest, whatever it is; splitting, mirroring and verifying are
lists of runs. A reader thread reads and digests while the caller's thread writes, in pieces, so
memory is a few buffers whatever the size of the model; what has been read or is on the disk is told
to leave the page cache, since a copy of a model should not push everything else out of memory.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from tieredmoe.errors import PackError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.aligned_files import AlignedReader, page_buffers
from tieredmoe.pack.manifest import DIGEST_NBYTES
from tieredmoe.pack.reader import as_pack_errors
from tieredmoe.pack.verify import Damage
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from tieredmoe.pack.layout import Extent
    from tieredmoe.pack.manifest import Manifest
    from tieredmoe.pack.progress import Reporter
    from tieredmoe.spec import ExpertKey

PIECE_NBYTES = 4 << 20
N_BUFFERS = 4
"""Memory of a copy: enough to read on while a write stalls."""

SYNC_NBYTES = 1 << 30
"""After so many bytes written, they are put on the disk: a last sync of everything would stop the
progress, and a wish to cancel, for minutes."""


class Run(NamedTuple):
    """Bytes with one digest: where they are, and where a copy puts them.

    ``what`` names them in messages, ``key`` says whose they are, if an expert's.
    """

    source_index: int
    source_offset: int
    target_index: int
    target_offset: int
    nbytes: int
    digest: bytes
    what: str
    key: ExpertKey | None = None


class Target(Protocol):
    """Files that a copy writes."""

    def write(self, file_index: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""

    def sync(self, file_index: int) -> None:
        """Return when the file is on stable storage."""


def record_runs(
    manifest: Manifest,
    source: Callable[[ExpertKey], Extent],
    target: Callable[[ExpertKey], Extent],
    keys: Iterable[ExpertKey],
) -> Iterator[Run]:
    """The roles of ``keys``, record by record; padding is none of them, nobody reads it."""
    for key in keys:
        here, there = source(key), target(key)
        roles = manifest.layout.spec.layouts[key.layer].roles
        for role, digest in zip(roles, manifest.role_digests(key), strict=True):
            yield Run(
                here.file_index,
                here.offset + role.offset,
                there.file_index,
                there.offset + role.offset,
                role.nbytes,
                digest,
                f"layer {key.layer}, expert {key.expert}, {role.name}",
                key,
            )


def dense_runs(manifest: Manifest, first_index: int) -> Iterator[Run]:
    """Everything that is not experts; dense files are counted from ``first_index``, both ways."""
    shards = zip(manifest.layout.shards, manifest.digests, strict=True)
    for index, (shard, digests) in enumerate(shards, first_index):
        offset = 0
        for segment, digest in zip(shard.segments, digests, strict=True):
            if segment.slabs is not None:
                continue
            assert len(digest) == DIGEST_NBYTES
            what = "padding" if offset else "header"
            if segment.tensor is not None:
                what = f"tensor {segment.tensor}"
            yield Run(index, offset, index, offset, segment.nbytes, digest, what)
            offset += segment.nbytes


def copy_runs(
    runs: Iterable[Run],
    sources: Sequence[Path],
    target: Target,
    reporter: Reporter,
    *,
    total_nbytes: int,
    done_nbytes: int = 0,
) -> None:
    """Copy ``runs`` in order; when it returns, all that was written had its digest when read.

    ``done_nbytes`` were copied before.

    Raises ``PackError`` naming the first run that is damaged or cannot be read, and what
    ``target`` raises.
    """
    done = done_nbytes
    unsynced, written = 0, set[int]()
    with closing(_pieces(runs, sources)) as pieces:
        for run, at, piece in pieces:
            reporter.report("copy", done_nbytes=done, total_nbytes=total_nbytes)
            target.write(run.target_index, piece, run.target_offset + at)
            done += len(piece)
            unsynced += len(piece)
            written.add(run.target_index)
            if unsynced >= SYNC_NBYTES:
                for file_index in written:
                    target.sync(file_index)
                unsynced = 0
    reporter.report("copy", done_nbytes=done, total_nbytes=total_nbytes)


def sync_all(target: Target, sizes: Sequence[int], reporter: Reporter) -> None:
    """Put every file of ``target``, of these sizes, on stable storage."""
    done = 0
    for file_index, nbytes in enumerate(sizes):
        target.sync(file_index)
        done += nbytes
        reporter.report("sync", done_nbytes=done, total_nbytes=sum(sizes))


def find_damage(
    runs: Iterable[Run],
    sources: Sequence[Path],
    reporter: Reporter,
    *,
    total_nbytes: int,
    done_nbytes: int = 0,
) -> Iterator[Damage]:
    """Read ``runs`` from the disk, not from memory, and name each that has not its digest.

    Direct reads, where the file system takes them. ``done_nbytes`` were checked before.
    """
    done = done_nbytes
    with ExitStack() as stack:
        readers = []
        for path in sources:
            readers.append(AlignedReader(path, PackError))
            stack.callback(readers[-1].close)
            readers[-1].drop_cached()
        buffer = page_buffers(1, PIECE_NBYTES + 2 * PAGE_NBYTES)[0].view
        for run in runs:
            reporter.report("verify", done_nbytes=done, total_nbytes=total_nbytes)
            done += run.nbytes
            fact = _fact(readers[run.source_index], run, buffer)
            if fact is not None:
                path = sources[run.source_index]
                yield Damage(path, run.source_offset, run.nbytes, run.what, fact, run.key)
    reporter.report("verify", done_nbytes=done, total_nbytes=total_nbytes)


def _fact(reader: AlignedReader, run: Run, buffer: memoryview) -> str | None:
    hasher = xxhash.xxh3_128()
    for at in range(0, run.nbytes, PIECE_NBYTES):
        nbytes = min(PIECE_NBYTES, run.nbytes - at)
        try:
            hasher.update(reader.read(run.source_offset + at, nbytes, buffer))
        except PackError as error:
            return f"cannot be read: {error.fact}"
    return None if hasher.digest() == run.digest else "does not match its digest"


def _pieces(
    runs: Iterable[Run], sources: Sequence[Path]
) -> Generator[tuple[Run, int, memoryview], None, None]:
    """Each run in pieces, read ahead and digested; a run's last piece comes if its digest is right.

    A piece is valid until the next one is asked for.
    """
    hasher = xxhash.xxh3_128()
    cuts = (
        (run, at, min(PIECE_NBYTES, run.nbytes - at))
        for run in runs
        for at in range(0, run.nbytes, PIECE_NBYTES)
    )
    with ExitStack() as stack, as_pack_errors():
        fds = [stack.enter_context(opened(path))[0] for path in sources]
        reader = stack.enter_context(ThreadPoolExecutor(1, "tieredmoe-pack-read"))

        def fill(run: Run, at: int, piece: memoryview) -> None:
            # One thread fills pieces in order, so a run may be digested across them.
            fd, path = fds[run.source_index], sources[run.source_index]
            offset = run.source_offset + at
            read_exactly(fd, piece, offset=offset, path=path)
            os.posix_fadvise(fd, offset, len(piece), os.POSIX_FADV_DONTNEED)
            hasher.update(piece)
            if at + len(piece) < run.nbytes:
                return
            if hasher.digest() != run.digest:
                raise PackError(
                    path,
                    f"is damaged: {run.what} ({run.nbytes:,} bytes at {run.source_offset:,}) does "
                    "not match its digest; `tieredmoe pack verify` lists all damage",
                )
            hasher.reset()

        ahead: deque[tuple[Run, int, memoryview, memoryview, Future[None]]] = deque()

        def read_next(buffer: memoryview) -> None:
            for run, at, nbytes in islice(cuts, 1):
                piece = buffer[:nbytes]
                ahead.append((run, at, piece, buffer, reader.submit(fill, run, at, piece)))

        for _ in range(N_BUFFERS):
            read_next(memoryview(bytearray(PIECE_NBYTES)))
        while ahead:
            run, at, piece, buffer, filled = ahead.popleft()
            filled.result()
            yield run, at, piece
            read_next(buffer)
