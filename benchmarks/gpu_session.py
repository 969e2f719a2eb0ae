"""Everything that needs a GPU, by one command that keeps to a time: all GPU tests, all benchmarks.

    python benchmarks/gpu_session.py OUT [--dir DIR] [--budget 530] [--only tests,whole]

Runs the parts in the order of the table below, in the repository's root, and writes one log each
into OUT, besides `summary.txt`, which is also printed. Tests that only compute run side by side,
since most of their time is the compiler's; those that measure the device's memory, and every
benchmark, have it to themselves. What runs past its limit is ended, what the budget has no time
left for is left out, and both are said. Models and scratch files are made in DIR, which should be
on the drive of interest (37 GB). fio should be on the path, with huge pages for its buffers
(`sysctl vm.nr_hugepages=96`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


def gpu_tests(files: str, match: str = "", marked: str = "gpu and not slow") -> str:
    """A run of the GPU tests in ``files``, of those whose names ``match``."""
    paths = " ".join(f"tests/gpu/test_{file}.py" for file in files.split())
    options = f"-q -p no:cacheprovider --tb=short --durations=4 -m '{marked}' -k '{match}'"
    return f"-m pytest {paths} {options}"


class Part(NamedTuple):
    """Commands after ``python``, all at once or one after another; {dir} is a folder to write to.

    Each has ``limit_s`` seconds.
    """

    name: str
    limit_s: float
    commands: Sequence[str]
    at_once: bool = False


PARTS = (
    Part(
        "tests",
        170,
        (
            gpu_tests("device_experts", "decode_size"),
            gpu_tests("device_experts", "k_quants and not 2]", marked="gpu"),
            gpu_tests("device_experts", "not decode_size and not k_quants"),
            gpu_tests("device_linear", "few_rows"),
            gpu_tests("device_linear", "many_rows"),
            gpu_tests("device_linear", "not few_rows and not many_rows"),
            gpu_tests("deepseek_operations"),
            gpu_tests("deepseek_static"),
            gpu_tests("kimi_operations device_products"),
            gpu_tests("kimi_static", "recorded"),
            gpu_tests("kimi_static", "not recorded"),
            gpu_tests("device_step device_input"),
            gpu_tests("cuda_hierarchy cuda_doctor"),
        ),
        at_once=True,
    ),
    Part(
        "memory_tests",
        60,
        (gpu_tests("cuda_arena"), gpu_tests("open_on_device"), gpu_tests("real_dimensions")),
    ),
    Part(
        "whole",
        100,
        (
            "benchmarks/whole_model.py deepseek-v4-flash --dir {dir} --tokens 120 --routed 32",
            "benchmarks/whole_model.py kimi-k3 --dir {dir} --layers 5 --experts 160 --routed 0",
        ),
    ),
    Part(
        "gpu_memory",
        100,
        (
            "benchmarks/gpu_memory.py --parts link,hits,soak",
            "benchmarks/gpu_memory.py --parts disk --dir {dir} --nbytes 2e9 --reads 112 --rest 0.3",
        ),
    ),
    Part("kernels", 70, ("benchmarks/moe_kernels.py",)),
    Part("soak", 100, ("benchmarks/decode_soak.py deepseek-v4-flash --dir {dir}",)),
)


class Clock:
    """What is left of a budget of seconds."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        return self._end - time.monotonic()


def start(command: str, folder: str, log: Path) -> subprocess.Popen[bytes]:
    """``command`` in a process group of its own, all it says into ``log``."""
    with log.open("wb") as file:
        file.write(f"$ python {command}\n".encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, *shlex.split(command.format(dir=folder))],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How ``process`` ended, within ``limit_s`` or by us."""
    try:
        status = process.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "ended at its limit"
    return "ok" if status == 0 else f"exit status {status}"


def run(part: Part, out: Path, folder: str, clock: Clock) -> list[str]:
    """All commands of ``part``, their logs in one; a line of the summary for each."""
    logs = [out / f"{part.name}.{i}.part" for i in range(len(part.commands))]
    begin = time.monotonic()
    lines, waiting = [], []
    for command, log in zip(part.commands, logs, strict=True):
        if clock.left() <= 0:
            log.write_text(f"$ python {command}\nleft out: no time\n", "utf-8")
            lines.append(f"{part.name}: left out: {command}")
            continue
        process = start(command, folder, log)
        waiting.append((process, log, time.monotonic() + part.limit_s))
        if not part.at_once:
            lines += [line_of(part, *waiting.pop(), clock, begin)]
    lines += [line_of(part, *each, clock, begin) for each in waiting]
    with (out / f"{part.name}.txt").open("wb") as whole:
        for log in logs:
            whole.write(log.read_bytes() + b"\n")
            log.unlink()
    return lines


def line_of(
    part: Part,
    process: subprocess.Popen[bytes],
    log: Path,
    deadline: float,
    clock: Clock,
    begin: float,
) -> str:
    """Wait for ``process``; what the summary says of it."""
    how = ended(process, min(deadline - time.monotonic(), clock.left()))
    said = log.read_text("utf-8", errors="replace").splitlines()
    found = f"; {said[-1]}" if "-m pytest" in said[0] else ""
    command = said[0].removeprefix("$ python ")
    return f"{part.name} {time.monotonic() - begin:.0f} s: {how}: {command}{found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive")
    parser.add_argument("--budget", type=float, default=530, help="seconds for all parts")
    parser.add_argument("--only", default=",".join(part.name for part in PARTS))
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    clock = Clock(arguments.budget)
    summary = arguments.out / "summary.txt"
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="gpu-session-") as folder:
        # Kernels compiled by one process are there for the next.
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        for part in PARTS:
            if part.name not in wanted:
                continue
            lines = run(part, arguments.out, folder, clock)
            print("\n".join(lines), flush=True)
            with summary.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
