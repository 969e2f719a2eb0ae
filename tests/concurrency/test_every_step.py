"""Cancelling anybody, and closing, at every single step of short scenarios."""

import pytest
from stepping import SCENARIOS, cancel_at_every_step, close_at_every_step

CANCELS = [(scenario, victim) for scenario in SCENARIOS for victim in scenario.cast]
CLOSABLE = [scenario for scenario in SCENARIOS if "closing" not in scenario.cast]


@pytest.mark.parametrize(("scenario", "victim"), CANCELS, ids=str)
def test_a_cancel_at_any_step_leaves_nothing_behind_and_disturbs_nobody(scenario, victim):
    assert cancel_at_every_step(scenario, victim) > 3


@pytest.mark.parametrize(("scenario", "victim"), CANCELS[::3], ids=str)
def test_two_cancels_in_a_row_at_any_step_do_no_more_than_one(scenario, victim):
    assert cancel_at_every_step(scenario, victim, twice=True) > 3


@pytest.mark.parametrize("scenario", CLOSABLE, ids=str)
def test_a_close_at_any_step_leaves_nobody_writing_and_the_memory_can_be_used_at_once(scenario):
    assert close_at_every_step(scenario) > 3


@pytest.mark.parametrize("scenario", CLOSABLE[::2], ids=str)
def test_a_close_cancelled_at_any_step_runs_to_its_end_all_the_same(scenario):
    assert close_at_every_step(scenario, cancelled_after=2) > 3
