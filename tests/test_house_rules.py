"""The rules that tools can check: format, lint, types, import directions, torch-free core."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]],
    ids=" ".join,
)
def test_the_tree_passes(command):
    tool = shutil.which(command[0], path=str(BIN)) or shutil.which(command[0])
    assert tool, f"{command[0]} is not installed; pip install -e '.[test]'"
    done = subprocess.run(
        [tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_library_and_its_core_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tieredmoe, tieredmoe.chain, tieredmoe.threaded, tieredmoe.prefetch, "
        "tieredmoe.sim, tieredmoe.testing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
