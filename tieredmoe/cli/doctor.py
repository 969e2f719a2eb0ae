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

from tieredmoe.backends import open_backend
from tieredmoe.cli.findings import Level
from tieredmoe.cli.machine_checks import machine_findings
from tieredmoe.cli.model_checks import model_findings
from tieredmoe.cli.read_rate import measure, places
from tieredmoe.cli.storage_checks import storage_findings
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import BackendUnavailableError, DirectIOUnavailableError, PackError, ReadError
from tieredmoe.memory import HostPool
from tieredmoe.pack import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tieredmoe.cli.findings import Finding
    from tieredmoe.cli.read_rate import ReadRate
    from tieredmoe.pack import Checkpoint

_MARKS = {Level.OK: "[green]ok[/]", Level.NOTE: "[yellow]note[/]", Level.PROBLEM: "[red]problem[/]"}
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
    model = _model_at(path)
    yield from machine_findings()
    yield from storage_findings(path, model.data_files if model else ())
    if model is not None:
        yield from model_findings(model, config, _rate(model))


def _model_at(path: Path) -> Checkpoint | None:
    """The model at ``path``; None for a folder that is none."""
    try:
        return open_checkpoint(path)
    except PackError:
        if path.is_dir():
            return None
        raise


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

    try:
        return asyncio.run(read())
    except (BackendUnavailableError, DirectIOUnavailableError, ReadError):
        return None  # the storage findings say why


def _show(found: Iterable[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        advice = f"\n[dim]→ {finding.advice}[/]" if finding.advice else ""
        table.add_row(_MARKS[finding.level], finding.subject, f"{finding.fact}{advice}")
    Console().print(table)
