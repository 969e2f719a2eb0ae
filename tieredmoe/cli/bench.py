"""``tieredmoe bench``: what the drive can do, and what each backend makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tieredmoe.backends.kernel import Kernel
from tieredmoe.budget import format_size, parse_size
from tieredmoe.cli.io_contest import Contest, Standing, hold, refuse_memory
from tieredmoe.cli.read_rate import places
from tieredmoe.errors import ConfigError, NotAModelError
from tieredmoe.pack import open_checkpoint
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

app = typer.Typer(help="Measure this machine, side by side and in rounds.", no_args_is_help=True)

_RECORD_NBYTES = 12 << 20
_PIECE_NBYTES = 16 << 20


@app.callback()
def _bench() -> None:
    # A callback keeps `io` a sub-command while it is the only one.
    return


@app.command()
def io(
    path: Annotated[
        Path,
        typer.Argument(help="A model, a large file, or a folder (a file is made there meanwhile)."),
    ],
    *,
    record: Annotated[
        str | None, typer.Option(help="Bytes of a read (default: the model's record, or 12MiB).")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=64, help="Reads at once.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians are shown.")] = 5,
    turn: Annotated[
        str, typer.Option(help="Bytes that each backend reads in a round at most.")
    ] = "1GiB",
    make: Annotated[str, typer.Option(help="Size of the file made in a folder.")] = "2GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a drive at the size of an expert: its ceiling, and each backend's share of it."""
    asked_nbytes = parse_size(record) if record else None
    turn_nbytes = parse_size(turn)
    with _readable(path, parse_size(make)) as (files, nbytes):
        record_nbytes = _whole_pages(asked_nbytes or nbytes)
        where = places(files, record_nbytes)
        if len(where) < in_flight:
            raise ConfigError(
                f"{path} has {len(where)} records of {format_size(record_nbytes)}, and {in_flight} "
                "are to be read at once; name a larger file (--make, in a folder), or set --record "
                "or --in-flight"
            )
        contest = Contest(
            files=files,
            where=where,
            record_nbytes=record_nbytes,
            n_in_flight=in_flight,
            # None twice: the page cache would have it the second time.
            n_records=min(len(where), max(in_flight, turn_nbytes // record_nbytes)),
        )
        standings = asyncio.run(hold(contest, n_rounds=rounds))
    if as_json:
        typer.echo(json.dumps(_plain(contest, standings), indent=2))
    else:
        _show(contest, standings, rounds)


@contextmanager
def _readable(path: Path, make_nbytes: int) -> Iterator[tuple[Sequence[Path], int]]:
    """The files to read and the size of a record in them."""
    try:
        model = open_checkpoint(path)
    except NotAModelError:
        if path.is_dir():
            with _made_in(path, make_nbytes) as file:
                yield [file], _RECORD_NBYTES
        else:
            yield [path], _RECORD_NBYTES
        return
    yield model.data_files, model.slot_nbytes


@contextmanager
def _made_in(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of ``nbytes`` that no drive can compress, gone afterwards."""
    with ExitStack() as made:
        try:
            file = made.enter_context(
                tempfile.NamedTemporaryFile(dir=folder, prefix=".tieredmoe-bench-")
            )
            refuse_memory(folder, file.fileno(), Kernel())
            for start in range(0, nbytes, _PIECE_NBYTES):
                file.write(os.urandom(min(_PIECE_NBYTES, nbytes - start)))
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{folder}: a file of {format_size(nbytes)} cannot be made there "
                f"({error.strerror}); set --make, or name a file to read"
            ) from error
        yield Path(file.name)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _plain(contest: Contest, standings: Sequence[Standing]) -> dict[str, object]:
    return {
        "record_bytes": contest.record_nbytes,
        "in_flight": contest.n_in_flight,
        "records_per_turn": contest.n_records,
        "backends": {
            standing.way: {"absent": standing.absent}
            if standing.absent
            else {
                "gb_per_s": [rate.gb_per_s for rate in standing.rates],
                "share_of_ceiling": list(standing.shares),
                "cpu_s_per_gb": [rate.cpu_s_per_gb for rate in standing.rates],
            }
            for standing in standings
        },
    }


def _show(contest: Contest, standings: Sequence[Standing], n_rounds: int) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(
        f"records of {format_size(contest.record_nbytes)}, {contest.n_in_flight} at once, "
        f"{contest.n_records} in a turn, median of {n_rounds} rounds (least to most)"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("", "GB/s", "of plain reads", "CPU-s/GB"):
        table.add_column(heading, justify="right" if heading else "left")
    for standing in standings:
        if standing.absent:
            table.add_row(standing.way, f"absent: {standing.absent}")
            continue
        rates = [rate.gb_per_s for rate in standing.rates]
        table.add_row(
            standing.way,
            f"{standing.gb_per_s:.2f} ({min(rates):.2f}–{max(rates):.2f})",
            f"{standing.share:.2f} ({min(standing.shares):.2f}–{max(standing.shares):.2f})",
            f"{standing.cpu_s_per_gb:.3f}",
        )
    console.print(table)
