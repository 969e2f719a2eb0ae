"""Hooks turn what is known into hints, in order of certainty, and never into anything else."""

import logging

import numpy as np
import pytest

from tieredmoe.errors import ClosedError
from tieredmoe.prefetch import HashTable, MarkovPredictor, Prefetcher
from tieredmoe.prefetching import PrefetchReport
from tieredmoe.ring import PrefetchCounts
from tieredmoe.spec import ExpertKey, Priority
from tieredmoe.testing.tiny_pack import tiny_spec

SPEC = tiny_spec(layers=(1, 2, 5), n_experts=8, top_k=2)
CERTAIN, LOOKAHEAD = Priority.CERTAIN, Priority.LOOKAHEAD


class Target:
    """Notes what it is told."""

    spec = SPEC

    def __init__(self):
        self.hints = []
        self.routings = []
        self.counts = {}
        self.ahead_s = self.delay_s = 0.0
        self.closed = False

    def prefetch(self, layer, experts, *, priority):
        self._check()
        experts = list(experts)
        assert all(type(expert) is int for expert in experts)
        assert len(set(experts)) == len(experts) > 0
        self.hints.append((layer, experts, priority))
        return len(experts)

    def routed(self, layer, experts):
        self._check()
        self.routings.append((layer, list(experts)))

    def prefetch_report(self):
        return PrefetchReport(self.counts, self.ahead_s, self.delay_s)

    def _check(self):
        if self.closed:
            raise ClosedError("closed")


class Guesses:
    """Always the same guess."""

    width = 2

    def __init__(self, keys):
        self.keys = keys
        self.observed = []

    def observe(self, layer, experts):
        self.observed.append((layer, experts))

    def predict(self, layer, signal=None):
        del signal
        if isinstance(self.keys, Exception):
            raise self.keys
        return self.keys


def opened(**options):
    target = Target()
    return Prefetcher(target, **options), target


def table():
    return HashTable({1: [[0, 1], [2, 3]], 7: [[0], [1]]}, n_experts=8)


def test_tokens_are_certain_and_asked_for_whole():
    prefetcher, target = opened(table=table(), width=1)
    prefetcher.on_tokens([0, 1])
    assert target.hints == [(1, [0, 1, 2, 3], CERTAIN)]
    prefetcher.on_tokens("no tokens")
    assert len(target.hints) == 1


def test_without_a_table_tokens_say_nothing():
    prefetcher, target = opened()
    prefetcher.on_tokens([0])
    assert target.hints == []


@pytest.mark.parametrize(
    ("guess", "experts"),
    [
        ([5, 3, 1], [5, 3]),
        (np.array([5, 3]), [5, 3]),
        ([[5, 3], [1, 5]], [5, 1, 3]),
        (np.arange(8.0), [7, 6]),
        (np.array([[0, 9, 0, 8, 0, 0, 0, 0], [9, 8, 0, 0, 0, 0, 0, 0.0]]), [1, 0, 3]),
        (np.full(8, 0.5, np.float16), [0, 1]),
        ([5, 99, -1], [5]),
        ([5, 5], [5]),
    ],
)
def test_a_look_ahead_is_ids_or_scores_of_one_token_or_many(guess, experts):
    prefetcher, target = opened()
    prefetcher.on_hidden(2, guess)
    assert target.hints == [(2, experts, LOOKAHEAD)]


@pytest.mark.parametrize(
    "guess",
    [
        None,
        "text",
        [],
        np.zeros(7),
        np.full(8, np.nan),
        np.zeros((2, 2, 8)),
        [[1], [1, 2]],
        object(),
        [99],
        np.array(["a"]),
        [1j],
        True,
    ],
)
def test_a_look_ahead_that_is_neither_is_ignored(guess):
    prefetcher, target = opened()
    prefetcher.on_hidden(2, guess)
    assert target.hints == []


def test_layers_that_do_not_exist_are_ignored():
    prefetcher, target = opened(predictors=[Guesses([ExpertKey(4, 1)])])
    prefetcher.on_hidden(4, [1])
    prefetcher.on_routed(4, [1])
    assert (target.hints, target.routings) == ([], [])


def test_a_routing_drops_other_guesses_and_is_learnt():
    guesses = Guesses([])
    prefetcher, target = opened(predictors=[guesses])
    prefetcher.on_routed(1, np.array([[3, 1], [1, 4]]))
    assert target.routings == [(1, [3, 1, 4])]
    assert guesses.observed == [(1, [3, 1, 4])]


def test_predictors_guess_the_layer_that_follows_in_their_order():
    first, second = Guesses([]), Guesses([ExpertKey(2, 6), ExpertKey(2, 7), ExpertKey(2, 0)])
    prefetcher, target = opened(predictors=[first, second, Guesses([ExpertKey(2, 1)])])
    prefetcher.on_routed(1, [0])
    assert target.hints == [(2, [6, 7], LOOKAHEAD)]


def test_the_last_layer_is_followed_by_the_first():
    prefetcher, target = opened(predictors=[Guesses([ExpertKey(1, 6)])])
    prefetcher.on_routed(5, [0])
    assert target.hints == [(1, [6], LOOKAHEAD)]


def test_what_is_certain_or_looked_ahead_is_not_guessed():
    prefetcher, target = opened(
        table=table(), predictors=[Guesses([ExpertKey(1, 6)]), Guesses([ExpertKey(2, 6)])]
    )
    prefetcher.on_hidden(1, [5])
    prefetcher.on_routed(5, [0])
    assert target.hints == [], "layer 1 has a table"
    prefetcher.on_hidden(2, [5])
    prefetcher.on_routed(1, [0])
    assert target.hints == [(2, [5], LOOKAHEAD)]


@pytest.mark.parametrize(
    "garbage",
    [
        [ExpertKey(1, 0)],
        [ExpertKey(2, 8), ExpertKey(2, -1)],
        [(2, "x")],
        [ExpertKey(2, 0.5)],
    ],
)
def test_a_predictor_that_names_what_does_not_exist_is_not_heard(garbage):
    prefetcher, target = opened(predictors=[Guesses(garbage)])
    prefetcher.on_routed(1, [0])
    assert target.hints == []


@pytest.mark.parametrize("broken", [RuntimeError("broken"), None, 5, [7], [(1, 2, 3)]])
def test_a_predictor_that_fails_is_switched_off_and_logged_once(broken, caplog):
    good = Guesses([ExpertKey(2, 4)])
    prefetcher, target = opened(
        predictors=[Guesses(RuntimeError() if broken is None else broken), good]
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            prefetcher.on_routed(1, [0])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "switched off" in caplog.text
    assert target.hints == [(2, [4], LOOKAHEAD)] * 3


def test_an_endless_guess_is_cut_short():
    def endless():
        while True:
            yield ExpertKey(2, 3)

    class Endless(Guesses):
        def predict(self, layer, signal=None):
            return endless()

    prefetcher, target = opened(predictors=[Endless([])])
    prefetcher.on_routed(1, [0])
    assert target.hints == [(2, [3], LOOKAHEAD)]


def test_guesses_that_only_harm_come_to_an_end():
    prefetcher, target = opened(clock=lambda: 0.0)
    target.counts = {2: PrefetchCounts(), 5: PrefetchCounts()}
    for _ in range(12):
        prefetcher.on_hidden(2, [4, 5])
        prefetcher.on_routed(1, [0])
        prefetcher.on_routed(2, [0])
        target.counts[2].wasted += 2
        prefetcher.on_routed(5, [0])
    assert prefetcher.governor.width(2) == 0
    assert prefetcher.governor.width(5) == 2


def test_time_won_is_laid_to_the_layer_that_follows_and_time_lost_to_the_one_before():
    prefetcher, target = opened(clock=lambda: 0.0)
    calls = []
    prefetcher.governor.account = lambda layer, _, **seconds: calls.append((layer, seconds))
    prefetcher.on_routed(1, [0])
    target.ahead_s += 3.0
    target.delay_s += 1.0
    prefetcher.on_routed(2, [0])
    prefetcher.on_routed(5, [0])
    assert calls == [(1, {"won_s": 0.0, "lost_s": 1.0}), (2, {"won_s": 3.0, "lost_s": 0.0})]


def test_a_closed_hierarchy_is_no_error():
    prefetcher, target = opened(table=table(), predictors=[MarkovPredictor(
        layers=SPEC.layers, n_experts=8, top_k=2)])  # fmt: skip
    target.closed = True
    prefetcher.on_tokens([0])
    prefetcher.on_hidden(2, [1])
    prefetcher.on_routed(1, [1])
    assert target.hints == []
