"""The read rate of a threaded hierarchy while its caller is busy.

    python benchmarks/busy_caller.py [--dir DIR] [--nbytes 3e9] [--rounds 9] [--backend auto]
        [--window MIB] [--experts 16]

Every expert is a miss. The caller keeps three working sets on their way, each of as many experts of
12 MiB as a layer wants at once (``--experts``: 16 in Kimi-K3, 6 in DeepSeek-V4).
What it does until the oldest has landed is the subject: await it (idle), block outside Python
without the GIL (as when waiting for a device), spin in Python, the same with a shorter switch
interval (`sys.setswitchinterval`, the application's to choose), or sit in C code that keeps the
GIL. The rates are compared within each round. Writes a scratch file into DIR, which should be on
the disk of interest, and deletes it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from machine import describe_machine

from tieredmoe.backends import open_backend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostPool
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.records import Extents, whole_record
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import ROLES, ExpertKey, ExpertLayout, MoESpec
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.threaded_lease import ThreadedLease

RECORD_NBYTES = 12 << 20
DEPTH = 3
NAP_US = 10_000
"""How long one call outside Python lasts: a layer on a device takes about as long."""
SWITCH_S = 5e-4


class Scratch:
    """A file of records, one layer of them, none of which means anything."""

    def __init__(
        self, path: Path, *, nbytes: int, top_k: int, backend: str, window_nbytes: int | None
    ) -> None:
        n_experts = nbytes // RECORD_NBYTES // top_k * top_k
        role = (0, (RECORD_NBYTES // 12, 1), RECORD_NBYTES // 3)
        layout = ExpertLayout.build(dict.fromkeys(ROLES, role))
        self.spec = MoESpec("scratch", n_experts, top_k, {0: layout})
        self.path = path
        self.backend = backend
        self.window_nbytes = window_nbytes
        block = os.urandom(RECORD_NBYTES)
        with path.open("wb") as file:
            for _ in range(n_experts):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def extents(self, key: ExpertKey) -> Extents:
        record = Extent(0, key.expert * RECORD_NBYTES, RECORD_NBYTES)
        return whole_record(record, self.spec.layouts[0])

    async def hierarchy(self) -> Hierarchy:
        backend = open_backend(self.backend, [self.path], window_nbytes=self.window_nbytes)
        top_k = self.spec.top_k
        n_slots = (DEPTH + 1) * top_k
        pool = HostPool.allocate(n_slots * RECORD_NBYTES)
        region = pool.carve(n_slots * RECORD_NBYTES)
        pool.close()
        top = Tier(
            name="top",
            source=PackSource(self, backend),
            arena=HostArena(region, n_slots=n_slots, slot_nbytes=RECORD_NBYTES),
            policy=make_policy("lru", n_slots=n_slots, layers=(0,), top_k=top_k),
        )
        return Hierarchy(top, self.spec)

    def working_sets(self) -> Iterator[range]:
        top_k = self.spec.top_k
        return itertools.cycle(range(i, i + top_k) for i in range(0, self.spec.n_experts, top_k))


def landed(lease: ThreadedLease) -> bool:
    return len(lease.slots) == len(lease.experts)


def block_without_gil(lease: ThreadedLease) -> None:
    usleep = ctypes.CDLL(None).usleep
    while not landed(lease):
        usleep(NAP_US)


def spin_in_python(lease: ThreadedLease) -> None:
    while not landed(lease):
        for _ in range(1000):
            pass


def spin_and_switch_sooner(lease: ThreadedLease) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        spin_in_python(lease)
    finally:
        sys.setswitchinterval(interval)


def block_with_gil(lease: ThreadedLease) -> None:
    usleep = ctypes.PyDLL(None).usleep
    while not landed(lease):
        usleep(NAP_US)


async def drive_idle(hierarchy: ThreadedHierarchy, sets: Iterator[range], n_sets: int) -> None:
    flying: deque[ThreadedLease] = deque()
    for experts in itertools.islice(sets, n_sets):
        flying.append(await hierarchy.acquire(0, experts))
        if len(flying) == DEPTH:
            with flying.popleft() as lease:
                await lease.ready()
    for lease in flying:
        with lease:
            await lease.ready()


def drive(
    hierarchy: ThreadedHierarchy,
    sets: Iterator[range],
    n_sets: int,
    until_landed: Callable[[ThreadedLease], None],
) -> None:
    flying: deque[ThreadedLease] = deque()
    for experts in itertools.islice(sets, n_sets):
        flying.append(hierarchy.acquire_blocking(0, experts))
        if len(flying) == DEPTH:
            with flying.popleft() as lease:
                until_landed(lease)
    for lease in flying:
        with lease:
            until_landed(lease)


def measure(hierarchy: ThreadedHierarchy, scratch: Scratch, rounds: int) -> dict[str, list[float]]:
    """GB/s of each kind of caller in each round, in rotating order."""
    sets = scratch.working_sets()
    n_sets = scratch.spec.n_experts // scratch.spec.top_k
    callers = {
        "idle (awaits)": lambda: asyncio.run(drive_idle(hierarchy, sets, n_sets)),
        "blocks without the GIL": lambda: drive(hierarchy, sets, n_sets, block_without_gil),
        "spins in Python": lambda: drive(hierarchy, sets, n_sets, spin_in_python),
        f"spins, switching every {SWITCH_S * 1e3:g} ms": lambda: drive(
            hierarchy, sets, n_sets, spin_and_switch_sooner
        ),
        "in C code with the GIL": lambda: drive(hierarchy, sets, n_sets, block_with_gil),
    }
    rates: dict[str, list[float]] = {name: [] for name in callers}
    for i in range(rounds):
        names = list(callers)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before = hierarchy.stats()
            begin = time.perf_counter()
            callers[name]()
            seconds = time.perf_counter() - begin
            counted = hierarchy.stats().since(before)
            assert counted.cache_hits == counted.cache_joins == 0, "a hit among the misses"
            rates[name].append(counted.pack_read_bytes / seconds / 1e9)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="where the scratch file goes")
    parser.add_argument("--nbytes", type=float, default=3e9, help="its size; read once per line")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="auto", help="auto, uring, threads or buffered")
    parser.add_argument(
        "--window", type=int, default=None, help="MiB in flight at most (default: the device's)"
    )
    parser.add_argument("--experts", type=int, default=16, help="of a working set")
    args = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        scratch = Scratch(
            Path(folder) / "experts.bin",
            nbytes=int(args.nbytes),
            top_k=args.experts,
            backend=args.backend,
            window_nbytes=args.window and args.window << 20,
        )
        with ThreadedHierarchy.open(scratch.hierarchy) as hierarchy:
            stats = hierarchy.stats()
            window = f"{args.window} MiB" if args.window else "the device's"
            print(
                f"{folder}: {stats.backend}, direct I/O {stats.direct_io}, window {window}; "
                f"{DEPTH} sets of {args.experts} experts on their way"
            )
            rates = measure(hierarchy, scratch, args.rounds)
    idle = rates["idle (awaits)"]
    print(
        f"{'caller':<30}{'rounds':>7}{'GB/s':>7}{'min':>7}{'max':>7}"
        f"{'of idle':>9}{'min':>7}{'max':>7}"
    )
    for name, each in rates.items():
        ratios = [rate / base for rate, base in zip(each, idle, strict=True)]
        print(
            f"{name:<30}{len(each):>7}{statistics.median(each):>7.2f}{min(each):>7.2f}"
            f"{max(each):>7.2f}{statistics.median(ratios):>9.2f}{min(ratios):>7.2f}"
            f"{max(ratios):>7.2f}"
        )


if __name__ == "__main__":
    main()
