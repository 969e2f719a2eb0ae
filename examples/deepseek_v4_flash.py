"""Run DeepSeek-V4-Flash with its routed experts on disk.

    python examples/deepseek_v4_flash.py --gguf DeepSeek-V4-Flash.gguf --prompt "Why is the sky
    blue?"

packs the GGUF beside itself (once), then generates. With ``--pack DIR`` alone it runs a pack made
before. Without either it makes a small random DeepSeek-V4 under ``models/``, packs it and generates
from it with a cache for half of its experts: the text is noise, everything else is real. The end of
that run looks like this (the model is random, so its text is)::

    96 routed experts of 16 KiB in 6 layers, top-3; cache: 48 slots, 768 KiB; reads: threads, direct
    vram 786432, reserve 256MiB
    ...
             tokens  tok/s  hit rate  GB read per token  evictions
    prefill      39  332.6        0%           0.000035         35
    decode       47   15.5       67%           0.000091        282
    ended by: max_new_tokens
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tieredmoe import (
    Generation,
    HierarchyConfig,
    LanguageModel,
    TieredMoEError,
    check_model,
    create_pack,
    format_size,
    open_inventory,
    open_model,
    open_pack,
)
from tieredmoe.gguf import find_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEMO = Path("models/deepseek-v4-demo.gguf")
DEMO_PROMPT = "Tell me about the experts of a mixture-of-experts model."


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(
        description="Generate with DeepSeek-V4-Flash, its routed experts read from disk as needed.",
        epilog="Sizes: 24GiB, 512MiB, 80% (of the memory free at the start). Defaults suit a 32 GB "
        "card. Without --gguf and --pack, a small random model is made and run.",
    )
    parser.add_argument("--gguf", type=Path, help="the model, or any of its shards; packed once")
    parser.add_argument("--pack", type=Path, help="the pack's directory (default: GGUF + .pack)")
    parser.add_argument("--prompt", default=DEMO_PROMPT, help="the user's message; - reads stdin")
    parser.add_argument(
        "--ids", action="store_true", help="the prompt is token ids, separated by spaces"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--context", type=int, metavar="N", help="prompt and answer together")
    parser.add_argument("--vram", metavar="SIZE", help="expert cache (default: 21GiB)")
    parser.add_argument("--reserve", metavar="SIZE", help="memory left alone (default: 3GiB)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--buffered", action="store_true", help="read through the page cache")
    parser.add_argument("--stats", type=Path, metavar="PATH", help="write counters there, as JSON")
    return parser.parse_args()


def make_demo(path: Path, console: Console) -> None:
    """A small random DeepSeek-V4 with every kind of layer of the real one, made once."""
    if path.exists():
        return
    from tieredmoe.testing import DeepSeekV4Shape, make_deepseek_v4  # noqa: PLC0415 (demo only)

    path.parent.mkdir(parents=True, exist_ok=True)
    make_deepseek_v4(path, shape=DeepSeekV4Shape(n_routed_experts=16), seed=4)
    console.print(f"made a small random DeepSeek-V4: {path}")


@contextmanager
def bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for (bytes done, bytes in all)."""
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


async def pack_of(
    gguf: Path | None, pack: Path | None, config: HierarchyConfig, console: Console
) -> Path:
    """The pack to run: the one given, or the GGUF's, made now if it is not there.

    Whatever would keep the model from running is found before the conversion, not after.
    """
    if gguf is None:
        assert pack is not None
        return pack
    inventory = await asyncio.to_thread(open_inventory, gguf)
    first = inventory.shards[0].path
    pack = pack or first.with_name(re.sub(r"-\d{5}-of-\d{5}$", "", first.stem) + ".pack")
    await asyncio.to_thread(check_model, inventory, config)
    if pack.exists():
        (await asyncio.to_thread(open_pack, pack)).check_source(inventory)
        return pack
    with bar(console, "packing") as show:
        await create_pack(
            inventory, pack, progress=lambda step: show(step.done_nbytes, step.total_nbytes)
        )
    console.print(f"packed {gguf} into {pack}")
    return pack


def describe(model: LanguageModel, config: HierarchyConfig, console: Console) -> None:
    """What will run, and with how much memory."""
    spec, stats = model.hierarchy.spec, model.stats()
    console.print(
        f"{spec.n_records} routed experts of {format_size(spec.slot_nbytes)} "
        f"in {len(spec.layers)} layers, top-{spec.top_k}; "
        f"cache: {stats.cache_capacity_experts} slots, {format_size(stats.cache_capacity_bytes)}; "
        f"reads: {stats.backend}, {'direct' if stats.direct_io else 'not direct'}\n"
        f"vram {config.vram}, reserve {config.reserve}"
    )


def summary(generation: Generation, console: Console) -> None:
    """A small table of what the generation cost, finished or not."""
    report = generation.report
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens", "tok/s", "hit rate", "GB read per token", "evictions"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, n_tokens, rate, stats in (
        ("prefill", report.n_prefilled, report.prefill_tokens_per_s, report.prefill),
        ("decode", report.n_decoded, report.decode_tokens_per_s, report.decode),
    ):
        table.add_row(
            name,
            str(n_tokens),
            f"{rate:.1f}",
            f"{stats.hit_rate:.0%}",
            f"{stats.pack_read_bytes / 1e9 / max(1, n_tokens):.6f}",
            str(stats.cache_evictions),
        )
    console.print(table)
    console.print(f"ended by: {report.stop_reason}")


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: a model may say anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def prompt_of(args: argparse.Namespace) -> str | list[int]:
    """The prompt, from the command line or standard input."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.ids:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        sys.exit(f"error: --ids wants token ids separated by spaces, not {text!r}")


def configuration(args: argparse.Namespace) -> HierarchyConfig:
    """The settings of the tiers."""
    return HierarchyConfig(
        vram=args.vram or "21GiB",
        reserve=args.reserve or "3GiB",
        backend="buffered" if args.buffered else "auto",
        stats_path=args.stats,
    )


async def main(args: argparse.Namespace, prompt: str | list[int]) -> None:
    """Pack if needed, open, generate, report."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if args.gguf is None and args.pack is None:
        torch.set_num_threads(1)  # matrices this small are slower on several
        args.gguf = DEMO
        await asyncio.to_thread(make_demo, DEMO, console)
        half = find_experts(open_inventory(DEMO)).spec.nbytes // 2
        args.vram, args.reserve = args.vram or half, args.reserve or "256MiB"
    config = configuration(args)
    pack = await pack_of(args.gguf, args.pack, config, console)
    with bar(console, "loading") as show:
        model = await open_model(pack, config, progress=show)
    async with model:
        describe(model, config, console)
        generation = model.generate(
            prompt,
            max_new_tokens=args.max_new_tokens,
            n_context=args.context,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
        try:
            async for piece in generation:
                text = piece.text if model.tokenizer else f"{piece.token_id} "
                print(printable(text), end="", flush=True)
        finally:
            with suppress(BrokenPipeError):
                print(flush=True)
            summary(generation, console)


if __name__ == "__main__":
    try:
        given = arguments()
        asyncio.run(main(given, prompt_of(given)))  # standard input is read before the loop runs
    except TieredMoEError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
