"""Run Kimi-K3 with its routed experts on disk.

    python examples/kimi_k3.py --gguf KIMI-K3-Q2_K-00001-of-00038.gguf --prompt "Why is the sky
    blue?"

runs from the 38 shards as they are. With ``--pack DIR`` too, they are packed into it first, once;
with ``--pack DIR`` alone, a pack made before is run. On a GPU (``--device``, by default one if
there is any) it begins with a table of the memory that it will take. The real model's dense weights
are 23.9 GB: a card with 40 GB holds them beside the default cache of 5 GiB; on one with 24 or 32 GB
some layers wait in host memory and stream, which the table says and prices. Such a cache is smaller
than what one token needs: 449 slots for 1,472 experts.

Without either it makes a small random Kimi-K3 of three shards under ``models/``, packs it and
generates from the pack, with slots for half of the experts that one token needs. The text is noise,
everything else is real. The end of that run looks like this (the model is random, so its text is)::

    memory of the host: 20.93 GiB free
      dense weights         1.86 MiB
      sequence             18.43 MiB  4096 tokens
      scratch              115.5 MiB  prompts in chunks of 512 tokens
      expert cache           576 KiB  8 slots of 72 KiB, 12.5% of all experts
      left                  20.8 GiB  256 MiB of it in reserve
    64 routed experts of 72 KiB in 4 layers, top-4; cache: 8 slots, 576 KiB; reads: uring, direct
    ...
             tokens  tok/s  hit rate  GB read per token  evictions
    prefill      78  361.2        0%           0.000058         53
    decode       47   14.7       13%           0.001024        653
    first token after 0.1 s of loading and 0.2 s of prefill; ended by: max_new_tokens
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from terminal import arguments, bar, describe, run, show, source_of

from tieredmoe import HierarchyConfig, open_inventory, open_model
from tieredmoe.gguf import find_experts

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

DEMO = Path("models/kimi-k3-demo-00001-of-00003.gguf")
DEMO_PACK = Path("models/kimi-k3-demo.pack")
VRAM, RESERVE = "5GiB", "3GiB"


def make_demo(console: Console) -> None:
    """A small random Kimi-K3 with every kind of layer of the real one, made once."""
    if DEMO.exists():
        return
    from tieredmoe.testing import KimiK3Shape, make_kimi_k3  # noqa: PLC0415 (demo only)

    DEMO.parent.mkdir(parents=True, exist_ok=True)
    shape = KimiK3Shape(
        num_hidden_layers=5, attn_res_block_size=2, num_experts=16, num_experts_per_token=4
    )
    made = make_kimi_k3(DEMO.with_name("kimi-k3-demo.gguf"), shape=shape, seed=4, n_shards=3)
    console.print(f"made a small random Kimi-K3 in {len(made.paths)} shards: {made.paths[0]}")


async def main(args: Namespace, prompt: str | list[int], console: Console) -> None:
    """Pack if asked to, open, generate, report."""
    if args.gguf is None and args.pack is None:
        torch.set_num_threads(1)  # matrices this small are slower on several
        args.gguf, args.pack = DEMO, DEMO_PACK
        await asyncio.to_thread(make_demo, console)
        spec = find_experts(open_inventory(DEMO)).spec
        half = len(spec.layers) * spec.top_k // 2 * spec.slot_nbytes
        args.vram, args.reserve = args.vram or half, args.reserve or "256MiB"
    config = HierarchyConfig(
        device=args.device,
        vram=args.vram or VRAM,
        reserve=args.reserve or RESERVE,
        backend="buffered" if args.buffered else "auto",
        stats_path=args.stats,
    )
    source = await source_of(args.gguf, args.pack, config, console)
    with bar(console, "loading") as progress:
        model = await open_model(source, config, n_context=args.context, progress=progress)
    async with model:
        describe(model, console)
        generation = model.generate(
            prompt,
            max_new_tokens=args.max_new_tokens,
            n_context=args.context,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
        await show(generation, model, console)


if __name__ == "__main__":
    sizes = (
        "The real model's dense weights take 23.9 GB beside the cache; on a GPU with less than "
        "40 GB some of its layers stream from host memory."
    )
    run(main, arguments("Kimi-K3", sizes, vram=VRAM, reserve=RESERVE))
