"""``tieredmoe pack split``, ``mirror`` and ``attach``: a pack's experts on several drives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from tieredmoe.cli.pack_progress import show_progress
from tieredmoe.pack import attach_drives, mirror_pack, split_pack

if TYPE_CHECKING:
    from collections.abc import Sequence

PackPath = Annotated[Path, typer.Argument(help="The pack's directory.", metavar="PACK")]


def split(
    pack: PackPath,
    drives: Annotated[
        list[Path],
        typer.Argument(
            help="A new directory on each drive; PACK itself for a share on its own drive.",
            metavar="DIRECTORY",
        ),
    ],
    *,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Shares of the drives, like `2,1`, or `measured`: each is read for a second, and "
            "the fastest gets most. Without it all get the same.",
        ),
    ] = None,
    remove_original: Annotated[
        bool,
        typer.Option(
            "--remove-original",
            help="Remove the experts from PACK's own directory, after all drives were read again "
            "and found right. Then the drives are needed to run or restore the model.",
        ),
    ] = False,
) -> None:
    """Divide a pack's experts among drives, which then read side by side: twice the speed from two.

    Every layer is spread over all drives. PACK keeps its manifest and dense weights and is opened
    by its own path as before; if a drive is lost, so are its experts (see `mirror`). It is done
    whole or not at all, and whatever stops it leaves PACK as it was.

    Example: tieredmoe pack split /nvme0/k3.pack /nvme1/k3.part /nvme2/k3.part --weights measured
    """
    with show_progress() as progress:
        report = asyncio.run(
            split_pack(
                pack,
                drives,
                weights=_weights(weights),
                remove_original=remove_original,
                progress=progress,
            )
        )
    for drive, n, weight in zip(report.drives, report.n_experts, report.weights, strict=True):
        share = weight / sum(report.weights)
        typer.echo(f"{drive}: {n:,} experts, a share of {share:.0%}")
    removed = f", {decimal(report.removed_nbytes)} removed" if remove_original else ""
    typer.echo(f"{report.path}: split, {decimal(report.written_nbytes)} written{removed}")


def mirror(
    pack: PackPath,
    directory: Annotated[
        Path, typer.Argument(help="A new directory on another drive.", metavar="DIRECTORY")
    ],
) -> None:
    """Copy a pack to another drive and read from both: faster, and either drive may die.

    Each expert is read from the copy that will have it first, and from the other if that fails. A
    copy is a whole pack that opens by itself, too. Run it again for a third copy. It is done whole
    or not at all, and whatever stops it leaves PACK as it was.

    Example: tieredmoe pack mirror /nvme0/k3.pack /nvme1/k3.pack
    """
    with show_progress() as progress:
        report = asyncio.run(mirror_pack(pack, directory, progress=progress))
    copies = ", ".join(map(str, report.copies))
    typer.echo(f"{report.path}: {decimal(report.written_nbytes)} written, read from {copies} now")


def attach(
    pack: PackPath,
    directories: Annotated[
        list[Path],
        typer.Argument(
            help="Where the parts of a split are now (those that moved will do), or all copies.",
            metavar="DIRECTORY",
        ),
    ],
) -> None:
    """Say anew where the parts or copies of a pack are, after a drive was moved or replaced.

    Nothing is copied: each directory says itself which part or copy it is, so they can be named in
    any order, and one that belongs to another pack is refused by name.

    Example: tieredmoe pack attach /nvme0/k3.pack /mnt/new/k3.part
    """
    opened = asyncio.run(attach_drives(pack, directories))
    how = "a copy each in" if opened.placement is None else "split over"
    typer.echo(f"{opened.path}: {how} {', '.join(map(str, opened.drives))}")
    for fact in opened.left_out:
        typer.echo(f"tieredmoe: left out: {fact}", err=True)


def _weights(text: str | None) -> Sequence[float] | Literal["measured"] | None:
    if text is None:
        return None
    if text == "measured":
        return "measured"
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither `measured` nor numbers like `2,1`", param_hint="--weights"
        ) from None
