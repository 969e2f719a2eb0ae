"""Whatever work on a pack is killed, or loses its power, and wherever: not one byte is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_moe import MIXED, convert, make_small_moe

import tieredmoe

ROOT = Path(tieredmoe.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A model of two files with tensors of many pages, and the pack it becomes."""
    place = tmp_path_factory.mktemp("packed")
    (place / "model").mkdir()
    path = place / "model" / "m.gguf"
    model = make_small_moe(path, types=MIXED[1:], n_experts=4, n_shards=2)
    convert(model, place / "pack")
    return place


def crash(work, packed, tmp_path, **options):
    """How many crashes there were; the script has looked at what came of each."""
    places = (packed / "model", tmp_path / "place", packed / "pack")
    script = Path(__file__).with_name("crash_run.py")
    done = subprocess.run(
        [sys.executable, script, work, *places, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (3, {"reclaim": False, "power_loss": True, "then": "create"}),
        (5, {"reclaim": True, "power_loss": True, "then": "create"}),
        (8, {"reclaim": True, "power_loss": False, "then": "create"}),
        (11, {"reclaim": True, "power_loss": True, "then": "rollback"}),
    ],
)
def test_a_conversion_that_crashed_goes_on_or_back(packed, tmp_path, first, options):
    assert crash("create", packed, tmp_path, steps=[first, 200, 19], **options) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("then", ["create", "rollback"])
@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("reclaim", [False, True])
def test_a_conversion_that_crashed_at_any_step_goes_on_or_back(
    packed, tmp_path, reclaim, power_loss, then
):
    options = {"reclaim": reclaim, "power_loss": power_loss, "then": then}
    assert crash("create", packed, tmp_path, **options) > 50


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["create", "rollback"])
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_rollback_that_crashed_at_any_step_goes_on_or_forward(
    packed, tmp_path, power_loss, finish
):
    # Every other step for each, and every step for both ways of crashing and of finishing.
    first = int(power_loss != (finish == "create"))
    options = {"power_loss": power_loss, "finish": finish, "stop_at": 80, "first": first}
    assert crash("rollback", packed, tmp_path, **options) > 20


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_restore_that_crashed_at_any_step_goes_on(packed, tmp_path, power_loss):
    assert crash("restore", packed, tmp_path, power_loss=power_loss) > 15


@pytest.mark.parametrize("reclaim", [False, True])
def test_a_conversion_killed_at_a_random_moment_loses_nothing(packed, tmp_path, reclaim):
    assert crash("kill", packed, tmp_path, n_kills=6, reclaim=reclaim) == 6


@pytest.mark.slow
@pytest.mark.parametrize("reclaim", [False, True])
def test_a_conversion_killed_at_many_random_moments_loses_nothing(packed, tmp_path, reclaim):
    assert crash("kill", packed, tmp_path, n_kills=60, reclaim=reclaim) == 60
