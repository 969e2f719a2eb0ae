"""What running a GGUF in place costs beside running its pack: experts read, side by side.

    python benchmarks/virtual_pack.py --dir /where/the/drive/is [--gb 4] [--rounds 11]

Writes a GGUF of random experts as large as those of DeepSeek-V4-Flash (13.4 MB, MXFP4) in two
shards, packs it, and reads both through ``open_hierarchy``: acquires of six experts, none of them
resident, one after the other, direct reads only. In every round both read the same experts, the
order changing from round to round; the ratio is taken within a round. Prints one line per backend
and kind of top tier:

* device: behind 8 staging slots, copies out of which cost the host nothing, as with a GPU's;
* staged: host memory behind 8 staging slots, so the host copies every byte, of the pack as well;
* in place: host memory that is read into, where a virtual pack's roles are moved within the slot.

The last two measure the processor as much as the drive. A third reader, "same", takes records as a
pack's out of the GGUF's own bytes: its ratio to the pack is what the places of the files on the
drive make, that of the virtual pack to it is what the way of reading makes. The files are removed
at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.gguf_writer import GGUFWriter
from machine import describe_machine

from tieredmoe import Hierarchy, HierarchyConfig, Tier, create_pack, open_hierarchy
from tieredmoe.backends import open_backend
from tieredmoe.memory import PASSED, HostArena, HostPool, PassedFence
from tieredmoe.pack import Extent, PackSource, open_pack, open_virtual_pack
from tieredmoe.pack.records import whole_record
from tieredmoe.policies import make_policy

if TYPE_CHECKING:
    from tieredmoe.memory import Arena
    from tieredmoe.pack import Checkpoint, Extents, VirtualPack
    from tieredmoe.source import Source
    from tieredmoe.spec import ExpertKey, MoESpec

ROWS, COLUMNS = 2048, 4096
ROLE_NBYTES = ROWS * COLUMNS // 32 * 17
N_EXPERTS, TOP_K = 32, 6
N_SLOTS, STAGE_SLOTS = 12, 8
TOPS = {"device": STAGE_SLOTS, "staged": STAGE_SLOTS, "in place": 0}


class SamePlaces:
    """The GGUF's bytes, taken a record at a time: what the drive gives for these very places."""

    def __init__(self, gguf: VirtualPack) -> None:
        self.spec, self.data_files = gguf.spec, gguf.data_files
        self.slot_nbytes = gguf.spec.slot_nbytes
        self._n_records = [path.stat().st_size // self.slot_nbytes for path in self.data_files]

    def extents(self, key: ExpertKey) -> Extents:
        number = (key.layer * N_EXPERTS + key.expert) % sum(self._n_records)
        file_index = int(number >= self._n_records[0])
        offset = (number - file_index * self._n_records[0]) * self.slot_nbytes
        record = Extent(file_index, offset, self.slot_nbytes)
        return whole_record(record, self.spec.layouts[key.layer])

    def check_unchanged(self) -> None:
        pass


class DeviceSlot:
    def __init__(self, arena: Device, slot_index: int) -> None:
        self.arena, self.slot_index, self.nbytes = arena, slot_index, arena.slot_nbytes
        self.ready = self.idle = PASSED


class Device:
    """An arena into which copies cost the host nothing."""

    def __init__(self, n_slots: int, slot_nbytes: int) -> None:
        self.n_slots, self.slot_nbytes = n_slots, slot_nbytes
        self._slots = [DeviceSlot(self, i) for i in range(n_slots)]

    def slot(self, slot_index: int) -> DeviceSlot:
        return self._slots[slot_index]

    def copy_from(self, *_: object) -> PassedFence:
        return PASSED

    def close(self) -> None:
        pass


async def open_tiers(model: Checkpoint, top: str, backend: str) -> Hierarchy:
    if top != "device":
        vram = N_SLOTS * (model.slot_nbytes if top == "in place" else model.spec.slot_nbytes)
        config = HierarchyConfig(vram=vram, reserve=0, stage_slots=TOPS[top], backend=backend)
        return await open_hierarchy(model, config)
    pool = HostPool.allocate(STAGE_SLOTS * model.slot_nbytes)
    region = pool.carve(STAGE_SLOTS * model.slot_nbytes)
    pool.close()
    source: Source = PackSource(model, open_backend(backend, model.data_files), arranged=False)
    staging = HostArena(region, n_slots=STAGE_SLOTS, slot_nbytes=model.slot_nbytes)
    source = tier("staging", source, staging, model.spec)
    device = Device(N_SLOTS, model.spec.slot_nbytes)
    return Hierarchy(tier("top", source, device, model.spec), model.spec)


def tier(name: str, source: Source, arena: Arena, spec: MoESpec) -> Tier:
    policy = make_policy("lru", n_slots=arena.n_slots, layers=spec.layers, top_k=TOP_K)
    return Tier(name=name, source=source, arena=arena, policy=policy)


def write_gguf(directory: Path, *, n_layers: int, rng: np.random.Generator) -> Path:
    """Two shards: gate and half of up in the first, the rest in the second."""
    roles = [(layer, role) for role in ("gate", "up", "down") for layer in range(n_layers)]
    cut = len(roles) // 2
    paths = [directory / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for index, (path, inside) in enumerate(zip(paths, (roles[:cut], roles[cut:]), strict=True)):
        writer = GGUFWriter(path, arch="")
        if index == 0:
            writer.add_string("general.architecture", "deepseek4")
            writer.add_uint32("deepseek4.block_count", n_layers)
            writer.add_uint32("deepseek4.expert_count", N_EXPERTS)
            writer.add_uint32("deepseek4.expert_used_count", TOP_K)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(roles))
        for layer, role in inside:
            shape = (N_EXPERTS, COLUMNS, ROWS) if role == "down" else (N_EXPERTS, ROWS, COLUMNS)
            writer.add_tensor_info(
                f"blk.{layer}.ffn_{role}_exps.weight",
                (*shape[:2], shape[2] // 32 * 17),
                np.dtype(np.uint8),
                N_EXPERTS * ROLE_NBYTES,
                raw_dtype=GGMLQuantizationType.MXFP4,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("r+b") as file:
            start = file.seek(0, os.SEEK_END)
            # In one piece on the drive, as the pack's file is.
            os.posix_fallocate(file.fileno(), start, 32 + len(inside) * N_EXPERTS * ROLE_NBYTES)
            file.write(bytes(-start % 32))
            for _ in range(len(inside) * N_EXPERTS):
                file.write(rng.bytes(ROLE_NBYTES))
            file.truncate()
    return paths[0]


SCATTERED = np.random.default_rng(0).permutation(N_EXPERTS).tolist()


def working_sets(n_layers: int, n_acquires: int, start: int) -> list[tuple[int, list[int]]]:
    """Experts from all over a layer; none comes back before all slots have been used anew."""
    n_sets = N_EXPERTS // TOP_K
    return [
        (i % n_layers, SCATTERED[i // n_layers % n_sets * TOP_K :][:TOP_K])
        for i in range(start, start + n_acquires)
    ]


async def read_all(hierarchy: Hierarchy, sets: list[tuple[int, list[int]]]) -> float:
    """Payload bytes per second of these acquires, every one of them a miss."""
    before = hierarchy.stats()
    begin = time.perf_counter()
    for layer, experts in sets:
        async with hierarchy.acquire(layer, experts) as lease:
            await lease.ready()
    seconds = time.perf_counter() - begin
    done = hierarchy.stats().since(before)
    assert done.cache_hits == 0
    assert done.pack_reads == len(sets) * TOP_K
    return done.pack_payload_bytes / seconds


async def compare(
    models: dict[str, Checkpoint], top: str, backend: str, *, rounds: int, n_acquires: int
) -> None:
    tiers = {name: await open_tiers(model, top, backend) for name, model in models.items()}
    n_layers = len(tiers["pack"].spec.layers)
    rates: dict[str, list[float]] = {name: [] for name in models}
    try:
        for i in range(rounds + 1):
            sets = working_sets(n_layers, n_acquires, i * n_acquires)
            for name in [*models][i % 3 :] + [*models][: i % 3]:
                rates[name].append(await read_all(tiers[name], sets))
        stats = {name: hierarchy.stats() for name, hierarchy in tiers.items()}
    finally:
        for hierarchy in tiers.values():
            await hierarchy.close()
    for of_model in rates.values():
        del of_model[0]  # the first round warms up
    medians = {name: statistics.median(of_model) / 1e9 for name, of_model in rates.items()}
    ratios = {
        other: [v / o for v, o in zip(rates["virtual"], rates[other], strict=True)]
        for other in ("pack", "same")
    }
    extra = stats["virtual"].pack_read_bytes / stats["virtual"].pack_payload_bytes - 1
    assert all(one.direct_io for one in stats.values()), "not direct: this would measure memory"
    print(
        f"{stats['virtual'].backend:<9}{top:<9}{rounds:>4}"
        + "".join(f"{medians[name]:>9.2f}" for name in models)
        + "".join(
            f"{statistics.median(of):>12.3f} ({min(of):.2f}-{max(of):.2f})"
            for of in ratios.values()
        )
        + f"{extra:>10.2%}"
    )


def opened(gguf: Path, pack: Path) -> dict[str, Checkpoint]:
    virtual = open_virtual_pack(gguf)
    return {"pack": open_pack(pack), "virtual": virtual, "same": SamePlaces(virtual)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the GGUF")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--acquires", type=int, default=12, help="acquires per round and model")
    parser.add_argument("--backends", default="auto,threads")
    parser.add_argument("--tops", default=",".join(TOPS), help=f"of {', '.join(TOPS)}")
    args = parser.parse_args()
    n_layers = max(2, round(args.gb * 1e9 / (3 * ROLE_NBYTES * N_EXPERTS)))
    print(describe_machine())
    directory = Path(tempfile.mkdtemp(prefix="tieredmoe-bench-", dir=args.dir))
    try:
        gguf = write_gguf(directory, n_layers=n_layers, rng=np.random.default_rng(1))
        asyncio.run(create_pack(gguf, directory / "pack"))
        record = open_virtual_pack(gguf).spec.slot_nbytes
        print(
            f"{n_layers * N_EXPERTS} records of {record / 1e6:.1f} MB, acquires of {TOP_K}, "
            f"{args.acquires} per round; GB/s of payload, median; ratio virtual to pack per round"
        )
        print(
            f"{'backend':<9}{'top':<9}{'n':>4}{'pack':>9}{'virtual':>9}{'same':>9}"
            f"{'virtual/pack (min-max)':>24}{'virtual/same (min-max)':>24}{'envelope':>10}"
        )
        models = opened(gguf, directory / "pack")
        for backend in args.backends.split(","):
            for top in args.tops.split(","):
                rounds = {"rounds": args.rounds, "n_acquires": args.acquires}
                asyncio.run(compare(models, top, backend, **rounds))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
