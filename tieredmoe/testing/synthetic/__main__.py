"""``python -m tieredmoe.testing.synthetic``: make a synthetic model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tieredmoe.errors import TieredMoEError
from tieredmoe.testing.synthetic.model import make_synthetic
from tieredmoe.testing.synthetic.published import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.testing.synthetic.published import ModelName

Target = Annotated[Path, typer.Argument(help="The GGUF to write; shards lie beside it.")]


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(PUBLISHED)}.")],
    path: Target,
    *,
    layers: Annotated[int, typer.Option(help="Layers, every kind among them.")] = 8,
    experts: Annotated[
        int | None, typer.Option(help="Experts, the published number if not given.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens, likewise.")] = None,
    shards: Annotated[int, typer.Option(help="Files.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    tokenizer: Annotated[bool, typer.Option(help="With a tokenizer, or for ids only.")] = True,
) -> None:
    """Write a model of a published model's dimensions and types, with random weights."""
    start_s = time.monotonic()
    try:
        with _progress_bar() as show:
            made = make_synthetic(
                cast("ModelName", model),
                path,
                n_layers=layers,
                n_experts=experts,
                vocab_size=vocabulary,
                seed=seed,
                n_shards=shards,
                tokenizer="tiny" if tokenizer else None,
                progress=show,
            )
    except TieredMoEError as error:
        typer.echo(f"synthetic: {error}", err=True)
        raise typer.Exit(1) from error
    seconds = time.monotonic() - start_s
    typer.echo(
        f"{made.paths[0]}: {decimal(made.nbytes)} in {len(made.paths)} file(s), "
        f"{decimal(made.dense_nbytes)} of it dense, {decimal(made.expert_nbytes)} an expert; "
        f"{seconds:.1f} s, {decimal(int(made.nbytes / seconds))}/s"
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; yields the callback that moves it. It vanishes at the end."""
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


if __name__ == "__main__":
    typer.run(main)
