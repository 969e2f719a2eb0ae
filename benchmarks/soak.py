"""Does it stay as fast and as small? 200,000 acquires over a skewed trace, in one process.

    python benchmarks/soak.py [--acquires 200000]

Routing is Zipf-like per layer (each layer favours its own experts), 43 layers, 64 experts, top-6, a
cache of a seventh of them, records in memory so that the disk is not what is measured. Printed are
the median and 99th percentile of acquire + landing + release for each tenth of the run, the ratio
of the last tenth to the second (the first warms up), and the growth of the resident set since then.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from pathlib import Path

import numpy as np
from machine import describe_machine

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.testing import TinyPack, host_arena, tiny_spec
from tieredmoe.tier import Tier

N_LAYERS, N_EXPERTS, TOP_K = 43, 64, 6


def resident_nbytes() -> int:
    """The resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def routing(n_acquires: int) -> np.ndarray:
    """Experts [n_acquires, top-k]: popularity falls as 1/rank, ranks differ between layers."""
    rng = np.random.default_rng(7)
    popularity = 1 / np.arange(1, N_EXPERTS + 1)
    ranks = np.stack([rng.permutation(N_EXPERTS) for _ in range(N_LAYERS)])
    # The k largest of log-weights with Gumbel noise are a draw without replacement.
    chosen = np.empty((n_acquires, TOP_K), np.int64)
    for start in range(0, n_acquires, 10_000):
        n = min(10_000, n_acquires - start)
        noise = rng.gumbel(size=(n, N_EXPERTS))
        top = np.argpartition(-(np.log(popularity) + noise), TOP_K, axis=1)[:, :TOP_K]
        layers = (start + np.arange(n)) % N_LAYERS
        chosen[start : start + n] = ranks[layers[:, None], top]
    return chosen


async def soak(n_acquires: int) -> None:
    """Run and print."""
    spec = tiny_spec(layers=range(N_LAYERS), n_experts=N_EXPERTS, top_k=TOP_K, role_nbytes=64)
    pack = TinyPack(spec)
    source = PackSource(pack, MemoryBackend([bytes(pack.image)], alignment=4096))
    n_slots = spec.n_records // 7
    for name, slots in (("lru", 8), ("lfu_lru", n_slots)):
        policy = make_policy(name, n_slots=slots, layers=spec.layers, top_k=TOP_K)
        source = Tier(name=name, source=source, arena=host_arena(slots), policy=policy)
    chosen = routing(n_acquires).tolist()
    seconds = np.zeros(n_acquires)
    tenth = n_acquires // 10
    grown_from = 0
    async with Hierarchy(source, spec) as hierarchy:
        for i, experts in enumerate(chosen):
            if i == tenth:
                gc.collect()
                grown_from = resident_nbytes()
            start = time.perf_counter()
            lease = await hierarchy.acquire(i % N_LAYERS, experts)
            await lease.ready()
            lease.release()
            seconds[i] = time.perf_counter() - start
        gc.collect()
        grown = resident_nbytes() - grown_from
        stats = hierarchy.stats()
    print(describe_machine())
    print(f"{n_acquires} acquires of {TOP_K} in {n_slots} slots, {stats.hit_rate:.1%} hits")
    medians = []
    for i in range(10):
        part = seconds[i * tenth : (i + 1) * tenth] * 1e6
        medians.append(statistics.median(part))
        late = np.percentile(part, 99)
        print(f"  tenth {i + 1:2}: median {medians[-1]:6.1f} µs, p99 {late:7.1f} µs")
    print(f"last tenth / second tenth: {medians[9] / medians[1]:.3f}")
    print(f"resident set grew by {grown / 1e6:.2f} MB after the first tenth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acquires", type=int, default=200_000)
    asyncio.run(soak(parser.parse_args().acquires))
