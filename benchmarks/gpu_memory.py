"""The way of experts onto a GPU, hop by hop, each beside the limit of its hop.

    python benchmarks/gpu_memory.py [--parts link,disk,hits,soak] [--dir DIR] [--nbytes 3e9]
        [--records 13369344,11956224] [--rounds 9] [--reads 160] [--in-flight 8] [--steps 10000]

`link`: copies of whole records from the registered pool into a `CudaArena`, table entries and
fences included, against one large registered buffer copied in pieces of 256 MiB; both timed on the
host from an idle device to an idle device, in turns, ratios within the round.
`disk`: acquires that all miss, from a scratch file of random bytes in DIR into the GPU, against fio
with as many bytes in flight on the same file (io_uring, direct, its buffers on huge pages: have
enough of them, `sysctl vm.nr_hugepages=N`), in turns, each first in every other round; rates are of
the steady state, as in `io_backends.py`. fio asks for the next record whenever one has landed. An
acquire asks for its next four only when all of its four have, so there are --callers of them: with
three the drive's window is full three quarters of the time (simulated), with six always. Every
record's stamps are looked at on the GPU.
`hits`: six resident experts, from router ids on an idle GPU to kernels that could be launched (ids
copied to pinned memory, event, acquire, `wait_on`), and on to the end of `release`.
`soak`: acquires with evictions through a small arena; every byte is compared on the GPU, and what
is allocated after the first tenth and at the end must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from io_backends import STAMP_NBYTES, Run, Scratch, by_fio
from machine import describe_machine

from tieredmoe.backends import open_backend
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.budget import format_size
from tieredmoe.chain import compose
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory import HostArena, HostPool, Part
from tieredmoe.memory.cuda import CudaArena
from tieredmoe.memory.cuda_device import open_device
from tieredmoe.memory.cuda_events import EventFence
from tieredmoe.memory.pinning import PinnedHost
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.records import Extents, whole_record
from tieredmoe.pack.source import PackSource
from tieredmoe.spec import ROLES, ExpertKey, ExpertLayout, MoESpec
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier_plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.pack.source import Records
    from tieredmoe.source import Source

DEVICE = torch.device("cuda", 0)
PIECE_NBYTES = 256 << 20
TOP_K = 6


def flat_spec(n_records: int, record_nbytes: int, *, n_experts: int) -> MoESpec:
    """Records of three roles that fill them."""
    role_nbytes = record_nbytes // 3 // 8 * 8
    layout = ExpertLayout.build(dict.fromkeys(ROLES, (0, (role_nbytes // 8, 2), role_nbytes)))
    assert layout.payload_nbytes == record_nbytes, "choose a multiple of 24 bytes"
    layouts = dict.fromkeys(range(n_records // n_experts), layout)
    return MoESpec("flat", n_experts, TOP_K, layouts)


class FilePack:
    """A scratch file's records as a model's experts."""

    def __init__(self, scratch: Scratch) -> None:
        self.spec = flat_spec(scratch.n_records, scratch.record_nbytes, n_experts=8)
        self._record_nbytes = scratch.record_nbytes

    def number(self, key: ExpertKey) -> int:
        return key.layer * self.spec.n_experts + key.expert

    def extents(self, key: ExpertKey) -> Extents:
        extent = Extent(0, self.number(key) * self._record_nbytes, self._record_nbytes)
        return whole_record(extent, self.spec.layouts[key.layer])


async def open_tiers(source: Source, spec: MoESpec, *, n_slots: int, stage_slots: int) -> Hierarchy:
    """The usual chain over ``source`` with the top tier on the GPU."""
    planned = Plan(n_slots, spec.slot_nbytes, stage_slots, spec.slot_nbytes, on_device=True)
    pool = HostPool.allocate(planned.nbytes)
    arena, fallbacks = open_device("cuda").arena_over(pool, planned, spec, strict=True)
    assert not fallbacks
    top = compose(source, spec, planned, pool, policy="lru", arena=arena)
    pool.close()
    return Hierarchy(top, spec)


def spread(values: list[float], digits: int = 2) -> str:
    return (
        f"{len(values):>7}{min(values):>9.{digits}f}{statistics.median(values):>9.{digits}f}"
        f"{max(values):>9.{digits}f}"
    )


# -- the link --------------------------------------------------------------------------------------


def measure_link(records: list[int], rounds: int) -> None:
    print(f"\n{'GB/s, host to device':<52}{'n':>7}{'min':>9}{'median':>9}{'max':>9}")
    pool = HostPool.allocate(2 * PIECE_NBYTES)
    pinned = PinnedHost.register(pool, device=DEVICE)
    assert pinned.refused is None, pinned.refused
    view = pool.carve(2 * PIECE_NBYTES).view
    pieces = [
        torch.frombuffer(view[i * PIECE_NBYTES : (i + 1) * PIECE_NBYTES], dtype=torch.uint8)
        for i in range(2)
    ]
    target = torch.empty(PIECE_NBYTES, dtype=torch.uint8, device=DEVICE)

    def link() -> float:
        begin = time.perf_counter()
        for i in range(16):
            target.copy_(pieces[i % 2], non_blocking=True)
        torch.cuda.synchronize()
        return 16 * PIECE_NBYTES / (time.perf_counter() - begin) / 1e9

    for record_nbytes in records:
        copies = Copies(record_nbytes)
        copies.run()
        link()
        rates: dict[str, list[float]] = {"link": [], "ours": []}
        for number in range(rounds):
            ways: list[tuple[str, Callable[[], float]]] = [("link", link), ("ours", copies.run)]
            for name, way in ways if number % 2 else ways[::-1]:
                rates[name].append(way())
        ratios = [ours / of for ours, of in zip(rates["ours"], rates["link"], strict=True)]
        size = f"records of {record_nbytes / 2**20:.2f} MiB"
        print(f"{'the link, 256 MiB at a time, between ' + size:<52}{spread(rates['link'])}")
        print(f"{'copy_from, ' + size:<52}{spread(rates['ours'])}")
        print(f"{'  of the link':<52}{spread(ratios, 3)}")
        print(f"{'  µs on the host per copy_from':<52}{spread(copies.host_us, 1)}")
        copies.close()
    pinned.close()
    pool.close()


class Copies:
    """Whole records from eight staging slots into an arena that is full: each evicts another."""

    def __init__(self, record_nbytes: int) -> None:
        self.spec = flat_spec(96, record_nbytes, n_experts=8)
        pool = HostPool.allocate(8 * record_nbytes)
        pinned = PinnedHost.register(pool, device=DEVICE, record_nbytes=record_nbytes)
        assert pinned.refused is None, pinned.refused
        self.host = HostArena(pool.carve(8 * record_nbytes), n_slots=8, slot_nbytes=record_nbytes)
        pool.close()
        self.arena = CudaArena(
            n_slots=32,
            slot_nbytes=record_nbytes,
            layers=self.spec.layers,
            n_experts=8,
            device=DEVICE,
            pinned=pinned,
        )
        self.keys = [*self.spec.keys()]
        self.n = 0
        self.host_us: list[float] = []

    def run(self) -> float:
        parts = (Part(0, 0, self.spec.layouts[0].payload_nbytes),)
        n_copies = 320
        begin = time.perf_counter()
        for _ in range(n_copies):
            key = self.keys[self.n % len(self.keys)]
            source, target = self.host.slot(self.n % 8), self.arena.slot(self.n % 32)
            self.arena.copy_from(key, source, target, parts)
            self.n += 1
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        self.host_us.append((enqueued - begin) / n_copies * 1e6)
        return n_copies * parts[0].nbytes / (time.perf_counter() - begin) / 1e9

    def close(self) -> None:
        self.host.close()
        self.arena.close()


# -- the disk --------------------------------------------------------------------------------------


def measure_disk(directory: Path, nbytes: int, records: list[int], options: Disk) -> None:
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; leave `disk` out of --parts")
    print(f"\n{'GB/s, disk to device':<52}{'n':>7}{'min':>9}{'median':>9}{'max':>9}")
    for record_nbytes in records:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            scratch = Scratch(Path(folder) / "records", nbytes=nbytes, record_nbytes=record_nbytes)
            n = min(options.n_reads, scratch.n_records // 8 * 8)
            ways: dict[str, Callable[[], Run]] = {
                "fio": lambda s=scratch, n=n: by_fio(s, options.n_in_flight, n, options.memory),
                "ours": lambda s=scratch, n=n: by_acquires(s, options, n),
            }
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            names = list(ways)
            for _ in range(options.rounds):
                names.reverse()
                for name in names:
                    scratch.empty_cache()
                    time.sleep(options.rest_s)
                    runs[name].append(ways[name]())
                    scratch.refuse_cached(f"{name} went through the page cache")
        rates = {name: [run.rate for run in each] for name, each in runs.items()}
        ratios = [ours / fio for ours, fio in zip(rates["ours"], rates["fio"], strict=True)]
        size = f"{n} records of {record_nbytes / 2**20:.2f} MiB, {options.n_in_flight} in flight"
        print(f"{'fio, ' + size:<52}{spread(rates['fio'])}")
        print(f"{'acquire, ' + size:<52}{spread(rates['ours'])}")
        print(f"{'  of fio':<52}{spread(ratios, 3)}")


class Disk:
    """How the disk is measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds = args.rounds
        self.n_in_flight = args.in_flight
        self.n_callers = args.callers
        self.memory = args.fio_memory
        self.n_reads = args.reads
        self.rest_s = args.rest


def by_acquires(scratch: Scratch, options: Disk, n_reads: int) -> Run:
    """Acquires of four experts by callers enough that the window is full all the time."""
    n_in_flight, n_callers = options.n_in_flight, options.n_callers
    pack: Records = FilePack(scratch)
    keys = [*pack.spec.keys()]
    layers = random.sample(range(len(keys) // 8), n_reads // 8)
    sets = iter([(layer, half) for layer in layers for half in ((0, 1, 2, 3), (4, 5, 6, 7))])
    landed: list[float] = []
    stamps: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    async def call(hierarchy: Hierarchy, stream: torch.cuda.Stream) -> None:
        payload = pack.spec.layouts[0].payload_nbytes
        for layer, experts in sets:
            async with hierarchy.acquire(layer, experts) as lease:
                async for expert in lease.as_completed():
                    landed.append(time.perf_counter())
                    lease.wait_on(stream)
                    row = hierarchy.arena.tensor[lease.slots[expert].slot_index]
                    with torch.cuda.stream(stream):
                        first = row[:STAMP_NBYTES].clone()
                        last = row[payload - STAMP_NBYTES : payload].clone()
                    stamps.append((pack.number(ExpertKey(layer, expert)), first, last))

    async def read_all() -> None:
        backend = open_backend(
            "auto",
            [scratch.path],
            record_nbytes=scratch.record_nbytes,
            window_nbytes=n_in_flight * scratch.record_nbytes,
        )
        source = PackSource(pack, backend)
        stream = torch.cuda.Stream(DEVICE)
        n_slots = 4 * n_callers + n_in_flight  # what is pinned, and some to evict
        async with await open_tiers(
            source, pack.spec, n_slots=n_slots, stage_slots=n_in_flight + 4
        ) as hierarchy:
            await asyncio.gather(*(call(hierarchy, stream) for _ in range(n_callers)))
            torch.cuda.synchronize()

    cpu = time.process_time()
    asyncio.run(read_all())
    cpu = time.process_time() - cpu
    assert len(landed) == n_reads
    for number, first, last in stamps:
        right = list(number.to_bytes(STAMP_NBYTES, "little"))
        if first.tolist() != right or last.tolist() != right:
            sys.exit(f"record {number}: wrong bytes on the GPU")
    return Run.steady(landed, n_in_flight, scratch.record_nbytes, cpu)


# -- hits ------------------------------------------------------------------------------------------


async def open_resident() -> Hierarchy:
    pack = TinyPack(tiny_spec(layers=range(8), n_experts=64, top_k=TOP_K, role_nbytes=1024))
    source = PackSource(pack, MemoryBackend([pack.image], alignment=4096))
    hierarchy = await open_tiers(source, pack.spec, n_slots=512, stage_slots=16)
    for layer in pack.spec.layers:
        async with hierarchy.acquire(layer, range(64)) as lease:
            await lease.ready()
            lease.wait_on(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return hierarchy


class Routed:
    """Router ids on the GPU, and the usual way of them to the host."""

    def __init__(self, rounds: int) -> None:
        rng = random.Random(0)
        sets = [rng.sample(range(64), TOP_K) for _ in range(rounds)]
        self.ids = torch.tensor(sets, device=DEVICE)
        self.pinned = torch.empty(TOP_K, dtype=torch.int64, pin_memory=True)
        self.event = torch.cuda.Event()
        self.stream = torch.cuda.current_stream()

    def on_host(self, i: int) -> list[int]:
        self.pinned.copy_(self.ids[i], non_blocking=True)
        self.event.record(self.stream)
        self.event.synchronize()
        return self.pinned.tolist()


def measure_hits(rounds: int) -> None:
    print(f"\n{'µs, 6 resident experts':<52}{'n':>7}{'p10':>9}{'median':>9}{'p90':>9}")
    routed = Routed(rounds)

    def table(name: str, times: list[tuple[int, int, int, int]]) -> None:
        rows = {
            "ids on the host": [b - a for a, b, _, _ in times],
            "acquire and wait_on": [c - b for _, b, c, _ in times],
            "release": [d - c for _, _, c, d in times],
            "ids on the GPU to kernels launchable": [c - a for a, _, c, _ in times],
            "the same and release": [d - a for a, _, _, d in times],
        }
        for what, ns in rows.items():
            tenths = statistics.quantiles(ns, n=10)
            median = statistics.median(ns)
            print(
                f"{name + ': ' + what:<52}{len(ns):>7}{tenths[0] / 1e3:>9.1f}"
                f"{median / 1e3:>9.1f}{tenths[-1] / 1e3:>9.1f}"
            )

    async def own_loop() -> list[tuple[int, int, int, int]]:
        times = []
        async with await open_resident() as hierarchy:
            for i in range(rounds):
                torch.cuda.synchronize()
                a = time.perf_counter_ns()
                ids = routed.on_host(i)
                b = time.perf_counter_ns()
                lease = await hierarchy.acquire(i % 8, ids)
                lease.wait_on(routed.stream)
                c = time.perf_counter_ns()
                lease.release()
                times.append((a, b, c, time.perf_counter_ns()))
        return times

    def threaded() -> list[tuple[int, int, int, int]]:
        times = []
        with ThreadedHierarchy.open(open_resident) as hierarchy:
            for i in range(rounds):
                torch.cuda.synchronize()
                a = time.perf_counter_ns()
                ids = routed.on_host(i)
                b = time.perf_counter_ns()
                lease = hierarchy.acquire_blocking(i % 8, ids)
                lease.wait_on(routed.stream)
                c = time.perf_counter_ns()
                lease.release()
                times.append((a, b, c, time.perf_counter_ns()))
        return times

    table("own loop", asyncio.run(own_loop()))
    table("threaded", threaded())


# -- the soak --------------------------------------------------------------------------------------


def allocated() -> dict[str, int]:
    """What could leak, in bytes or objects."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "device": total - free,
        "device, by torch": torch.cuda.memory_allocated(),
        "pinned pages": int(status.get("VmPin", "0 kB").split()[0]) * 1024,
        "resident set": int(status["VmRSS"].split()[0]) * 1024,
        "event fences": sum(type(each) is EventFence for each in gc.get_objects()),
    }


def soak(n_steps: int) -> None:
    pack = TinyPack(tiny_spec(layers=range(6), n_experts=32, top_k=4, role_nbytes=1 << 16))
    payload = pack.spec.layouts[0].payload_nbytes
    truth = torch.stack(
        [
            torch.frombuffer(bytearray(pack.payload(key)), dtype=torch.int64)
            for key in pack.spec.keys()
        ]
    ).to(DEVICE)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    rng = random.Random(0)

    async def opened() -> Hierarchy:
        source = PackSource(pack, MemoryBackend([pack.image], alignment=4096))
        return await open_tiers(source, pack.spec, n_slots=24, stage_slots=6)

    seen: list[dict[str, int]] = []
    with ThreadedHierarchy.open(opened) as hierarchy:
        words = hierarchy.arena.tensor.view(torch.int64)[:, : payload // 8]
        for step in range(n_steps):
            layer, experts = rng.randrange(6), rng.sample(range(32), 4)
            with hierarchy.acquire_blocking(layer, experts) as lease:
                lease.wait()
                stream = streams[step % 2]
                lease.wait_on(stream)
                with torch.cuda.stream(stream):
                    ids = torch.tensor(experts).to(DEVICE, non_blocking=True)
                    slots = hierarchy.arena.slot_of(layer)[ids].long()
                    wrong += (words[slots] != truth[layer * 32 + ids]).sum()
                streams[0].wait_stream(streams[1])
                streams[1].wait_stream(streams[0])
            if step + 1 in {n_steps // 10, n_steps}:
                seen.append(allocated())
        stats = hierarchy.stats()
    print(
        f"\nsoak: {n_steps} acquires of 4 in 24 slots, {stats.cache_evictions} evictions, "
        f"{format_size(stats.h2d_bytes)} copied, {int(wrong)} wrong words"
    )
    print(f"{'':<30}{'after a tenth':>16}{'at the end':>16}{'growth':>12}")
    for name in seen[0]:
        then, now = seen[0][name], seen[1][name]
        print(f"{name:<30}{then:>16,}{now:>16,}{now - then:>12,}")
    if int(wrong):
        sys.exit("wrong bytes on the GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="link,disk,hits,soak")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--nbytes", type=float, default=3e9, help="size of the scratch file")
    parser.add_argument("--records", default="13369344,11956224", help="bytes of a record")
    parser.add_argument("--reads", type=int, default=160, help="records read in a run")
    parser.add_argument("--callers", type=int, default=6, help="acquires of four side by side")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rest", type=float, default=0.5, help="seconds before each run")
    parser.add_argument("--in-flight", type=int, default=8, help="records")
    parser.add_argument("--fio-memory", default="mmaphuge")
    parser.add_argument("--hits", type=int, default=3000, help="acquires to time")
    parser.add_argument("--steps", type=int, default=10_000, help="acquires of the soak")
    args = parser.parse_args()
    records = [int(text) for text in args.records.split(",")]
    parts = args.parts.split(",")
    print(f"{describe_machine()}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "link" in parts:
        measure_link(records, args.rounds)
    if "disk" in parts:
        measure_disk(args.dir, int(args.nbytes), records, Disk(args))
    if "hits" in parts:
        measure_hits(args.hits)
    if "soak" in parts:
        soak(args.steps)


if __name__ == "__main__":
    main()
