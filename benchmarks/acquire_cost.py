"""What an acquire costs when everything is resident, and what choosing a victim costs.

    python benchmarks/acquire_cost.py [--rounds 2000]

Prints a table of microseconds: acquire + release of 6 and of 16 resident experts, awaited in the
hierarchy's own loop, without and with a trace, and through a threaded hierarchy, awaited and
blocking; and one eviction with all slots but one pinned, for 10 to 10,000 slots. No disk is read
meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import TYPE_CHECKING

from machine import describe_machine

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import POLICIES, make_policy
from tieredmoe.residency import Residency
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_spec
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

N_LAYERS, N_EXPERTS = 8, 64
SIZES = (6, 16)
SLOTS = (10, 1_000, 10_000)
TRACE_EVENTS = 10_000


def row(what: str, nanoseconds: list[int]) -> float:
    """Print one line of the table; the median in microseconds."""
    microseconds = [ns / 1e3 for ns in nanoseconds]
    tenths = statistics.quantiles(microseconds, n=10)
    median = statistics.median(microseconds)
    print(f"{what:<58}{len(microseconds):>7}{tenths[0]:>9.1f}{median:>9.1f}{tenths[-1]:>9.1f}")
    return median


async def resident_hierarchy(trace_events: int = 0) -> Hierarchy:
    """Every expert of a small model in the slots of its only tier."""
    pack = TinyPack(tiny_spec(layers=range(N_LAYERS), n_experts=N_EXPERTS, top_k=6, role_nbytes=8))
    n_slots = N_LAYERS * N_EXPERTS
    top = Tier(
        name="top",
        source=PackSource(pack, MemoryBackend([pack.image], alignment=4096)),
        arena=host_arena(n_slots),
        policy=make_policy("lfu_lru", n_slots=n_slots, layers=pack.spec.layers, top_k=6),
    )
    hierarchy = Hierarchy(top, pack.spec, trace_events=trace_events)
    for layer in pack.spec.layers:
        async with hierarchy.acquire(layer, range(N_EXPERTS)) as lease:
            await lease.ready()
    return hierarchy


def working_sets(n_experts: int, rounds: int) -> list[tuple[int, list[int]]]:
    """Layer after layer, as a model asks, and each time other experts."""
    return [
        (i % N_LAYERS, [(i * 7 + j * 3) % N_EXPERTS for j in range(n_experts)])
        for i in range(rounds)
    ]


async def awaited(acquire: Callable, sets: list[tuple[int, list[int]]]) -> list[int]:
    times = []
    for layer, experts in sets:
        begin = time.perf_counter_ns()
        (await acquire(layer, experts)).release()
        times.append(time.perf_counter_ns() - begin)
    return times


def blocking(acquire: Callable, sets: list[tuple[int, list[int]]]) -> list[int]:
    times = []
    for layer, experts in sets:
        begin = time.perf_counter_ns()
        acquire(layer, experts).release()
        times.append(time.perf_counter_ns() - begin)
    return times


async def measure_own_loop(rounds: int) -> None:
    async with (
        await resident_hierarchy() as hierarchy,
        await resident_hierarchy(TRACE_EVENTS) as traced,
    ):
        for n in SIZES:
            sets = working_sets(n, rounds)
            times: dict[str, list[int]] = {"": [], ", traced": []}
            for i in range(0, rounds, 100):  # in turns: the machine is another every second
                for each, into in zip((hierarchy, traced), times.values(), strict=True):
                    into.extend(await awaited(each.acquire, sets[i : i + 100]))
            for how, taken in times.items():
                row(f"{n} resident experts, in the hierarchy's own loop{how}", taken)


def measure_threaded(rounds: int) -> None:
    with ThreadedHierarchy.open(resident_hierarchy) as hierarchy:
        for n in SIZES:
            sets = working_sets(n, rounds)
            row(
                f"{n} resident experts, threaded, blocking",
                blocking(hierarchy.acquire_blocking, sets),
            )
            times = asyncio.run(awaited(hierarchy.acquire, sets))
            row(f"{n} resident experts, threaded, awaited", times)


def eviction_times(policy: str, n_slots: int, rounds: int) -> list[int]:
    """Time admissions of one absent expert each, into the slot of the only one not pinned."""
    residency = Residency(
        n_slots, make_policy(policy, n_slots=n_slots, layers=range(n_slots + rounds), top_k=1)
    )
    keys = (ExpertKey(i, 0) for i in itertools.count())
    for key in itertools.islice(keys, n_slots):
        residency.commit(residency.admit([key]).to_fill[0])
    residency.unpin(residency.entries[ExpertKey(n_slots // 2, 0)])
    times = []
    for key in itertools.islice(keys, rounds):
        begin = time.perf_counter_ns()
        entry = residency.admit([key]).to_fill[0]
        times.append(time.perf_counter_ns() - begin)
        residency.commit(entry)
        residency.unpin(entry)
    assert residency.evictions == rounds
    return times


def measure_victims(rounds: int) -> None:
    for policy in POLICIES:
        medians = [
            row(
                f"evict one of {n_slots:,} slots, the others pinned, {policy}",
                eviction_times(policy, n_slots, rounds),
            )
            for n_slots in SLOTS
        ]
        print(f"{'':<8}slowest to fastest, by the median: {max(medians) / min(medians):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="acquires per line")
    rounds = parser.parse_args().rounds
    print(describe_machine())
    print(f"{'µs':<58}{'n':>7}{'p10':>9}{'median':>9}{'p90':>9}")
    asyncio.run(measure_own_loop(rounds))
    measure_threaded(rounds)
    measure_victims(rounds)


if __name__ == "__main__":
    main()
