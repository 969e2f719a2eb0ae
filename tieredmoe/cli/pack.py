"""``tieredmoe pack``: make and verify expert packs, describe any model."""

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

from tieredmoe.pack import (
    DrivesPack,
    ForeignPack,
    Pack,
    PackProgress,
    VirtualPack,
    create_pack,
    has_drives,
    open_checkpoint,
    verify_drives,
    verify_foreign_pack,
    verify_pack,
)
from tieredmoe.pack.drives import is_drive, refuse_drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.spec import ExpertLayout, MoESpec

app = typer.Typer(help="Make and verify expert packs, describe any model.", no_args_is_help=True)


PackPath = Annotated[Path, typer.Argument(help="A pack's directory.")]
ModelPath = Annotated[
    Path, typer.Argument(help="A pack's directory, or a GGUF: a file, a shard, their folder.")
]


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
def info(path: ModelPath) -> None:
    """Say what a model on disk holds: layers, types, sizes, where its experts are read."""
    model = open_checkpoint(path)
    spec = model.spec
    payload_nbytes = sum(spec.n_experts * each.payload_nbytes for each in spec.layouts.values())
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("model", spec.architecture)
    table.add_row(
        "routed", f"{len(spec.layers)} layers of {spec.n_experts} experts, top-{spec.top_k}"
    )
    about: Iterator[tuple[str, str]] = iter(())
    if isinstance(model, Pack):
        table.add_row("experts", _packed_experts(model, payload_nbytes))
        about = _about_pack(model)
    elif isinstance(model, DrivesPack):
        table.add_row("experts", f"{decimal(payload_nbytes)} {_on_drives(model)}")
        about = _about_drives(model)
    else:
        table.add_row(
            "experts", f"{decimal(payload_nbytes)} in {len(model.data_files)} file(s), run in place"
        )
        if isinstance(model, VirtualPack):
            about = _about_gguf(model, payload_nbytes)
        elif isinstance(model, ForeignPack):
            about = _about_foreign(model)
    table.add_row("slot", f"{spec.slot_nbytes:,} bytes hold any expert")
    if model.slot_nbytes != spec.slot_nbytes:
        table.add_row("reads", f"{model.slot_nbytes:,} bytes hold what is read for any expert")
    for layers, types in _types(spec):
        table.add_row(f"layers {layers}", types)
    for row in about:
        table.add_row(*row)
    Console(soft_wrap=True, markup=False, emoji=False).print(table)


@app.command()
def verify(path: PackPath) -> None:
    """Compare every byte of a pack with its digest, and name whatever is damaged."""
    if is_drive(path):
        refuse_drive(path)
    model = open_checkpoint(path) if path.is_file() else None
    with _progress_bar() as progress:
        if isinstance(model, ForeignPack):
            report = asyncio.run(verify_foreign_pack(model, progress=progress))
        elif has_drives(path):
            report = asyncio.run(verify_drives(path, progress=progress))
        else:
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


def _packed_experts(pack: Pack, payload_nbytes: int) -> str:
    files = pack.manifest.layout.expert_files
    nbytes = sum(file.nbytes for file in files)
    padding = 1 - payload_nbytes / nbytes
    return f"{decimal(nbytes)} in {len(files)} file(s), {padding:.1%} of it padding"


def _on_drives(model: DrivesPack) -> str:
    how = "a copy each in" if model.placement is None else "split over"
    return f"{how} {', '.join(map(str, model.drives))}"


def _about_drives(model: DrivesPack) -> Iterator[tuple[str, str]]:
    for fact in model.left_out:
        yield "left out", fact
    yield from _about_pack(model.pack)


def _about_pack(pack: Pack) -> Iterator[tuple[str, str]]:
    layout = pack.manifest.layout
    dense_nbytes = sum(shard.dense_file.nbytes for shard in layout.shards)
    yield "dense", f"{decimal(dense_nbytes)}, {len(pack.tensors)} tensors in the model"
    yield "source", f"{decimal(layout.source_nbytes)} in {len(layout.shards)} file(s)"
    yield "source digest", pack.manifest.source_digest.hex()
    yield "config digest", pack.manifest.config_digest.hex()


def _about_gguf(model: VirtualPack, payload_nbytes: int) -> Iterator[tuple[str, str]]:
    nbytes = sum(shard.file_nbytes for shard in model.inventory.shards)
    dense = decimal(nbytes - payload_nbytes)
    yield "dense", f"{dense}, {len(model.tensors)} tensors in the model"
    yield "digests", "none; a pack has them (`tieredmoe pack create`)"


def _about_foreign(model: ForeignPack) -> Iterator[tuple[str, str]]:
    yield "format", model.format
    yield "dense", f"in {model.source.path}, {len(model.tensors)} tensors in the model"
    yield "digests", "SHA-256 per matrix" if model.has_digests else "none"


def _types(spec: MoESpec) -> Iterator[tuple[str, str]]:
    """Runs of layers whose roles have the same types, and those types."""

    def types(item: tuple[int, ExpertLayout]) -> str:
        names = ((role.name, GGMLQuantizationType(role.ggml_type).name) for role in item[1].roles)
        return ", ".join(f"{role} {name}" for role, name in names)

    for shown, group in groupby(spec.layouts.items(), key=types):
        layers = [layer for layer, _ in group]
        yield (f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])), shown
