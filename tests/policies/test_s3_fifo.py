"""S3-FIFO against its definition, and the three things that make it one."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from plain_policies import BesidePlain, PlainS3FIFO

from tieredmoe.policies import S3FIFOPolicy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.policy import PolicyContract


class TestS3FIFO(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return S3FIFOPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class BesidePlainS3FIFO(BesidePlain):
    policy_class = S3FIFOPolicy
    plain_class = PlainS3FIFO


def test_every_victim_is_the_plain_models():
    run_state_machine_as_test(BesidePlainS3FIFO, settings=settings(stateful_step_count=60))


def uses(*experts):
    return [Step(0, (expert,)) for expert in experts]


def residency(n_slots=10):
    return Residency(n_slots, S3FIFOPolicy(n_slots=n_slots, layers=(0,), top_k=1))


def test_a_scan_leaves_what_is_used_where_it_is():
    kept = residency()
    replay(uses(*range(5), *range(5), *range(5)), kept)
    replay(uses(*range(100, 200)), kept)
    assert all(ExpertKey(0, expert) in kept.entries for expert in range(5))


def test_what_left_a_while_ago_and_comes_back_is_not_on_trial_again():
    kept = residency()
    replay(uses(*range(11)), kept)  # expert 0 had to go
    replay(uses(0, *range(20, 40)), kept)
    assert ExpertKey(0, 0) in kept.entries


def test_ghosts_are_no_more_than_the_main_queues_slots():
    kept = residency()
    replay(uses(*range(500)), kept)
    assert len(kept.policy._ghosts) == 9


@pytest.mark.parametrize("n_asked", [0, 3])
def test_looking_for_a_victim_changes_no_later_one(n_asked):
    kept = residency()
    for step in uses(*(i * i % 17 for i in range(300))):
        replay([step], kept)
        for _ in range(n_asked):
            kept.policy.victim()
    assert sorted(key.expert for key in kept.entries) == sorted(
        key.expert for key in _unasked().entries
    )


def _unasked():
    kept = residency()
    replay(uses(*(i * i % 17 for i in range(300))), kept)
    return kept
