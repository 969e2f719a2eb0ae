"""A device's stream on virtual time: work enqueued in order, ended later, fences between.

``SimStream`` runs what it is given one after the other, as a device does: fences to wait for, and
kernels that take a while and look at memory when they begin and when they end. The host goes on at
once, so a lease can be released, and its slots be wanted by others, while a kernel still reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from tieredmoe.memory.fences import PASSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.memory.protocol import Fence


class Waits(Protocol):
    """What ``LateFence.wait_on`` needs of a stream."""

    def wait_for(self, fence: Fence) -> None:
        """Order later work after ``fence``."""


class LateFence:
    """A fence that passes when its maker says so; ``number`` counts those of one ``stream``."""

    __slots__ = ("_callbacks", "_passed", "number", "stream")

    def __init__(self, *, stream: object = None, number: int = 0) -> None:
        self._passed = False
        self._callbacks: list[Callable[[], None]] = []
        self.stream = stream or self
        self.number = number

    def passed(self) -> bool:
        """Whether all work before the fence has ended."""
        return self._passed

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the fence has passed; at once if it has."""
        if self._passed:
            callback()
        else:
            self._callbacks.append(callback)

    def wait_on(self, stream: object) -> None:
        """Order later work of ``stream``, a ``SimStream`` or its like, after this fence."""
        cast("Waits", stream).wait_for(self)

    def covers(self, other: Fence) -> bool:
        """Whether ``other`` is of the same stream and not later, or has nothing before it."""
        if isinstance(other, LateFence):
            return other.stream is self.stream and other.number <= self.number
        return other is PASSED

    def pass_now(self) -> None:
        """All work before the fence has ended: tell everyone, once."""
        assert not self._passed, "a fence passes once"
        self._passed = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class SimStream:
    """A device's queue of work. Bound to the loop in which its first kernel begins."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._n_fences = 0

    @property
    def n_pending(self) -> int:
        """Pieces of work, fences included, that have not ended."""
        return len(self._work)

    def wait_for(self, fence: Fence) -> None:
        """Order all later work after ``fence``."""
        self._enqueue(lambda: fence.on_passed(self._next))

    def run(self, look: Callable[[], None], *, duration_s: float) -> None:
        """Enqueue a kernel of ``duration_s`` that calls ``look`` as it begins and as it ends."""

        def begin() -> None:
            look()
            asyncio.get_running_loop().call_later(duration_s, end)

        def end() -> None:
            look()
            self._next()

        self._enqueue(begin)

    def fence(self) -> LateFence:
        """A fence after everything enqueued so far."""
        self._n_fences += 1
        fence = LateFence(stream=self, number=self._n_fences)

        def reached() -> None:
            fence.pass_now()
            self._next()

        self._enqueue(reached)
        return fence

    async def synchronize(self) -> None:
        """Return when everything enqueued so far has ended. Cancelling it changes nothing."""
        passed = asyncio.Event()
        self.fence().on_passed(passed.set)
        await passed.wait()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if len(self._work) == 1:
            work()

    def _next(self) -> None:
        self._work.popleft()
        if self._work:
            self._work[0]()
