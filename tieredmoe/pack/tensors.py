"""Dense tensors through a read backend: each byte of them read once, several pieces in flight.

Dense weights are 8 to 24 GB of a large model, read once, in the order of their files. They go the
way of the experts (direct, into huge pages, a bounded window), in pieces small enough that a few of
them are all the memory it takes. Pieces are delivered in order, so a tensor's digest is computed on
the way. Rejected: reading straight into the tensors' own memory (a tensor lies anywhere in a page
and wants its own alignment; a pack's dense file does not even keep 32), and one read per tensor (a
norm is a page, an embedding a gigabyte).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from tieredmoe.backends import ReadOp, open_backend
from tieredmoe.errors import BackendUnavailableError, PackError, ReadError
from tieredmoe.memory import HostPool
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.backends import ReadBackend
    from tieredmoe.gguf import Metadata, TensorInfo
    from tieredmoe.memory import HostRegion
    from tieredmoe.pack.layout import Extent
    from tieredmoe.pack.records import Checkpoint

PIECE_NBYTES = 8 << 20
N_PIECES = 8
"""Pieces in memory: half of them are on their way, the others are full or being emptied."""

Deliver = Callable[[str, int, memoryview], None]
"""``deliver(name, start, data)``: bytes of a tensor from ``start`` on; ``data`` is lent."""


class Pinned(Protocol):
    """Memory registered with a device, until it is closed."""

    def close(self) -> None:
        """Let it be ordinary memory again."""


Pin = Callable[[HostPool], Pinned]
"""Registers all memory of a pool, which must not be closed before."""


class Share(NamedTuple):
    """Bytes ``[begin, end)`` of a piece are those of a tensor from its byte ``start`` on."""

    name: str
    begin: int
    end: int
    start: int


class Piece(NamedTuple):
    """Whole pages of one file, of which ``needed_nbytes`` must be there, and whose they are."""

    file_index: int
    offset: int
    nbytes: int
    needed_nbytes: int
    shares: tuple[Share, ...]


def plan_pieces(extents: Mapping[str, Extent], *, piece_nbytes: int) -> Iterator[Piece]:
    """Pieces of at most ``piece_nbytes`` that hold every byte of ``extents``, in file order.

    No page is in two of them. ``extents`` do not overlap; ``piece_nbytes`` is whole pages.
    """
    for run in _runs(extents):
        file_index, start = run[0][1].file_index, _page_of(run[0][1].offset)
        end = _pages_to(max(extent.offset + extent.nbytes for _, extent in run))
        first = 0
        for offset in range(start, end, piece_nbytes):
            nbytes = min(piece_nbytes, end - offset)
            shares = []
            for index in range(first, len(run)):
                name, extent = run[index]
                begin = max(offset, extent.offset)
                stop = min(offset + nbytes, extent.offset + extent.nbytes)
                if begin >= offset + nbytes:
                    break
                if begin < stop:
                    shares.append(Share(name, begin - offset, stop - offset, begin - extent.offset))
                if extent.offset + extent.nbytes <= offset + nbytes:
                    first = index + 1
            yield Piece(file_index, offset, nbytes, shares[-1].end, tuple(shares))


class TensorLoader:
    """``model`` as a ``TensorSource`` that also brings many tensors at once, through a backend.

    ``backend``, ``allow_buffered`` and ``strict`` mean what they mean to ``open_backend``; where
    ``backend`` cannot be had a second time, ``otherwise`` is opened. ``pin`` registers the memory
    that the pieces are read into, for those who copy them to a device.
    """

    def __init__(
        self,
        model: Checkpoint,
        *,
        backend: str = "auto",
        otherwise: str | None = None,
        allow_buffered: bool = False,
        strict: bool = False,
        pin: Pin | None = None,
    ) -> None:
        self._model = model
        self._pin = pin
        self._names = (backend, otherwise or backend)
        self._open_named = partial(open_backend, allow_buffered=allow_buffered, strict=strict)

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""
        return self._model.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._model.tensors

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, read alone; see ``TensorSource.read``."""
        return self._model.read(name)

    def load(self, names: Sequence[str], deliver: Deliver) -> None:
        """Read all dense tensors ``names`` once, handing out their bytes in file order.

        Takes 64 MiB beside what ``deliver`` keeps. Blocks, and runs a loop of its own: call it in a
        thread that has none. A digest is compared when a tensor's last byte was handed out. Raises
        ``PackError`` for other bytes than were packed, ``GGUFError`` or ``PackError`` for a file
        that was changed since the model was opened, ``ReadError``, ``DirectIOUnavailableError``,
        ``KeyError`` for what is no dense tensor, and whatever ``deliver`` raises, which ends it.
        """
        model = self._model
        stored = [name for name in names if model.tensors[name].nbytes]
        extents = {name: model.locate_tensor(name) for name in stored}
        pieces = list(plan_pieces(extents, piece_nbytes=PIECE_NBYTES))
        if pieces:
            with self._runner() as runner:
                runner.run(self._load(pieces, _Checking(model, deliver)))

    def _runner(self) -> asyncio.Runner:
        runner = asyncio.Runner()
        try:
            runner.get_loop()
        except OSError as error:
            raise ReadError(
                path=self._model.path,
                offset=0,
                nbytes=0,
                errno=error.errno or 0,
                fact="no event loop can be made to read it with; raise `ulimit -n`",
            ) from error
        return runner

    def _open(self, files: Sequence[Path]) -> ReadBackend:
        first, second = self._names
        try:
            return self._open_named(first, files)
        except BackendUnavailableError:
            if second == first:
                raise
        return self._open_named(second, files)

    async def _load(self, pieces: Sequence[Piece], deliver: Deliver) -> None:
        model = self._model
        used = sorted({piece.file_index for piece in pieces})
        buffer_nbytes = max(piece.nbytes for piece in pieces)
        n_buffers = min(N_PIECES, len(pieces))
        with ExitStack() as held:
            pool = HostPool.allocate(n_buffers * buffer_nbytes)
            held.callback(pool.close)
            if self._pin is not None:
                held.callback(self._pin(pool).close)
            buffers = [pool.carve(buffer_nbytes) for _ in range(n_buffers)]
            backend = self._open([model.tensor_files[i] for i in used])
            try:
                model.check_unchanged()
                await _stream(backend, pieces, {f: i for i, f in enumerate(used)}, buffers, deliver)
                model.check_unchanged()
            finally:
                await backend.close()


async def _stream(
    backend: ReadBackend,
    pieces: Sequence[Piece],
    index_of: Mapping[int, int],
    buffers: Sequence[HostRegion],
    deliver: Deliver,
) -> None:
    left = iter(pieces)
    running: deque[tuple[Piece, HostRegion, asyncio.Future[None]]] = deque()

    def start(buffer: HostRegion) -> None:
        piece = next(left, None)
        if piece is not None:
            target = buffer.view[: piece.nbytes]
            op = ReadOp(
                index_of[piece.file_index],
                piece.offset,
                target,
                buffer.address,
                piece.needed_nbytes,
            )
            (read,) = backend.submit([op])
            running.append((piece, buffer, read))

    for buffer in buffers:
        start(buffer)
    while running:
        piece, buffer, read = running.popleft()
        await read
        for name, begin, end, first in piece.shares:
            deliver(name, first, buffer.view[begin:end])
        start(buffer)


class _Checking:
    """Hands bytes on, and compares each tensor's digest, if it has one, at its last byte."""

    def __init__(self, model: Checkpoint, deliver: Deliver) -> None:
        self._model = model
        self._deliver = deliver
        self._hasher = xxhash.xxh3_128()

    def __call__(self, name: str, start: int, data: memoryview) -> None:
        self._deliver(name, start, data)
        digest = self._model.tensor_digest(name)
        if digest is None:
            return
        if start == 0:
            self._hasher.reset()
        # Tensors come whole, one after the other: one hasher serves them all.
        self._hasher.update(data)
        is_last = start + data.nbytes == self._model.tensors[name].nbytes
        if is_last and self._hasher.digest() != digest:
            file = self._model.tensor_files[self._model.locate_tensor(name).file_index]
            raise PackError(
                file,
                f"is damaged: tensor {name!r} does not match its digest; "
                "`tieredmoe pack verify` lists all damage",
            )


def _runs(extents: Mapping[str, Extent]) -> Iterator[list[tuple[str, Extent]]]:
    """Extents in file order, cut where a page between two of them belongs to neither."""
    run: list[tuple[str, Extent]] = []
    end = 0
    for name, extent in sorted(extents.items(), key=lambda item: item[1]):
        joins = run and run[0][1].file_index == extent.file_index and extent.offset <= end
        if run and not joins:
            yield run
            run = []
        run.append((name, extent))
        end = _pages_to(extent.offset + extent.nbytes)
    if run:
        yield run


def _page_of(offset: int) -> int:
    return offset // PAGE_NBYTES * PAGE_NBYTES


def _pages_to(offset: int) -> int:
    return -(-offset // PAGE_NBYTES) * PAGE_NBYTES
