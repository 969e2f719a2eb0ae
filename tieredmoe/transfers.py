"""How many transfers into and out of a tier's slots are running, and waiting for the last to end.

What is running cannot be stopped, so this is what stands between closing a tier and freeing its
memory.
"""

from __future__ import annotations

import asyncio


class Transfers:
    """The transfers of one tier. Bound to one loop."""

    __slots__ = ("_drained", "n")

    def __init__(self) -> None:
        self.n = 0
        self._drained: list[asyncio.Future[None]] = []

    def begin(self, n: int = 1) -> None:
        """So many more are running."""
        self.n += n

    def end(self) -> None:
        """One has ended: nothing of it touches a slot any more."""
        self.n -= 1
        if not self.n:
            waiting, self._drained = self._drained, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def drain(self) -> None:
        """Return when none is running. Safe to cancel."""
        while self.n:
            future = asyncio.get_running_loop().create_future()
            self._drained.append(future)
            await future
