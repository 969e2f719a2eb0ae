"""Every known bug of keeping is found by the directed tests of it."""

import pytest
import test_keeping
from keeping_mutants import MUTANTS_OF_KEEPING
from test_mutants import cases, finding


def play_all():
    for case in cases(test_keeping):
        case()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bug", MUTANTS_OF_KEEPING, ids=str)
def test_a_bug_of_keeping_is_found(bug, monkeypatch):
    with monkeypatch.context() as patched:
        bug.infect(patched)
        found = finding(play_all)
    assert found, f"no test sees: {bug}"
