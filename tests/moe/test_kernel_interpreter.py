"""The kernels' arithmetic without a device: a few device tests under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are written in Triton")

GPU_TESTS = [
    Path(__file__).parents[1] / "gpu" / f"test_device_{what}.py" for what in ("experts", "linear")
]


def test_tiny_experts_and_matrices_pass_in_the_interpreter():
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "tiny", "-p", "no:cacheprovider", *GPU_TESTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
