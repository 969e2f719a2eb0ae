"""Where the time of a token goes, in a whole model of real dimensions.

    python benchmarks/whole_model.py deepseek-v4-flash --layers 8 --device cuda --dir /where
    python benchmarks/whole_model.py kimi-k3 --layers 6 --shards 4 --slots 3%,10%,25% --dir /where

Makes a synthetic model (or takes --model), opens it with room for every expert, brings them all in,
and decodes text-like tokens one by one: wall time from the token's id to the next one's, greedy. On
a GPU its part is timed by events around the very graphs that decoding replays, in their order, so
that no layer's weights are in a cache; the dense and the routed part in the same way. Control is
what is left of the wall time: Python, launches, ids to the host; below it, in tokens of their own,
where the host is between its launches. Floors are bytes over the
bandwidth of a large copy (reads and writes counted) in the same run; of dense tensors all but the
embedding and hash tables count, of which a token takes a row. On the host the routed part is what
its provider takes.

With --slots also caches of so many experts (a number, or a share of all), each from a cold start:
wall time, hit rate, bytes read. Between them, how skewed the routing is.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from device_times import copy_bandwidth, host_path, host_times, replayed, row
from machine import describe_machine

from tieredmoe import HierarchyConfig
from tieredmoe.adapters import open_model
from tieredmoe.gguf import find_experts, open_inventory
from tieredmoe.pack import open_checkpoint
from tieredmoe.testing import RoutingStatistics, make_synthetic, text_like_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tieredmoe.adapters import LanguageModel
    from tieredmoe.gguf import GGUFInventory


class ObservedExperts:
    """The host's provider, its time and its routing noted; handed to ``forward`` in its place."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self.seconds = 0.0
        self.ids: dict[int, list[list[int]]] = {}

    async def run(self, layer: int, *arguments: Any, meanwhile: Callable[[], Any]) -> Any:
        self.ids.setdefault(layer, []).extend(arguments[1].ids.tolist())
        begin = time.perf_counter()
        beside = 0.0

        def timed() -> Any:
            nonlocal beside
            start = time.perf_counter()
            done = meanwhile()
            beside = time.perf_counter() - start
            return done

        result = await self._experts.run(layer, *arguments, meanwhile=timed)
        self.seconds += time.perf_counter() - begin - beside
        return result


class ObservedTiers:
    """A device's tiers, what is asked of them noted."""

    def __init__(self, tiers: Any) -> None:
        self._tiers = tiers
        self.ids: dict[int, list[list[int]]] = {}

    def acquire(self, layer: int, experts: Sequence[int]) -> Any:
        self.ids.setdefault(layer, []).append(list(experts))
        return self._tiers.acquire(layer, experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tiers, name)


class Run:
    """One sequence of one open model, decoded token by token."""

    def __init__(self, language: LanguageModel, n_context: int) -> None:
        self.language = language
        self.model = language.model
        self.experts: Any = language._experts  # noqa: SLF001 (a benchmark sees inside)
        self.is_device = hasattr(self.experts, "tiers")
        if not self.is_device:
            self.experts = ObservedExperts(self.experts)
        self.tokens = text_like_tokens(n_context, vocab_size=self.model.config.vocab_size)
        self.state = self.model.new_state(n_context)
        self.logits = torch.zeros(0)

    async def token(self) -> None:
        """One token, to the id that greedy decoding would go on with."""
        ids = torch.tensor(self.tokens[self.state.n_tokens :][:1])
        logits = await self.model.forward(ids, self.state, self.experts, logits="last")
        int(logits[-1].argmax())
        self.logits = logits[-1]

    async def timed(self, n: int) -> list[float]:
        """Microseconds of each of ``n`` tokens."""
        times = []
        for _ in range(n):
            await asyncio.sleep(0)
            begin = time.perf_counter()
            await self.token()
            times.append((time.perf_counter() - begin) * 1e6)
        return times

    async def bring_all_in(self) -> None:
        """Every expert resident."""
        spec = self.language.hierarchy.spec
        for layer in spec.layers:
            for start in range(0, spec.n_experts, 32):
                wanted = range(start, min(start + 32, spec.n_experts))
                async with self.language.hierarchy.acquire(layer, wanted) as lease:
                    await lease.ready()

    async def routing(self, n: int) -> dict[int, list[list[int]]]:
        """The experts of ``n`` more tokens, by layer."""
        watched = self.experts
        if self.is_device:
            watched = self.experts.tiers = ObservedTiers(self.experts.tiers)
        watched.ids.clear()
        for _ in range(n):
            await self.token()
        return watched.ids


def token_nbytes(inventory: GGUFInventory) -> tuple[int, int]:
    """What a token reads of dense and of routed weights."""
    experts = find_experts(inventory)
    routed_names = {info.name for info in experts.tensors.values()}
    by_row = {"token_embd.weight"}
    dense = sum(
        info.nbytes
        for name, info in inventory.tensors.items()
        if name not in routed_names | by_row and "tid2eid" not in name
    )
    spec = experts.spec
    return dense, sum(layout.payload_nbytes for layout in spec.layouts.values()) * spec.top_k


async def resident(path: Path, arguments: argparse.Namespace) -> None:
    """Everything in the top tier: the split of a token, then the routing."""
    inventory = open_inventory(path)
    spec = find_experts(inventory).spec
    dense_nbytes, routed_nbytes = token_nbytes(inventory)
    n_tokens = arguments.warm + arguments.tokens + arguments.replays + arguments.routed
    config = settings(arguments, path, spec.n_records)
    async with await open_model(path, config, n_context=n_tokens) as language:
        print(language.plan)
        print(f"opened in {language.load_s:.1f} s")
        run = Run(language, n_tokens)
        begin = time.perf_counter()
        await run.bring_all_in()
        print(f"all experts in after {time.perf_counter() - begin:.1f} s")
        await run.timed(arguments.warm)
        before = language.stats()
        if not run.is_device:
            run.experts.seconds = 0.0
        walls = await run.timed(arguments.tokens)
        done = language.stats().since(before)
        device = torch.device("cpu" if arguments.device == "host" else arguments.device)
        copies = copy_bandwidth(device, arguments.replays)
        copy = statistics.median(copies)
        print(
            f"copy {copy:.0f} GB/s ({min(copies):.0f} to {max(copies):.0f}, n = {len(copies)}); "
            f"hits {done.hit_rate:.2%} in the tokens measured"
        )
        print(
            f"{'µs per token':<28}{'n':>5}{'min':>11}{'median':>11}{'max':>11}"
            f"{'MB':>10}{'floor':>10}{'of it':>8}{'GB/s':>8}"
        )
        row("wall", walls, nbytes=dense_nbytes + routed_nbytes, copy=copy)
        if run.is_device:
            nbytes = (dense_nbytes, routed_nbytes)
            await split_on_device(run, walls, nbytes, copy, arguments.replays)
        else:
            routed_us = run.experts.seconds * 1e6 / arguments.tokens
            row("routed (mean)", [routed_us], nbytes=routed_nbytes, copy=copy)
            rest_us = statistics.mean(walls) - routed_us
            row("dense, control (mean)", [rest_us], nbytes=dense_nbytes, copy=copy)
        if arguments.routed:
            report_routing(await run.routing(arguments.routed), spec.n_experts)


async def split_on_device(
    run: Run, walls: Sequence[float], nbytes: tuple[int, int], copy: float, replays: int
) -> None:
    """The graphs that decoding has recorded, replayed without the host between them."""
    inner: Any = run.model
    while not hasattr(inner, "_stepper"):
        inner = inner._model  # noqa: SLF001 (recordings have no public face)
    step, experts, stepper = inner._stepper  # noqa: SLF001
    dense = stepper.pieces
    whole = [dense[0], *stepper.with_sums[1:]]
    sums = torch.cuda.CUDAGraph()
    with torch.cuda.graph(sums, capture_error_mode="thread_local"):
        for layer in step.layers:
            experts.batches.execute_resident(layer)
    on_gpu = replayed(whole, replays)
    row("on the GPU", on_gpu, nbytes=sum(nbytes), copy=copy)
    row("  dense alone", replayed(dense, replays), nbytes=nbytes[0], copy=copy)
    row("  routed alone", replayed([sums.replay], replays), nbytes=nbytes[1], copy=copy)
    control = [wall - statistics.median(on_gpu) for wall in walls]
    n_layers = len(step.layers)
    row("control", control)
    row(f"  each of {n_layers} layers", [us / n_layers for us in control])
    for name, times in (await host_path(stepper, run.token, replays)).items():
        row("  " + name, times)
    row("  to enter a token", host_times(lambda: step.enter(run.tokens[0]), replays))
    row("  to choose the next", host_times(lambda: int(step.logits[-1].argmax()), replays))
    for i, piece in enumerate(dense):
        # Again and again: what fits the L2 cache is found there.
        row(f"  dense graph {i} of {n_layers}", replayed([piece], replays))


def report_routing(ids: dict[int, list[list[int]]], n_experts: int) -> None:
    """One line per layer."""
    print(f"{'layer':<6}{'top 1/16':>9}{'touched':>9}   overlap with the token 1, 2, 8, 32 before")
    for layer, chosen in sorted(ids.items()):
        top_share, n_touched, overlaps = RoutingStatistics.of(np.array(chosen), n_experts=n_experts)
        shown = "  ".join(f"{overlap:.3f}" for overlap in overlaps)
        print(f"{layer:<6}{top_share:>9.3f}{n_touched:>9}   {shown}")


async def partial(path: Path, arguments: argparse.Namespace) -> None:
    """Caches smaller than the model, each from a cold start."""
    spec = find_experts(open_inventory(path)).spec
    print(
        f"{'slots':>7}{'of all':>8}{'n':>5}{'ms min':>9}{'median':>9}{'mean':>9}{'max':>9}"
        f"{'hits':>8}{'MB/token':>10}{'GB/s':>7}"
    )
    for text in arguments.slots.split(","):
        n_slots = (
            int(text) if not text.endswith("%") else int(spec.n_records * float(text[:-1]) / 100)
        )
        n_slots = min(max(n_slots, spec.top_k), spec.n_records)
        n_tokens = arguments.warm + arguments.tokens
        config = settings(arguments, path, n_slots)
        async with await open_model(path, config, n_context=n_tokens) as language:
            run = Run(language, n_tokens)
            await run.timed(arguments.warm)
            before = language.stats()
            walls = [us / 1e3 for us in await run.timed(arguments.tokens)]
            done = language.stats().since(before)
            print(
                f"{language.stats().cache_capacity_experts:>7}{n_slots / spec.n_records:>8.1%}"
                f"{len(walls):>5}{min(walls):>9.2f}"
                f"{statistics.median(walls):>9.2f}{statistics.mean(walls):>9.2f}{max(walls):>9.2f}"
                f"{done.hit_rate:>8.1%}{done.pack_read_bytes / len(walls) / 1e6:>10.1f}"
                f"{done.pack_read_bytes / sum(walls) / 1e6:>7.2f}",
                flush=True,
            )


def settings(arguments: argparse.Namespace, path: Path, n_slots: int) -> HierarchyConfig:
    """A hierarchy whose top tier has ``n_slots`` slots."""
    model = open_checkpoint(path)
    # On the host the top tier is read into, so its slots have room for whole pages around a record.
    on_host = arguments.device == "host"
    slot_nbytes = model.slot_nbytes if on_host else model.spec.slot_nbytes
    return HierarchyConfig(
        device=arguments.device,
        vram=n_slots * slot_nbytes,
        reserve=0,
        policy=arguments.policy,
        allow_buffered=arguments.allow_buffered,
    )


@contextmanager
def model_at(arguments: argparse.Namespace) -> Iterator[Path]:
    """The model given, or one made for this run."""
    if arguments.model is not None:
        yield arguments.model
        return
    directory = Path(tempfile.mkdtemp(prefix="tieredmoe-bench-", dir=arguments.dir))
    try:
        begin = time.perf_counter()
        made = make_synthetic(
            arguments.name,
            directory / "model.gguf",
            n_layers=arguments.layers,
            n_experts=arguments.experts,
            vocab_size=arguments.vocabulary,
            n_shards=arguments.shards,
            tokenizer=None,
        )
        seconds = time.perf_counter() - begin
        print(
            f"{arguments.name}, {made.n_layers} layers of {made.n_experts} experts: "
            f"{made.nbytes / 1e9:.2f} GB written in {seconds:.1f} s, "
            f"{made.nbytes / seconds / 1e9:.2f} GB/s"
        )
        yield made.paths[0]
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("deepseek-v4-flash", "kimi-k3"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=None)
    parser.add_argument("--vocabulary", type=int, default=None)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF instead of a new one")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or host")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--warm", type=int, default=8, help="tokens before those measured")
    parser.add_argument("--routed", type=int, default=300, help="tokens whose routing is shown")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--policy", default="lfu_lru")
    parser.add_argument("--slots", default="", help="such as 64,5%%,25%%")
    parser.add_argument("--allow-buffered", action="store_true")
    arguments = parser.parse_args()
    if arguments.device != "host":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {describe_machine()}")
    else:
        print(f"torch {torch.__version__}; {describe_machine()}")
    with model_at(arguments) as path:
        asyncio.run(resident(path, arguments))
        if arguments.slots:
            asyncio.run(partial(path, arguments))


if __name__ == "__main__":
    main()
