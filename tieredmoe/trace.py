"""What happened when: the last few thousand events of a hierarchy, in a ring of fixed size.

An event says what happened, when by the loop's clock (virtual time in a simulation), in which tier
and to which experts. Those that begin something and those that end it can be paired: an acquire's
carry its number; a key has one fill at a time in a tier, and one copy out of it. So a timeline of
waits, leases, reads and copies can be drawn from a snapshot alone::

    QUEUED ─────▶ GRANTED ─┬─▶ RELEASED      an acquire (``acquire`` is the number of its first
       └────────▶ LEFT     │                 event); one that needs no waiting begins at ACQUIRED
                ACQUIRED ──┘
    FILLING ──▶ LANDED, FAILED or DROPPED    one expert on its way into a slot of ``tier``
    COPYING ──▶ COPIED                       one expert on its way out of ``tier``, into the next
    RETURNING ──▶ RETURNED                   one expert on its way back, from the next into ``tier``
    EVICTED                                  one expert gave its slot in ``tier`` to another

What an acquire sets off is recorded just before it: the evictions, each with the fill it made room
for, then ACQUIRED or GRANTED.

Written to from the loop's thread, and from callers' threads by full hits and releases; garbage
collection may release a lease anywhere. So nothing here locks: a number is drawn in one step of the
interpreter and belongs to one place in the ring. Rejected: a ``deque`` (reading one while another
thread appends to it fails) and an object per lease or fill that collects its times (it would be
paid for with the trace off).
"""

from __future__ import annotations

import enum
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tieredmoe.entry import Entry
    from tieredmoe.spec import ExpertKey


class EventKind(enum.Enum):
    """What happened; the module's docstring says how kinds belong together."""

    ACQUIRED = "acquired"
    """An acquire got its slots at once."""
    QUEUED = "queued"
    """An acquire has to wait for slots."""
    GRANTED = "granted"
    """An acquire that waited got its slots."""
    LEFT = "left"
    """An acquire left the queue with nothing: cancelled, timed out, or refused by the close."""
    RELEASED = "released"
    """Pins were given back; those of a stream's wave come back in parts."""
    FILLING = "filling"
    """A fill was asked of the source below."""
    PREFETCHED = "prefetched"
    """The fill that follows was asked for before anybody wanted the expert."""
    LANDED = "landed"
    """The expert is READY."""
    FAILED = "failed"
    """The fill failed and left nothing; ``error`` says why."""
    DROPPED = "dropped"
    """The fill was dropped before it started, since nobody wanted it any more."""
    EVICTED = "evicted"
    """The expert lost its slot to another."""
    COPYING = "copying"
    """A copy into the tier above was begun."""
    COPIED = "copied"
    """That copy has passed its fence (or failed, which the tier above records)."""
    RETURNING = "returning"
    """The expert was evicted above and has a slot here again; its copy back was begun."""
    RETURNED = "returned"
    """That copy has passed its fence."""


class Event(NamedTuple):
    """One thing that happened; ``number`` counts all events of a ring, from 0, without gaps.

    ``at_s`` is seconds of the loop's clock. Two events of different threads may be numbered in
    another order than that of their times, a few microseconds apart. ``hits``, ``misses`` and
    ``joins`` (within misses) are those of an acquire when it got its slots, else 0.
    """

    number: int
    at_s: float
    kind: EventKind
    tier: str
    layer: int
    experts: tuple[int, ...]
    acquire: int | None = None
    hits: int = 0
    misses: int = 0
    joins: int = 0
    error: str | None = None


class TraceRing:
    """The last ``n_events`` events; older ones are dropped, and counted by their numbers.

    All methods may be called in any thread and never wait.
    """

    __slots__ = ("_clock", "_events", "_numbers")

    def __init__(self, n_events: int, *, clock: Callable[[], float]) -> None:
        """Allocate the ring. ``clock`` gives seconds, in any thread."""
        assert n_events > 0
        self._events: list[Event | None] = [None] * n_events
        self._numbers = count()
        self._clock = clock

    def note(self, kind: EventKind, tier: str, key: ExpertKey, error: str | None = None) -> None:
        """Record what happened to one expert in ``tier``."""
        number = next(self._numbers)
        self._put(Event(number, self._clock(), kind, tier, key.layer, (key.expert,), error=error))

    def note_acquire(
        self,
        kind: EventKind,
        tier: str,
        layer: int,
        experts: tuple[int, ...],
        *,
        acquire: int | None = None,
        hits: int = 0,
        misses: int = 0,
        joins: int = 0,
    ) -> int:
        """Record an event of the ``acquire`` of that number, None at its first; its number."""
        number = next(self._numbers)
        acquire = number if acquire is None else acquire
        self._put(
            Event(number, self._clock(), kind, tier, layer, experts, acquire, hits, misses, joins)
        )
        return acquire

    def snapshot(self) -> tuple[Event, ...]:
        """The events in the ring, by number. That of the first is how many have been dropped.

        A writer that slept while the others filled the whole ring has overwritten an event; neither
        that one nor its own, which is too old, is in here.
        """
        events = self._events.copy()  # in one step: other threads write on
        known = sorted(event for event in events if event is not None)
        return tuple(event for event in known if event.number > known[-1].number - len(events))

    @property
    def n_dropped(self) -> int:
        """How many events were recorded and are no longer in the ring."""
        events = self.snapshot()
        return events[0].number if events else 0

    def check(self) -> None:
        """Assert that no event is out of its place; O(n), for tests."""
        for i, event in enumerate(self._events.copy()):
            assert event is None or event.number % len(self._events) == i, f"{event} in place {i}"

    def _put(self, event: Event) -> None:
        self._events[event.number % len(self._events)] = event

    def __repr__(self) -> str:
        return f"<TraceRing of {len(self._events)} events, {self.n_dropped} dropped>"


def note_evicted(trace: TraceRing, tier: str, keys: Iterable[ExpertKey]) -> None:
    """Note that experts had to go though nobody took their slots."""
    for key in keys:
        trace.note(EventKind.EVICTED, tier, key)


def note_fills(trace: TraceRing, tier: str, entries: Sequence[Entry]) -> None:
    """Note that experts have been given slots, each after the one that had to go for it."""
    for entry in entries:
        if entry.evicted is not None:
            trace.note(EventKind.EVICTED, tier, entry.evicted)
        trace.note(EventKind.FILLING, tier, entry.key)


def note_end(trace: TraceRing, tier: str, entry: Entry, error: BaseException | None) -> None:
    """Note how a fill has ended."""
    kind = EventKind.LANDED if error is None else EventKind.FAILED
    trace.note(kind, tier, entry.key, None if error is None else str(error))
