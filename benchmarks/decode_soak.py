"""Does decoding on a GPU stay as fast and as small? 10,000 tokens, misses among them.

    python benchmarks/decode_soak.py deepseek-v4-flash --dir /where [--steps 10000]

A synthetic model of two layers and real dimensions whose cache has nine slots for ten experts, so
that experts come and go all the time. Sequences of 1,000 tokens follow each other, since a longer
sequence is larger by right. Printed for each: milliseconds per token, hits, and how much more
memory is taken than after the first: of the device (what the driver has left), of torch's pinned
memory, and of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
from pathlib import Path

import torch
from machine import describe_machine
from whole_model import Run, model_at, settings

from tieredmoe.adapters import open_model
from tieredmoe.pack import open_checkpoint


def taken(device: torch.device) -> tuple[int, int, int]:
    """Bytes taken of the device, of torch's pinned memory, and resident in the process."""
    gc.collect()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return total - free, pinned, resident


async def soak(path: Path, arguments: argparse.Namespace) -> None:
    """Decode and print."""
    spec = open_checkpoint(path).spec
    n_slots = max(spec.top_k, int(spec.n_records * arguments.share))
    config = settings(arguments, path, n_slots)
    device = torch.device(arguments.device)
    async with await open_model(path, config, n_context=arguments.sequence) as language:
        print(f"{n_slots} slots for {spec.n_records} experts")
        print(
            f"{'tokens':>7}{'ms':>8}{'max':>9}{'hits':>8}{'device':>12}{'pinned':>10}{'RSS MB':>9}"
        )
        first: tuple[int, int, int] | None = None
        for n in range(arguments.sequence, arguments.steps + 1, arguments.sequence):
            before = language.stats()
            run = Run(language, arguments.sequence)
            times = await run.timed(arguments.sequence)
            assert torch.isfinite(run.logits).all()
            done = language.stats().since(before)
            del run
            now = taken(device)
            first = first or now
            grown = [one - other for one, other in zip(now, first, strict=True)]
            print(
                f"{n:>7}{statistics.median(times) / 1e3:>8.2f}{max(times) / 1e3:>9.1f}"
                f"{done.hit_rate:>8.1%}{grown[0]:>12}{grown[1]:>10}{grown[2] / 1e6:>9.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("deepseek-v4-flash", "kimi-k3"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF instead of a new one")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policy", default="lfu_lru")
    parser.add_argument("--allow-buffered", action="store_true")
    parser.add_argument("--share", type=float, default=0.9, help="slots per expert")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--sequence", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {describe_machine()}")
    with model_at(arguments) as path:
        asyncio.run(soak(path, arguments))


if __name__ == "__main__":
    main()
