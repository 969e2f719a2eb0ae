"""A stream of leases that is consumed in another thread or loop than the one that feeds it.

The hierarchy's stream runs as one job in the I/O thread and hands over a lease whenever it is asked
for the next. Rejected: resuming the generator from outside, step by step, which cannot be closed
while a step is running that its consumer has given up.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from tieredmoe.loop_thread import Job, LoopThread, resolve
from tieredmoe.threaded_lease import ThreadedLease

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from concurrent.futures import Future

    from tieredmoe.lease import Lease


class Feed:
    """The leases of one stream for one consumer, who asks for them one by one and closes it."""

    def __init__(
        self, thread: LoopThread[Any], start: Callable[[], AsyncGenerator[Lease, None]]
    ) -> None:
        """Feed from what ``start`` begins in the loop of ``thread``, once it is asked."""
        self._thread = thread
        self._start = start
        self._asked = asyncio.Event()
        self._job: Job | None = None
        self._promise: Future[ThreadedLease | None]

    def ask(self) -> Future[ThreadedLease | None]:
        """The next lease, its experts landed, or None at the end.

        The last one is given back now. Whoever does not want the answer any more closes the feed.
        """
        self._promise = self._thread.promise(cancellable=True)
        if self._job is None:
            self._job = self._thread.spawn(self._feed)
        else:
            self._thread.post(self._asked.set)
        return self._promise

    def close(self) -> None:
        """Give everything back, on its way or handed over. Idempotent."""
        if self._job is not None:
            self._promise.cancel()
            self._job.cancel()

    async def _feed(self) -> None:
        try:
            async with aclosing(self._start()) as leases:
                async for lease in leases:
                    resolve(self._promise, ThreadedLease(self._thread, lease))
                    await self._asked.wait()
                    self._asked.clear()
        except Exception as error:  # noqa: BLE001 (raised where the consumer waits)
            resolve(self._promise, error=error)
        else:
            resolve(self._promise)
