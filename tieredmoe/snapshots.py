"""Counters to a file now and then, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tieredmoe.stats import Stats

logger = logging.getLogger(__name__)


class SnapshotFile:
    """Replaces the JSON file ``path`` by a fresh snapshot every ``every`` steps, and at the close.

    Statistics must never stop a run: a snapshot that cannot be written is a warning. Bound to the
    running loop; ``tick`` may be called in any thread. Raises ``ConfigError`` for a file that holds
    something else.
    """

    def __init__(self, path: Path, *, every: int, snapshot: Callable[[], Stats]) -> None:
        check_snapshot_path(path)
        self.path = path
        self._every = every
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        self._writing: asyncio.Task[None] | None = None
        self._warned: int | None = None

    def tick(self, n_steps: int) -> None:
        """Start writing a snapshot if it is time and the last one has been written."""
        if n_steps % self._every == 0:
            with contextlib.suppress(RuntimeError):  # a closed loop has written its last
                self._loop.call_soon_threadsafe(self._start)

    async def close(self) -> None:
        """Write the last snapshot, after any still being written.

        Cancelled, it stops waiting, not writing; called again, it writes one more and waits.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing})
        await asyncio.wait({self._start()})

    def _start(self) -> asyncio.Task[None]:
        """Start writing a snapshot unless one is still being written; that write, or this."""
        if self._writing is None or self._writing.done():
            self._writing = self._loop.create_task(self._write(self._snapshot()))
        return self._writing

    async def _write(self, stats: Stats) -> None:
        try:
            await stats.write(self.path)
        except OSError as error:
            if error.errno != self._warned:  # every snapshot of a long run would say the same
                self._warned = error.errno
                logger.warning("%s: statistics could not be written: %s", self.path, error)


def check_snapshot_path(path: Path) -> None:
    """Raise ``ConfigError`` if ``path`` is a file that holds something else than a snapshot.

    A snapshot replaces what is there, and that might be the model. Blocks for one small read.
    """
    try:
        with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
            beginning = file.read(4096) if file else b""
    except OSError:
        return  # what cannot be read is not judged; writing it will warn
    if beginning and b'"cache_hits"' not in beginning:
        raise ConfigError(
            f"stats_path: {path} holds something else than statistics, which would replace it; "
            "name another file, or delete this one"
        )
