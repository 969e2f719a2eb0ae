"""The machine that a benchmark's numbers belong to."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """One line: processor, how many, what else runs (load), which Python."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{models[0] if models else platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
