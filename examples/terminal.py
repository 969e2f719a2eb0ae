"""What the examples share: their options, and how they talk to a person at a terminal.

What is worth reading about tieredmoe is in the examples themselves; here are progress bars, tables,
exit codes and the like.
"""

from __future__ import annotations

import argparse
import asyncio
import os
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
    TieredMoEError,
    check_model,
    create_pack,
    format_size,
    open_inventory,
    open_pack,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tieredmoe import Generation, HierarchyConfig, LanguageModel

    Main = Callable[[argparse.Namespace, str | list[int], Console], Awaitable[None]]

PROMPT = "Tell me about the experts of a mixture-of-experts model."


def arguments(model: str, sizes: str, *, vram: str, reserve: str) -> argparse.Namespace:
    """What was asked for on the command line of the example for ``model``."""
    parser = argparse.ArgumentParser(
        description=f"Generate with {model}, its routed experts read from disk as needed.",
        epilog=f"Sizes: 24GiB, 512MiB, 80% (of the memory free at the start). {sizes} Without "
        "--gguf and --pack, a small random model is made and run.",
    )
    parser.add_argument("--gguf", type=Path, help="the model, or any of its shards; runs as it is")
    parser.add_argument(
        "--pack", type=Path, help="run this pack; with --gguf, make it first if it is not there"
    )
    parser.add_argument("--prompt", default=PROMPT, help="the user's message; - reads stdin")
    parser.add_argument(
        "--ids", action="store_true", help="the prompt is token ids, separated by spaces"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument(
        "--context", type=int, metavar="N", help="prompt and answer together (memory for: 8192)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="host, cuda, cuda:1 and so on (default: auto, a GPU if there is one)",
    )
    parser.add_argument("--vram", metavar="SIZE", help=f"expert cache (default: {vram})")
    parser.add_argument("--reserve", metavar="SIZE", help=f"memory left alone (default: {reserve})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--buffered", action="store_true", help="read through the page cache")
    parser.add_argument("--stats", type=Path, metavar="PATH", help="write counters there, as JSON")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "host"
    return args


def prompt_of(args: argparse.Namespace) -> str | list[int]:
    """The prompt, from the command line or standard input."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.ids:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        sys.exit(f"error: --ids wants token ids separated by spaces, not {text!r}")


def run(main: Main, args: argparse.Namespace) -> None:
    """Run ``main`` to the end of the process: every failure is one line and an exit code."""
    try:
        # Standard input is read before the loop runs.
        asyncio.run(_until_terminated(main, args, prompt_of(args)))
    except TieredMoEError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


async def _until_terminated(main: Main, args: argparse.Namespace, prompt: str | list[int]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await main(args, prompt, Console(stderr=True, highlight=False, soft_wrap=True))


@contextmanager
def bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for (bytes done, bytes in all); none where there is no terminal."""
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


async def source_of(
    gguf: Path | None, pack: Path | None, config: HierarchyConfig, console: Console
) -> Path:
    """What to run: the GGUF or the pack; of both, the pack, made from the GGUF if it is not there.

    Whatever would keep the model from running is found before the conversion, not after.
    """
    if gguf is None or pack is None:
        source = gguf or pack
        assert source is not None
        return source
    inventory = await asyncio.to_thread(open_inventory, gguf)
    if await asyncio.to_thread(pack.exists):
        (await asyncio.to_thread(open_pack, pack)).check_source(inventory)
        return pack
    await asyncio.to_thread(check_model, inventory, config)
    with bar(console, "packing") as show:
        await create_pack(
            inventory, pack, progress=lambda step: show(step.done_nbytes, step.total_nbytes)
        )
    console.print(f"packed {gguf} into {pack}")
    return pack


def describe(model: LanguageModel, console: Console) -> None:
    """What will run, and with how much memory."""
    spec, stats = model.hierarchy.spec, model.stats()
    console.print(
        f"{model.plan}\n"
        f"{spec.n_records} routed experts of {format_size(spec.slot_nbytes)} "
        f"in {len(spec.layers)} layers, top-{spec.top_k}; "
        f"cache: {stats.cache_capacity_experts} slots, {format_size(stats.cache_capacity_bytes)}; "
        f"reads: {stats.backend}, {'direct' if stats.direct_io else 'not direct'}"
    )


async def show(generation: Generation, model: LanguageModel, console: Console) -> None:
    """Print the answer as it comes, and then what it cost, finished or not."""
    try:
        async for piece in generation:
            text = piece.text if model.tokenizer else f"{piece.token_id} "
            print(_printable(text), end="", flush=True)
    finally:
        with suppress(BrokenPipeError):
            print(flush=True)
        _print_costs(generation, model, console)


def _printable(text: str) -> str:
    """``text`` without what a terminal would obey: a model may say anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _print_costs(generation: Generation, model: LanguageModel, console: Console) -> None:
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
    console.print(
        f"first token after {model.load_s:.1f} s of loading and {report.first_token_s:.1f} s of "
        f"prefill; ended by: {report.stop_reason}"
    )
