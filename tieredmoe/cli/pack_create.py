"""``tieredmoe pack create``, ``restore`` and ``rollback``: what writes terabytes.

Exit codes: 0 done; 1 an error that the message explains; 2 wrong usage, or a source that would be
given up without a yes; 130 interrupted. After 1 and 130 the same command goes on where it was.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from tieredmoe.cli.exit_codes import INTERRUPTED, WRONG_USAGE
from tieredmoe.cli.pack_progress import show_progress
from tieredmoe.pack import create_pack, restore_pack, rollback_pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Source = Annotated[Path, typer.Argument(help="A GGUF file, any of its shards, or their folder.")]


def create(
    source: Source,
    dest: Annotated[Path, typer.Argument(help="The pack's directory, which must not exist yet.")],
    *,
    reclaim_source: Annotated[
        bool,
        typer.Option(
            "--reclaim-source",
            help="Give the source up layer by layer, as soon as the pack has a layer for certain. "
            "Takes the space of one layer; `pack restore` brings the files back.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before giving up.")] = False,
    safety_margin_gib: Annotated[
        float, typer.Option(min=0, help="Leave this much of the drive free.")
    ] = 0,
    max_file_gib: Annotated[
        float | None, typer.Option(min=0, help="Start a new file of experts at this size.")
    ] = None,
) -> None:
    """Convert a GGUF model to a pack; stopped by whatever, the same command goes on."""
    if reclaim_source and not yes:
        _confirm(source, dest)
    start_s = time.monotonic()
    with _resumable(), show_progress() as progress:
        report = asyncio.run(
            create_pack(
                source,
                dest,
                progress=progress,
                file_nbytes_max=None if max_file_gib is None else max(1, _gib(max_file_gib)),
                reclaim_source=reclaim_source,
                safety_margin_nbytes=_gib(safety_margin_gib),
            )
        )
    seconds = time.monotonic() - start_s
    rate = decimal(int(report.source_read_nbytes / seconds))
    typer.echo(
        f"{dest}: {decimal(report.source_read_nbytes)} converted in {seconds:.1f} s, {rate}/s"
    )
    if report.resumed_nbytes:
        typer.echo(f"{decimal(report.resumed_nbytes)} were there from an earlier run")
    if reclaim_source:
        typer.echo(
            f"{decimal(report.reclaimed_nbytes)} given up in the source, whose files are gone; "
            f"`tieredmoe pack restore {dest} FOLDER` writes them again"
        )
    _tell(report.fallbacks)


def restore(
    pack: Annotated[Path, typer.Argument(help="A pack's directory.")],
    dest: Annotated[Path, typer.Argument(help="A new directory for the GGUF files.")],
) -> None:
    """Write the GGUF files that a pack was made from, byte for byte, proved by their digests."""
    start_s = time.monotonic()
    with _resumable(), show_progress() as progress:
        report = asyncio.run(restore_pack(pack, dest, progress=progress))
    seconds = time.monotonic() - start_s
    for path in report.files:
        typer.echo(str(path))
    rate = decimal(int(report.written_nbytes / seconds))
    typer.echo(f"{len(report.files)} file(s) restored in {seconds:.1f} s, {rate}/s", err=True)
    _tell(report.fallbacks)


def rollback(
    dest: Annotated[
        Path, typer.Argument(help="The pack that an interrupted `create` was to make.")
    ],
    *,
    source: Annotated[
        Path | None, typer.Option(help="Where the source is now, if it was moved.")
    ] = None,
) -> None:
    """Undo an interrupted conversion: the source gets its bytes back, the beginnings go."""
    with _resumable(), show_progress() as progress:
        report = asyncio.run(rollback_pack(dest, source=source, progress=progress))
    returned = f", {decimal(report.returned_nbytes)} given back to its source"
    typer.echo(f"{dest}: conversion undone{returned if report.returned_nbytes else ''}")


def _confirm(source: Path, dest: Path) -> None:
    typer.echo(
        f"The bytes of {source} will be taken out of its files while {dest} is made, each layer\n"
        "after it was read again from the pack and found right. At the end the files are removed.\n"
        "Until then no program can use them; `tieredmoe pack rollback` or `restore` undoes it.",
        err=True,
    )
    if not _is_terminal():
        typer.echo("tieredmoe: nobody is there to ask; say --yes to give the source up", err=True)
        raise typer.Exit(WRONG_USAGE)
    try:
        is_wanted = typer.confirm("Give the source up?", err=True)
    except typer.Abort:
        typer.echo("\ntieredmoe: nothing was done", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not is_wanted:
        typer.echo("tieredmoe: nothing was done", err=True)
        raise typer.Exit(WRONG_USAGE)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("tieredmoe: interrupted; the same command goes on after what is done", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _tell(fallbacks: Sequence[str]) -> None:
    for fallback in fallbacks:
        typer.echo(f"tieredmoe: slower than it could be: {fallback}", err=True)


def _gib(n: float) -> int:
    if not math.isfinite(n):
        raise typer.BadParameter(f"{n} is not a number of GiB")
    return round(n * (1 << 30))
