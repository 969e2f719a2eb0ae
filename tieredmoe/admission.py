"""Waiting for slots: the asynchronous half of admission, and the only place where it suspends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.copying import Ticket
from tieredmoe.errors import ClosedError, QueueFullError, WorkingSetTooLargeError
from tieredmoe.trace import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from tieredmoe.lease import Lease, Leases
    from tieredmoe.spec import ExpertKey


async def admit(
    leases: Leases,
    layer: int,
    keys: Sequence[ExpertKey],
    *,
    owner: object = None,
    wake: asyncio.Event | None = None,
) -> Lease:
    """A lease on ``keys`` (distinct, of ``layer``) in the top tier; suspends only if it must queue.

    It belongs to ``owner``, by default the current task. Cancellation at any moment, also in the
    tick of the grant, gives everything back.

    Raises at once ``WorkingSetTooLargeError`` if the set can never be granted: it is larger than
    the tier, or than what is left of it by the leases of owners that wait while they hold, this one
    among them; ``QueueFullError`` if it would have to wait and ``leases.waiting_max`` others do;
    ``ClosedError``, also later.
    """
    tier = leases.tier
    n_slots = tier.residency.n_slots
    if len(keys) > n_slots:
        raise WorkingSetTooLargeError(n_wanted=len(keys), n_slots=n_slots)
    owner = owner or asyncio.current_task()
    admission = tier.try_admit(keys)
    if admission is not None:
        return leases.grant(layer, admission, owner=owner, wake=wake)
    holds = bool(leases.held_by({owner}))
    if holds:
        refusal = _never_fitting(leases, keys, leases.waiting | {owner})
        if refusal is not None:
            raise refusal
    goes_ahead = holds and tier.residency.n_fitting(keys) == len(keys)
    if tier.n_waiting >= leases.waiting_max and not goes_ahead:
        raise QueueFullError(waiting_max=leases.waiting_max)
    waiting = _Waiting(leases, layer, keys, owner, wake)
    # Ahead of the queue, for whoever is in it may be waiting for what this owner holds.
    tier.enqueue(waiting.ticket, ahead=holds)
    try:
        if holds:
            leases.waiting.add(owner)
        lease = await waiting.granted
    except BaseException:
        waiting.give_up()
        raise
    finally:
        leases.waiting.discard(owner)
    if lease.released:
        raise ClosedError("the hierarchy was closed")
    return lease


def hopeless(leases: Leases, ticket: Ticket) -> WorkingSetTooLargeError | None:
    """Why ``ticket``, in the queue of a tier that has lost slots, may wait for ever; else None."""
    n_slots = leases.tier.residency.n_slots
    if len(ticket.keys) > n_slots:
        return WorkingSetTooLargeError(n_wanted=len(ticket.keys), n_slots=n_slots)
    if ticket.owner not in leases.waiting:
        return None
    return _never_fitting(leases, ticket.keys, leases.waiting)


def _never_fitting(
    leases: Leases, keys: Sequence[ExpertKey], waiting: AbstractSet[object]
) -> WorkingSetTooLargeError | None:
    """The refusal of ``keys`` if the holders ``waiting``, the caller among them, leave too little.

    Those who wait while they hold give nothing back before they are served.
    """
    n_slots = leases.tier.residency.n_slots
    held = leases.held_by(waiting)
    if len(held.union(keys)) <= n_slots:
        return None
    return WorkingSetTooLargeError(n_wanted=len(keys), n_slots=n_slots, n_held=len(held))


class _Waiting:
    """One acquire in the queue.

    Its lease is made in the grant itself, not when its task wakes up: a fill that fails in between
    must find its waiter.
    """

    def __init__(
        self,
        leases: Leases,
        layer: int,
        keys: Sequence[ExpertKey],
        owner: object,
        wake: asyncio.Event | None,
    ) -> None:
        self.granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.ticket = Ticket(keys, self._on_granted, self._on_refused, owner)
        self._lease: Lease | None = None
        self._refused = False
        self._layer = layer
        self._leases = leases
        self._tier = leases.tier
        number = self._note(EventKind.QUEUED, None)
        self._make = partial(leases.grant, layer, owner=owner, wake=wake, number=number)
        self._number = number

    def give_up(self) -> None:
        """Leave the queue, or give back what was granted meanwhile."""
        if self._lease is not None:
            self._lease.release()
        elif not self._refused:
            self._note(EventKind.LEFT, self._number)
            self._tier.withdraw(self.ticket)

    def _on_granted(self) -> None:
        assert self.ticket.admission is not None
        self._lease = self._make(self.ticket.admission)
        if not self.granted.done():
            self.granted.set_result(self._lease)

    def _on_refused(self, error: BaseException) -> None:
        self._refused = True
        self._leases.waiting.discard(self.ticket.owner)  # its task may run much later
        self._note(EventKind.LEFT, self._number)
        if not self.granted.done():
            self.granted.set_exception(error)

    def _note(self, kind: EventKind, number: int | None) -> int | None:
        trace = self._tier.trace
        if trace is None:
            return None
        experts = tuple(key.expert for key in self.ticket.keys)
        return trace.note_acquire(kind, self._tier.name, self._layer, experts, acquire=number)
