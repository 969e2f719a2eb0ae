"""Who goes next on a device, and how much at once."""

import pytest

from tieredmoe.backends.lane import Lane, Read
from tieredmoe.backends.lanes import Lanes
from tieredmoe.spec import Priority

DEMAND, CERTAIN, LOOKAHEAD, WARMUP = Priority
MB = 1_000_000


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Future:
    """A name: the lane only asks whether it is the same one."""


def read(nbytes=MB, device=1):
    return Read(Future(), [], nbytes, device, 1)


def lane(window=8 * MB, n_reads_max=100, **options):
    return Lane(window_nbytes=window, n_reads_max=n_reads_max, **options)


def put(lane, n, priority=DEMAND, nbytes=MB):
    reads = [read(nbytes) for _ in range(n)]
    for each in reads:
        lane.put(each, priority)
    return reads


def take_all(lane):
    taken = []
    while (each := lane.take()) is not None:
        taken.append(each)
    return taken


def test_demand_fills_the_window_in_order():
    one = lane()
    reads = put(one, 10)
    assert take_all(one) == reads[:8]
    assert (one.n_in_flight, one.in_flight_nbytes, one.n_queued) == (8, 8 * MB, 2)
    one.ended(reads[3])
    assert take_all(one) == [reads[8]]


def test_the_number_of_reads_is_bounded_too():
    one = lane(n_reads_max=3)
    put(one, 10)
    assert len(take_all(one)) == 3


def test_two_reads_start_however_large():
    one = lane(window=1)
    put(one, 5)
    assert len(take_all(one)) == 2


def test_prefetch_has_one_record_in_flight_until_the_rate_is_known():
    one = lane(window=1000 * MB)
    put(one, 10, LOOKAHEAD)
    assert len(take_all(one)) == 1


def test_a_record_may_take_several_reads():
    one = lane(window=1000 * MB, record_nbytes=3 * MB)
    put(one, 20, LOOKAHEAD)
    assert len(take_all(one)) == 3


def test_prefetch_has_a_millisecond_of_the_measured_rate_in_flight():
    clock = Clock()
    one = lane(window=1000 * MB, clock=clock)
    (first,) = put(one, 1, nbytes=MB)
    one.take()
    clock.now += 0.0001  # 10 GB/s: 10 MB in 1 ms
    one.ended(first)
    put(one, 30, CERTAIN)
    assert len(take_all(one)) == 10


def test_time_without_reads_does_not_count_for_the_rate():
    clock = Clock()
    one = lane(window=1000 * MB, clock=clock)
    for _ in range(3):
        (each,) = put(one, 1)
        one.take()
        clock.now += 0.0001
        one.ended(each)
        clock.now += 100
    assert one.prefetch_window_nbytes == pytest.approx(10 * MB, abs=1)


def test_reads_side_by_side_take_their_time_once():
    clock = Clock()
    one = lane(window=1000 * MB, clock=clock)
    reads = put(one, 2)
    take_all(one)
    for each in reads:
        clock.now += 0.0001
        one.ended(each)
    assert one.prefetch_window_nbytes == 10 * MB


def test_the_rate_follows_the_device():
    clock = Clock()
    one = lane(window=1000 * MB, clock=clock)
    for seconds in (0.0001, 0.005):
        for _ in range(4000):
            (each,) = put(one, 1)
            one.take()
            clock.now += seconds
            one.ended(each)
    # 0.2 GB/s is 0.2 MB in 1 ms: the floor of one read again.
    assert one.prefetch_window_nbytes == MB


@pytest.mark.parametrize("priority", [CERTAIN, LOOKAHEAD, WARMUP])
def test_no_prefetch_starts_while_demand_waits(priority):
    one = lane(window=2 * MB)
    put(one, 5, priority)
    demand = put(one, 3)
    assert take_all(one) == demand[:2]
    one.ended(demand[0])
    assert take_all(one) == [demand[2]]
    assert one.take() is None
    one.ended(demand[1])
    assert len(take_all(one)) == 1


def test_a_small_prefetch_does_not_slip_past_what_is_more_urgent_and_does_not_fit():
    one = lane(window=8 * MB)
    put(one, 2, DEMAND, nbytes=3 * MB)
    (large,) = put(one, 1, DEMAND, nbytes=4 * MB)
    (hint,) = put(one, 1, CERTAIN, nbytes=3 * MB)
    (small,) = put(one, 1, WARMUP, nbytes=1)
    first, second = take_all(one)
    one.ended(first)
    assert take_all(one) == [large]
    one.ended(second)
    one.ended(large)
    put(one, 2, CERTAIN, nbytes=3 * MB)
    assert take_all(one)[0] is hint
    assert small.future in one._waiting[WARMUP]


def test_prefetch_in_flight_leaves_demand_its_place():
    one = lane(window=100 * MB, n_reads_max=16, record_nbytes=4 * MB)
    put(one, 50, CERTAIN)
    assert len(take_all(one)) == 4
    demand = put(one, 3)
    assert take_all(one) == demand


def test_prefetch_never_takes_every_read_there_can_be():
    one = lane(window=1000 * MB, n_reads_max=4, record_nbytes=100 * MB)
    put(one, 50, CERTAIN)
    assert len(take_all(one)) == 3
    assert lane(n_reads_max=1)._n_prefetch_max == 1


def test_the_more_certain_goes_first():
    one = lane(window=1 * MB, record_nbytes=4 * MB)
    warm, look, certain = (put(one, 1, p)[0] for p in (WARMUP, LOOKAHEAD, CERTAIN))
    assert take_all(one) == [certain, look]
    one.ended(certain)
    assert take_all(one) == [warm]


def test_a_promoted_prefetch_stands_last_in_the_demand_queue():
    one = lane(window=1)
    hint, other = put(one, 2, LOOKAHEAD)
    demand = put(one, 1)
    one.promote(other.future)
    assert take_all(one) == [*demand, other]
    one.promote(Future())
    for each in (*demand, other):
        one.ended(each)
    assert take_all(one) == [hint]


def test_a_promoted_read_does_not_count_as_prefetch():
    one = lane(window=1000 * MB, record_nbytes=4 * MB, clock=Clock())
    hints = put(one, 8, LOOKAHEAD)
    assert len(take_all(one)) == 4
    for each in hints[4:]:
        one.promote(each.future)
    more = put(one, 4, LOOKAHEAD)
    assert take_all(one) == hints[4:]
    for each in (hints[0], *hints[4:7]):
        one.ended(each)
    assert take_all(one) == more[:1]


def test_no_prefetch_starts_while_demand_keeps_the_device_busy():
    one = lane(window=1000 * MB, record_nbytes=4 * MB)
    demand = put(one, 3)
    assert take_all(one) == demand
    hints = put(one, 2, CERTAIN)
    assert one.take() is None
    one.ended(demand[0])
    assert one.take() is None
    one.ended(demand[1])
    assert take_all(one) == hints


def test_demand_is_delayed_until_the_last_prefetch_it_found_has_ended():
    clock = Clock()
    one = lane(window=1000 * MB, record_nbytes=4 * MB, clock=clock)
    hints = put(one, 2, LOOKAHEAD)
    take_all(one)
    clock.now = 1.0
    put(one, 1)
    take_all(one)
    assert one.demand_delay_s == 0
    later = put(one, 1, LOOKAHEAD)
    assert take_all(one) == later
    for clock.now, each in ((2.0, hints[0]), (4.0, hints[1]), (8.0, later[0])):
        one.ended(each)
    assert one.demand_delay_s == 3.0


def test_a_prefetch_that_demand_wants_is_not_in_its_way():
    clock = Clock()
    one = lane(window=1000 * MB, record_nbytes=4 * MB, clock=clock)
    wanted, other = put(one, 2, LOOKAHEAD)
    take_all(one)
    one.promote(wanted.future)
    put(one, 1)
    clock.now = 1.0
    one.promote(other.future)
    assert one.demand_delay_s == 1.0
    clock.now = 5.0
    one.ended(wanted)
    one.ended(other)
    assert one.demand_delay_s == 1.0


def test_the_time_that_prefetch_has_to_itself_is_what_it_can_win():
    clock = Clock()
    one = lane(window=1000 * MB, record_nbytes=4 * MB, clock=clock)
    first, second = put(one, 2, LOOKAHEAD)
    take_all(one)
    clock.now = 1.0
    one.ended(first)
    clock.now = 3.0
    (demand,) = put(one, 1)
    assert one.ahead_s == 3.0
    take_all(one)
    clock.now = 4.0
    one.ended(demand)
    clock.now = 6.0
    one.promote(second.future)
    assert one.ahead_s == 5.0
    clock.now = 9.0
    one.ended(second)
    assert one.ahead_s == 5.0


def test_prefetch_alone_delays_nobody():
    clock = Clock()
    one = lane(window=1000 * MB, record_nbytes=4 * MB, clock=clock)
    hints = put(one, 2, LOOKAHEAD)
    take_all(one)
    for each in hints:
        clock.now += 1.0
        one.ended(each)
    put(one, 1)
    assert one.demand_delay_s == 0


def test_a_removed_read_never_starts():
    one = lane(window=1)
    reads = put(one, 3) + put(one, 2, WARMUP)
    assert one.remove(reads[0].future)
    assert not one.remove(reads[0].future)
    assert one.remove(reads[4].future)
    assert take_all(one) == reads[1:3]
    assert not one.remove(reads[1].future)
    assert one.clear() == [reads[3].future]
    assert one.n_queued == 0


def test_a_halved_window_admits_half_and_never_nothing():
    one = lane(window=8 * MB)
    one.halve()
    put(one, 10)
    assert len(take_all(one)) == 4
    for _ in range(100):
        one.halve()
    assert one.window_nbytes == 1


def test_devices_do_not_wait_for_each_other():
    lanes = Lanes({1: 2 * MB, 2: 3 * MB}, n_reads_max=10)
    slow = [read(device=1) for _ in range(5)]
    fast = [read(device=2) for _ in range(5)]
    lanes.put([*slow, *fast], DEMAND)
    assert list(lanes.take()) == slow[:2] + fast[:3]
    assert (lanes.n_in_flight, lanes.in_flight_nbytes, lanes.n_queued) == (5, 5 * MB, 5)
    lanes.ended(fast[0])
    assert list(lanes.take()) == [fast[3]]
    assert lanes.remove(slow[4].future)
    assert lanes.clear() == [slow[2].future, slow[3].future, fast[4].future]


def test_promotion_and_halving_reach_every_device():
    lanes = Lanes({1: 2 * MB, 2: 2 * MB}, n_reads_max=10)
    hint = read(device=2)
    lanes.put([hint], WARMUP)
    demand = [read(device=2), read(device=2)]
    lanes.put(demand, DEMAND)
    lanes.promote(hint.future)
    lanes.halve()
    assert list(lanes.take()) == demand
    lanes.ended(demand[0])
    assert list(lanes.take()) == [hint]
