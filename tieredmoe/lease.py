"""A lease: the caller's hold on the experts of one acquire.

While it is held its experts stay where they are. Each miss has a future of its own in each lease,
so a caller may await, time out or cancel it without touching anyone else's (awaiting one shared
future would let a cancelled caller cancel everybody's).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from tieredmoe.entry import ABSENT, FILLING, READY, Entry
from tieredmoe.errors import ClosedError
from tieredmoe.source import load_error
from tieredmoe.trace import EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from types import TracebackType

    from tieredmoe.entry import Admission
    from tieredmoe.memory.protocol import Fence, Slot
    from tieredmoe.spec import ExpertKey
    from tieredmoe.tier import Tier

_NO_MISSES: dict[int, asyncio.Future[None]] = {}


class Leases:
    """Every lease of one top tier, with the task or thread that owns it, and what they share.

    A lease is in ``owners`` until its pins are given back: whoever takes it out gives them back.
    Being one operation of a dict, that is right between threads, too.
    """

    def __init__(self, tier: Tier, *, waiting_max: int) -> None:
        """Lease out the slots of ``tier``, with ``waiting_max`` acquires in its queue at most."""
        self.tier = tier
        self.waiting_max = waiting_max
        self.landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.landed.set_result(None)
        self.owners: dict[Lease, object] = {}
        self.waiting: set[object] = set()
        """Owners that hold leases and stand in the queue for more."""

    def grant(
        self,
        layer: int,
        admission: Admission,
        *,
        owner: object,
        wake: asyncio.Event | None = None,
        number: int | None = None,
    ) -> Lease:
        """The lease on what was admitted just now, for an acquire that queued as ``number``."""
        lease = Lease(self, layer, admission.entries, owner=owner, wake=wake)
        if self.tier.trace is not None:
            n_misses = len(lease.misses)
            lease.number = self.tier.trace.note_acquire(
                EventKind.ACQUIRED if number is None else EventKind.GRANTED,
                self.tier.name,
                layer,
                lease.experts,
                acquire=number,
                hits=len(admission.entries) - n_misses,
                misses=n_misses,
                joins=n_misses - len(admission.to_fill),
            )
        return lease

    def held_by(self, owners: AbstractSet[object]) -> set[ExpertKey]:
        """The keys that leases of ``owners`` keep in a slot."""
        leases = list(self.owners)  # in one step: other threads add and remove theirs
        return {key for lease in leases if self.owners.get(lease) in owners for key in lease.keys()}

    def release_all(self) -> None:
        """Release every lease; their holders' own ``release`` becomes a no-op."""
        for lease in list(self.owners):
            lease.release()


class Lease:
    """Pins on the experts of one layer; made by ``Hierarchy.acquire``, given back by ``release``.

    Use it as a context manager, or call ``release`` exactly when the last kernel that reads the
    slots has been enqueued. Releasing twice is harmless. ``number`` is that of its acquire in the
    trace, None where there is none.
    """

    __slots__ = (
        "_arrived",
        "_entries",
        "_misses",
        "_released",
        "_siblings",
        "_streams",
        "_wake",
        "layer",
        "number",
    )

    def __init__(
        self,
        siblings: Leases,
        layer: int,
        entries: list[Entry],
        *,
        owner: object,
        wake: asyncio.Event | None = None,
    ) -> None:
        self.layer = layer
        self.number: int | None = None
        self._siblings = siblings
        self._entries = entries
        self._released = False
        self._misses = _NO_MISSES
        self._arrived: list[tuple[int, BaseException | None]] = []
        self._wake = wake
        self._streams: tuple[object, ...] = ()
        for entry in entries:
            if entry.state is not READY:
                self._watch(entry)
        siblings.owners[self] = owner

    def _watch(self, entry: Entry) -> None:
        if self._misses is _NO_MISSES:
            self._misses = {}
            self._wake = self._wake or asyncio.Event()
        self._misses[entry.key.expert] = asyncio.get_running_loop().create_future()
        entry.waiters.append(self._landed)

    # -- what the caller sees ----------------------------------------------------------------------

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct experts held, in the order in which they were asked for."""
        return tuple(entry.key.expert for entry in self._entries)

    @property
    def released(self) -> bool:
        """Whether the pins have been given back, by ``release`` or by the hierarchy's close."""
        return self._released

    def keys(self) -> tuple[ExpertKey, ...]:
        """The distinct keys held in a slot: all but those that failed."""
        return tuple(entry.key for entry in self._entries if entry.state is not ABSENT)

    @property
    def futures(self) -> Mapping[int, asyncio.Future[None]]:
        """One future per expert; hits share a completed one. Fails with ``ExpertLoadError``.

        The futures are this lease's own: cancelling one cancels no transfer and disturbs no one.
        """
        landed = self._siblings.landed
        return {
            entry.key.expert: self._misses.get(entry.key.expert, landed) for entry in self._entries
        }

    @property
    def misses(self) -> Mapping[int, asyncio.Future[None]]:
        """The futures of the experts that were not resident at the grant."""
        return self._misses

    @property
    def slots(self) -> Mapping[int, Slot]:
        """The slots of the experts that have landed; one still in flight or failed is not in it.

        Empty once released: a slot may then hold another expert at any time.
        """
        if self._released:
            return {}
        slots = self._siblings.tier.slots
        return {
            entry.key.expert: slots[entry.slot_index]
            for entry in self._entries
            if entry.state is READY
        }

    async def as_completed(self) -> AsyncIterator[int]:
        """Yield every expert of the lease once: hits at once, then misses as they land.

        Raises ``ExpertLoadError`` for one that failed (those that landed stay usable) and
        ``ClosedError`` if the lease is released meanwhile. Cancelled or timed out, it leaves the
        lease held and its transfers running; iterated again, it begins at the first expert.
        """
        misses = self._misses
        for expert in self.experts:
            if expert not in misses:
                self._check_held()
                yield expert
        for n_seen in range(len(misses)):
            await self._arrival(n_seen)
            expert, error = self._arrived[n_seen]
            if error is not None:
                raise error
            yield expert

    async def ready(self) -> None:
        """Return when every expert has landed; raises the first failure, as ``as_completed`` does.

        Cancelled or timed out, it leaves the lease held and can be awaited again.
        """
        async for _ in self.as_completed():
            pass

    def wait_on(self, stream: object) -> None:
        """Order all later work of a device ``stream`` after the copies of the landed experts.

        In any thread, and again whenever more have landed. The slots are not written again before
        all work that ``stream`` has been given until ``release`` has ended.
        """
        if self._released:
            return
        if stream not in self._streams:
            self._streams += (stream,)
        slots = self._siblings.tier.slots
        for entry in self._entries:
            if entry.state is READY:
                slots[entry.slot_index].ready.wait_on(stream)

    def release(self, fences: Sequence[Fence] | None = None) -> None:
        """Give every pin back; futures still pending fail with ``ClosedError``. Never raises.

        At once; only if another thread is admitting or releasing at this very moment, the slots
        are free one turn of the loop later. ``fences`` are those of ``fences``, if they have been
        made.
        """
        if self._claim():
            if self._misses:
                self._abandon(ClosedError("the lease was released before its expert landed"))
            if fences is None:
                fences = self.fences() if self._streams else ()
            self._siblings.tier.unpin(self._entries, fences)

    def release_landed(self, post: Callable[[Callable[[], None]], object]) -> None:
        """``release`` in any thread, once every miss has landed or failed; never waits.

        ``post`` runs a callback in the hierarchy's loop.
        """
        if self._claim():
            fences = self.fences() if self._streams else ()
            self._siblings.tier.unpin_landed(self._entries, fences, post)

    def fences(self) -> Sequence[Fence]:
        """Fences after all that the streams of ``wait_on`` have been given; in any thread."""
        fence = self._siblings.tier.arena.fence
        return [fence(stream) for stream in self._streams]

    def take_landed(self) -> Lease | None:
        """Move the experts that have landed to a lease of their own; None if there are none.

        Raises the error of one that failed, and ``ClosedError`` once released.
        """
        self._check_held()
        for _, error in self._arrived:
            if error is not None:
                raise error
        landed = [entry for entry in self._entries if entry.state is READY]
        if not landed:
            return None
        self._entries = [entry for entry in self._entries if entry.state is not READY]
        owner = self._siblings.owners[self]
        lease = Lease(self._siblings, self.layer, landed, owner=owner)
        lease.number = self.number
        return lease

    def _claim(self) -> bool:
        """True for the one caller who gets to give the pins back."""
        try:
            del self._siblings.owners[self]
        except KeyError:
            return False
        self._released = True
        if self.number is not None:
            self._note_release(self.number)
        return True

    def _note_release(self, number: int) -> None:
        tier = self._siblings.tier
        assert tier.trace is not None
        tier.trace.note_acquire(
            EventKind.RELEASED, tier.name, self.layer, self.experts, acquire=number
        )

    # -- arrivals ----------------------------------------------------------------------------------

    async def _arrival(self, n_seen: int) -> None:
        """Return when more than ``n_seen`` misses have landed or failed."""
        self._check_held()
        while len(self._arrived) <= n_seen:
            assert self._wake is not None
            self._wake.clear()
            await self._wake.wait()
            self._check_held()

    def _check_held(self) -> None:
        if self._released:
            raise ClosedError("the lease was released while its experts were awaited")

    def _landed(self, entry: Entry, error: BaseException | None) -> None:
        seen = None if error is None else load_error(entry, error)
        self._settle(entry.key.expert, seen)
        self._arrived.append((entry.key.expert, seen))
        assert self._wake is not None
        self._wake.set()

    def _settle(self, expert: int, error: BaseException | None) -> None:
        """Resolve or fail a miss's future; the loop does not report a failure nobody looks at."""
        future = self._misses[expert]
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()

    def _abandon(self, error: BaseException) -> None:
        for entry in self._entries:
            if entry.state is FILLING:
                entry.waiters.remove(self._landed)
        for expert in self._misses:
            self._settle(expert, error)
        assert self._wake is not None
        self._wake.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        held = "released" if self._released else f"{len(self.slots)}/{len(self._entries)} landed"
        return f"<Lease layer {self.layer}, {held}>"
