"""Reads a trace as whoever draws a timeline of it does, and asserts that everything pairs."""

from collections import Counter

from tieredmoe.spec import ExpertKey
from tieredmoe.trace import EventKind


def assert_whole(events, tiers):
    """All ``events`` of a hierarchy at rest are there, each beginning has its end, and what they
    say of the ``tiers`` is what these know themselves.
    """
    line = Timeline()
    for number, event in enumerate(events):
        assert event.number == number, "events were dropped; give the trace more room"
        line.play(event)
    assert not line.waiting, f"acquires that never left the queue: {line.waiting}"
    held = {acquire: experts for acquire, experts in line.held.items() if experts.total()}
    assert not held, f"leases never released: {held}"
    assert not line.filling, f"fills that never ended: {line.filling}"
    assert not +line.copying, f"copies that never ended: {+line.copying}"
    assert not line.returning, f"copies back that never ended: {line.returning}"
    for tier in tiers:
        resident = {key for name, key in line.resident if name == tier.name}
        assert resident == set(tier.residency.entries), f"{tier.name} holds others than traced"
        assert line.evictions[tier.name] == tier.residency.evictions
    top = tiers[-1].residency
    assert (line.hits, line.misses, line.joins) == (top.hits, top.misses, top.joins)


class Timeline:
    """What is open at this point of the trace."""

    def __init__(self):
        self.waiting = {}
        self.held = {}
        self.filling = set()
        self.copying = Counter()
        self.returning = set()
        self.resident = set()
        self.evictions = Counter()
        self.hits = self.misses = self.joins = 0

    def play(self, event):
        if event.acquire is None:
            (expert,) = event.experts
            self._played(event)((event.tier, ExpertKey(event.layer, expert)))
        else:
            assert event.acquire <= event.number
            self._played(event)(event)
        assert (event.error is not None) == (event.kind is EventKind.FAILED)

    def _played(self, event):
        return getattr(self, f"on_{event.kind.value}")

    # ---- acquires

    def on_queued(self, event):
        assert event.acquire == event.number
        self.waiting[event.acquire] = event.experts

    def on_acquired(self, event):
        assert event.acquire == event.number
        self._hold(event)

    def on_granted(self, event):
        assert self.waiting.pop(event.acquire) == event.experts
        self._hold(event)

    def on_left(self, event):
        assert self.waiting.pop(event.acquire) == event.experts

    def on_released(self, event):
        self.held[event.acquire].subtract(event.experts)
        assert min(self.held[event.acquire].values(), default=0) >= 0

    def _hold(self, event):
        assert event.hits + event.misses == len(event.experts)
        self.held[event.acquire] = Counter(event.experts)
        self.hits += event.hits
        self.misses += event.misses
        self.joins += event.joins

    # ---- experts

    def on_prefetched(self, where):
        assert where not in self.filling
        assert where not in self.resident

    def on_filling(self, where):
        assert where not in self.filling
        assert where not in self.resident
        self.filling.add(where)

    def on_landed(self, where):
        self.filling.remove(where)
        self.resident.add(where)

    def on_failed(self, where):
        self.filling.remove(where)

    on_dropped = on_failed

    def on_evicted(self, where):
        self.resident.remove(where)
        self.evictions[where[0]] += 1

    def on_copying(self, where):
        assert where in self.resident
        # More than one at a time: what was copied may be evicted above and asked for again before
        # the device has come to the first copy.
        self.copying[where] += 1

    def on_copied(self, where):
        assert where in self.resident, "evicted from under its copy"
        self.copying[where] -= 1
        assert self.copying[where] >= 0, "a copy ended that had not begun"

    def on_returning(self, where):
        assert where not in self.resident
        self.resident.add(where)
        self.returning.add(where)

    def on_returned(self, where):
        assert where in self.resident, "evicted from under its copy back"
        self.returning.remove(where)
