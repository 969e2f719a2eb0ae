"""Any bytes at all end in a right answer or an error of ours: no crash, hang or gigabyte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = ("gguf", "manifest", "drives", "drive", "journal")
N_SHORT, N_LONG = 60, 10_000


def fuzz(*names, n_inputs, seed):
    """By target, how many inputs were accepted and refused, in a process of limited memory."""
    folders = [HERE, HERE.parent / "gguf", HERE.parent / "pack", HERE.parents[1]]
    command = [sys.executable, "-W", "error", HERE / "fuzz_process.py", str(n_inputs), str(seed)]
    done = subprocess.run(
        [*command, *names],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-6000:]}"
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: (int(accepted), int(refused)) for name, accepted, refused in lines}


def test_spoilt_files_are_read_right_or_refused():
    found = fuzz(*TARGETS, n_inputs=N_SHORT, seed=1)
    assert tuple(found) == TARGETS
    for accepted, refused in found.values():
        assert accepted + refused >= N_SHORT
        assert refused > N_SHORT // 4


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fifty_thousand_spoilt_files_are_read_right_or_refused(target):
    found = fuzz(target, n_inputs=N_LONG, seed=int.from_bytes(os.urandom(4), "little"))
    accepted, refused = found[target]
    assert accepted + refused >= N_LONG
    assert accepted > 0
