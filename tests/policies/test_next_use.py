"""The estimator of next uses: its arithmetic, what it learns, and when."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test
from plain_policies import BesidePlain, PlainNextUse

from tieredmoe.policies import NextUsePolicy
from tieredmoe.policies.next_use import HALF_LIVES_TOKENS
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.policy import PolicyContract


class TestNextUse(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return NextUsePolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class BesidePlainNextUse(BesidePlain):
    policy_class = NextUsePolicy
    plain_class = PlainNextUse

    @rule()
    def settle(self):
        self.tell("settle")


def test_every_victim_is_the_plain_models():
    run_state_machine_as_test(BesidePlainNextUse, settings=settings(stateful_step_count=40))


def served(policy, layer, *experts):
    """Working sets of one expert each, brought in at once, and learnt from."""
    for expert in experts:
        key = ExpertKey(layer, expert)
        policy.step(layer, [key])
        policy.settle()
        policy.admit(key)
        policy.release(key)


def make(n_slots=4, layers=(0,), top_k=2):
    return NextUsePolicy(n_slots=n_slots, layers=layers, top_k=top_k)


def drain(policy):
    order = []
    while (victim := policy.victim()) is not None:
        policy.forget(victim)
        order.append(victim.expert)
    return order


def test_shares_go_to_the_memory_that_foresees():
    """Routing that repeats itself is foreseen by the shortest memory; fixed odds by the longest."""
    repeating, steady = make(), make()
    rng = random.Random(1)
    for i in range(600):
        repeating.step(0, [ExpertKey(0, i // 6)])
        steady.step(0, [ExpertKey(0, rng.randrange(8))])
    assert repeating._shares.argmax() == 0
    assert steady._shares.argmax() == len(HALF_LIVES_TOKENS) - 1
    assert repeating._shares.sum() == pytest.approx(1)


def test_what_is_learnt_changes_who_goes():
    """Used often a while ago or once just now: it depends on how this model routes."""
    victims = {}
    for name, step in (("repeating", lambda i: i // 6), ("steady", lambda i: i * 5 % 8)):
        policy = make()
        for i in range(600):
            policy.step(0, [ExpertKey(0, step(i))])
        for expert in [200] * 12 + [300] * 6 + [201]:
            policy.step(0, [ExpertKey(0, expert)])
        policy.settle()
        for expert in (200, 201):
            policy.admit(ExpertKey(0, expert))
            policy.release(ExpertKey(0, expert))
        victims[name] = policy.victim().expert
    assert victims == {"repeating": 200, "steady": 201}


def test_a_victim_goes_by_what_was_known_before_its_step_settled_or_not():
    rng = random.Random(3)
    trace = [Step(i % 3, rng.sample(range(12), 2)) for i in range(400)]
    resident = []
    for settles in (False, True):
        residency = Residency(9, make(n_slots=9, layers=(0, 1, 2)))
        for step in trace:
            replay([step], residency)
            if settles:
                residency.settle()
        resident.append(set(residency.entries))
    assert resident[0] == resident[1]


def test_what_the_router_thinks_of_an_expert_keeps_it():
    """Of two used alike, the one that is nearly chosen again is expected sooner."""
    policy = make()
    served(policy, 0, 0, 1)
    assert drain(policy)[0] == 0
    policy = make()
    served(policy, 0, 0, 1)
    policy.observe(0, np.array([0.4, 0.1, 0.25, 0.25], np.float32))
    assert drain(policy) == [1, 0]


def test_probabilities_that_foresee_win_the_shares():
    """What was probable a token ago is what is chosen now, and nothing else foresees it."""
    rng = np.random.default_rng(5)
    policy = make(n_slots=8)
    chosen = [0, 1]
    for _ in range(400):
        policy.step(0, [ExpertKey(0, expert) for expert in dict.fromkeys(chosen)])
        chosen = rng.integers(0, 32, 2).tolist()
        probabilities = np.full(32, 1e-3, np.float32)
        probabilities[chosen] = 0.4
        policy.observe(0, probabilities)
    assert policy._shares.argmax() == len(HALF_LIVES_TOKENS)


def test_a_hierarchys_policy_learns_from_what_it_is_shown():
    residency = Residency(4, make())
    replay([Step(0, [0]), Step(0, [1])], residency)
    residency.observe(0, np.array([0.4, 0.1, 0.25, 0.25]))
    assert residency.policy.victim() == ExpertKey(0, 1)


def test_half_a_million_tokens_without_an_expert_are_no_error():
    """What is left of its memories has no reciprocal any more: it counts as never used."""
    policy = make()
    served(policy, 0, 0, 1)
    policy._memories[0, :, 0] = 5e-324
    policy.step(0, [ExpertKey(0, 1)])
    policy.settle()
    policy.step(0, [ExpertKey(0, 0)])
    policy.settle()
    assert set(drain(policy)) == {0, 1}
