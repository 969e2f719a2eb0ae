"""Does it stay as fast and as small? 200,000 acquires over a skewed trace, in one process.

    python benchmarks/soak.py [--acquires 200000]

Routing is Zipf-like per layer (each layer favours its own experts), 43 layers, 64 experts, top-6, a
cache of a seventh of them, records in memory so that the disk is not what is measured.

Two things change with time and are no drift. A machine gets slower and faster by itself, so after
every 20 acquires a fixed piece of work is timed that has nothing to do with the library, and each
acquire is divided by the one at hand (the median of five). And the share of hits falls while the
policy's counts fill up, so a tenth's figure is a mean of medians, one for each number of misses,
weighted by how often that number comes in the whole run.

Printed for each tenth are both times and the quotient, and in the end that of the last tenth over
that of the second (the first warms up), and the growth of the resident set since then.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from pathlib import Path

import numpy as np
from machine import describe_machine

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import PAGE_NBYTES
from tieredmoe.testing import TinyPack, host_arena, tiny_spec
from tieredmoe.tier import Tier

N_LAYERS, N_EXPERTS, TOP_K = 43, 64, 6
EVERY = 20
"""Acquires between two pieces of reference work; one takes about as long as one acquire."""
N_SEEN_MIN = 50
"""Acquires with one number of misses that a tenth must have for their median to count."""


def resident_nbytes() -> int:
    """The resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def routing(n_acquires: int) -> np.ndarray:
    """Experts [n_acquires, top-k]: popularity falls as 1/rank, ranks differ between layers."""
    rng = np.random.default_rng(7)
    popularity = 1 / np.arange(1, N_EXPERTS + 1)
    ranks = np.stack([rng.permutation(N_EXPERTS) for _ in range(N_LAYERS)])
    # The k largest of log-weights with Gumbel noise are a draw without replacement.
    chosen = np.empty((n_acquires, TOP_K), np.int8)
    for start in range(0, n_acquires, 10_000):
        n = min(10_000, n_acquires - start)
        noise = rng.gumbel(size=(n, N_EXPERTS))
        top = np.argpartition(-(np.log(popularity) + noise), TOP_K, axis=1)[:, :TOP_K]
        layers = (start + np.arange(n)) % N_LAYERS
        chosen[start : start + n] = ranks[layers[:, None], top]
    return chosen


class Reference:
    """The same work each time, of the kind and size of an acquire's, and none of it ours.

    Futures, callbacks, small objects, lookups in a table as large as the model's, and copies of
    records all over an image as large as the pack.
    """

    def __init__(self, n_records: int, n_slots: int) -> None:
        self._table = {(i % N_LAYERS, i // N_LAYERS): [i] for i in range(n_records)}
        self._image = bytes(np.ones(n_records * PAGE_NBYTES, np.uint8))
        self._slots = memoryview(bytearray(n_slots * PAGE_NBYTES))
        self._n_records, self._n_slots = n_records, n_slots
        self._at = 0

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(4):
            futures = []
            for _ in range(TOP_K):
                self._at = (self._at + 7919) % self._n_records
                future = loop.create_future()
                loop.call_soon(self._land, self._at, future)
                futures.append((future, [self._at]))
            for future, _ in futures:
                await future

    def _land(self, i: int, future: asyncio.Future[None]) -> None:
        key = (i % N_LAYERS, i // N_LAYERS)
        self._table[key] = [self._table.pop(key)[0]]
        begin, slot = i * PAGE_NBYTES, i % self._n_slots * PAGE_NBYTES
        self._slots[slot : slot + PAGE_NBYTES] = self._image[begin : begin + PAGE_NBYTES]
        future.set_result(None)


async def step(hierarchy: Hierarchy, layer: int, experts: list[int]) -> int:
    """What is measured: acquire, all landed, release; returns how many were not resident."""
    lease = await hierarchy.acquire(layer, experts)
    await lease.ready()
    lease.release()
    return len(lease.misses)


def chain(pack: TinyPack, n_slots: int) -> Tier:
    """Eight staging slots and ``n_slots`` above them, over a pack in memory."""
    source = PackSource(pack, MemoryBackend([bytes(pack.image)], alignment=4096))
    for name, slots in (("lru", 8), ("lfu_lru", n_slots)):
        policy = make_policy(name, n_slots=slots, layers=pack.spec.layers, top_k=TOP_K)
        source = Tier(name=name, source=source, arena=host_arena(slots), policy=policy)
    return source


async def soak(n_acquires: int) -> None:
    """Run and print."""
    spec = tiny_spec(layers=range(N_LAYERS), n_experts=N_EXPERTS, top_k=TOP_K, role_nbytes=64)
    n_slots = spec.n_records // 7
    chosen = routing(n_acquires)
    seconds = np.ones(n_acquires)  # not zeros: their pages would come one by one
    misses = np.ones(n_acquires, np.int8)
    beside = np.ones(n_acquires // EVERY)
    reference = Reference(spec.n_records, n_slots)
    tenth = n_acquires // 10
    grown_from = 0
    async with Hierarchy(chain(TinyPack(spec), n_slots), spec) as hierarchy:
        for i in range(n_acquires):
            if i == tenth:
                gc.collect()
                grown_from = resident_nbytes()
            experts = chosen[i].tolist()
            begin = time.perf_counter()
            misses[i] = await step(hierarchy, i % N_LAYERS, experts)
            seconds[i] = time.perf_counter() - begin
            if i % EVERY == EVERY - 1:
                begin = time.perf_counter()
                await reference.work()
                beside[i // EVERY] = time.perf_counter() - begin
        gc.collect()
        grown = resident_nbytes() - grown_from
        stats = hierarchy.stats()
    print(describe_machine())
    print(f"{n_acquires} acquires of {TOP_K} in {n_slots} slots, {stats.hit_rate:.1%} hits")
    report(seconds * 1e6, misses, beside * 1e6)
    print(f"resident set grew by {grown / 1e6:.2f} MB after the first tenth")


def report(times: np.ndarray, misses: np.ndarray, beside: np.ndarray) -> None:
    """Print a line per tenth, and the last over the second, as measured and over the reference."""
    at_hand = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(beside, 2, "edge"), 5), 1)
    relative = times / np.repeat(at_hand, EVERY)
    tenths = np.array_split(np.arange(len(times)), 10)
    numbers = [
        n for n in range(TOP_K + 1) if min(np.sum(misses[t] == n) for t in tenths) >= N_SEEN_MIN
    ]
    weights = [np.mean(misses == n) for n in numbers]

    def typical(figures: np.ndarray, tenth: np.ndarray) -> float:
        medians = [np.median(figures[tenth][misses[tenth] == n]) for n in numbers]
        return float(np.average(medians, weights=weights))

    measured = [typical(times, tenth) for tenth in tenths]
    quotients = [typical(relative, tenth) for tenth in tenths]
    print(f"{'µs':<10}{'misses':>8}{'p99':>9}{'acquire':>9}{'reference':>11}{'quotient':>10}")
    for i, (tenth, work) in enumerate(zip(tenths, np.array_split(beside, 10), strict=True)):
        print(
            f"tenth {i + 1:<4}{misses[tenth].mean():>8.2f}{np.percentile(times[tenth], 99):>9.1f}"
            f"{measured[i]:>9.1f}{np.median(work):>11.1f}{quotients[i]:>10.3f}"
        )
    print(f"last tenth / second tenth, as measured: {measured[9] / measured[1]:.3f}")
    print(f"last tenth / second tenth, over the reference: {quotients[9] / quotients[1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acquires", type=int, default=200_000)
    asyncio.run(soak(parser.parse_args().acquires))
