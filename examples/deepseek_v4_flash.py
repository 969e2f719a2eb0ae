"""Run DeepSeek-V4-Flash with its routed experts on disk.

    python examples/deepseek_v4_flash.py --gguf DeepSeek-V4-Flash.gguf --prompt "Why is the sky
    blue?"

runs from the GGUF as it is. With ``--pack DIR`` too, it is packed into it first, once; with
``--pack DIR`` alone, a pack made before is run. On a GPU (``--device``, by default one if there is
any) it begins with a table of the memory that it will take.

Without either it makes a small random DeepSeek-V4 under ``models/``, packs it and generates from
the pack with a cache for half of its experts: the text is noise, everything else is real. The end
of that run looks like this (the model is random, so its text is)::

    memory of the host: 21.93 GiB free
      dense weights         1.74 MiB
      sequence              4.45 MiB  8192 tokens
      scratch              59.44 MiB  prompts in chunks of 512 tokens
      expert cache           768 KiB  48 slots of 16 KiB, 50.0% of all experts
      left                 21.86 GiB  256 MiB of it in reserve
    96 routed experts of 16 KiB in 6 layers, top-3; cache: 48 slots, 768 KiB; reads: uring, direct
    ...
             tokens  tok/s  hit rate  GB read per token  evictions
    prefill      39  196.7        0%           0.000035         35
    decode       47   20.0       67%           0.000098        282
    first token after 0.2 s of loading and 0.2 s of prefill; ended by: max_new_tokens
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

DEMO = Path("models/deepseek-v4-demo.gguf")
DEMO_PACK = Path("models/deepseek-v4-demo.pack")
VRAM, RESERVE = "21GiB", "3GiB"


def make_demo(path: Path, console: Console) -> None:
    """A small random DeepSeek-V4 with every kind of layer of the real one, made once."""
    if path.exists():
        return
    from tieredmoe.testing import DeepSeekV4Shape, make_deepseek_v4  # noqa: PLC0415 (demo only)

    path.parent.mkdir(parents=True, exist_ok=True)
    make_deepseek_v4(path, shape=DeepSeekV4Shape(n_routed_experts=16), seed=4)
    console.print(f"made a small random DeepSeek-V4: {path}")


async def main(args: Namespace, prompt: str | list[int], console: Console) -> None:
    """Pack if asked to, open, generate, report."""
    if args.gguf is None and args.pack is None:
        torch.set_num_threads(1)  # matrices this small are slower on several
        args.gguf, args.pack = DEMO, DEMO_PACK
        await asyncio.to_thread(make_demo, DEMO, console)
        half = find_experts(open_inventory(DEMO)).spec.nbytes // 2
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
    sizes = "Defaults suit a 32 GB card."
    run(main, arguments("DeepSeek-V4-Flash", sizes, vram=VRAM, reserve=RESERVE))
