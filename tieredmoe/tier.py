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

* I6 if the head of the queue fits, it has been granted (whatever frees a slot calls ``pump``).
* I7 after ``close``: no pins of ours below, no FILLING, no reader running.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.copying import CopyFill, Ticket
from tieredmoe.errors import ClosedError
from tieredmoe.residency import FILLING, Admission, Entry, Residency
from tieredmoe.source import RefusedFill
from tieredmoe.trace import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.protocol import Arena, Part, Slot
    from tieredmoe.policies.protocol import EvictionPolicy
    from tieredmoe.source import Fill, Source
    from tieredmoe.spec import ExpertKey
    from tieredmoe.stats import SourceCounters
    from tieredmoe.trace import TraceRing


class Tier:
    """Experts of a ``source`` held in the slots of an ``arena``, victims chosen by a ``policy``.

    All methods but ``drain`` and ``close`` are synchronous and must run in the loop's thread, save
    ``try_hits`` and ``unpin_landed``, which serve resident experts in any thread.
    """

    def __init__(
        self,
        *,
        name: str,
        source: Source,
        arena: Arena,
        policy: EvictionPolicy,
        policy_name: str = "custom",
    ) -> None:
        self.name = name
        self.source = source
        self.arena = arena
        self.policy_name = policy_name
        self.residency = Residency(arena.n_slots, policy)
        self.slots = tuple(arena.slot(i) for i in range(arena.n_slots))
        self.copied_nbytes = 0
        self.failed_fills = 0
        self.trace: TraceRing | None = None
        """Where what happens here is recorded; its hierarchy sets it."""
        self._queue: deque[Ticket] = deque()
        self._n_transfers = 0
        self._drained: list[asyncio.Future[None]] = []
        self._pumping = False
        self._closed = False

    # -- admission ---------------------------------------------------------------------------------

    def try_admit(self, keys: Sequence[ExpertKey]) -> Admission | None:
        """Pin ``keys`` now, starting the fills of absent ones, or None if one has to queue."""
        self._check_open()
        if self._queue:
            return None
        admission = self.residency.admit(keys)
        if admission is None:
            return None
        if admission.to_fill:
            self._fill(admission.to_fill)
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
            self._queue.append(ticket)
        self.pump()

    def withdraw(self, ticket: Ticket) -> None:
        """Undo ``ticket``, granted or still in the queue, and let the next one have its turn."""
        if ticket.admission is not None:
            self.unpin(ticket.admission.entries)
        else:
            self._queue.remove(ticket)
            self.pump()

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Drop one pin of each; a fill nobody wants any more is dropped if it has not started.

        At once, unless another thread is inside the mutex at this moment (or we are, and garbage
        collection released a lease in the middle of it): then in the loop's next turn.
        """
        unwanted = self.residency.try_unpin(entries)
        if unwanted is None:
            asyncio.get_running_loop().call_soon(self.unpin, entries)
            return
        # Last asked, first dropped: dropping a running fill first would start its queued successor.
        for entry in reversed(unwanted):
            self._drop(entry, ClosedError("nobody waits for this expert"))
        if self._queue:
            self.pump()

    # -- admission, from any thread ----------------------------------------------------------------

    def try_hits(self, keys: Sequence[ExpertKey]) -> list[Entry] | None:
        """Pin ``keys`` if all are READY and nobody stands in the queue, else None."""
        self._check_open()
        return None if self._queue else self.residency.pinned_hits(keys)

    def unpin_landed(
        self, entries: Sequence[Entry], post: Callable[[Callable[[], None]], object]
    ) -> None:
        """``unpin`` of entries none of which is FILLING; ``post`` runs a callback in our loop.

        At once, or if the mutex is taken, by ``post``.
        No wake-up is lost. A ticket is queued before the mutex is taken to admit it, and here the
        mutex is given back before the queue is looked at. So either that admission comes after our
        unpinning and counts the slots, or the ticket is in the queue when we look and we ``pump``.
        """
        if self.residency.try_unpin(entries) is None:
            post(partial(self.unpin, entries))
        elif self._queue:
            post(self.pump)

    # -- admission, in the loop --------------------------------------------------------------------

    def pump(self) -> None:
        """Grant queued tickets, first come, first served, as long as the head fits (I6)."""
        if self._pumping:
            return  # a grant below freed a slot: the loop of the outer call sees it
        self._pumping = True
        try:
            while granted := self._grant():
                for ticket in granted:
                    ticket.on_granted()
        finally:
            self._pumping = False

    def _grant(self) -> list[Ticket]:
        granted: list[Ticket] = []
        to_fill: list[Entry] = []
        while self._queue:
            admission = self.residency.admit(self._queue[0].keys)
            if admission is None:
                break
            ticket = self._queue.popleft()
            ticket.admission = admission
            granted.append(ticket)
            to_fill += admission.to_fill
        if to_fill:
            self._fill(to_fill)
        return granted

    # -- fills -------------------------------------------------------------------------------------

    def _fill(self, entries: Sequence[Entry]) -> None:
        requests = [(entry.key, self.arena.slot(entry.slot_index)) for entry in entries]
        if self.trace is not None:
            self._note_fills(self.trace, entries)
        try:
            fills = self.source.read_into(requests)
        except Exception as error:  # noqa: BLE001 (whatever a source raises reaches every waiter)
            fills = [RefusedFill(error) for _ in requests]
        self._n_transfers += len(fills)
        for entry, fill in zip(entries, fills, strict=True):
            entry.fill = fill
            fill.done.add_done_callback(partial(self._landed, entry))

    def _landed(self, entry: Entry, done: asyncio.Future[None]) -> None:
        self._end_transfer()
        if done.cancelled() and entry.state is not FILLING:
            return  # we dropped it, and said so then
        error = ClosedError("the read was dropped") if done.cancelled() else done.exception()
        waiters, entry.waiters = entry.waiters, []
        if self.trace is not None:
            self._note_end(self.trace, entry, error)
        if error is None:
            self.residency.commit(entry)
        else:
            self.failed_fills += 1
            self.residency.abort(entry)
        for waiter in waiters:
            waiter(entry, error)
        self.pump()

    def _drop(self, entry: Entry, error: BaseException) -> None:
        """Drop the fill of ``entry`` if it has not started; ``error`` goes to those who wait."""
        fill: Fill = entry.fill  # type: ignore[assignment]  # FILLING entries have one
        if not fill.drop_if_queued():
            return
        waiters, entry.waiters = entry.waiters, []
        if self.trace is not None:
            self.trace.note(EventKind.DROPPED, self.name, entry.key)
        self.residency.abort(entry)
        for waiter in waiters:
            waiter(entry, error)

    def _note_fills(self, trace: TraceRing, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.evicted is not None:
                trace.note(EventKind.EVICTED, self.name, entry.evicted)
            trace.note(EventKind.FILLING, self.name, entry.key)

    def _note_end(self, trace: TraceRing, entry: Entry, error: BaseException | None) -> None:
        kind = EventKind.LANDED if error is None else EventKind.FAILED
        trace.note(kind, self.name, entry.key, None if error is None else str(error))

    # -- being a source ----------------------------------------------------------------------------

    def read_into(self, requests: Sequence[tuple[ExpertKey, Slot]]) -> Sequence[Fill]:
        """Start copying each expert, brought in here first if absent, into the slot above."""
        self._check_open()
        if requests:
            # A slot above has one writer at most, so never more than there are wait for ours.
            n_above = requests[0][1].arena.n_slots
            assert len(self._queue) + len(requests) <= n_above, f"more than {n_above} copies"
        fills = [CopyFill(self, key, target) for key, target in requests]
        for fill in fills:
            self._queue.append(fill.ticket)
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
        """A copy out of ``entry``'s slot begins; ``drain`` waits for its end."""
        self._n_transfers += 1
        if self.trace is not None:
            self.trace.note(EventKind.COPYING, self.name, entry.key)

    def end_copy(self, entry: Entry) -> None:
        """The copy out of ``entry``'s slot has passed its fence: the slot may be rewritten."""
        if self.trace is not None:
            self.trace.note(EventKind.COPIED, self.name, entry.key)
        self._end_transfer()
        self.unpin([entry])

    def _end_transfer(self) -> None:
        self._n_transfers -= 1
        if not self._n_transfers:
            waiting, self._drained = self._drained, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return when no transfer into or out of our slots is running. Safe to cancel."""
        while self._n_transfers:
            future = asyncio.get_running_loop().create_future()
            self._drained.append(future)
            await future

    def shut(self) -> None:
        """Refuse all new work, and with ``ClosedError`` all that waits for slots. Idempotent."""
        self._closed = True
        tickets = list(self._queue)
        self._queue.clear()
        for ticket in tickets:
            ticket.on_refused(ClosedError(f"tier {self.name!r} was closed"))

    async def close(self) -> None:
        """Shut, drop queued fills, drain, close what is below, free the memory.

        Dropped fills end in ``ClosedError``. Cancelling this coroutine leaves the tier shut with
        its memory intact; calling it again goes on where it was.
        """
        self.shut()
        error = ClosedError(f"tier {self.name!r} was closed")
        for entry in reversed(list(self.residency.entries.values())):
            if entry.state is FILLING:
                self._drop(entry, error)
        await self.drain()
        await self.source.close()
        self.arena.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` has begun."""
        return self._closed

    @property
    def n_waiting(self) -> int:
        """How many acquires, or copies into the tier above, wait for slots."""
        return len(self._queue)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name!r} is closed")

    def check(self) -> None:
        """Assert the invariants; O(n), for tests."""
        self.residency.check()
        if self._queue:
            head = self._queue[0].keys
            assert self.residency.n_fitting(head) < len(head), "I6: the head fits and waits"
        for entry in self.residency.entries.values():
            assert (entry.fill is not None) == (entry.state is FILLING), f"I5: {entry}"

    def __repr__(self) -> str:
        return f"<Tier {self.name!r} {len(self._queue)} queued, {self.residency!r}>"
