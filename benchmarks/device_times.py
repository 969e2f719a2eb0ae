"""Times of a device and of the host that drives it, and the line that shows one.

Of a device: events around work that is enqueued without a pause, so that the host's own time is
hidden behind it. Of the host: a clock around work that it only enqueues.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

N_UNTIMED = 3
"""Replays before those timed: the first two of a recording run it and record it."""


def replayed(recordings: Sequence[Callable[[], None]], replays: int) -> list[float]:
    """Microseconds of the device for all ``recordings``, one after another, each time."""
    times = []
    for _ in range(N_UNTIMED + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for recording in recordings:
            recording()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[N_UNTIMED:]


def host_times(work: Callable[[], object], n: int) -> list[float]:
    """Microseconds that the host takes for ``work`` when the device is idle."""
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


async def host_path(
    stepper: Any, token: Callable[[], Awaitable[object]], n: int
) -> dict[str, list[float]]:
    """Microseconds of the host between the graphs of ``n`` tokens, each made by ``token``.

    The first and the third of them hold up the device.
    """
    marks: list[tuple[bool, int, int]] = []

    def noted(call: Callable[[], Any], *, is_launch: bool) -> Callable[[], Any]:
        def noting() -> Any:
            begin = time.perf_counter_ns()
            result = call()
            marks.append((is_launch, begin, time.perf_counter_ns()))
            return result

        return noting

    recordings, wait = (stepper.pieces, stepper.with_sums), stepper._ids.wait  # noqa: SLF001 (no public face)
    stepper.pieces, stepper.with_sums = (
        tuple(noted(recording, is_launch=True) for recording in each) for each in recordings
    )
    stepper._ids.wait = noted(wait, is_launch=False)  # noqa: SLF001
    times: dict[str, list[float]] = {
        "to the first launch": [],
        "launch to waiting for ids": [],
        "ids there to launched": [],
        "last launch to the next id": [],
    }
    for _ in range(n):
        marks.clear()
        begin = time.perf_counter_ns()
        await token()
        end = time.perf_counter_ns()
        times["to the first launch"].append((marks[0][1] - begin) / 1e3)
        times["last launch to the next id"].append((end - marks[-1][2]) / 1e3)
        for (_, _, before), (is_launch, after, done) in pairwise(marks):
            if is_launch:
                times["ids there to launched"].append((done - before) / 1e3)
            else:
                times["launch to waiting for ids"].append((after - before) / 1e3)
    stepper.pieces, stepper.with_sums = recordings
    stepper._ids.wait = wait  # noqa: SLF001
    return times


def copy_bandwidth(device: torch.device, n: int) -> list[float]:
    """GB/s of copies, reads and writes."""
    nbytes = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        times = replayed([lambda: target.copy_(source)], n)
    else:
        times = []
        for _ in range(n):
            begin = time.perf_counter()
            target.copy_(source)
            times.append((time.perf_counter() - begin) * 1e6)
    return [2 * nbytes / us / 1e3 for us in times]


def row(what: str, times: Sequence[float], *, nbytes: int = 0, copy: float = 0.0) -> None:
    """One line: µs, and beside the floor of ``nbytes`` where there is one."""
    us = statistics.median(times)
    line = f"{what:<28}{len(times):>5}{min(times):>11.1f}{us:>11.1f}{max(times):>11.1f}"
    if nbytes:
        floor = nbytes / copy / 1e3
        line += f"{nbytes / 1e6:>10.1f}{floor:>10.1f}{floor / us:>8.1%}{nbytes / us / 1e3:>8.0f}"
    print(line, flush=True)
