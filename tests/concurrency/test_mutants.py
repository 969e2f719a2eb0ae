"""Every known bug is found by at least one harness, within its ordinary budget.

``TIEREDMOE_EVERY_HARNESS=1`` tries all harnesses on each mutant instead of stopping at the first
that finds it, and so shows which are redundant (``pytest -rP`` prints the findings).
"""

import asyncio
import contextlib
import gc
import importlib.util
import inspect
import os
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import test_closing
import test_device
import test_failing_reads
import test_fast_path
import test_foreign_parts
import test_holding
import test_idle
import test_limits
import test_prefetching
import test_races
import test_resizing
import test_streams
import test_timelines
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from limit_mutants import MUTANTS_OF_LIMITS
from mutants import MUTANTS
from mutation import mutant
from prefetch_mutants import MUTANTS_OF_PREFETCH
from stepping import SCENARIOS, cancel_at_every_step, close_at_every_step
from storm import storm

EVERY_HARNESS = bool(os.environ.get("TIEREDMOE_EVERY_HARNESS"))
TESTS = Path(__file__).parent.parent
DIRECTED = (
    test_prefetching,
    test_races,
    test_failing_reads,
    test_closing,
    test_holding,
    test_streams,
    test_device,
    test_idle,
    test_resizing,
    test_foreign_parts,
    test_fast_path,
    test_limits,
    test_timelines,
)


def load(path):
    """A test module of another directory, which is not on the path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(module):
    """The tests of ``module`` that need no fixture, one call for each set of parameters."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or "tmp_path" in inspect.signature(test).parameters:
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for choice in product(*(arguments_of(mark) for mark in marks)):
            yield partial(test, **{name: value for chosen in choice for name, value in chosen})


def arguments_of(mark):
    names, values = mark.args
    if isinstance(names, str):
        names, values = (names,), [(value,) for value in values]
    return [tuple(zip(names, value, strict=True)) for value in values]


def races():
    for module in DIRECTED:
        for case in cases(module):
            case()


def storms():
    for seed in range(300):
        storm(seed)


def cancels():
    for scenario in SCENARIOS:
        for victim in scenario.cast:
            cancel_at_every_step(scenario, victim)


def closes():
    for scenario in SCENARIOS:
        if "closing" not in scenario.cast:
            close_at_every_step(scenario, cancelled_after=None)
            close_at_every_step(scenario, cancelled_after=2)


def machine():
    module = load(TESTS / "test_residency_machine.py")
    few = settings(  # to find is enough, none is shrunk
        max_examples=40, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    for machine in (module.ResidencyMachine, module.LfuLruMachine):
        run_state_machine_as_test(machine, settings=few)


def replays():
    module = load(TESTS / "sim" / "test_replay.py")
    for case in cases(module):
        case()


HARNESSES = (races, machine, storms, replays, cancels, closes)


def finding(harness):
    """What ``harness`` finds, in one line, or None."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            harness()
        except (Exception, pytest.fail.Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (any is a finding)
            return f"{type(error).__name__}: {error}".splitlines()[0][:120]
        finally:
            gc.collect()
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "bug",
    [
        *MUTANTS,
        *(pytest.param(bug, marks=pytest.mark.slow) for bug in MUTANTS_OF_PREFETCH),
        *MUTANTS_OF_LIMITS,
    ],
    ids=str,
)
def test_a_known_bug_is_found(bug, monkeypatch):
    found = {}
    with monkeypatch.context() as patched:
        bug.infect(patched)
        for harness in HARNESSES:
            what = finding(harness)
            if what is not None:
                found[harness.__name__] = what
                if not EVERY_HARNESS:
                    break
    for name, what in found.items():
        print(f"{bug}: found by {name}: {what}")  # noqa: T201 (that is what -rP is for)
    assert found, f"no harness sees: {bug}"


def test_a_mutant_whose_code_is_gone_says_so(monkeypatch):
    function = MUTANTS[0].edits[0].function
    with pytest.raises(AssertionError, match="mend the mutant"):
        mutant("gone", function, "no such code").infect(monkeypatch)
