"""Progress of long work on stderr: a bar with rate and time left on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.pack import PackProgress

LINE_INTERVAL_S = 10.0
"""A line where there is no terminal comes no more often than this, but at the end of a phase."""


@contextmanager
def show_progress() -> Iterator[Callable[[PackProgress], None]]:
    """Yields the callback that shows progress; a bar vanishes at the end, lines stay."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
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
                # What an earlier run has done counts as done, not as speed.
                tasks[progress.phase] = bars.add_task(
                    progress.phase, total=progress.total_nbytes, completed=progress.done_nbytes
                )
            bars.update(tasks[progress.phase], completed=progress.done_nbytes)

        yield show


class _Lines:
    """Lines for a log: phase, how far, at what rate, how much longer."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}
        self._due_s = time.monotonic() + LINE_INTERVAL_S

    def show(self, progress: PackProgress) -> None:
        now_s = time.monotonic()
        start_s, start_nbytes = self._began.setdefault(
            progress.phase, (now_s, progress.done_nbytes)
        )
        at_end = progress.done_nbytes == progress.total_nbytes
        if now_s < self._due_s and not (at_end and now_s > start_s):
            return
        self._due_s = now_s + LINE_INTERVAL_S
        rate = (progress.done_nbytes - start_nbytes) / max(now_s - start_s, 1e-9)
        line = (
            f"{progress.phase}: {decimal(progress.done_nbytes)} of "
            f"{decimal(progress.total_nbytes)}, {decimal(int(rate))}/s"
        )
        if rate and not at_end:
            left_s = (progress.total_nbytes - progress.done_nbytes) / rate
            line += f", {left_s / 60:.0f} min left"
        typer.echo(line, err=True)
