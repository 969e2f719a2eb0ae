"""What ``auto`` stands for, and that it says why."""

import logging
import re

import pytest

from tieredmoe.errors import ConfigError
from tieredmoe.policies import POLICIES, LRFUPolicy, LRUPolicy, choose_policy, remembers


def choose(n_slots, name="auto"):
    """Of a model with W = 4 × 3 lookups a token and 32 experts."""
    return choose_policy(name, n_slots=n_slots, layers=(1, 2, 3, 4), top_k=3, n_experts=8)


@pytest.mark.parametrize(
    ("n_slots", "policy_class", "reason"),
    [
        (3, LRFUPolicy, "3 slots are 0.25 × the 12 lookups of a token: .* over all layers"),
        (11, LRFUPolicy, "11 slots are 0.92 × the 12 lookups of a token: .* over all layers"),
        (12, LRFUPolicy, "12 slots are 1.00 × the 12 lookups of a token: .* each of 4 layers"),
        (31, LRFUPolicy, "31 slots are 2.58 × the 12 lookups of a token: .* each of 4 layers"),
        (32, LRUPolicy, "all 32 experts fit"),
    ],
)
def test_auto_goes_by_slots_over_a_tokens_lookups(n_slots, policy_class, reason):
    choice = choose(n_slots)
    assert type(choice.policy) is policy_class
    assert POLICIES[choice.name] is policy_class
    assert re.search(reason, choice.reason), choice.reason


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n_slots", [3, 32])
def test_a_policy_that_was_asked_for_is_taken_whatever_the_size(name, n_slots):
    choice = choose(n_slots, name)
    assert type(choice.policy) is POLICIES[name]
    assert (choice.name, choice.reason) == (name, "it was asked for")


def test_the_choice_and_its_reason_are_one_line_in_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="tieredmoe"):
        choice = choose(11)
    assert [record.getMessage() for record in caplog.records] == [
        f"eviction policy lrfu: {choice.reason}"
    ]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="'clock'; known: lrfu"):
        choose(3, "clock")


def test_who_remembers():
    assert {name for name in ("auto", *POLICIES) if remembers(name)} == {
        "auto",
        "lrfu",
        "next_use",
    }
