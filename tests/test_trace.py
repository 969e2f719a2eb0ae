"""The ring: so many events, the last ones, in order, from any thread."""

import threading

import pytest

from tieredmoe.spec import ExpertKey
from tieredmoe.trace import EventKind, TraceRing


def ring_of(n_events):
    ticks = iter(range(10**6))
    return TraceRing(n_events, clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("n_recorded", [0, 1, 5, 6, 17])
def test_a_ring_holds_the_last_events_in_order_and_counts_the_dropped(n_recorded):
    ring = ring_of(5)
    for i in range(n_recorded):
        ring.note(EventKind.LANDED, "top", ExpertKey(1, i))
        ring.check()
    n_dropped = max(0, n_recorded - 5)
    numbers = list(range(n_dropped, n_recorded))
    snapshot = ring.snapshot()
    assert [event.number for event in snapshot] == numbers
    assert [event.experts for event in snapshot] == [(i,) for i in numbers]
    assert [event.at_s for event in snapshot] == numbers
    assert ring.n_dropped == n_dropped
    assert f"5 events, {n_dropped} dropped" in repr(ring)


def test_a_snapshot_stays_as_it_is():
    ring = ring_of(2)
    ring.note(EventKind.FILLING, "top", ExpertKey(1, 0))
    snapshot = ring.snapshot()
    for _ in range(3):
        ring.note(EventKind.FILLING, "top", ExpertKey(1, 1))
    assert [event.experts for event in snapshot] == [(0,)]


def test_an_acquire_is_known_by_the_number_of_its_first_event():
    ring = ring_of(9)
    ring.note(EventKind.FILLING, "top", ExpertKey(1, 0))
    acquire = ring.note_acquire(EventKind.QUEUED, "top", 1, (2, 3))
    again = ring.note_acquire(
        EventKind.GRANTED, "top", 1, (2, 3), acquire=acquire, hits=1, misses=1, joins=1
    )
    fill, queued, granted = ring.snapshot()
    assert (fill.acquire, queued.acquire, granted.acquire) == (None, 1, 1)
    assert acquire == again == queued.number
    assert (granted.layer, granted.experts) == (1, (2, 3))
    assert (granted.hits, granted.misses, granted.joins) == (1, 1, 1)


def test_an_event_out_of_its_place_is_found():
    ring = ring_of(3)
    ring.note(EventKind.LANDED, "top", ExpertKey(1, 0))
    ring._events.reverse()
    with pytest.raises(AssertionError, match="in place 2"):
        ring.check()


def test_threads_lose_no_event_and_snapshots_never_fail():
    ring = TraceRing(4000, clock=lambda: 0.0)

    def write(layer):
        for expert in range(1000):
            ring.note(EventKind.LANDED, "top", ExpertKey(layer, expert))

    threads = [threading.Thread(target=write, args=[layer]) for layer in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ring.snapshot()
    events = ring.snapshot()
    assert [event.number for event in events] == list(range(4000))
    for layer in range(4):
        assert [e.experts[0] for e in events if e.layer == layer] == list(range(1000))


def test_an_event_whose_writer_slept_for_a_whole_turn_of_the_ring_is_a_dropped_one():
    asleep = []

    def clock():
        if not asleep:
            asleep.append(True)
            for expert in range(1, 4):  # what other threads record meanwhile
                ring.note(EventKind.LANDED, "top", ExpertKey(1, expert))
        return 0.0

    ring = TraceRing(2, clock=clock)
    ring.note(EventKind.LANDED, "top", ExpertKey(1, 0))
    ring.check()
    assert [event.number for event in ring.snapshot()] == [3]
    assert ring.n_dropped == 3
