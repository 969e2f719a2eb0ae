"""The policy that knows the future, against its definition."""

import random

import pytest

from tieredmoe.residency import Residency
from tieredmoe.sim import BeladyPolicy, Step, replay, replay_steps
from tieredmoe.spec import ExpertKey


def random_trace(seed, n_steps=300):
    rng = random.Random(seed)
    return [Step(i % 2, rng.sample(range(9), rng.randint(0, 3))) for i in range(n_steps)]


@pytest.mark.parametrize("seed", range(5))
def test_it_evicts_what_is_used_last_of_all(seed):
    trace = random_trace(seed)
    residency = Residency(7, BeladyPolicy(trace))
    resident = set()
    for i, (step, missed) in enumerate(zip(trace, replay_steps(trace, residency), strict=True)):
        keys = {ExpertKey(step.layer, expert) for expert in step.experts}
        assert set(missed) == keys - resident
        resident |= keys
        while len(resident) > 7:
            resident.remove(max(resident - keys, key=lambda key: (next_use(trace, i, key), key)))
        assert {next_use(trace, i, key) for key in residency.entries} == {
            next_use(trace, i, key) for key in resident
        }
        resident = set(residency.entries)


def next_use(trace, now, key):
    later = (i for i, step in enumerate(trace) if i > now and step.layer == key.layer)
    return next((i for i in later if key.expert in trace[i].experts), len(trace))


def test_the_textbooks_case():
    """Belady's own reference string, three frames: nine faults of twenty."""
    string = (7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1)
    trace = [Step(0, (page,)) for page in string]
    assert replay(trace, Residency(3, BeladyPolicy(trace))).misses == 9


def test_another_trace_than_it_knows_is_an_assertion():
    policy = BeladyPolicy([Step(0, (1,)), Step(0, (2,)), Step(0, (1,))])
    policy.step(0, [ExpertKey(0, 1)])
    with pytest.raises(AssertionError, match="is used in step 2, not 1"):
        policy.step(0, [ExpertKey(0, 1)])


def test_cold_keys_go_first_and_used_again_they_do_not():
    key = [ExpertKey(0, expert) for expert in range(3)]
    policy = BeladyPolicy([Step(0, (0, 1, 2)), Step(0, (0,)), Step(0, (1,)), Step(0, (0,))])
    policy.step(0, key)
    for each in key:
        policy.admit(each)
        policy.release(each, cold=each == key[0])
    assert policy.victim() == key[0]
    policy.step(0, [key[0]])
    assert policy.victim() == key[2]
    policy.forget(key[2])
    policy.hold(key[0])
    assert policy.victim() == key[1]
