"""How fast a GGUF becomes a pack, against dd and fio copying as many bytes on the same disk.

    python benchmarks/pack_create.py [--dir DIR] [--gb 2] [--rounds 5] [--fio FIO] [--reclaim]

Every round, in an order that rotates: `dd` of the file (16 MiB blocks, direct both ways, fsync; it
reads and writes in turn), fio reading the file and writing another at once (8 MiB blocks on huge
pages, 4 in flight each, fsync), and `create_pack`, digests, journal and manifest included, in a
process of its own whose peak memory is told. Ratios are taken inside a round. Writes a model of
random bytes into DIR, which should be on the disk of interest, and deletes it. With --reclaim the
source is given up on the way, which reads the pack once more, and written anew before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from machine import describe_machine

from tieredmoe.testing.tiny_container import StoredTensor, write_shards

N_EXPERTS = 32
SHAPES = {"gate": (2048, 4096), "up": (2048, 4096), "down": (4096, 2048)}
MXFP4 = GGMLQuantizationType.MXFP4
LAYER_NBYTES = 3 * N_EXPERTS * 2048 * 4096 // 32 * 17
DENSE_NBYTES = 16 << 20

CHILD = """
import asyncio, json, resource, sys, time
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack
from tieredmoe.pack.planning import plan_inventory
source, dest, reclaim = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
plan_inventory(open_inventory(source))
def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
before = memory("VmRSS")
start_s = time.perf_counter()
report = asyncio.run(create_pack(source, dest, reclaim_source=reclaim))
seconds = time.perf_counter() - start_s
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "seconds": seconds, "peak_nbytes": memory("VmHWM") - before,
    "cpu_s": usage.ru_utime + usage.ru_stime, "fallbacks": report.fallbacks,
}))
"""


def make_model(folder: Path, nbytes: int) -> Path:
    """One file with expert matrices of DeepSeek-V4-Flash's size, and some dense bytes per layer."""
    rng = np.random.default_rng(0)
    tensors = []
    for layer in range(max(1, round(nbytes / LAYER_NBYTES))):
        dense = rng.integers(0, 256, (DENSE_NBYTES // 4096, 4096), np.uint8)
        f32 = GGMLQuantizationType.F32
        tensors.append(StoredTensor(f"blk.{layer}.attn_q.weight", dense, f32))
        noise = rng.integers(0, 256, (LAYER_NBYTES // 3,), np.uint8)
        for role, (n_rows, n_columns) in SHAPES.items():
            slabs = noise.reshape(N_EXPERTS, n_rows, n_columns // 32 * 17)
            tensors.append(StoredTensor(f"blk.{layer}.ffn_{role}_exps.weight", slabs, MXFP4))
    keys = {"block_count": len(tensors) // 4, "expert_count": N_EXPERTS, "expert_used_count": 6}
    return write_shards(
        folder / "model.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=[tensors],
    )[0]


def run_dd(source: Path, folder: Path) -> float:
    """Seconds of a copy by dd."""
    start_s = time.perf_counter()
    flags = ["bs=16M", "iflag=direct", "oflag=direct", "conv=fsync"]
    target = folder / "dd.bin"
    subprocess.run(["dd", f"if={source}", f"of={target}", *flags], check=True, capture_output=True)
    seconds = time.perf_counter() - start_s
    target.unlink()
    return seconds


def run_fio(fio: Path, source: Path, folder: Path) -> float:
    """Seconds of the longer of reading the file and writing as much, at once."""
    target = folder / "fio.bin"
    nbytes = source.stat().st_size // (8 << 20) * (8 << 20)
    common = ["--bs=8M", "--direct=1", "--ioengine=io_uring", "--iodepth=4", f"--size={nbytes}"]
    done = subprocess.run(
        [
            *(fio, "--output-format=json", *common),
            *("--name=read", "--rw=read", f"--filename={source}"),
            *("--name=write", "--rw=write", f"--filename={target}", "--end_fsync=1"),
            *("--fallocate=native",),
        ],
        check=True,
        capture_output=True,
        text=True,
        # Without huge pages for its buffers fio is half as fast here, and no reference.
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    )
    jobs = json.loads(done.stdout)["jobs"]
    target.unlink()
    return max(job["job_runtime"] for job in jobs) / 1000 * source.stat().st_size / nbytes


def run_ours(source: Path, folder: Path, *, reclaim: bool) -> dict[str, float]:
    """What a conversion in a process of its own took."""
    command = [sys.executable, "-c", CHILD, source, folder / "pack", str(reclaim)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "pack")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fio", type=Path, default=Path(shutil.which("fio") or "fio"))
    parser.add_argument("--reclaim", action="store_true")
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=arguments.dir) as scratch:
        folder = Path(scratch)
        source = make_model(folder, round(arguments.gb * 1e9))
        compare(source, folder, arguments)


def compare(source: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """All rounds and their table."""
    nbytes = source.stat().st_size
    spare = folder / "spare.gguf"
    seconds: dict[str, list[float]] = {"dd": [], "fio": [], "create_pack": []}
    ours: list[dict[str, float]] = []
    for i in range(arguments.rounds):
        names = list(seconds)
        for name in names[i % 3 :] + names[: i % 3]:
            if name == "dd":
                seconds[name].append(run_dd(source, folder))
            elif name == "fio":
                seconds[name].append(run_fio(arguments.fio, source, folder))
            else:
                model = source
                if arguments.reclaim:
                    model = Path(shutil.copyfile(source, spare))
                    subprocess.run(["sync", spare], check=True)
                ours.append(run_ours(model, folder, reclaim=arguments.reclaim))
                seconds[name].append(ours[-1]["seconds"])
    print(f"{nbytes / 1e9:.2f} GB, {arguments.rounds} rounds; GB/s: median (least, most)")
    for name, taken in seconds.items():
        rates = [nbytes / each / 1e9 for each in taken]
        print(f"{name:12} {statistics.median(rates):.3f} ({min(rates):.3f}, {max(rates):.3f})")
    for name in ("dd", "fio"):
        pairs = zip(seconds[name], seconds["create_pack"], strict=True)
        ratios = [theirs / mine for theirs, mine in pairs]
        spread = f"({min(ratios):.2f}, {max(ratios):.2f})"
        print(f"create_pack / {name:4} {statistics.median(ratios):.2f} {spread}")
    peak = max(each["peak_nbytes"] for each in ours)
    cpu = statistics.median(each["cpu_s"] for each in ours) / nbytes * 1e9
    print(f"peak memory beyond the metadata {peak / 2**20:.0f} MiB; {cpu:.2f} CPU-s/GB")
    print(f"fallbacks: {ours[-1]['fallbacks'] or 'none'}")


if __name__ == "__main__":
    main()
