"""Writes the GGUF files that a pack was made from, byte for byte, from the pack alone.

File by file, each piece compared with its digest while it is on its way, each file noted when it is
on stable storage: what was interrupted goes on after the last whole file. The digests of a file's
pieces are those that its own digest in the manifest is made of, so a finished file is proved. Until
all are, they have other names: half a GGUF file begins like a whole one, and is as long.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from tieredmoe.backends.file_locks import lock_shared
from tieredmoe.errors import PackError
from tieredmoe.pack.aligned_files import AlignedReader
from tieredmoe.pack.drives import DrivesPack, has_drives, is_drive, open_drives, refuse_drive
from tieredmoe.pack.journal import JOURNAL_NAME, read_journal
from tieredmoe.pack.layout import DataFile, slab_runs
from tieredmoe.pack.manifest import DIGEST_NBYTES
from tieredmoe.pack.partial import partial_path, target_problems
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import Pack, open_pack
from tieredmoe.pack.stream_copy import N_READERS, Part, Stream, StreamCopy, first_failure
from tieredmoe.pack.work_place import WorkPlace, tidy
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from tieredmoe.pack.layout import ShardLayout

WORK = "restore"


@attrs.frozen
class RestoreReport:
    """What restoring did: ``files`` are the source's, ``resumed_nbytes`` were there before."""

    path: Path
    files: tuple[Path, ...]
    written_nbytes: int
    resumed_nbytes: int
    fallbacks: tuple[str, ...]


async def restore_pack(
    pack: Path | str,
    dest: Path | str,
    *,
    progress: Callable[[PackProgress], None] | None = None,
) -> RestoreReport:
    """The original GGUF files of ``pack`` in the new directory ``dest``, identical to their last.

    They have the names and the order they had. The pack is only read; one on several drives will
    do. What was interrupted goes on with the same arguments, after the last whole file.

    Raises ``PackError``: for a destination that will not do, with every problem found before the
    first byte is written; for a pack that is damaged, naming the place; for a disk that is full.
    Cancelling returns when all is at rest.
    """
    return await run_in_thread(partial(_restore, *_settled(pack, dest)), progress)


def _settled(pack: Path | str, dest: Path | str) -> tuple[Path, Path]:
    return Path(pack).absolute(), Path(dest).absolute()


def _restore(path: Path, dest: Path, reporter: Reporter) -> RestoreReport:
    model = _opened(path)
    shards = model.manifest.layout.shards
    files = [DataFile(f"shard-{i:05d}.bin", shard.nbytes) for i, shard in enumerate(shards)]
    names = {file.name: shard.name for file, shard in zip(files, shards, strict=True)}
    total = model.manifest.layout.source_nbytes
    head = {"work": WORK, "source": model.manifest.source_digest.hex()}
    restored = tuple(dest / shard.name for shard in shards)
    if _is_published(dest, head, shards):
        try:
            tidy(dest)
        except OSError as error:
            raise PackError(dest, f"tidying up failed: {error.strerror}") from error
        return RestoreReport(dest, restored, 0, total, ())
    if problems := target_problems(dest, total, goes_on=True):
        raise PackError(dest, "; ".join(problems))
    read_journal(partial_path(dest) / JOURNAL_NAME)  # one of a newer version is left alone
    with WorkPlace(dest) as place:
        journal = place.journal or place.begin(head, files)
        if not _is_of(journal.path, head):
            raise PackError(
                place.path, "holds other unfinished work; finish that, or name another directory"
            )
        done = {record["shard"] for record in journal.records[1:]}
        place.rename_files({name: unfinished for unfinished, name in names.items()})
        place.open_files(files, finished=done)
        resumed_nbytes = sum(files[index].nbytes for index in done)
        place.final_nbytes = total
        with _Restoring(model, place, reporter, done_nbytes=resumed_nbytes) as restoring:
            restoring.restore([index for index in range(len(files)) if index not in done])
        place.rename_files(names)
        place.publish()
        place.tidy()
        return RestoreReport(
            dest,
            restored,
            place.written_nbytes,
            resumed_nbytes,
            (*restoring.fallbacks, *place.fallbacks),
        )


def _is_published(dest: Path, head: Mapping[str, str], shards: Sequence[ShardLayout]) -> bool:
    """Whether this very work was killed after the directory had got its name, and is all there."""
    try:
        return _is_of(dest / JOURNAL_NAME, head) and all(
            (dest / shard.name).stat().st_size == shard.nbytes for shard in shards
        )
    except (OSError, ValueError):
        return False


def _is_of(journal: Path, head: Mapping[str, str]) -> bool:
    """Whether there is a journal of this very work."""
    records, _ = read_journal(journal)
    return bool(records) and {key: records[0].get(key) for key in head} == head


def _opened(path: Path) -> Pack | DrivesPack:
    try:
        if has_drives(path):
            return open_drives(path)
        if is_drive(path):
            refuse_drive(path)
    except (OSError, ValueError) as error:
        raise PackError(path, f"cannot be opened: {error}") from error
    return open_pack(path)


class _Restoring:
    """The pack's files, open and locked, and the copies out of them; a context manager."""

    def __init__(
        self, model: Pack | DrivesPack, place: WorkPlace, reporter: Reporter, *, done_nbytes: int
    ) -> None:
        self._model = model
        self._layout = model.manifest.layout
        self._place = place
        self._reporter = reporter
        self._done_nbytes = done_nbytes
        self._lock = threading.Lock()
        self._stack = ExitStack()
        dense = [model.path / shard.dense_file.name for shard in self._layout.shards]
        self._paths = (*model.data_files, *dense)
        self._readers: list[AlignedReader] = []

    def __enter__(self) -> Self:
        with self._stack:
            for path in self._paths:
                self._readers.append(AlignedReader(path, PackError))
                self._stack.callback(self._readers[-1].close)
                lock_shared(self._readers[-1].fd, path, PackError)
            longest = max(shard.nbytes for shard in self._layout.shards)
            copy = StreamCopy(
                self._readers, self._place.write, self._advance, stream_nbytes=longest
            )
            self._copy = self._stack.enter_context(copy)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why the pack is read through the page cache, if it is."""
        return tuple(reader.fallback for reader in self._readers if reader.fallback is not None)

    def restore(self, shard_indices: Sequence[int]) -> None:
        """Write these files, compared with their digests; each is noted when it is durable."""
        self._advance(0)
        ahead: deque[tuple[Stream, Future[list[bytes]]]] = deque()
        for shard_index in shard_indices:
            self._place.reserve(shard_index, 0, self._layout.shards[shard_index].nbytes)
            stream = Stream(shard_index, 0, list(self._parts(shard_index)))
            ahead.append((stream, self._copy.start(stream)))
            if len(ahead) > N_READERS:
                self._end(ahead)
        while ahead:
            self._end(ahead)

    def _end(self, ahead: deque[tuple[Stream, Future[list[bytes]]]]) -> None:
        stream, copy = ahead.popleft()
        if copy.exception():
            copies = [copy, *(other for _, other in ahead)]
            wait(copies)
            failure = first_failure(copies)
            assert failure is not None, "one that failed first is among those that were started"
            raise failure
        self._compare(stream, copy.result())
        self._place.sync(stream.target_index)
        self._place.note({"shard": stream.target_index})

    def _compare(self, stream: Stream, found: Sequence[bytes]) -> None:
        expected = b"".join(self._model.manifest.digests[stream.target_index])
        for i, (part, digest) in enumerate(zip(stream.parts, found, strict=True)):
            if digest != expected[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES]:
                assert part.file_index is not None, "every byte of a source is somewhere"
                raise PackError(
                    self._paths[part.file_index],
                    f"is damaged: {part.nbytes:,} bytes at {part.offset:,} do not match their "
                    "digest; `tieredmoe pack verify` lists all damage",
                )

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            # Reported under the lock: several threads copy, and progress never goes back.
            self._done_nbytes += nbytes
            done, total = self._done_nbytes, self._layout.source_nbytes
            self._reporter.report("copy", done_nbytes=done, total_nbytes=total)

    def _parts(self, shard_index: int) -> Iterator[Part]:
        """The pieces of one file, in its order, and where they lie in the pack."""
        dense_index, dense_offset = len(self._model.data_files) + shard_index, 0
        for segment in self._layout.shards[shard_index].segments:
            if segment.slabs is None:
                yield Part(dense_index, dense_offset, segment.nbytes)
                dense_offset += segment.nbytes
                continue
            layer = segment.slabs.layer
            runs = slab_runs(self._layout.spec.layouts[layer], segment.slabs)
            for expert in range(self._layout.spec.n_experts):
                record = self._model.locate(ExpertKey(layer, expert))
                for run in runs:
                    offset = record.offset + run.role.offset
                    yield Part(record.file_index, offset, run.role.nbytes)
