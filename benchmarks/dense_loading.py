"""How fast the dense weights of a model come into memory, against what drive and memory allow.

    python benchmarks/dense_loading.py [--dir DIR] [--gb 2] [--rounds 7] [--backend auto]

Loads the dense tensors of a GGUF the way `open_model` does. Beside it, in every round: plain direct
reads of the same file with as much in flight, and a copy of as many bytes into memory touched for
the first time, which every load ends in; the slower of the two is the floor. Writes a scratch file
of random bytes into DIR, which should be on the disk of interest, and deletes it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from machine import describe_machine

from tieredmoe.adapters.dense_tensors import DenseTensors
from tieredmoe.backends.kernel import Kernel
from tieredmoe.cli.raw_reads import read_raw
from tieredmoe.cli.read_rate import places
from tieredmoe.memory import HostPool
from tieredmoe.pack import open_virtual_pack
from tieredmoe.pack.tensors import N_PIECES, PIECE_NBYTES, TensorLoader
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

if TYPE_CHECKING:
    from collections.abc import Callable

Q8_0 = GGMLQuantizationType.Q8_0
ROW_VALUES, ROW_NBYTES = 4096, 4096 // 32 * 34
N_ROWS = 14336


def make_model(folder: Path, nbytes: int) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """A GGUF of large dense matrices, with one layer of tiny experts for form's sake."""
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 256, (N_ROWS, ROW_NBYTES), np.uint8)
    n_matrices = max(1, nbytes // matrix.nbytes - 1)
    names = ["token_embd.weight", *(f"blk.0.dense_{i}.weight" for i in range(n_matrices))]
    tensors = [StoredTensor(name, matrix, Q8_0) for name in names]
    slab = rng.integers(0, 256, (2, 32, 34), np.uint8)
    tensors += [
        StoredTensor(f"blk.0.ffn_{r}_exps.weight", slab, Q8_0) for r in ("gate", "up", "down")
    ]
    metadata = {"deepseek4.block_count": 1, "deepseek4.expert_count": 2}
    path = write_shards(
        folder / "dense.gguf",
        architecture="deepseek4",
        metadata=metadata | {"deepseek4.expert_used_count": 1},
        shards=[tensors],
    )[0]
    return path, dict.fromkeys(names, (N_ROWS, ROW_VALUES))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="where the scratch file goes")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path, shapes = make_model(Path(folder), int(args.gb * 1e9))
        nbytes = len(shapes) * N_ROWS * ROW_NBYTES
        source = torch.randint(0, 256, (PIECE_NBYTES,), dtype=torch.uint8)

        def load() -> None:
            loader = TensorLoader(open_virtual_pack(path), backend=args.backend)
            tensors = DenseTensors(
                loader,
                floats=shapes,
                matrices=shapes,
                integers={},
                others={},
                device=torch.device("cpu"),
            )
            tensors.embedding()

        def read() -> None:
            pool = HostPool.allocate(N_PIECES * PIECE_NBYTES)
            read_raw(
                [path],
                sorted(places([path], PIECE_NBYTES)),
                pool,
                kernel=Kernel(),
                record_nbytes=PIECE_NBYTES,
                n_in_flight=N_PIECES,
                n_records=nbytes // PIECE_NBYTES,
            )
            pool.close()

        def copy() -> None:
            target = torch.empty(nbytes // PIECE_NBYTES * PIECE_NBYTES, dtype=torch.uint8)
            for start in range(0, len(target), PIECE_NBYTES):
                target[start : start + PIECE_NBYTES] = source

        ways = {"load": load, "plain reads": read, "copies into new memory": copy}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(args.rounds):
            names = list(ways)
            for name in names[i % 3 :] + names[: i % 3]:
                rates[name].append(nbytes / timed(ways[name]) / 1e9)
    print(f"{nbytes / 1e9:.2f} GB in {len(shapes)} matrices, backend {args.backend}")
    print(f"{'':<24}{'rounds':>7}{'GB/s':>7}{'min':>7}{'max':>7}")
    for name, each in rates.items():
        print(
            f"{name:<24}{len(each):>7}{statistics.median(each):>7.2f}{min(each):>7.2f}"
            f"{max(each):>7.2f}"
        )
    floors = [
        min(pair)
        for pair in zip(rates["plain reads"], rates["copies into new memory"], strict=True)
    ]
    shares = [rate / floor for rate, floor in zip(rates["load"], floors, strict=True)]
    print(
        f"load, of the slower of the other two: {statistics.median(shares):.2f} "
        f"({min(shares):.2f}-{max(shares):.2f})"
    )


if __name__ == "__main__":
    main()
