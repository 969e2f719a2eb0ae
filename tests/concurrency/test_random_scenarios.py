"""Thousands of random scenarios; each seed is one, and plays the same every time.

``TIEREDMOE_SCENARIOS`` says how many (default 2000). A block that fails names its seed:
``storm(seed)`` plays it alone.
"""

import os

import pytest
from storm import storm

N_SCENARIOS = int(os.environ.get("TIEREDMOE_SCENARIOS", "2000"))
N_BLOCKS = 8


@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_random_scenarios_end_with_everything_right_and_nothing_left(block):
    for seed in range(block, N_SCENARIOS, N_BLOCKS):
        try:
            storm(seed)
        except BaseException as error:
            error.add_note(f"this was storm({seed})")
            raise


def test_the_scenarios_see_all_that_can_happen_to_a_caller():
    outcomes = {outcome for seed in range(60) for outcome in storm(seed)}
    assert outcomes == {"served", "failed", "closed", "cancelled", "timed out", "too large"}
