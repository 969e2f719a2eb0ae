"""Runs of bytes whose digests are known, read from the disk by several threads and compared.

Direct reads, where the file system takes them: right after a conversion the page cache would only
confirm what was written, not what the disk kept. Each thread reads a span in pieces into a buffer
of its own, so memory is a few buffers whatever the size of the model, and a drive has several reads
to work on while others are hashed. Rejected: one reader and one hasher (the drive idles between
reads), and one read per role (a record's roles share pages).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import itemgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import xxhash

from tieredmoe.errors import PackError
from tieredmoe.pack.aligned_files import AlignedReader, page_buffers
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from tieredmoe.spec import ExpertKey

N_THREADS = 4
PIECE_NBYTES = 4 << 20
"""Bytes of one read. Memory is ``N_THREADS`` of these."""

BATCH_NBYTES = 8 << 20
"""Small spans go to a thread together, up to so many bytes."""

MISMATCH = "does not match its digest"


class Hasher(Protocol):
    """What xxhash and hashlib have in common."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes so far."""


class SpanPart(NamedTuple):
    """Bytes of a span under one digest; without one they are read and not compared.

    ``mismatch`` is what is wrong if they have another.
    """

    nbytes: int
    digest: bytes | None
    what: str = ""
    mismatch: str = MISMATCH


class Span(NamedTuple):
    """``parts`` that lie end to end in a file: a record, or a dense tensor.

    ``what`` names the whole in messages, ``key`` says whose it is, if an expert's.
    """

    file_index: int
    offset: int
    what: str
    parts: tuple[SpanPart, ...]
    key: ExpertKey | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class Failure(NamedTuple):
    """Bytes that are not what they should be; ``part_index`` is None if all of ``span``."""

    span: Span
    part_index: int | None
    fact: str

    @property
    def offset(self) -> int:
        """Where they begin in their file."""
        before = self.span.parts[: self.part_index or 0]
        return self.span.offset + sum(part.nbytes for part in before)

    @property
    def nbytes(self) -> int:
        """How many they are."""
        if self.part_index is None:
            return self.span.nbytes
        return self.span.parts[self.part_index].nbytes

    @property
    def what(self) -> str:
        """What they are, for messages."""
        name = "" if self.part_index is None else self.span.parts[self.part_index].what
        return f"{self.span.what}, {name}" if name else self.span.what


class SpanReader:
    """Compares spans of ``files``; a context manager. ``fallbacks`` say what was not read directly.

    ``hasher`` makes what the digests are of. Raises ``PackError`` for a file that cannot be opened.
    """

    def __init__(
        self, files: Sequence[Path], *, hasher: Callable[[], Hasher] = xxhash.xxh3_128
    ) -> None:
        self._stack = ExitStack()
        self._hasher = hasher
        with self._stack:
            self._readers = []
            for path in files:
                self._readers.append(AlignedReader(path, PackError))
                self._stack.callback(self._readers[-1].close)
                self._readers[-1].drop_cached()
            self._buffers: SimpleQueue[memoryview] = SimpleQueue()
            for buffer in page_buffers(N_THREADS, PIECE_NBYTES + 2 * PAGE_NBYTES):
                self._buffers.put(buffer.view)
            self._threads = self._stack.enter_context(
                ThreadPoolExecutor(N_THREADS, "tieredmoe-verify")
            )
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why files are read through the page cache, if any are."""
        found = [reader.fallback for reader in self._readers]
        return tuple(fallback for fallback in found if fallback is not None)

    def failures(self, spans: Iterable[Span], advance: Callable[[int], None]) -> Iterator[Failure]:
        """Everything that is wrong with ``spans``, in their order.

        ``advance`` is told of bytes that are done, and may raise to end it; reads that have been
        started are waited for.
        """
        running: deque[tuple[int, Future[list[Failure]]]] = deque()
        for batch in _batches(spans):
            nbytes = sum(span.nbytes for span in batch)
            running.append((nbytes, self._threads.submit(self._compare, batch)))
            if len(running) > 2 * N_THREADS:
                done, future = running.popleft()
                yield from future.result()
                advance(done)
        while running:
            done, future = running.popleft()
            yield from future.result()
            advance(done)

    def _compare(self, batch: Sequence[Span]) -> list[Failure]:
        buffer = self._buffers.get()
        try:
            return [failure for span in batch for failure in self._span_failures(span, buffer)]
        finally:
            self._buffers.put(buffer)

    def _span_failures(self, span: Span, buffer: memoryview) -> list[Failure]:
        hashers = [self._hasher() for _ in span.parts]
        lengths = iter(
            [(hasher, part.nbytes) for hasher, part in zip(hashers, span.parts, strict=True)]
        )
        hasher, left = next(lengths)
        for at in range(0, span.nbytes, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, span.nbytes - at)
            try:
                piece = self._readers[span.file_index].read(span.offset + at, nbytes, buffer)
            except PackError as error:
                return [Failure(span, None, f"cannot be read: {error.fact}")]
            while len(piece):
                if not left:
                    hasher, left = next(lengths)
                taken, piece = piece[:left], piece[left:]
                hasher.update(taken)
                left -= len(taken)
        return [
            Failure(span, i, part.mismatch)
            for i, (part, hasher) in enumerate(zip(span.parts, hashers, strict=True))
            if part.digest is not None and hasher.digest() != part.digest
        ]


def sampled(spans: Iterable[Span], n: int, *, seed: int | None = None) -> list[Span]:
    """``n`` different ones of ``spans`` in their order, or all; larger ones are likelier.

    So whatever share of the bytes is damaged, so likely is each draw to meet it. ``seed`` makes the
    choice repeatable. Efraimidis and Spirakis (2006): the n largest of u^(1/weight), as logarithms.
    """
    drawing = random.Random(seed)  # noqa: S311 (a sample, not a secret)
    keyed = (
        (math.log(1.0 - drawing.random()) / span.nbytes, i, span) for i, span in enumerate(spans)
    )
    chosen = heapq.nlargest(n, keyed, key=itemgetter(0))
    return [span for _, _, span in sorted(chosen, key=itemgetter(1))]


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    nbytes = 0
    for span in spans:
        batch.append(span)
        nbytes += span.nbytes
        if nbytes >= BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
