"""The command's entry: sub-commands are added here, and errors end here, in one line each."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tieredmoe._version import __version__
from tieredmoe.cli.bench import app as bench_app
from tieredmoe.cli.doctor import doctor
from tieredmoe.cli.exit_codes import EXPLAINED, FAILED
from tieredmoe.cli.pack import app as pack_app
from tieredmoe.cli.replay import replay
from tieredmoe.errors import TieredMoEError

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="tieredmoe",
    help="Tiered memory for the routed experts of giant mixture-of-experts models.",
    epilog=EXPLAINED,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # so the paragraphs of a docstring flow
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.add_typer(pack_app, name="pack")
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(replay)


@app.callback()
def _root(
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"tieredmoe {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; an error of the library's is one line on stderr and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        # A path may have bytes, and a text of ours a dash, that the terminal's encoding has not.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="tieredmoe")
    except TieredMoEError as error:
        typer.echo(f"tieredmoe: {error}", err=True)
        sys.exit(FAILED)
    except OSError as error:  # the library's own are above: this is the output's
        typer.echo(f"tieredmoe: the output cannot be written: {error}", err=True)
        # What is left in the buffer would fail again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
