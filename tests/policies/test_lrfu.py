"""The default policy: its victims, its idea of a token, its shares by layer."""

import random
from math import log2

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from plain_policies import BesidePlain, PlainLRFU

from tieredmoe.policies import LRFUPolicy, lrfu
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.policy import PolicyContract


class TestLRFU(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return LRFUPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class BesidePlainLRFU(BesidePlain):
    policy_class = LRFUPolicy
    plain_class = PlainLRFU


class QuickPlainLRFU(PlainLRFU):
    half_life = 2
    octaves_per_origin = 4


class BesidePlainQuickLRFU(BesidePlainLRFU):
    plain_class = QuickPlainLRFU


def test_every_victim_is_the_plain_models():
    run_state_machine_as_test(BesidePlainLRFU, settings=settings(stateful_step_count=60))


def test_every_victim_is_the_plain_models_when_time_is_quick(monkeypatch):
    """Sums fall out of the window of classes, and the origin of time moves."""
    monkeypatch.setattr(lrfu, "HALF_LIFE_TOKENS", QuickPlainLRFU.half_life)
    monkeypatch.setattr(lrfu, "_OCTAVES_PER_ORIGIN", 4)
    monkeypatch.setattr(lrfu, "_OCTAVES_BELOW", 2)
    run_state_machine_as_test(BesidePlainQuickLRFU, settings=settings(stateful_step_count=60))


@pytest.mark.parametrize("n_slots", [5, 9, 40])
def test_moving_the_origin_of_time_moves_no_more_than_what_is_rounded(monkeypatch, n_slots):
    rng = random.Random(n_slots)
    weights = [1 / (rank + 1) for rank in range(30)]
    trace = [
        Step(i % 3, list(dict.fromkeys(rng.choices(range(30), weights, k=4)))) for i in range(6000)
    ]
    hits = []
    for octaves in (1000, lrfu._OCTAVES_PER_ORIGIN, 2):
        monkeypatch.setattr(lrfu, "_OCTAVES_PER_ORIGIN", octaves)
        policy = LRFUPolicy(n_slots=n_slots, layers=(0, 1, 2), top_k=3)
        hits.append(replay(trace, Residency(n_slots, policy)).hits)
    assert hits[1:] == pytest.approx([hits[0]] * 2, rel=0.002)


def test_sums_stay_short_however_long_it_runs():
    policy = LRFUPolicy(n_slots=2, layers=(0,), top_k=1)
    hot, rare = ExpertKey(0, 0), ExpertKey(0, 1)
    for key in (hot, rare):
        policy.step(0, [key])
        policy.admit(key)
        policy.release(key)
    for _ in range(1100 * lrfu.HALF_LIFE_TOKENS):
        policy.step(0, [hot])
    policy.hold(hot)
    policy.release(hot)
    assert policy.victim() == rare
    assert max(node.weight for node in policy._order.ranked.values()) < 2**30


def served(policy, layer, *experts):
    """Working sets of one expert each, brought in at once."""
    for expert in experts:
        key = ExpertKey(layer, expert)
        policy.step(layer, [key])
        policy.admit(key)
        policy.release(key)


def tokens(policy, layers, n, expert=99):
    """``n`` tokens that use something else."""
    for _ in range(n):
        for layer in layers:
            policy.step(layer, [ExpertKey(layer, expert)])


@pytest.mark.parametrize(("n_tokens", "victim"), [(20, 2), (44, 1)])
def test_a_use_counts_half_after_32_tokens(n_tokens, victim):
    """Two uses are worth less than a new one as soon as they are older than that."""
    layers = (0, 1, 2)
    policy = LRFUPolicy(n_slots=3, layers=layers, top_k=3)
    served(policy, 0, 1)
    policy.step(0, [ExpertKey(0, 1)])
    tokens(policy, layers, n_tokens)
    served(policy, 0, 2)
    assert policy.victim() == ExpertKey(0, victim)


def test_interleaved_generations_age_an_expert_by_tokens_not_by_turns():
    """A token of three others each makes three tokens, in whatever order their layers come."""
    layers = (0, 1, 2, 3)

    def after(schedule):
        policy = LRFUPolicy(n_slots=2, layers=layers, top_k=3)
        served(policy, 0, 1)
        policy.step(0, [ExpertKey(0, 1)])
        for layer in schedule:
            policy.step(layer, [ExpertKey(layer, 99)])
        served(policy, 0, 2)
        return policy.victim().expert

    alone = [layer for _ in range(20) for layer in layers]
    interleaved = [layer for i in range(20) for layer in (0, 3, 1, 2)]
    turns_back = [layer for i in range(20) for layer in (3, 2, 1, 0)]
    assert after(alone) == after(interleaved) == after(turns_back) == 2


def test_a_prefills_union_counts_an_expert_once():
    """However many of its tokens used it: all of one step is one use."""
    policy = LRFUPolicy(n_slots=8, layers=(0,), top_k=2)
    residency = Residency(8, policy)
    replay([Step(0, range(8)), Step(0, [3]), Step(0, [3]), Step(0, [9])], residency)
    assert ExpertKey(0, 0) not in residency.entries
    assert ExpertKey(0, 3) in residency.entries


def test_layers_keep_their_shares():
    """A layer that uses few experts often takes no slots from one that uses many seldom."""
    layers, n_slots = (0, 1), 8
    residency = Residency(n_slots, LRFUPolicy(n_slots=n_slots, layers=layers, top_k=2))
    rng = random.Random(1)
    for _ in range(200):
        replay([Step(0, rng.sample(range(5), 2)), Step(1, rng.sample(range(64), 2))], residency)
        held = [key.layer for key in residency.entries]
    assert (held.count(0), held.count(1)) == (4, 4)


def test_a_layer_below_its_quota_takes_from_the_one_furthest_above():
    policy = LRFUPolicy(n_slots=6, layers=(0, 1, 2), top_k=2)
    served(policy, 0, 0, 1, 2, 3)
    served(policy, 1, 0, 1)
    policy.step(2, [ExpertKey(2, 0)])
    assert policy.victim() == ExpertKey(0, 0)


def test_with_less_than_top_k_for_a_layer_all_share():
    """Then the expert used longest ago goes, whichever layer is full."""
    policy = LRFUPolicy(n_slots=5, layers=(0, 1), top_k=3)
    served(policy, 1, 0)
    served(policy, 0, 0, 1, 2, 3)
    policy.step(0, [ExpertKey(0, 4)])
    assert policy.victim() == ExpertKey(1, 0)


def test_resizing_shares_anew():
    """Below top-k a layer the order is one for all; above, the layer with too many gives."""
    policy = LRFUPolicy(n_slots=6, layers=(0, 1), top_k=3)
    served(policy, 1, 0, 1)
    served(policy, 0, 0, 1, 2, 3)
    policy.step(0, [ExpertKey(0, 4)])
    assert policy.victim() == ExpertKey(0, 0)
    policy.resize(5)
    assert policy.victim() == ExpertKey(1, 0)
    policy.resize(6)
    assert policy.victim() == ExpertKey(0, 0)


def test_a_class_is_half_an_octave():
    """What the plain model rounds by, so that both are known to mean the same."""
    assert lrfu.CLASSES_PER_OCTAVE == 2
    assert int(log2(1.5) * 2) == 1
