"""``tieredmoe pack``: make, describe and verify expert packs."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from gguf import GGMLQuantizationType
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from tieredmoe.pack import PackProgress, create_pack, open_pack, verify_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.spec import ExpertLayout, MoESpec

app = typer.Typer(help="Make, describe and verify expert packs.", no_args_is_help=True)

PackPath = Annotated[Path, typer.Argument(help="A pack's directory.")]


@app.command()
def create(
    source: Annotated[
        Path, typer.Argument(help="A GGUF file, any of its shards, or their folder.")
    ],
    dest: Annotated[Path, typer.Argument(help="The pack's directory, which must not exist yet.")],
) -> None:
    """Convert a GGUF model to a pack, in one pass; the source is only read."""
    start_s = time.monotonic()
    with _progress_bar() as progress:
        report = asyncio.run(create_pack(source, dest, progress=progress))
    seconds = time.monotonic() - start_s
    rate = decimal(int(report.source_read_nbytes / seconds))
    typer.echo(
        f"{dest}: {decimal(report.source_read_nbytes)} converted in {seconds:.1f} s, {rate}/s"
    )


@app.command()
def info(path: PackPath) -> None:
    """Say what a pack holds: model, layers, types, sizes, source."""
    pack = open_pack(path)
    layout, spec = pack.manifest.layout, pack.spec
    experts_nbytes = sum(file.nbytes for file in layout.expert_files)
    payload_nbytes = sum(spec.n_experts * each.payload_nbytes for each in spec.layouts.values())
    dense_nbytes = sum(shard.dense_file.nbytes for shard in layout.shards)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("model", spec.architecture)
    table.add_row(
        "routed", f"{len(spec.layers)} layers of {spec.n_experts} experts, top-{spec.top_k}"
    )
    table.add_row(
        "experts",
        f"{decimal(experts_nbytes)} in {len(layout.expert_files)} file(s), "
        f"{1 - payload_nbytes / experts_nbytes:.1%} of it padding",
    )
    table.add_row("slot", f"{spec.slot_nbytes:,} bytes hold any expert")
    for layers, types in _types(spec):
        table.add_row(f"layers {layers}", types)
    table.add_row("dense", f"{decimal(dense_nbytes)}, {len(pack.tensors)} tensors in the model")
    table.add_row("source", f"{decimal(layout.source_nbytes)} in {len(layout.shards)} file(s)")
    table.add_row("source digest", pack.manifest.source_digest.hex())
    table.add_row("config digest", pack.manifest.config_digest.hex())
    Console(soft_wrap=True).print(table)


@app.command()
def verify(path: PackPath) -> None:
    """Compare every byte of a pack with its digest, and name whatever is damaged."""
    with _progress_bar() as progress:
        report = asyncio.run(verify_pack(path, progress=progress))
    for damage in report.damage:
        typer.echo(str(damage))
    if report.damage:
        typer.echo(f"tieredmoe: {path}: damaged in {len(report.damage)} place(s)", err=True)
        raise typer.Exit(1)
    typer.echo(f"{path}: sound, {decimal(report.read_nbytes)} compared")


@contextmanager
def _progress_bar() -> Iterator[Callable[[PackProgress], None]]:
    """A bar on stderr; yields the callback that moves it. It vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(progress: PackProgress) -> None:
            if progress.phase not in tasks:
                tasks[progress.phase] = bars.add_task(progress.phase, total=progress.total_nbytes)
            bars.update(tasks[progress.phase], completed=progress.done_nbytes)

        yield show


def _types(spec: MoESpec) -> Iterator[tuple[str, str]]:
    """Runs of layers whose roles have the same types, and those types."""

    def types(item: tuple[int, ExpertLayout]) -> str:
        names = ((role.name, GGMLQuantizationType(role.ggml_type).name) for role in item[1].roles)
        return ", ".join(f"{role} {name}" for role, name in names)

    for shown, group in groupby(spec.layouts.items(), key=types):
        layers = [layer for layer, _ in group]
        yield (f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])), shown
