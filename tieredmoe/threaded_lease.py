"""A lease in the hands of another thread or loop.

It stands for a ``Lease`` of the I/O thread's loop. What was resident can be used and given back
without that thread; what was not has futures of ``concurrent.futures``, which any thread can wait
for and any loop can wrap. They cannot be cancelled, so a caller that is, disturbs nobody.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tieredmoe.errors import ClosedError
from tieredmoe.loop_thread import LoopThread, resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from tieredmoe.lease import Lease
    from tieredmoe.memory.protocol import Slot

T = TypeVar("T")

_NO_FUTURES: Mapping[int, Future[None]] = MappingProxyType({})


class ThreadedLease:
    """Pins on the experts of one layer; made by ``ThreadedHierarchy``, given back by ``release``.

    Everything here may be called in any thread. Use it as a context manager, or call ``release``
    exactly when the last kernel that reads the slots has been enqueued.
    """

    __slots__ = ("_arrivals", "_futures", "_lease", "_n_arrived", "_released", "_thread")

    def __init__(self, thread: LoopThread[Any], lease: Lease) -> None:
        """Stand for ``lease``; in the loop of ``thread``, unless all its experts were resident."""
        self._thread = thread
        self._lease = lease
        self._released = False
        self._futures = _NO_FUTURES
        self._arrivals: Sequence[Future[int]] = ()
        self._n_arrived = 0
        if lease.misses:
            self._watch(lease.misses)

    @property
    def layer(self) -> int:
        """The layer of the experts."""
        return self._lease.layer

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct experts held, in the order in which they were asked for."""
        return self._lease.experts

    @property
    def released(self) -> bool:
        """Whether the pins have been given back, by ``release`` or by the hierarchy's close."""
        return self._released or self._lease.released

    @property
    def futures(self) -> Mapping[int, Future[None]]:
        """One future per expert; hits share a completed one. Fails with ``ExpertLoadError``.

        Callbacks added to them run in the I/O thread and should be short. Cancelling has no effect.
        """
        futures, landed = self._futures, self._thread.done
        return {expert: futures.get(expert, landed) for expert in self._lease.experts}

    @property
    def slots(self) -> Mapping[int, Slot]:
        """The slots of the experts that have landed; one still in flight or failed is not in it.

        Empty once released: a slot may then hold another expert at any time.
        """
        return {} if self._released else self._lease.slots

    async def as_completed(self) -> AsyncIterator[int]:
        """Yield every expert of the lease once: hits at once, then misses as they land.

        Raises ``ExpertLoadError`` for one that failed (those that landed stay usable) and
        ``ClosedError`` if the lease is released meanwhile. Cancelled or timed out, it leaves the
        lease held and its transfers running; iterated again, it begins at the first expert.
        """
        for expert in self._hits():
            yield self._held(expert)
        for arrival in self._arrivals:
            expert = arrival.result() if arrival.done() else await asyncio.wrap_future(arrival)
            yield self._held(expert)

    def as_completed_blocking(self, timeout: float | None = None) -> Iterator[int]:
        """``as_completed`` for a thread: waits at most ``timeout`` seconds in all.

        Raises ``TimeoutError``, also; the lease is then held as before.
        """
        deadline = None if timeout is None else monotonic() + timeout
        for expert in self._hits():
            yield self._held(expert)
        for n, arrival in enumerate(self._arrivals):
            try:
                expert = arrival.result(None if deadline is None else deadline - monotonic())
            except TimeoutError:
                raise TimeoutError(
                    f"layer {self.layer}: {len(self._arrivals) - n} of {len(self.experts)} experts "
                    f"have not landed within {timeout} s; the lease is still held"
                ) from None
            yield self._held(expert)

    async def ready(self) -> None:
        """Return when every expert has landed; raises the first failure, as ``as_completed`` does.

        Cancelled or timed out, it leaves the lease held and can be awaited again.
        """
        async for _ in self.as_completed():
            pass

    def wait(self, timeout: float | None = None) -> None:
        """``ready`` for a thread; raises ``TimeoutError`` as ``as_completed_blocking`` does."""
        for _ in self.as_completed_blocking(timeout):
            pass

    def wait_on(self, stream: object) -> None:
        """Order all later work of a device ``stream`` after the copies of the landed experts.

        The slots are not written again before all work that ``stream`` has been given until
        ``release`` has ended.
        """
        self._lease.wait_on(stream)

    def release(self) -> None:
        """Give every pin back; futures still pending fail with ``ClosedError``. Never raises.

        Idempotent. With a read in flight, or another thread admitting or releasing at this very
        moment, that is done in the I/O thread a little later, before anything that this thread asks
        of it afterwards.
        """
        thread = self._thread
        if self._n_arrived == len(self._arrivals):
            self._lease.release_landed(thread.post)
        else:
            self._released = True
            # Fences are made here: later on, the streams may have been given other work.
            thread.post(self._lease.release, self._lease.fences())

    def _hits(self) -> list[int]:
        return [expert for expert in self._lease.experts if expert not in self._futures]

    def _held(self, expert: int) -> int:
        if self.released:
            raise ClosedError("the lease was released while its experts were awaited")
        return expert

    def _watch(self, misses: Mapping[int, asyncio.Future[None]]) -> None:
        promise = partial(self._thread.promise, cancellable=False)
        self._futures = {expert: promise() for expert in misses}
        self._arrivals = [promise() for _ in misses]
        for expert, landed in misses.items():
            landed.add_done_callback(partial(self._landed, expert))

    def _landed(self, expert: int, landed: asyncio.Future[None]) -> None:
        error = landed.exception()
        arrival = self._arrivals[self._n_arrived]
        self._n_arrived += 1
        resolve(self._futures[expert], error=error)
        resolve(arrival, expert, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ThreadedLease of {self._lease!r}>"


def waited_for(promise: Future[T], layer: int, timeout: float | None) -> T:
    """What ``promise`` brings, or a ``TimeoutError`` that says what may be in its way."""
    try:
        return promise.result(timeout)
    except TimeoutError:
        raise TimeoutError(
            f"layer {layer}: no experts within {timeout} s; other leases hold the slots, or the "
            "disk is slow: release what is not needed, or wait longer"
        ) from None


def give_back(promise: Future[ThreadedLease]) -> None:
    """Release the lease that ``promise`` has brought, if it has brought one."""
    if promise.exception() is None:
        promise.result().release()
