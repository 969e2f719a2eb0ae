"""A hierarchy on a thread of its own: for engines that block, and for those without a loop.

A model that waits for a device or computes in Python would stop the loop that feeds the disk. Here
that loop has its own thread; the hierarchy in it is the one of ``tieredmoe.hierarchy``, unchanged.
Callers come from any thread and any loop, and every verb has two faces: awaitable, under the names
of ``Hierarchy``, and blocking, under the same with ``_blocking``.

Experts that are all resident are leased and given back in the caller's thread, under the one mutex
of ``Residency``: a call to another thread costs more than the whole lease. Only while nobody stands
in the queue, though, so nobody who waits for slots is overtaken.

What callers do with the interpreter's lock is felt here, since each read needs it once or twice. Of
an idle caller's read rate remain, with the threads backend, 12 MiB experts and 2.2 GB/s on two
shared cores (medians of 9 rounds, ``benchmarks/busy_caller.py``): 0.9 to 1.0 while the caller
blocks without the lock, 0.6 to 0.7 while it spins in Python, 0.9 when it does so with
``sys.setswitchinterval(0.0005)`` (5 ms is the default, and the application's to change), and 0.5
while C code keeps the lock for 10 ms at a time.

Rejected: one verb whose result can be awaited or waited for (a forgotten ``await`` would block a
loop, and with it those who hold the slots it waits for); a loop shared by all instances (a module's
state, and one failure would be everybody's).
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

from tieredmoe.acquire import Acquire
from tieredmoe.errors import ClosedError
from tieredmoe.loop_thread import LoopThread, resolve
from tieredmoe.prefetching import hint
from tieredmoe.spec import Priority
from tieredmoe.threaded_lease import ThreadedLease, give_back, waited_for
from tieredmoe.threaded_stream import Feed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from tieredmoe.hierarchy import Hierarchy
    from tieredmoe.memory.protocol import Arena
    from tieredmoe.prefetching import PrefetchReport
    from tieredmoe.spec import ExpertKey, MoESpec
    from tieredmoe.stats import Stats
    from tieredmoe.trace import Event


class ThreadedHierarchy:
    """Serves the experts of a ``Hierarchy`` to any thread and any loop; a context manager in both.

    Made by ``open`` or ``aopen``, and closed by whoever made it: at the interpreter's exit its
    thread just stops, with reads in flight, and no last statistics are written. An exception that a
    signal handler raises in the middle of a call (``KeyboardInterrupt``) gives back what it can;
    after one, close the hierarchy. After a fork the child must open its own: here all but closing
    and releasing, which do nothing there, raises ``ClosedError``.
    """

    def __init__(self, thread: LoopThread[Hierarchy]) -> None:
        """Serve what ``thread`` has opened; ``open`` and ``aopen`` are the way in."""
        self._thread = thread
        self._hierarchy = thread.opened.result()
        self._booking = threading.Lock()

    @classmethod
    def open(cls, make: Callable[[], Awaitable[Hierarchy]]) -> Self:
        """Start the thread and await ``make()`` in its loop; blocks until the hierarchy is there.

        ``make`` is, say, ``lambda: open_hierarchy(pack, config)``; its errors come as they are.
        """
        thread = LoopThread(make, name="tieredmoe-io")
        try:
            thread.opened.exception()
            return cls(thread)
        except BaseException:
            thread.stop()
            raise

    @classmethod
    async def aopen(cls, make: Callable[[], Awaitable[Hierarchy]]) -> Self:
        """``open`` for a coroutine. Cancelled, it closes what ``make`` makes once that is made."""
        thread = LoopThread(make, name="tieredmoe-io")
        try:
            await asyncio.wrap_future(thread.opened)
            return cls(thread)
        except BaseException:
            thread.stop()
            raise

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""
        return self._hierarchy.spec

    @property
    def arena(self) -> Arena:
        """The arena of the top tier: where leased experts are."""
        return self._hierarchy.arena

    # -- awaitable ---------------------------------------------------------------------------------

    def acquire(self, layer: int, experts: Iterable[int]) -> Acquire[ThreadedLease]:
        """Pin the distinct ``experts`` of ``layer``: ``await`` it, or enter it with ``async with``.

        As ``Hierarchy.acquire``, from any loop: same order, same errors, and cancelling it (or a
        timeout) at any await gives everything back. A full hit needs no suspension.
        """
        return Acquire(self.admit, layer, self._keys(layer, experts))

    async def admit(self, layer: int, keys: list[ExpertKey]) -> ThreadedLease:
        """A lease on ``keys``, all of ``layer``, owned by the current task.

        What ``acquire`` awaits, with its errors; cancelled, it gives everything back, also what the
        I/O thread is granting at that moment.
        """
        owner = asyncio.current_task()
        lease = self._hits(layer, keys, owner)
        if lease is None:
            with self._acquiring(layer, keys, owner) as promise:
                lease = await asyncio.wrap_future(promise)
        return lease

    def stream(self, layer: int, experts: Iterable[int]) -> AsyncGenerator[ThreadedLease, None]:
        """Yield leases that together hold each distinct expert once, as they land; any set size.

        As ``Hierarchy.stream``, from any loop: an error, a timeout or a cancellation ends it with
        everything given back.
        """
        return self._stream(layer, self._keys(layer, experts))

    async def _stream(
        self, layer: int, keys: list[ExpertKey]
    ) -> AsyncGenerator[ThreadedLease, None]:
        owner = asyncio.current_task()
        if not keys:
            return
        lease = self._hits(layer, keys, owner)
        if lease is not None:
            with lease:
                yield lease
            return
        with closing(self._feed(layer, keys, owner)) as feed:
            while (lease := await asyncio.wrap_future(feed.ask())) is not None:
                with lease:
                    yield lease

    async def resize(self, n_slots: int) -> int:
        """Keep ``n_slots`` slots in the top tier: as ``Hierarchy.resize``, from any loop.

        Cancelling it stops the wait only: what was asked for goes on.
        """
        return await asyncio.wrap_future(self._resizing(n_slots))

    # -- blocking ----------------------------------------------------------------------------------

    def acquire_blocking(
        self, layer: int, experts: Iterable[int], *, timeout: float | None = None
    ) -> ThreadedLease:
        """``acquire`` for a thread: waits for slots at most ``timeout`` seconds.

        Raises ``TimeoutError``, also, with everything given back. In a coroutine it would block the
        loop, perhaps of those who hold the slots: ``await`` the other one there.
        """
        keys = self._keys(layer, experts)
        owner = threading.current_thread()
        lease = self._hits(layer, keys, owner)
        if lease is None:
            with self._acquiring(layer, keys, owner) as promise:
                lease = waited_for(promise, layer, timeout)
        return lease

    def stream_blocking(
        self, layer: int, experts: Iterable[int], *, timeout: float | None = None
    ) -> Generator[ThreadedLease, None, None]:
        """``stream`` for a thread: waits for each lease at most ``timeout`` seconds.

        ``TimeoutError``, as any other error, ends it with everything given back. Leaving the loop
        early needs ``close`` (use ``contextlib.closing``).
        """
        return self._stream_blocking(layer, self._keys(layer, experts), timeout)

    def _stream_blocking(
        self, layer: int, keys: list[ExpertKey], timeout: float | None
    ) -> Generator[ThreadedLease, None, None]:
        owner = threading.current_thread()
        if not keys:
            return
        lease = self._hits(layer, keys, owner)
        if lease is not None:
            with lease:
                yield lease
            return
        with closing(self._feed(layer, keys, owner)) as feed:
            while (lease := waited_for(feed.ask(), layer, timeout)) is not None:
                with lease:
                    yield lease

    def resize_blocking(self, n_slots: int) -> int:
        """``resize`` for a thread; waits for as long as leases hold slots that are to go."""
        return self._resizing(n_slots).result()

    # -- both --------------------------------------------------------------------------------------

    def prefetch(
        self, layer: int, experts: Iterable[int], *, priority: Priority = Priority.LOOKAHEAD
    ) -> int:
        """As ``Hierarchy.prefetch``, from any thread; how many were asked for, as absent by now."""
        entries = self._hierarchy.top.residency.entries
        keys = [key for key in self._keys(layer, experts) if key not in entries]
        start = partial(self._hierarchy.prefetch, priority=hint(priority))
        self._thread.post(start, layer, [key.expert for key in keys])
        return len(keys)

    def routed(self, layer: int, experts: Iterable[int]) -> None:
        """As ``Hierarchy.routed``, from any thread."""
        chosen = [key.expert for key in self._keys(layer, experts)]
        self._thread.post(self._hierarchy.routed, layer, chosen)

    def prefetch_report(self) -> PrefetchReport:
        """As ``Hierarchy.prefetch_report``; exact once nothing is going on."""
        return self._hierarchy.prefetch_report()

    def count_executed(self, layer: int, n_pairs: int) -> None:
        """Book ``n_pairs`` (token, expert) pairs computed in ``layer``: the audit of top-k."""
        with self._booking:
            self._hierarchy.count_executed(layer, n_pairs)

    def stats(self) -> Stats:
        """A snapshot of all counters; exact once nothing is going on."""
        self._thread.check()
        return self._hierarchy.stats()

    def trace(self) -> tuple[Event, ...]:
        """What happened last, as ``Hierarchy.trace``; also after the close or the thread's end."""
        return self._hierarchy.trace()

    def close(self) -> None:
        """Release all leases, refuse what waits, drain all I/O, free the memory, end the thread.

        Idempotent, in any thread; returns when all that is done. Whoever still reads a slot in
        another thread must have stopped. Raises ``ClosedError`` if the thread had ended by itself.
        """
        self._thread.join()

    async def aclose(self) -> None:
        """``close`` for a coroutine. Cancelling it stops the wait only: the closing goes on."""
        if not self._thread.forked:
            self._thread.stop()
            await asyncio.wrap_future(self._thread.ended)

    # -- the two ways to a lease -------------------------------------------------------------------

    def _keys(self, layer: int, experts: Iterable[int]) -> list[ExpertKey]:
        self._thread.check()
        return self._hierarchy.keys(layer, experts)

    def _hits(self, layer: int, keys: list[ExpertKey], owner: object) -> ThreadedLease | None:
        """A lease made here and now, if all is resident and nobody waits."""
        hit = self._hierarchy.hits(layer, keys, owner=owner)
        if hit is None:
            return None
        lease = ThreadedLease(self._thread, hit)
        # Looked at after the lease is known: closing finds it there, or we see the closing here.
        if self._hierarchy.closed:
            lease.release()
            raise ClosedError("the hierarchy was closed")
        return lease

    @contextmanager
    def _acquiring(
        self, layer: int, keys: list[ExpertKey], owner: object
    ) -> Iterator[Future[ThreadedLease]]:
        """A lease that the I/O thread gets; an exception gives it back, come or not."""
        thread = self._thread
        thread.check_waiter()
        promise: Future[ThreadedLease] = thread.promise(cancellable=True)
        job = thread.spawn(partial(self._acquire, layer, keys, owner, promise))
        try:
            yield promise
        except BaseException:
            job.cancel()
            # What the I/O thread resolves in this moment, it will not find to be cancelled.
            if not promise.cancel():
                promise.add_done_callback(give_back)
            raise

    async def _acquire(
        self, layer: int, keys: list[ExpertKey], owner: object, promise: Future[ThreadedLease]
    ) -> None:
        """Keep ``promise``; in the loop."""
        try:
            lease = await self._hierarchy.admit(layer, keys, owner=owner)
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            resolve(promise, error=error)
            return
        threaded = ThreadedLease(self._thread, lease)
        if not resolve(promise, threaded):
            threaded.release()

    def _resizing(self, n_slots: int) -> Future[int]:
        self._thread.check()
        self._thread.check_waiter()
        promise: Future[int] = self._thread.promise(cancellable=False)
        self._thread.spawn(partial(self._resize, n_slots, promise))
        return promise

    async def _resize(self, n_slots: int, promise: Future[int]) -> None:
        """Keep ``promise``; in the loop."""
        try:
            resolve(promise, await self._hierarchy.resize(n_slots))
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            resolve(promise, error=error)

    def _feed(self, layer: int, keys: list[ExpertKey], owner: object) -> Feed:
        self._thread.check_waiter()
        experts = [key.expert for key in keys]
        return Feed(self._thread, partial(self._hierarchy.stream, layer, experts, owner=owner))

    # -- being a context manager -------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<ThreadedHierarchy of {self._hierarchy!r}>"
