"""The chain of experts: what it learns and forgets, and that it beats guessing by frequency."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tieredmoe.prefetch import MarkovPredictor
from tieredmoe.prefetch.markov import COUNT_MAX
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.predictor import PredictorContract

TRACE = Path(__file__).parent.parent / "data" / "traces" / "olmoe-1b-7b_80_tokens.npz"
LAYERS = (3, 4, 6)


class TestMarkov(PredictorContract):
    def make_predictor(self, *, layers, n_experts, top_k):
        return MarkovPredictor(layers=layers, n_experts=n_experts, top_k=top_k)


class TestMarkovOfAnotherWidth(PredictorContract):
    def make_predictor(self, *, layers, n_experts, top_k):
        return MarkovPredictor(layers=layers, n_experts=n_experts, top_k=top_k, width=2 * top_k)


def predictor(**options):
    return MarkovPredictor(layers=LAYERS, n_experts=10, top_k=2, **options)


def token(markov, *routed):
    for layer, experts in zip(LAYERS, routed, strict=True):
        markov.observe(layer, experts)


def predicted(markov, layer):
    return [key.expert for key in markov.predict(layer)]


def test_what_followed_is_predicted_the_likeliest_first():
    markov = predictor()
    for _ in range(3):
        token(markov, [1], [5, 2], [0])
    token(markov, [1], [5, 7], [0])
    markov.observe(3, [1])
    assert list(markov.predict(4)) == [ExpertKey(4, 5), ExpertKey(4, 2)]


def test_the_first_layer_follows_the_last_of_the_step_before():
    markov = predictor()
    token(markov, [1], [0], [8])
    token(markov, [6], [0], [8])
    token(markov, [6], [0], [8])
    assert predicted(markov, 3) == [6]


def test_there_is_no_guess_unless_the_layer_before_came_just_before():
    markov = predictor()
    token(markov, [1], [2], [3])
    markov.observe(3, [1])
    assert predicted(markov, 4) == [2]
    assert predicted(markov, 6) == []
    assert predicted(markov, 3) == []


def test_a_layer_that_was_left_out_teaches_nothing():
    markov = predictor()
    markov.observe(3, [1])
    markov.observe(6, [9])
    markov.observe(4, [5])
    assert predicted(markov, 6) == []


def test_an_expert_seen_with_everything_does_not_drown_the_others():
    """Expert 0 follows itself each time, among others; what always follows 1 is 5, seen once."""
    markov = predictor(width=1)
    for i in range(COUNT_MAX - 2):
        token(markov, [0], [2 + i % 3, 0], [0])
    token(markov, [1], [5], [0])
    markov.observe(3, [0, 1])
    assert predicted(markov, 4) == [5]


def test_old_habits_fade():
    markov = predictor(width=1)
    for _ in range(1000):
        token(markov, [1], [2], [0])
    for _ in range(COUNT_MAX):
        token(markov, [1], [7], [0])
    markov.observe(3, [1])
    assert predicted(markov, 4) == [7]


def test_counts_stay_below_their_limit_and_the_width_below_the_experts():
    markov = predictor(width=100)
    assert markov.width == 10
    for _ in range(3 * COUNT_MAX):
        token(markov, range(10), range(10), range(10))
    assert markov._followers.max() < COUNT_MAX
    assert predicted(markov, 3) == list(range(10))
    assert "3 layers of 10, width 10" in repr(markov)


def test_experts_may_come_as_an_array():
    markov = predictor()
    token(markov, *np.array([[1], [2], [3]], np.int16))
    markov.observe(3, np.array([1]))
    assert predicted(markov, 4) == [2]


# ---- on a real trace


def recall(guess, learn, n_tokens_min=1):
    """The share of routed experts that were guessed, from the second token on."""
    found = total = 0
    for t, of_token in enumerate(np.load(TRACE)["expert"].tolist()):
        for layer, experts in enumerate(of_token):
            if t >= n_tokens_min:
                found += len(set(guess(layer)) & set(experts))
                total += len(experts)
            learn(layer, experts)
    return found / total


def recall_by_frequency():
    counts = [Counter() for _ in range(16)]
    return recall(
        lambda layer: [expert for expert, _ in counts[layer].most_common(8)],
        lambda layer, experts: counts[layer].update(experts),
    )


@pytest.mark.parametrize(("width", "at_least"), [(8, 0.6), (16, 0.77)])
def test_it_finds_far_more_of_a_real_trace_than_frequency_does(width, at_least):
    markov = MarkovPredictor(layers=range(16), n_experts=64, top_k=8, width=width)
    found = recall(lambda layer: predicted(markov, layer), markov.observe)
    assert found > at_least
    assert found > recall_by_frequency() + 0.2
