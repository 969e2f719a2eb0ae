"""The fills of one tier: how they are asked for, how they end, and which of them nobody waits for.

A fill that was asked for as prefetch is a *guess* until demand comes for its expert: then it is
promoted, all the way down. Until then, and as long as it has not started, it may be dropped, to
make way for demand or because its layer was routed elsewhere.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.entry import FILLING
from tieredmoe.errors import ClosedError, DroppedError
from tieredmoe.source import RefusedFill
from tieredmoe.spec import Priority
from tieredmoe.trace import EventKind, note_end, note_fills

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable, Sequence

    from tieredmoe.copying import Ticket
    from tieredmoe.entry import Entry
    from tieredmoe.source import Fill
    from tieredmoe.spec import ExpertKey
    from tieredmoe.tier import Tier


class Fills:
    """The fills of ``tier``, which are counted in its ``transfers``. In the loop's thread."""

    __slots__ = ("_tier", "guesses", "n_failed")

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.guesses: dict[ExpertKey, Entry] = {}
        """Entries on their way that no demand has come for, the first asked first."""
        self.n_failed = 0

    def grant(self, queue: deque[Ticket]) -> list[Ticket]:
        """Take from ``queue`` what its tier has room for, in order, and ask for what is absent."""
        residency = self._tier.residency
        granted: list[Ticket] = []
        to_fill: dict[Priority, list[Entry]] = {}
        while queue:
            ticket = queue[0]
            admission = residency.admit(ticket.keys)
            if admission is None and ticket.priority is Priority.DEMAND and self.guesses:
                self._make_way(ticket.keys)
                admission = residency.admit(ticket.keys)
            if admission is None:
                break
            queue.popleft()
            ticket.admission = admission
            granted.append(ticket)
            if ticket.priority is Priority.DEMAND:
                self.want(admission.entries)
            if admission.to_fill:
                to_fill.setdefault(ticket.priority, []).extend(admission.to_fill)
        for priority, entries in to_fill.items():
            self.start(entries, priority)
        return granted

    def start(self, entries: Sequence[Entry], priority: Priority = Priority.DEMAND) -> None:
        """Ask the source below for ``entries``, FILLING since their admission."""
        self._tier.shrink()
        trace = self._tier.trace
        if trace is not None:
            note_fills(trace, self._tier.name, entries)
        if self._tier.below is not None:
            self._tier.below.take_back(entries, self._tier.slots)
        requests = [(entry.key, self._tier.arena.slot(entry.slot_index)) for entry in entries]
        try:
            fills = self._tier.source.read_into(requests, priority=priority)
        except Exception as error:  # noqa: BLE001 (whatever a source raises reaches every waiter)
            fills = [RefusedFill(error) for _ in requests]
        self._tier.transfers.begin(len(fills))
        for entry, fill in zip(entries, fills, strict=True):
            entry.fill = fill
            if priority is not Priority.DEMAND:
                self.guesses[entry.key] = entry
            fill.done.add_done_callback(partial(self._landed, entry))
        if self._tier.residency.learner is not None:
            asyncio.get_running_loop().call_soon(self._tier.residency.settle)

    def want(self, entries: Iterable[Entry]) -> None:
        """Demand has come for ``entries``: promote those that were guesses."""
        for entry in entries:
            if self.guesses.pop(entry.key, None) is not None:
                fill: Fill = entry.fill  # type: ignore[assignment]  # FILLING entries have one
                fill.promote()

    def drop(self, entry: Entry, error: BaseException) -> None:
        """Drop the fill of ``entry`` if it has not started; ``error`` goes to those who wait."""
        fill: Fill = entry.fill  # type: ignore[assignment]  # FILLING entries have one
        if not fill.drop_if_queued():
            return
        tier = self._tier
        self.guesses.pop(entry.key, None)
        waiters, entry.waiters = entry.waiters, []
        if tier.trace is not None:
            tier.trace.note(EventKind.DROPPED, tier.name, entry.key)
        tier.residency.abort(entry, dropped=True)
        for waiter in waiters:
            waiter(entry, error)

    def _make_way(self, keys: Sequence[ExpertKey]) -> None:
        """Drop guesses that have not started, the last asked first, until ``keys`` fit.

        Copies into the tier above that wait for them stand in the queue again.
        """
        residency = self._tier.residency
        for entry in reversed(list(self.guesses.values())):
            if residency.n_fitting(keys) == len(keys):
                return
            if entry.key not in keys:
                self.drop(entry, DroppedError("it made way for demand"))

    def _landed(self, entry: Entry, done: asyncio.Future[None]) -> None:
        self._tier.transfers.end()
        if done.cancelled() and entry.state is not FILLING:
            return  # we dropped it, and said so then
        tier = self._tier
        error = ClosedError("the read was dropped") if done.cancelled() else done.exception()
        self.guesses.pop(entry.key, None)
        waiters, entry.waiters = entry.waiters, []
        if tier.trace is not None:
            note_end(tier.trace, tier.name, entry, error)
        if error is None:
            tier.residency.commit(entry)
        else:
            self.n_failed += 1
            tier.residency.abort(entry)
        for waiter in waiters:
            waiter(entry, error)
        tier.pump()

    def check(self) -> None:
        """Assert that guesses are on their way; O(n), for tests."""
        for key, entry in self.guesses.items():
            assert entry.key == key, f"{entry} under another's key"
            assert entry.state is FILLING, f"{entry} is no guess any more"
