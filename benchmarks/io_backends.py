"""Each way of reading records from a disk against what fio gets from it, in one run.

    python benchmarks/io_backends.py [--dir DIR] [--nbytes 3e9] [--record 12582912]
        [--in-flight 4,8] [--rounds 9] [--ways fio,uring,threads,buffered,mmap] [--splits 1]

Whole records at random places, so many in flight, into a pool of huge pages; a record is read once
per run at most. Each round runs every way once, in an order shuffled anew, and ratios are taken
within the round. Every run is preceded by the same rest: a drive that is limited in bytes per
second lets whoever comes after a slow or a resting neighbour run ahead of its limit for a while.
fio reads as many blocks of the same size, no block twice, with as many in flight, io_uring, direct,
its buffers on huge pages too: have enough of them (`sysctl vm.nr_hugepages=N`, and set it back), or
say `--fio-memory malloc`, which gives a slower fio and flatters all others. With `--splits 1,4` the
direct backends read a record also as four parallel parts, shown as `uring ÷4`.

`buffered` and `mmap` (pages of a mapping faulted in by as many threads as records in flight) start
with an empty page cache. A run that the page cache could have served, or that a direct way left in
it, is refused. Rates are of the steady state, fio's by its log: from the landing of as many records
as are in flight to the landing of the last but as many. Processor time is that of this process, or
fio's own. Writes a scratch file of random bytes into DIR, which should be on the disk of interest,
and deletes it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from machine import describe_machine

from tieredmoe.backends import ReadOp, open_backend
from tieredmoe.backends.kernel import cached_nbytes, drop_cached
from tieredmoe.errors import BackendUnavailableError, DirectIOUnavailableError
from tieredmoe.memory import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.memory.pages import HostRegion

WAYS = ("fio", "uring", "threads", "buffered", "mmap")
STAMP_NBYTES = 8
CACHED_SHARE_MAX = 0.01


class Run(NamedTuple):
    """What one run read, in how long, with how much processor time."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @classmethod
    def steady(cls, landed: list[float], n_in_flight: int, record_nbytes: int, cpu: float) -> Run:
        """The run between filling and draining the queue; ``landed`` are the records' times."""
        times = sorted(landed)
        n = len(times) - 2 * n_in_flight
        seconds = times[-n_in_flight - 1] - times[n_in_flight - 1]
        return cls(n * record_nbytes, seconds, cpu * n / len(times))

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / self.nbytes * 1e9


class Scratch:
    """A file of records of random bytes, each with its number at both ends."""

    def __init__(self, path: Path, *, nbytes: int, record_nbytes: int) -> None:
        self.path = path
        self.record_nbytes = record_nbytes
        self.n_records = nbytes // record_nbytes
        record = bytearray(os.urandom(record_nbytes))
        with path.open("wb") as file:
            for i in range(self.n_records):
                record[:STAMP_NBYTES] = record[-STAMP_NBYTES:] = i.to_bytes(STAMP_NBYTES, "little")
                file.write(record)
            file.flush()
            os.fsync(file.fileno())

    @property
    def nbytes(self) -> int:
        return self.n_records * self.record_nbytes

    def some(self, n: int) -> list[int]:
        """``n`` different records."""
        return random.sample(range(self.n_records), n)

    def check(self, record: int, view: memoryview) -> None:
        stamp = record.to_bytes(STAMP_NBYTES, "little")
        if view[:STAMP_NBYTES] != stamp or view[-STAMP_NBYTES:] != stamp:
            sys.exit(f"record {record}: wrong bytes")

    def cached_share(self) -> float:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            cached = cached_nbytes(fd, 0, self.nbytes)
        finally:
            os.close(fd)
        if cached is None:
            sys.exit("this kernel does not say what the page cache holds: nothing can be trusted")
        return cached / self.nbytes

    def empty_cache(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            drop_cached(fd, 0, self.nbytes)
        finally:
            os.close(fd)
        self.refuse_cached("the page cache keeps what it was asked to drop")

    def refuse_cached(self, fact: str) -> None:
        share = self.cached_share()
        if share > CACHED_SHARE_MAX:
            sys.exit(f"{fact}: it holds {share:.0%} of the file; these numbers would be its own")


class Slots:
    """The targets: one record each, in huge pages."""

    def __init__(self, region: HostRegion, record_nbytes: int) -> None:
        starts = range(0, region.nbytes, record_nbytes)
        self.views = [region.view[start : start + record_nbytes] for start in starts]
        self.addresses = [region.address + start for start in starts]


def by_backend(name: str, scratch: Scratch, slots: Slots, n_reads: int, splits: int) -> Run:
    """Read through a backend; every slot reads its next record as soon as it has one."""

    async def read_all() -> Run:
        backend = open_backend(name, [scratch.path], read_splits=splits)
        records = iter(scratch.some(n_reads))
        landed: list[float] = []

        async def fill(view: memoryview, address: int) -> None:
            for record in records:
                offset = record * scratch.record_nbytes
                await backend.submit([ReadOp(0, offset, view, address)])[0]
                landed.append(time.perf_counter())
                scratch.check(record, view)

        cpu = time.process_time()
        await asyncio.gather(*map(fill, slots.views, slots.addresses))
        cpu = time.process_time() - cpu
        await backend.close()
        return Run.steady(landed, len(slots.views), scratch.record_nbytes, cpu)

    return asyncio.run(read_all())


def by_page_faults(scratch: Scratch, slots: Slots, n_reads: int) -> Run:
    """Copy out of a cold mapping, as a loader does that maps its model."""
    with scratch.path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), scratch.nbytes, mmap.MAP_PRIVATE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    records = iter(scratch.some(n_reads))
    landed: list[float] = []

    def fill(view: memoryview, address: int) -> None:
        for record in records:
            source = start + record * scratch.record_nbytes
            ctypes.memmove(address, source, scratch.record_nbytes)
            landed.append(time.perf_counter())
            scratch.check(record, view)

    with ThreadPoolExecutor(len(slots.views)) as threads:
        cpu = time.process_time()
        list(threads.map(fill, slots.views, slots.addresses))
        cpu = time.process_time() - cpu
    mapping.close()
    return Run.steady(landed, len(slots.views), scratch.record_nbytes, cpu)


def by_fio(scratch: Scratch, n_in_flight: int, n_reads: int, memory: str) -> Run:
    """What fio gets: the disk's limit at this block size and queue depth."""
    block = scratch.record_nbytes
    command = [
        "fio",
        "--name=limit",
        f"--filename={scratch.path}",
        f"--size={scratch.nbytes}",
        "--rw=randread",
        f"--bs={block}",
        f"--blockalign={block}",
        f"--iodepth={n_in_flight}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--iomem={memory}",
        "--randrepeat=0",
        f"--io_size={n_reads * block}",
        f"--write_lat_log={scratch.path}",  # when each read landed, in milliseconds
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["read"]["runtime"] / 1e3
    log = Path(f"{scratch.path}_clat.1.log").read_text().splitlines()
    landed = [int(line.split(",")[0]) / 1e3 for line in log]
    assert len(landed) == n_reads, "fio logged other reads than it was asked for"
    return Run.steady(landed, n_in_flight, block, cpu)


def ways_of(args: argparse.Namespace, scratch: Scratch, slots: Slots) -> dict[str, Callable]:
    """The runs to compare, by name."""
    n, n_in_flight = min(args.reads, scratch.n_records), len(slots.views)
    ways: dict[str, Callable[[], Run]] = {}
    for name in args.ways:
        if name == "fio":
            ways[name] = lambda: by_fio(scratch, n_in_flight, n, args.fio_memory)
        elif name == "mmap":
            ways[name] = lambda: by_page_faults(scratch, slots, n)
        else:
            for splits in args.splits if name != "buffered" else [1]:
                label = name if splits == 1 else f"{name} ÷{splits}"
                ways[label] = lambda name=name, splits=splits: by_backend(
                    name, scratch, slots, n, splits
                )
    return ways


def measure(
    ways: dict[str, Callable], scratch: Scratch, *, rounds: int, rest_s: float
) -> dict[str, list[Run]]:
    """Every way once per round, in shuffled order, each from an empty page cache."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            scratch.empty_cache()
            time.sleep(rest_s)
            runs[name].append(ways[name]())
            if name not in {"buffered", "mmap"}:
                scratch.refuse_cached(f"{name} went through the page cache")
    return runs


def rows(runs: dict[str, list[Run]]) -> Iterator[str]:
    """The table: rates, ratios to fio and to mmap within the rounds, processor time."""
    yield (
        f"{'way':<12}{'rounds':>7}{'GB/s':>7}{'min':>7}{'max':>7}"
        f"{'of fio':>9}{'min':>7}{'max':>7}{'of mmap':>9}{'CPU-s/GB':>10}"
    )
    for name, each in runs.items():
        rates = [run.rate for run in each]
        line = (
            f"{name:<12}{len(each):>7}{statistics.median(rates):>7.2f}"
            f"{min(rates):>7.2f}{max(rates):>7.2f}"
        )
        for other, width in (("fio", 9), ("mmap", 9)):
            if other not in runs:
                line += f"{'-':>{width}}" + ("" if other == "mmap" else f"{'-':>7}{'-':>7}")
                continue
            ratios = [rate / base.rate for rate, base in zip(rates, runs[other], strict=True)]
            line += f"{statistics.median(ratios):>{width}.2f}"
            if other == "fio":
                line += f"{min(ratios):>7.2f}{max(ratios):>7.2f}"
        yield line + f"{statistics.median(run.cpu_per_gb for run in each):>10.3f}"


def check_tools(args: argparse.Namespace) -> None:
    """Exit with what is missing rather than compare with nothing, or unfairly."""
    if "fio" not in args.ways:
        return
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (apt install fio); or leave it out: --ways uring,threads")
    if args.fio_memory.endswith("huge"):
        meminfo = Path("/proc/meminfo").read_text().splitlines()
        numbers = dict(line.split(":", 1) for line in meminfo)
        n_free = int(numbers["HugePages_Free"])
        n_wanted = -(-max(args.in_flight) * args.record // (2 << 20)) + 8
        if n_free < n_wanted:
            sys.exit(
                f"fio's buffers need {n_wanted} huge pages and {n_free} are free: "
                f"sysctl vm.nr_hugepages={n_wanted} (and set it back), or --fio-memory malloc"
            )


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(WAYS):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(WAYS)}")
        return chosen

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="where the scratch file goes")
    parser.add_argument("--nbytes", type=float, default=3e9, help="its size")
    parser.add_argument("--record", type=int, default=12 << 20, help="bytes; a multiple of 4096")
    parser.add_argument("--in-flight", type=numbers, default=[4, 8], help="records at once")
    parser.add_argument("--reads", type=int, default=120, help="records per run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before every run")
    parser.add_argument("--ways", type=names, default=list(WAYS))
    parser.add_argument("--splits", type=numbers, default=[1], help="parts of a record at once")
    parser.add_argument("--fio-memory", default="mmaphuge", help="fio's iomem=")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.reads < 4 * max(args.in_flight):
        sys.exit("--reads: fewer than four times the records in flight have no steady state")
    check_tools(args)
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = Path(folder) / "records.bin"
        scratch = Scratch(path, nbytes=int(args.nbytes), record_nbytes=args.record)
        for n_in_flight in args.in_flight:
            pool = HostPool.allocate(n_in_flight * args.record)
            slots = Slots(pool.carve(n_in_flight * args.record), args.record)
            share = "unknown" if pool.huge_share is None else f"{pool.huge_share:.0%}"
            print(
                f"\n{n_in_flight} records of {args.record} bytes in flight, {args.reads} a run, "
                f"{share} huge pages, fio on {args.fio_memory}"
            )
            try:
                runs = measure(
                    ways_of(args, scratch, slots), scratch, rounds=args.rounds, rest_s=args.rest
                )
            except (BackendUnavailableError, DirectIOUnavailableError) as error:
                sys.exit(f"{error} (or leave it out of --ways)")
            print("\n".join(rows(runs)), flush=True)


if __name__ == "__main__":
    main()
