"""Converts a GGUF model to a pack in one pass: source bytes are read once, pack bytes written once.

The source is read in file order, in chunks, by a reader thread that also digests; the conversion's
thread writes the pieces of a chunk to their places while the next chunks are being read. Memory is
the few buffers between the two, whatever the size of the model. Rejected: going through the pack in
its own order (the source would be read in small strides), and one task per expert.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import xxhash

from tieredmoe.errors import ConfigError, GGUFError, PackError
from tieredmoe.gguf import GGUFInventory, find_experts, open_inventory
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.document import dump_manifest
from tieredmoe.pack.layout import Chunk, PackLayout, SlabRole, SourceShard, plan_pack
from tieredmoe.pack.manifest import DIGEST_NBYTES, Manifest
from tieredmoe.pack.partial import PartialPack, target_problems
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import open_pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.gguf import ShardInfo

CHUNK_NBYTES = 1 << 20
"""Bytes read at once. What is read should still be in the CPU's cache when it is digested and
written: with chunks of 8 MiB, the system time was 2.9 s instead of 2.1 to 2.4 (1.74 GB, two cores
under load, ext4, n = 2)."""

N_BUFFERS = 8
"""Chunks in memory: enough to even out a reader and a writer that stall at different times."""


@attrs.frozen
class ConversionReport:
    """What a conversion did. ``source_read_nbytes`` does not count the headers' first reading.

    The pack's files hold ``written_nbytes`` plus ``zero_nbytes``: the records' padding, which the
    file system supplies as zeros and nobody writes.
    """

    path: Path
    source_read_nbytes: int
    written_nbytes: int
    zero_nbytes: int


async def create_pack(
    source: Path | str | GGUFInventory,
    dest: Path | str,
    *,
    progress: Callable[[PackProgress], None] | None = None,
    file_nbytes_max: int | None = None,
) -> ConversionReport:
    """Make a pack of the GGUF model ``source`` at ``dest``: it is there whole, or not at all.

    ``source`` is a file, any of its shards, their directory, or an inventory; it is only read.
    ``file_nbytes_max`` splits the expert data into files of at most that size, but of at least one
    layer each. ``progress`` is called in the running loop, a few times a second. Raises
    ``GGUFError`` for a source and ``PackError`` for a destination that will not do, with every
    problem found before the first byte is written. Cancelling removes what was written and returns
    when that is done.
    """
    if file_nbytes_max is not None and not (
        isinstance(file_nbytes_max, int) and file_nbytes_max > 0
    ):
        raise ConfigError(f"file_nbytes_max is {file_nbytes_max!r}, it must be 1 or more bytes")
    work = partial(_convert, _settled(source), _settled(Path(dest)), file_nbytes_max)
    return await run_in_thread(work, progress)


def _settled(place: Path | str | GGUFInventory) -> Any:
    """A path as it is now: the work goes on elsewhere while the working directory may change."""
    return place if isinstance(place, GGUFInventory) else Path(place).absolute()


def plan_inventory(inventory: GGUFInventory, *, file_nbytes_max: int | None = None) -> PackLayout:
    """The geometry of the pack that ``inventory`` would become."""
    experts = find_experts(inventory)
    return plan_pack(
        experts.spec,
        [
            SourceShard(shard.path.name, shard.file_nbytes, shard.data_offset)
            for shard in inventory.shards
        ],
        inventory.tensors,
        {info.name: SlabRole(*key) for key, info in experts.tensors.items()},
        file_nbytes_max=file_nbytes_max,
    )


def pack_nbytes(layout: PackLayout) -> int:
    """The exact size of a pack of this layout, manifest included."""
    blank = tuple(
        tuple(bytes(DIGEST_NBYTES * layout.n_pieces(segment)) for segment in shard.segments)
        for shard in layout.shards
    )
    return layout.data_nbytes + len(dump_manifest(Manifest(layout, blank)))


def _convert(
    source: Path | str | GGUFInventory, dest: Path, file_nbytes_max: int | None, reporter: Reporter
) -> ConversionReport:
    inventory = source if isinstance(source, GGUFInventory) else open_inventory(source)
    layout = plan_inventory(inventory, file_nbytes_max=file_nbytes_max)
    nbytes = pack_nbytes(layout)
    with _Source(inventory.shards) as shards:
        if problems := target_problems(dest, nbytes):
            raise PackError(dest, "; ".join(problems))
        with PartialPack(dest, nbytes) as pack:
            pack.create(layout.files)
            digests = _copy(layout, shards, pack, reporter)
            shards.check_unchanged()
            synced_nbytes = 0
            for index, file in enumerate(layout.files):
                pack.sync(index)
                synced_nbytes += file.nbytes
                reporter.report("sync", done_nbytes=synced_nbytes, total_nbytes=layout.data_nbytes)
            pack.write_manifest(dump_manifest(Manifest(layout, digests)))
            # The last check before others can see it: what was written is what will be opened.
            open_pack(pack.path)
            pack.publish()
    return ConversionReport(
        dest, shards.read_nbytes, pack.written_nbytes, nbytes - pack.written_nbytes
    )


class _Source:
    """The shards, open, and known to be what the inventory saw."""

    def __init__(self, shards: tuple[ShardInfo, ...]) -> None:
        self.read_nbytes = 0
        self._shards = shards
        self._fds: list[int] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            for shard in self._shards:
                self._fds.append(self._stack.enter_context(opened(shard.path))[0])
            self.check_unchanged()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, shard_index: int, target: memoryview, offset: int) -> None:
        """Fill ``target`` from ``offset`` of a shard; ``GGUFError`` if it cannot be filled."""
        path = self._shards[shard_index].path
        read_exactly(self._fds[shard_index], target, offset=offset, path=path)
        self.read_nbytes += len(target)

    def check_unchanged(self) -> None:
        """Raise ``GGUFError`` if a shard is not as it was when its header was read."""
        for fd, shard in zip(self._fds, self._shards, strict=True):
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (shard.file_nbytes, shard.mtime_ns):
                raise GGUFError(
                    shard.path,
                    f"changed since it was opened (it had {shard.file_nbytes} bytes, now "
                    f"{status.st_size}); convert it when nothing writes to it",
                )


def _copy(
    layout: PackLayout, source: _Source, pack: PartialPack, reporter: Reporter
) -> tuple[tuple[bytes, ...], ...]:
    """Copy every piece to its place; returns the digests, as ``Manifest`` holds them."""
    digests: list[bytes] = []
    hasher = xxhash.xxh3_128()

    def fill(chunk: Chunk, buffer: memoryview) -> None:
        # One reader thread fills chunks in order, so a piece may be digested across them.
        source.read(chunk.shard_index, buffer[: chunk.nbytes], chunk.source_offset)
        for cut in chunk.cuts:
            hasher.update(buffer[cut.begin : cut.end])
            if cut.last:
                digests.append(hasher.digest())
                hasher.reset()

    done = 0
    chunks = layout.chunks(CHUNK_NBYTES)
    ahead: deque[tuple[Chunk, memoryview, Future[None]]] = deque()
    with ThreadPoolExecutor(1, "tieredmoe-pack-read") as reader:

        def read_next(buffer: memoryview) -> None:
            for chunk in islice(chunks, 1):
                ahead.append((chunk, buffer, reader.submit(fill, chunk, buffer)))

        for _ in range(N_BUFFERS):
            read_next(memoryview(bytearray(CHUNK_NBYTES)))
        while ahead:
            chunk, buffer, filled = ahead.popleft()
            filled.result()
            reporter.report("copy", done_nbytes=done, total_nbytes=layout.source_nbytes)
            for cut in chunk.cuts:
                pack.write(cut.file_index, buffer[cut.begin : cut.end], cut.offset)
            done += chunk.nbytes
            read_next(buffer)
    reporter.report("copy", done_nbytes=done, total_nbytes=layout.source_nbytes)
    return _by_segment(layout, digests)


def _by_segment(layout: PackLayout, digests: list[bytes]) -> tuple[tuple[bytes, ...], ...]:
    """Digests of all pieces in file order, joined per segment."""
    of_pieces = iter(digests)
    return tuple(
        tuple(b"".join(islice(of_pieces, layout.n_pieces(segment))) for segment in shard.segments)
        for shard in layout.shards
    )
