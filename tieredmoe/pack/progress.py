"""Runs long blocking work in a thread of its own: progress comes out, a wish to stop goes in.

Conversion, verification and loading are plain synchronous code, which reads top to bottom and
cleans up in ``finally``; this is their only asynchronous part. Rejected: awaiting every chunk in
the event loop, where a second cancellation can hit the clean-up of the first.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRESS_INTERVAL_S = 0.1
"""Progress is reported no more often than this, but for the first and last of a phase."""

T = TypeVar("T")
Phase = Literal["copy", "sync", "verify", "load"]


class PackProgress(NamedTuple):
    """How far a phase of the work has come."""

    done_nbytes: int
    total_nbytes: int
    phase: Phase


class StoppedError(Exception):
    """The work ends here because its caller was cancelled; nobody but ``run_in_thread`` sees it."""


class Reporter:
    """The worker's end: report, and learn whether to go on."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[PackProgress], None] | None
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._due_s = 0.0
        self._stopped = False

    def stop(self) -> None:
        """Make the next ``report`` raise."""
        # A bool written by one thread and read by another needs no lock.
        self._stopped = True

    def report(self, phase: Phase, *, done_nbytes: int, total_nbytes: int) -> None:
        """Pass progress on if it is due; raises ``StoppedError`` once ``stop`` was called."""
        if self._stopped:
            raise StoppedError
        if self._callback is None:
            return
        now_s = time.monotonic()
        if now_s < self._due_s and 0 < done_nbytes < total_nbytes:
            return
        self._due_s = now_s + PROGRESS_INTERVAL_S
        self._loop.call_soon_threadsafe(
            self._callback, PackProgress(done_nbytes, total_nbytes, phase)
        )


async def run_in_thread(
    work: Callable[[Reporter], T], progress: Callable[[PackProgress], None] | None
) -> T:
    """The result of ``work`` run in a thread; ``progress`` is called in the running loop.

    Cancelling makes the next ``report`` of the work raise, and returns only when the work, clean-up
    included, has ended; further cancellations change nothing.
    """
    loop = asyncio.get_running_loop()
    reporter = Reporter(loop, progress)
    cancelled: asyncio.CancelledError | None = None
    with ThreadPoolExecutor(1, "tieredmoe-pack") as executor:
        future = loop.run_in_executor(executor, work, reporter)
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                cancelled = error
                reporter.stop()
    if cancelled is not None:
        # Whatever the work raised in its last moments, the caller asked to hear no more of it.
        future.exception()
        raise cancelled
    return future.result()
