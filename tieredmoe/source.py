"""The one verb between tiers: whatever can fill a slot with an expert is a ``Source``.

It takes a batch, not one key, so that one acquire reaches the disk as one submission. Its futures
are between it and the tier above alone; callers see those of their own lease.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from tieredmoe.errors import ClosedError, ExpertLoadError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.entry import Entry
    from tieredmoe.memory.protocol import Part, Slot
    from tieredmoe.spec import ExpertKey
    from tieredmoe.stats import SourceCounters


class Fill(Protocol):
    """One transfer into one slot."""

    done: asyncio.Future[None]
    """Resolves when the bytes are in place or ordered before the slot's ``ready`` fence; fails only
    when nothing will write the slot any more."""

    def promote(self) -> None:
        """Somebody waits for it now: let what has not started go as demand, all the way down.

        Changes nothing for a transfer that is demand already, runs, or has ended.
        """

    def drop_if_queued(self) -> bool:
        """True: the transfer had not started and never will; ``done`` is cancelled. Else False."""


class Source(Protocol):
    """Whatever can fill slots with experts: a tier, or a leaf that reads a disk."""

    def read_into(
        self, requests: Sequence[tuple[ExpertKey, Slot]], *, priority: Priority = Priority.DEMAND
    ) -> Sequence[Fill]:
        """Start filling each slot with its expert; returns at once, one ``Fill`` per request.

        What cannot start yet waits: the more urgent first, first come, first served among equals.
        """

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """Where this source puts the bytes of ``key``, as parts to their uniform place."""

    @property
    def counters(self) -> SourceCounters:
        """What the disk at the bottom was asked for."""

    async def close(self) -> None:
        """Refuse new requests; return when nothing is in flight, and every fill has ended.

        Idempotent. Cancelling it stops the wait, never a transfer: called again, it goes on.
        """


class RefusedFill:
    """A fill that its source refused to start: it fails like one that ran, on the same path."""

    __slots__ = ("done",)

    def __init__(self, error: BaseException) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.set_exception(error)

    def promote(self) -> None:
        """It has ended already."""

    def drop_if_queued(self) -> bool:
        """It has ended already."""
        return False


def load_error(entry: Entry, error: BaseException) -> BaseException:
    """What a waiter of ``entry`` sees: its own ``ExpertLoadError``, or ``ClosedError`` as it is."""
    if isinstance(error, ClosedError):
        return error
    return ExpertLoadError(entry.key, error)
