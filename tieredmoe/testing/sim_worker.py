"""A worker in virtual time, where threads cannot be: what a ``VerifiedSource`` works on.

The work is done at the end of its time, so a slot rewritten while it is being checked shows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class SimWorker:
    """A ``Worker`` that takes ``delay_s`` for each piece of work; any number side by side."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self.n_running = 0
        self.n_done = 0
        self.closed = False

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do ``work`` when its time is over, in the loop's thread."""
        assert not self.closed, "work after the close"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.n_running += 1
        loop.call_later(self._delay_s, self._end, work, future)
        return future

    def close(self) -> None:
        """No more work; none may be running."""
        assert not self.n_running, "closed with work running"
        self.closed = True

    def _end(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        self.n_running -= 1
        self.n_done += 1
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 (raised again where the future is awaited)
            future.set_exception(error)
        else:
            future.set_result(result)
