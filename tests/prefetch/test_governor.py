"""Guesses are as many as pay: narrowed by harm, switched off, tried again, widened."""

from collections import defaultdict

import pytest

from tieredmoe.prefetch import Governor
from tieredmoe.prefetch.governor import EVIDENCE, EVIDENCE_OF_MODEL, PROBE_S, PROBE_S_MAX
from tieredmoe.ring import PrefetchCounts


class Bench:
    def __init__(self, width=8):
        self.now = 0.0
        self.governor = Governor(width_max=width, clock=lambda: self.now)
        self.counts = defaultdict(PrefetchCounts)

    def step(self, *, useful=0, late=0, wasted=0, won_s=0.0, lost_s=0.0, layer=0):
        counts = self.counts[layer]
        counts.useful += useful
        counts.late += late
        counts.wasted += wasted
        self.governor.account(layer, counts, won_s=won_s, lost_s=lost_s)
        return self.governor.width(layer)


def test_a_layer_begins_with_all():
    assert Bench(6).governor.width(3) == 6


def test_good_guesses_stay_wide():
    bench = Bench()
    assert {bench.step(useful=4, late=2, wasted=3) for _ in range(50)} == {8}


def test_wasted_guesses_narrow_and_end():
    bench = Bench()
    widths = [bench.step(useful=1, wasted=7) for _ in range(6)]
    assert widths == [4, 2, 1, 0, 0, 0]


def test_guesses_that_keep_demand_waiting_longer_than_they_win_narrow_though_they_are_right():
    bench = Bench()
    assert bench.step(useful=EVIDENCE, won_s=2.0, lost_s=1.9) == 8
    assert bench.step(useful=EVIDENCE, won_s=2.0, lost_s=2.3) == 4


def test_only_what_is_used_has_won_anything():
    bench = Bench()
    assert bench.step(useful=EVIDENCE, wasted=EVIDENCE, won_s=2.0, lost_s=1.1) == 4


def test_great_harm_ends_guessing_at_once():
    bench = Bench()
    assert bench.step(useful=EVIDENCE, won_s=1.0, lost_s=2.1) == 0


def test_nothing_is_decided_on_little_evidence():
    bench = Bench()
    assert bench.step(wasted=EVIDENCE - 1, lost_s=9.0) == 8
    assert bench.step(useful=2, lost_s=9.0) == 0


def test_what_is_many_guesses_ago_does_not_count():
    bench = Bench()
    bench.step(wasted=EVIDENCE - 1)
    for _ in range(100):
        bench.step(useful=2, wasted=1)
    assert bench.step(useful=1, wasted=4) == 8


def test_what_was_switched_off_is_tried_again_after_ever_longer_times():
    bench = Bench(1)
    off_s = []
    for _ in range(9):
        assert bench.step(wasted=20) == 0
        begin = bench.now
        while not bench.governor.width(0):
            bench.now += PROBE_S
        off_s.append(bench.now - begin)
    assert off_s[:4] == [2, 4, 8, 16]
    assert off_s[-1] == PROBE_S_MAX


def test_a_probe_that_pays_widens_to_the_most():
    bench = Bench()
    while bench.step(useful=1, wasted=EVIDENCE):
        pass
    bench.now += PROBE_S
    assert bench.governor.width(0) == 1
    widths = [bench.step(useful=EVIDENCE_OF_MODEL) for _ in range(4)]
    assert widths == [2, 4, 8, 8]


def test_harm_over_all_layers_ends_guessing_for_each():
    bench = Bench()
    for layer in range(EVIDENCE_OF_MODEL + 8):
        bench.step(useful=1, won_s=1.0, lost_s=1.5, layer=layer)
    assert bench.governor.width(0) == 4
    assert bench.governor.width(10**6) == 4


def test_layers_are_governed_one_by_one():
    bench = Bench()
    bench.step(wasted=20, layer=1)
    assert bench.governor.width(1) == 4
    assert bench.governor.width(2) == 8
    assert repr(bench.governor) == "<Governor 8, by layer {1: 4, 2: 8}>"


@pytest.mark.parametrize("width", [1, 6])
def test_the_same_course_gives_the_same_widths(width):
    def course():
        bench = Bench(width)
        return [bench.step(useful=i % 3, wasted=i % 5, lost_s=i % 2) for i in range(200)]

    assert course() == course()
