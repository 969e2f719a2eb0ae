"""The read path's contract: what a backend takes, promises and counts.

A backend reads byte ranges of files that it opened itself into memory that its caller owns. It
knows no experts, tiers or policies. Rejected: one future per batch (a batch's reads land one by
one, and compute should start on the first), and cancelling reads (an issued block read cannot be
cancelled; its memory is written whatever happened to the future).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from tieredmoe.spec import Priority

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence


@attrs.frozen(eq=False)
class ReadOp:
    """Read ``target.nbytes`` bytes at ``offset`` of file ``file_index`` into ``target``.

    ``target`` is a writable, contiguous view of bytes; the operation holds it until the read has
    ended, so the memory cannot go away under the kernel. ``address`` is where it starts. With a
    direct backend, offset, length and address are multiples of ``BackendInfo.alignment``.

    ``needed_nbytes`` is how much of the target must be filled (default: all). What lies beyond is
    padding of an aligned envelope; the file may end in it.
    """

    file_index: int
    offset: int
    target: memoryview
    address: int
    needed_nbytes: int | None = None


@attrs.frozen
class Fallback:
    """A kind of I/O that was asked for and could not be had: why, and what would change that."""

    backend: str
    reason: str
    hint: str


@attrs.frozen
class BackendInfo:
    """What kind of I/O one really has: ``direct`` is proven, not hoped for.

    ``window_nbytes`` is how much may be in flight on one device. ``fallbacks`` are the better kinds
    that were asked for before this one, none if one has the best that was asked for.
    """

    name: str
    direct: bool
    alignment: int
    window_nbytes: int
    reason: str
    fallbacks: tuple[Fallback, ...] = ()


@attrs.frozen
class ReadStats:
    """A snapshot of a backend's counters. ``errors`` counts by ``ReadError.kind``.

    ``submit_ns_max`` is the longest that a submission kept the loop from running, the wait for the
    interpreter's lock included; 0 where submitting never enters the kernel. ``demand_delay_s`` is
    the time in which reads of prefetch were in flight that demand had found in front of it,
    ``ahead_s`` that in which nothing but prefetch was in flight.
    """

    reads: int
    read_nbytes: int
    short_reads: int
    retries: int
    errors: dict[str, int]
    in_flight: int
    queued: int
    submit_ns_max: int = 0
    demand_delay_s: float = 0.0
    ahead_s: float = 0.0


class ReadBackend(Protocol):
    """Positioned reads into caller-owned memory, bound to the loop in which it was opened.

    In a forked child it is dead: ``submit`` and ``drain`` raise, the others change nothing.
    """

    @property
    def info(self) -> BackendInfo:
        """What this backend is, fixed from open to close."""

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Start all reads of ``batch`` in order; returns at once with one future per read.

        Reads that cannot start yet wait: the more urgent first, first come, first served among
        equals. While demand waits for a device, or keeps it busy, no prefetch of that device
        starts.

        A future resolves when all its bytes are in place, or fails with ``ReadError`` when no more
        byte will be written. Cancelling a future does not stop its read. Raises ``ClosedError``
        after ``close`` has begun and in a forked child, and ``ValueError`` for a range that breaks
        the alignment; then nothing of the batch was started.
        """

    def promote(self, read: asyncio.Future[None]) -> None:
        """Let ``read`` wait as demand from now on, behind the demand that waits already.

        Changes nothing if it has been started or has ended.
        """

    def drop(self, read: asyncio.Future[None]) -> bool:
        """True if ``read`` was still queued: it never starts, and its future is cancelled.

        False, with nothing changed, if it has been started or has ended.
        """

    async def drain(self) -> None:
        """Return when no read is queued or in flight. Cancelling it stops the wait only."""

    async def close(self) -> None:
        """Refuse new reads, drop queued ones with ``ClosedError``, drain, release. Idempotent."""

    def stats(self) -> ReadStats:
        """A snapshot of the counters."""
