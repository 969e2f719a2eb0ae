"""Threads that hash and repair, so that the loop serves others meanwhile.

xxh3 drops the GIL and outruns one SSD per core, so a few threads are plenty. They are all started
at open: a thread refused in mid-run would leave work behind in a queue, with a slot's memory in it.
Rejected: the loop's default executor, where other work would stand between a token and its experts.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class VerifyThreads:
    """A ``Worker`` on ``n_threads`` threads of its own; bound to the running loop."""

    def __init__(self, n_threads: int = 4) -> None:
        """Start the threads; raises ``ConfigError`` if the system does not give them."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="tieredmoe-verify")
        # As long as none gets past the barrier, each piece of work needs a thread of its own.
        started = threading.Barrier(n_threads)
        try:
            for _ in range(n_threads):
                self._pool.submit(started.wait)
        except RuntimeError as error:
            started.abort()
            self._pool.shutdown()
            raise ConfigError(
                f"the system refused {n_threads} hashing threads: {error}; raise its limit on "
                "processes (ulimit -u, the container's pids limit) or on address space (ulimit "
                "-v), or set verify='off'"
            ) from error

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start ``work`` in a thread; first come, first served."""
        return asyncio.wrap_future(self._pool.submit(work), loop=self._loop)

    def close(self) -> None:
        """Join the threads, which have nothing left to do. Idempotent."""
        self._pool.shutdown()
