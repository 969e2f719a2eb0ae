"""From one tier into the slots of the next: a place in the queue, then one copy."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.entry import READY
from tieredmoe.errors import DroppedError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from tieredmoe.entry import Admission, Entry
    from tieredmoe.memory.protocol import Slot
    from tieredmoe.spec import ExpertKey
    from tieredmoe.tier import Tier


class Ticket:
    """A place in a tier's queue; ``admission`` is set, its entries pinned, by the grant.

    ``owner`` is who will hold what is granted, None if that is a copy.
    """

    __slots__ = ("admission", "keys", "on_granted", "on_refused", "owner", "priority")

    def __init__(
        self,
        keys: Sequence[ExpertKey],
        on_granted: Callable[[], None],
        on_refused: Callable[[BaseException], None],
        owner: object = None,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> None:
        self.keys = keys
        self.priority = priority
        self.owner = owner
        self.on_granted = on_granted
        self.on_refused = on_refused
        self.admission: Admission | None = None


def queue_up(queue: deque[Ticket], ticket: Ticket, *, again: bool = False) -> None:
    """Put ``ticket`` in front of those that are less urgent, and behind its equals.

    One that stood there before and stands there ``again`` goes in front of its equals.
    """
    place = len(queue)
    while place and (
        queue[place - 1].priority > ticket.priority
        or (again and queue[place - 1].priority == ticket.priority)
    ):
        place -= 1
    queue.insert(place, ticket)


class CopyFill:
    """Waits for a slot and an expert in ``tier``, then copies it into the slot ``target`` above.

    The source slot stays pinned until the copy has passed its fence; ``done`` resolves as soon as
    the copy is enqueued, so that compute can be ordered after it without a host synchronisation.
    """

    __slots__ = ("_key", "_target", "_tier", "done", "ticket")

    def __init__(self, tier: Tier, key: ExpertKey, target: Slot, priority: Priority) -> None:
        self._tier = tier
        self._key = key
        self._target = target
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ticket = Ticket((key,), self._granted, self._refused, priority=priority)

    def promote(self) -> None:
        """Let it wait as demand from now on, and what it waits for."""
        if self.ticket.priority is not Priority.DEMAND and not self.done.done():
            self._tier.promote(self.ticket)

    def drop_if_queued(self) -> bool:
        """True unless the copy is enqueued: until then, nothing has touched the target."""
        if self.done.done():
            return False
        self.done.cancel()
        if self.ticket.admission is not None:
            entry = self.ticket.admission.entries[0]
            entry.waiters.remove(self._arrived)
        self._tier.withdraw(self.ticket)
        return True

    def _granted(self) -> None:
        assert self.ticket.admission is not None
        entry = self.ticket.admission.entries[0]
        if entry.state is READY:
            self._copy(entry)
        else:
            entry.waiters.append(self._arrived)

    def _arrived(self, entry: Entry, error: BaseException | None) -> None:
        if error is None:
            self._copy(entry)
            return
        if isinstance(error, DroppedError):
            self._tier.requeue(self.ticket)
            return
        self._tier.unpin([entry])
        self.done.set_exception(error)

    def _refused(self, error: BaseException) -> None:
        self.done.set_exception(error)

    def _copy(self, entry: Entry) -> None:
        tier = self._tier
        parts = tier.source.parts(self._key)
        source = tier.arena.slot(entry.slot_index)
        tier.begin_copy(entry)
        try:
            fence = self._target.arena.copy_from(self._key, source, self._target, parts)
        except Exception as error:  # noqa: BLE001 (a failed copy fails the expert, not the loop)
            tier.end_copy(entry)
            self.done.set_exception(error)
            return
        tier.copied_nbytes += sum(part.nbytes for part in parts)
        entry.copied_up = True
        self.done.set_result(None)
        fence.on_passed(partial(tier.end_copy, entry))
