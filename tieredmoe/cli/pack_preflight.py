"""``tieredmoe pack check``: what `pack create` would meet, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from tieredmoe.cli.exit_codes import FAILED
from tieredmoe.cli.wording import counted
from tieredmoe.pack import check_conversion

if TYPE_CHECKING:
    from tieredmoe.pack import Preflight

SourcePath = Annotated[
    Path,
    typer.Argument(help="A GGUF file, any of its shards, or their folder.", metavar="SOURCE"),
]
DestPath = Annotated[
    Path, typer.Argument(help="The pack's directory, as `create` would be told.", metavar="DEST")
]


def check(
    source: SourcePath,
    dest: DestPath,
    *,
    reclaim_source: Annotated[
        bool, typer.Option("--reclaim-source", help="As for `create`.")
    ] = False,
    safety_margin_gib: Annotated[float, typer.Option(min=0, help="As for `create`.")] = 0,
    max_file_gib: Annotated[float | None, typer.Option(min=0, help="As for `create`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List everything that keeps `create` from starting, and the space it needs. Writes nothing.

    Looks at every shard's header, the destination and its file system, and at what an interrupted
    conversion left there. Exit code 1 if there is a problem.

    Example: tieredmoe pack check /models/K3 /big/K3.pack --safety-margin-gib 20
    """
    found = check_conversion(
        source,
        dest,
        file_nbytes_max=None if max_file_gib is None else max(1, round(max_file_gib * 2**30)),
        reclaim_source=reclaim_source,
        safety_margin_nbytes=round(safety_margin_gib * 2**30),
    )
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        _show(found)
    if found.problems:
        typer.echo(f"tieredmoe: {counted(len(found.problems), 'problem')}", err=True)
        raise typer.Exit(FAILED)


def _show(found: Preflight) -> None:
    for problem in found.problems:
        typer.echo(problem)
    if found.layout is not None and found.needed_nbytes is not None:
        nbytes, files = found.layout.source_nbytes, counted(len(found.layout.shards), "file")
        free = "" if found.free_nbytes is None else f", {decimal(found.free_nbytes)} are free"
        typer.echo(
            f"{found.dest}: {decimal(nbytes)} in {files} become a pack that "
            f"takes {decimal(found.needed_nbytes)} at most{free}"
        )
    for note in found.notes:
        typer.echo(f"slower than it could be: {note}")


def _plain(found: Preflight) -> dict[str, object]:
    return {
        "dest": str(found.dest),
        "ready": not found.problems,
        "source_problems": list(found.source_problems),
        "dest_problems": list(found.dest_problems),
        "notes": list(found.notes),
        "needed_nbytes": found.needed_nbytes,
        "free_nbytes": found.free_nbytes,
    }
