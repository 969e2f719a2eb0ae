"""``tieredmoe pack verify``: is what the disk has what was written?"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from tieredmoe.cli.exit_codes import FAILED, WRONG_USAGE
from tieredmoe.cli.pack_progress import show_progress
from tieredmoe.cli.wording import counted
from tieredmoe.pack import (
    ForeignPack,
    has_drives,
    open_checkpoint,
    verify_drives,
    verify_foreign_pack,
    verify_pack,
)
from tieredmoe.pack.drives import is_drive, refuse_drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.pack import PackProgress, VerifyReport

PackPath = Annotated[Path, typer.Argument(help="A pack's directory.", metavar="PACK")]


def verify(
    path: PackPath,
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte. This is the default.")
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Read only N parts (an expert, or a dense tensor), chosen at random, and say how "
            "much damage that would have met. 1000 experts of Kimi-K3 are 12 GB of its terabyte.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Choose the same parts as another run with this seed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a pack with its digests and name whatever is damaged. Exit code 1 if anything is.

    Nothing is changed. Files are read past the page cache, in 16 MiB of memory: what is checked is
    the disk. Of a pack on several drives every drive is checked, of a mirrored one every copy.
    """
    if full and sample is not None:
        typer.echo("tieredmoe: --full and --sample exclude each other", err=True)
        raise typer.Exit(WRONG_USAGE)
    start_s = time.monotonic()
    with show_progress() as progress:
        report = _verify(path, sample, seed, progress)
    seconds = time.monotonic() - start_s
    if as_json:
        typer.echo(json.dumps(_plain(path, report, seconds), indent=2))
    else:
        for damage in report.damage:
            typer.echo(str(damage))
    for fallback in report.fallbacks:
        typer.echo(f"tieredmoe: slower than it could be: {fallback}", err=True)
    if report.damage:
        places = counted(len(report.damage), "place")
        typer.echo(
            f"tieredmoe: {path}: damaged in {places}; experts that are damaged can be served from "
            "the source GGUF (repair_from), a new pack mends all",
            err=True,
        )
        raise typer.Exit(FAILED)
    if not as_json:
        typer.echo(_sound(path, report, seconds))


def _verify(
    path: Path, sample: int | None, seed: int | None, progress: Callable[[PackProgress], None]
) -> VerifyReport:
    if is_drive(path):
        refuse_drive(path)
    # A directory is a pack of ours, and one that is damaged says so better by itself.
    model = open_checkpoint(path) if path.is_file() else None
    how = {"sample": sample, "seed": seed}
    if isinstance(model, ForeignPack):
        return asyncio.run(verify_foreign_pack(model, progress=progress, **how))
    check = verify_drives if has_drives(path) else verify_pack
    return asyncio.run(check(path, progress=progress, **how))


def _sound(path: Path, report: VerifyReport, seconds: float) -> str:
    rate = decimal(int(report.read_nbytes / max(seconds, 1e-9)))
    read = f"{decimal(report.read_nbytes)} compared in {seconds:.1f} s, {rate}/s"
    if report.n_read == report.n_parts:
        return f"{path}: sound, every byte: {read}"
    return (
        f"{path}: sound as far as was looked: {report.n_read:,} of {report.n_parts:,} parts, "
        f"{read}; if more than {report.share_found:.1%} of it were damaged, that would have shown "
        "with 95 % certainty"
    )


def _plain(path: Path, report: VerifyReport, seconds: float) -> dict[str, object]:
    return {
        "path": str(path),
        "sound": not report.damage,
        "complete": report.n_read == report.n_parts,
        "read_nbytes": report.read_nbytes,
        "total_nbytes": report.total_nbytes,
        "parts_read": report.n_read,
        "parts": report.n_parts,
        "damaged_share_met": report.share_found,
        "seconds": round(seconds, 3),
        "not_direct": list(report.fallbacks),
        "damage": [
            {
                "path": str(damage.path),
                "offset": damage.offset,
                "nbytes": damage.nbytes,
                "what": damage.what,
                "fact": damage.fact,
                "layer": None if damage.key is None else damage.key.layer,
                "expert": None if damage.key is None else damage.key.expert,
            }
            for damage in report.damage
        ],
    }
