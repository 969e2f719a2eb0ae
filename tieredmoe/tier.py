"""A memory level with slots: admission, the queue of those who wait for slots, and fills in flight.

A ``Tier`` has a lower ``Source`` and is one, so any number of tiers composes: a staging tier is a
small host tier, a RAM cache is the same with more slots. There is one verb between tiers,
``read_into``. It takes a batch, not one key, so that one acquire reaches the disk as one
submission.

Admission is all-or-nothing and first come, first served. Slots are reserved top-down and given back
bottom-up, and nobody holds part of a working set while waiting for the rest, so an acquire alone
cannot deadlock; a task that holds a lease and asks for more goes ahead of the queue. I/O is
abandoned, never cancelled: a fill nobody wants is dropped while it is queued; once it runs, it
completes and its expert lands READY and cold.

Demand waits, prefetch drops. In the top tier a prefetch gets a slot of the ring at once or not at
all; below it waits behind all demand, and what it holds there is dropped for demand unless its
read has begun. When demand comes for what was prefetched, its transfer is promoted all the way.

* I6 the queue is in order of priority, first come, first served among equals, and if its head fits,
  it has been granted (whatever frees a slot calls ``pump``).
* I7 after ``close``: no pins of ours below, no FILLING, no reader running.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.backing import Backing
from tieredmoe.copying import CopyFill, Ticket, queue_up
from tieredmoe.entry import FILLING, Admission, Entry
from tieredmoe.errors import ClosedError
from tieredmoe.filling import Fills
from tieredmoe.invariants import check_tier
from tieredmoe.keeping import Keeper
from tieredmoe.residency import Residency
from tieredmoe.spec import Priority
from tieredmoe.trace import EventKind, note_evicted
from tieredmoe.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.protocol import Arena, Fence, Part, Slot
    from tieredmoe.policies.protocol import EvictionPolicy
    from tieredmoe.source import Fill, Source
    from tieredmoe.spec import ExpertKey
    from tieredmoe.stats import SourceCounters
    from tieredmoe.trace import TraceRing


class Tier:
    """Experts of a ``source`` held in the slots of an ``arena``, victims chosen by a ``policy``.

    With ``keeps`` it holds what the tier above it has evicted, as long as it can, and not what that
    one has (``keeper``; ``below`` is that of the tier below).
    All methods but ``close`` are synchronous and must run in the loop's thread, save ``try_hits``
    and ``unpin_landed``, which serve resident experts in any thread.
    """

    def __init__(
        self,
        *,
        name: str,
        source: Source,
        arena: Arena,
        policy: EvictionPolicy,
        policy_name: str = "custom",
        policy_reason: str = "it was given",
        keeps: bool = False,
    ) -> None:
        self.name = name
        self.source = source
        self.arena = arena
        self.policy_name = policy_name
        self.policy_reason = policy_reason
        self.residency = Residency(arena.n_slots, policy)
        self.slots = tuple(arena.slot(i) for i in range(arena.n_slots))
        self.copied_nbytes = 0
        self.trace: TraceRing | None = None
        """Where what happens here is recorded; its hierarchy sets it."""
        self._queue: deque[Ticket] = deque()
        self.transfers = Transfers()
        self.fills = Fills(self)
        self.keeper = Keeper(self) if keeps else None
        self.below = source.keeper if isinstance(source, Tier) else None
        self._pumping = False
        self.backing = Backing(self.residency, arena, self.slots)
        self._closed = False

    # -- admission ---------------------------------------------------------------------------------

    def try_admit(self, keys: Sequence[ExpertKey]) -> Admission | None:
        """Pin ``keys`` now, starting the fills of absent ones, or None if one has to queue."""
        self._check_open()
        if self._queue:
            return None
        self.shrink()
        admission = self.residency.admit(keys)
        if admission is None:
            return None
        if self.fills.guesses:
            self.fills.want(admission.entries)
        if admission.to_fill:
            self.fills.start(admission.to_fill)
        return admission

    def enqueue(self, ticket: Ticket, *, ahead: bool = False) -> None:
        """Queue ``ticket``, which must not be larger than the tier, and grant it if it fits.

        Whoever holds pins already goes ``ahead`` of all others, who may be waiting for just these.
        """
        self._check_open()
        assert len(ticket.keys) <= self.residency.n_slots
        if ahead:
            self._queue.appendleft(ticket)
        else:
            queue_up(self._queue, ticket)
        self.pump()

    def promote(self, ticket: Ticket) -> None:
        """Demand has come for ``ticket``, granted or still in the queue."""
        ticket.priority = Priority.DEMAND
        if ticket.admission is not None:
            self.fills.want(ticket.admission.entries)
        else:
            self._queue.remove(ticket)
            queue_up(self._queue, ticket)
            self.pump()

    def requeue(self, ticket: Ticket) -> None:
        """What ``ticket`` was granted has made way for demand: it waits for its next turn."""
        ticket.admission = None
        queue_up(self._queue, ticket, again=True)

    def withdraw(self, ticket: Ticket) -> None:
        """Undo ``ticket``, granted or still in the queue, and let the next one have its turn."""
        if ticket.admission is not None:
            self.unpin(ticket.admission.entries)
        else:
            self._queue.remove(ticket)
            self.pump()

    def unpin(self, entries: Sequence[Entry], fences: Sequence[Fence] = ()) -> None:
        """Drop one pin of each; a fill nobody wants any more is dropped if it has not started.

        Slots of READY ones will not be written before ``fences`` have passed. At once, unless
        another thread is inside the mutex at this moment (or we are, and garbage collection
        released a lease in the middle of it): then in the loop's next turn.
        """
        unwanted = self._try_unpin(entries, fences)
        if unwanted is None:
            asyncio.get_running_loop().call_soon(self.unpin, entries, fences)
            return
        # Last asked, first dropped: dropping a running fill first would start its queued successor.
        for entry in reversed(unwanted):
            self.fills.drop(entry, ClosedError("nobody waits for this expert"))
        if self._queue or self.backing.shrinking:
            self.pump()

    # -- admission, from any thread ----------------------------------------------------------------

    def try_hits(self, keys: Sequence[ExpertKey]) -> list[Entry] | None:
        """Pin ``keys`` if all are READY and nobody stands in the queue, else None."""
        self._check_open()
        return None if self._queue else self.residency.pinned_hits(keys)

    def unpin_landed(
        self,
        entries: Sequence[Entry],
        fences: Sequence[Fence],
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        """``unpin`` of entries none of which is FILLING; ``post`` runs a callback in our loop.

        At once, or if the mutex is taken, by ``post``.
        No wake-up is lost. A ticket is queued before the mutex is taken to admit it, and here the
        mutex is given back before the queue is looked at. So either that admission comes after our
        unpinning and counts the slots, or the ticket is in the queue when we look and we ``pump``.
        The same goes for the sweep of a tier that shrinks.
        """
        if self._try_unpin(entries, fences) is None:
            post(partial(self.unpin, entries, fences))
        elif self._queue or self.backing.shrinking:
            post(self.pump)

    def _try_unpin(self, entries: Sequence[Entry], fences: Sequence[Fence]) -> list[Entry] | None:
        if not fences:
            return self.residency.try_unpin(entries)
        keep = partial(self.backing.keep_idle, entries, fences)
        return self.residency.try_unpin(entries, first=keep)

    # -- admission, in the loop --------------------------------------------------------------------

    def pump(self) -> None:
        """Grant queued tickets, first come, first served, as long as the head fits (I6)."""
        if self._pumping:
            return  # a grant below freed a slot: the loop of the outer call sees it
        self._pumping = True
        try:
            self.shrink()
            while granted := self.fills.grant(self._queue):
                for ticket in granted:
                    ticket.on_granted()
        finally:
            self._pumping = False

    # -- being resized -----------------------------------------------------------------------------

    def resize(
        self, n_slots: int, hopeless: Callable[[Ticket], BaseException | None] = lambda _: None
    ) -> None:
        """Hold experts in the first ``n_slots`` slots only, or in more of them again.

        What is pinned or in flight stays until it is not, and all memory until then (``backing``).
        Who would wait for slots for ever is refused with what ``hopeless`` says. Raises
        ``BudgetError``, with nothing changed, if memory for more cannot be had.
        """
        self._check_open()
        self.backing.resize(n_slots)
        for ticket in list(self._queue):
            error = hopeless(ticket)
            if error is not None:
                self._queue.remove(ticket)
                ticket.on_refused(error)
        self.pump()

    def shrink(self) -> None:
        """Give back what is left to give back, as far as that can be done now."""
        if self.backing.shrinking:
            swept = self.backing.give_back(self.pump)
            self.note_evicted(swept)

    def note_evicted(self, keys: Sequence[ExpertKey]) -> None:
        """``keys`` had to go though nobody took their slots."""
        if self.trace is not None:
            note_evicted(self.trace, self.name, keys)
        if self.below is not None:
            self.below.gone_above(keys)

    # -- being a source ----------------------------------------------------------------------------

    def read_into(
        self, requests: Sequence[tuple[ExpertKey, Slot]], *, priority: Priority = Priority.DEMAND
    ) -> Sequence[Fill]:
        """Start copying each expert, brought in here first if absent, into the slot above."""
        self._check_open()
        if requests:
            # A slot above has one writer at most, so never more than there are wait for ours.
            n_above = requests[0][1].arena.n_slots
            assert len(self._queue) + len(requests) <= n_above, f"more than {n_above} copies"
        fills = [CopyFill(self, key, target, priority) for key, target in requests]
        tickets = [fill.ticket for fill in fills]
        if self.keeper is not None:
            # What is here goes first: no read takes the slot of what was asked for beside it.
            tickets.sort(key=lambda ticket: ticket.keys[0] not in self.residency.entries)
        for ticket in tickets:
            queue_up(self._queue, ticket)
        self.pump()
        return fills

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """A copy out of this tier leaves every byte at its uniform place."""
        return [part._replace(source_offset=part.target_offset) for part in self.source.parts(key)]

    @property
    def counters(self) -> SourceCounters:
        """What the disk at the bottom was asked for."""
        return self.source.counters

    def begin_copy(self, entry: Entry) -> None:
        """A copy out of ``entry``'s slot begins; ``close`` waits for its end."""
        self.transfers.begin()
        if self.trace is not None:
            self.trace.note(EventKind.COPYING, self.name, entry.key)

    def end_copy(self, entry: Entry) -> None:
        """The copy out of ``entry``'s slot has passed its fence: the slot may be rewritten."""
        if self.trace is not None:
            self.trace.note(EventKind.COPIED, self.name, entry.key)
        self.transfers.end()
        if self.keeper is None or not entry.copied_up:
            self.unpin([entry])
            return
        self.residency.demote(entry)
        if self._queue or self.backing.shrinking:
            self.pump()

    # -- the end -----------------------------------------------------------------------------------

    def shut(self) -> None:
        """Refuse all new work, and with ``ClosedError`` all that waits for slots. Idempotent."""
        self._closed = True
        tickets = list(self._queue)
        self._queue.clear()
        for ticket in tickets:
            ticket.on_refused(ClosedError(f"tier {self.name!r} was closed"))

    async def close(self) -> None:
        """Shut, drop queued fills, drain, close what is below, free memory nothing reads any more.

        Dropped fills end in ``ClosedError``. Cancelling this coroutine leaves the tier shut with
        its memory intact; calling it again goes on where it was.
        """
        self.shut()
        error = ClosedError(f"tier {self.name!r} was closed")
        for entry in reversed(list(self.residency.entries.values())):
            if entry.state is FILLING:
                self.fills.drop(entry, error)
        await self.transfers.drain()
        await self.source.close()
        await self.backing.idle()
        self.arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name!r} is closed")

    @property
    def closed(self) -> bool:
        """Whether ``close`` has begun."""
        return self._closed

    @property
    def n_waiting(self) -> int:
        """How many acquires, or copies into the tier above, wait for slots."""
        return len(self._queue)

    def check(self) -> None:
        """Assert the invariants; O(n), for tests."""
        check_tier(self, self._queue)

    def __repr__(self) -> str:
        return f"<Tier {self.name!r} {len(self._queue)} queued, {self.residency!r}>"
