"""``tieredmoe doctor``: what this machine, this path and this model will do, and what to change."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tieredmoe.backends import open_backend
from tieredmoe.cli.findings import Level, note
from tieredmoe.cli.read_rate import measure, places
from tieredmoe.cli.storage_checks import storage_findings
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import (
    BackendUnavailableError,
    DirectIOUnavailableError,
    NotAModelError,
    ReadError,
    TieredMoEError,
)
from tieredmoe.memory import HostPool
from tieredmoe.pack import DrivesPack, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tieredmoe.cli.findings import Finding
    from tieredmoe.cli.read_rate import ReadRate
    from tieredmoe.pack import Checkpoint

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}
_N_IN_FLIGHT = 8
_MEASURED_NBYTES = 1 << 30


def doctor(
    path: Annotated[
        Path, typer.Argument(help="A model (a pack, or a GGUF or its folder), or any folder.")
    ] = Path(),
    *,
    vram: Annotated[str, typer.Option(help="Budget of the expert cache.")] = "21GiB",
    reserve: Annotated[str, typer.Option(help="Free memory to leave alone.")] = "3GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Say what will work here and how well. Exit code 1 if anything will not work."""
    config = HierarchyConfig(vram=vram, reserve=reserve)
    found = list(findings(path, config))
    if as_json:
        typer.echo(json.dumps([attrs.asdict(finding) for finding in found], indent=2))
    else:
        _show(found)
    if any(finding.level is Level.PROBLEM for finding in found):
        raise typer.Exit(1)


def findings(path: Path, config: HierarchyConfig) -> Iterator[Finding]:
    """Everything there is to say of ``path`` on this machine.

    Raises ``PackError`` or ``GGUFError`` for a path that is no folder and no sound model.
    """
    # Torch takes seconds to import, and commands that copy bytes do without.
    from tieredmoe.cli.machine_checks import machine_findings  # noqa: PLC0415
    from tieredmoe.cli.model_checks import model_findings  # noqa: PLC0415

    model = _model_at(path)
    yield from machine_findings()
    if model is None:
        yield from storage_findings(path, ())
        return
    yield from storage_findings(path, _read_files(model))
    if isinstance(model, DrivesPack) and model.left_out:
        facts = "; ".join(model.left_out)
        yield note("copies", f"left out: {facts}", "mend them, or say with `attach_drives` which")
    rate = None
    try:
        rate = _rate(model)
    except (BackendUnavailableError, DirectIOUnavailableError, ReadError):
        pass  # the storage findings say why
    except TieredMoEError as error:
        yield note("read speed", "not measured", str(error))
    yield from model_findings(model, config, rate)


def _model_at(path: Path) -> Checkpoint | None:
    """The model at ``path``; None for a folder that is none."""
    try:
        return open_checkpoint(path)
    except NotAModelError:
        if path.is_dir():
            return None
        raise


def _read_files(model: Checkpoint) -> Sequence[Path]:
    """Every file that experts are read from: of a mirror, those of all copies."""
    if isinstance(model, DrivesPack) and model.placement is None:
        names = [file.name for file in model.data_files]
        return [drive / name for drive in model.drives for name in names]
    return model.data_files


def _rate(model: Checkpoint) -> ReadRate | None:
    """What the model's experts are read at now: about a gigabyte of them, as a run would read."""
    nbytes = model.slot_nbytes
    where = places(model.data_files, nbytes)
    if not where:
        return None

    async def read() -> ReadRate:
        backend = open_backend("auto", model.data_files, record_nbytes=nbytes)
        try:
            pool = HostPool.allocate(_N_IN_FLIGHT * nbytes)
            try:
                return await measure(
                    backend,
                    where,
                    pool,
                    record_nbytes=nbytes,
                    n_in_flight=_N_IN_FLIGHT,
                    n_records=min(len(where), max(1, _MEASURED_NBYTES // nbytes)),
                )
            finally:
                pool.close()
        finally:
            await backend.close()

    return asyncio.run(read())


def _show(found: Iterable[Finding]) -> None:
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=console.width // 3)
    table.add_column(overflow="fold")
    for finding in found:
        # Text, since a path may look like markup.
        fact = Text(finding.fact)
        if finding.advice:
            fact.append(f"\n→ {finding.advice}", style="dim")
        mark = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(mark, Text(finding.subject), fact)
    console.print(table)
