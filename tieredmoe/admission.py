"""Waiting for slots: the asynchronous half of admission, and the only place where it suspends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.copying import Ticket
from tieredmoe.errors import ClosedError, WorkingSetTooLargeError
from tieredmoe.lease import Lease, Leases

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    It belongs to ``owner``, by default the current task.

    Cancellation at any moment, also in the tick of the grant, gives everything back.

    Raises ``WorkingSetTooLargeError`` at once if the set can never be granted: it is larger than
    the tier, or larger than what is left of it by the leases of owners that wait while they hold,
    this one among them. Raises ``ClosedError``.
    """
    tier = leases.tier
    n_slots = tier.residency.n_slots
    if len(keys) > n_slots:
        raise WorkingSetTooLargeError(n_wanted=len(keys), n_slots=n_slots)
    owner = owner or asyncio.current_task()
    entries = tier.try_admit(keys)
    if entries is not None:
        return Lease(leases, layer, entries, owner=owner, wake=wake)
    holds = bool(leases.held_by({owner}))
    if holds:
        # Those who wait while they hold give nothing back before they are served.
        held = leases.held_by(leases.waiting | {owner})
        if len(held.union(keys)) > n_slots:
            raise WorkingSetTooLargeError(n_wanted=len(keys), n_slots=n_slots, n_held=len(held))
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
        self.ticket = Ticket(keys, self._on_granted, self._on_refused)
        self._lease: Lease | None = None
        self._make = partial(Lease, leases, layer, owner=owner, wake=wake)
        self._tier = leases.tier

    def give_up(self) -> None:
        """Leave the queue, or give back what was granted meanwhile."""
        if self._lease is None:
            self._tier.withdraw(self.ticket)
        else:
            self._lease.release()

    def _on_granted(self) -> None:
        assert self.ticket.entries is not None
        self._lease = self._make(self.ticket.entries)
        if not self.granted.done():
            self.granted.set_result(self._lease)

    def _on_refused(self, error: BaseException) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)
