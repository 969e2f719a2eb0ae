"""Timing of kernels on a device: random weights, graphs of many calls, a copy to compare with."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

if TYPE_CHECKING:
    from collections.abc import Callable


def random_weights(kind: int, n: int, generator: np.random.Generator) -> torch.Tensor:
    """Bytes of ``n`` weights, all of whose floats are finite and scales small."""
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[T(kind)]
    blocks = generator.integers(0, 256, (n // n_weights, n_bytes), dtype=np.uint8)
    if kind == T.BF16:
        return (
            torch.from_numpy(generator.standard_normal(n, np.float32)).bfloat16().view(torch.uint8)
        )
    halves = {T.Q8_0: (0,), T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q6_K: (208,)}.get(T(kind), ())
    for at in halves:
        blocks[:, at : at + 2] = np.float16(1e-3).reshape(1).view(np.uint8)
    if kind == T.MXFP4:
        blocks[:, 0] = generator.integers(117, 122, len(blocks))
    return torch.from_numpy(blocks.reshape(-1))


def measured(work: Callable[[int], object], n: int, replays: int) -> list[float]:
    """Microseconds per call of ``work(0..n-1)``, from replays of one graph of them all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(n):
            work(i)
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record(stream)
            graph.replay()
            end.record(stream)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / n)
    return times[2:]


def copy_bandwidth(replays: int) -> float:
    """GB/s, reads and writes; not in a graph, whose copies go another and slower way."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        rates.append(2**31 / start.elapsed_time(end) / 1e6)
    rates = rates[2:]
    print(
        f"copy: median {statistics.median(rates):.0f} GB/s, "
        f"{min(rates):.0f} to {max(rates):.0f}, n = {len(rates)}"
    )
    return statistics.median(rates)


def row(what: str, times: list[float], nbytes: int, copy: float) -> None:
    us = statistics.median(times)
    rate = nbytes / us / 1e3
    print(
        f"{what:<58}{len(times):>4}{min(times):>9.1f}{us:>9.1f}{max(times):>9.1f}"
        f"{rate:>8.0f}{rate / copy:>7.1%}",
        flush=True,
    )
