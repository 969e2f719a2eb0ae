"""A thread with an event loop of its own, working for callers in other threads and loops.

It holds one resource, opened in its loop and closed there, and gives callers three things: ``post``
runs a callback in the loop, ``spawn`` a coroutine, and a ``promise`` is a ``concurrent.futures``
future that cannot outlive the thread unresolved. So whatever ends the thread, nobody waits for it
in vain.

Rejected: ``asyncio.run_coroutine_threadsafe`` (its result is lost, and with it a lease, when the
caller gives up while it is on its way) and a thread that ends itself at the interpreter's exit (it
would have to wait there for a disk that may not answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, TypeVarTuple

from tieredmoe.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


class Resource(Protocol):
    """What lives in the loop."""

    async def close(self) -> None:
        """Refuse all that waits and all that comes, then free everything.

        It is awaited to its end; nothing here cancels it.
        """


R = TypeVar("R", bound=Resource)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopThread(Generic[R]):
    """A daemon thread that runs a loop from its construction until ``stop``.

    ``opened`` resolves to what ``make`` has made in the loop, or to its error, unchanged. ``ended``
    resolves once everything is closed; it fails with ``ClosedError`` if the thread ended by itself.
    An exception in a callback ends it, too: a callback that failed is one that somebody waits for.
    ``done`` is a completed future, for all who have nothing to wait for.
    """

    def __init__(self, make: Callable[[], Awaitable[R]], *, name: str) -> None:
        """Start the thread. Raises ``ConfigError`` if the system does not give one."""
        self.opened: Future[R] = Future()
        self.ended: Future[None] = Future()
        for future in (self.opened, self.ended):
            future.set_running_or_notify_cancel()  # they are everybody's: nobody can cancel them
        self.done: Future[None] = Future()
        self.done.set_result(None)
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._promises: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self._over = False
        self._pid = os.getpid()
        # A daemon: a forgotten close must not hang the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise ConfigError(f"the system refused a thread for the I/O: {error}") from error

    # -- for any thread ----------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that has the thread."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise ``ClosedError`` in a forked process, and if the thread has ended by itself."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this hierarchy's I/O thread lives in process {self._pid} and was not inherited "
                "by this fork of it: open a hierarchy of its own in each process, after the fork"
            )
        if self._failure is not None:
            raise self._closed_error()

    def check_waiter(self) -> None:
        """Raise ``RuntimeError`` in the I/O thread itself: what it waits for would never come."""
        if threading.current_thread() is self._thread:  # an ident may be another's by now
            raise RuntimeError(
                "this call waits for the I/O thread and was made in it, from a future's callback: "
                "make it in another thread"
            )

    def post(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``callback`` in the loop, after all that was posted before; nothing once it ended."""
        if not self.forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback, *args)

    def spawn(self, make: Callable[[], Coroutine[Any, Any, None]]) -> Job:
        """Run the coroutine of ``make`` in the loop; not at all if the thread is ending."""
        job = Job(self)
        self.post(self._start, job, make)
        return job

    def promise(self, *, cancellable: bool) -> Future[Any]:
        """A future to be resolved from the loop; if the thread ends, it fails: ``ClosedError``.

        Cancelling it has no effect unless it is ``cancellable``.
        """
        promise: Future[Any] = Future()
        if not cancellable:
            promise.set_running_or_notify_cancel()
        self._promises.add(promise)
        promise.add_done_callback(self._promises.discard)
        # Looked at after the promise is known: the end of the thread finds it, or we see the end.
        if self._over or self._failure is not None:
            resolve(promise, error=self._closed_error())
        return promise

    def stop(self) -> None:
        """Begin to close; ``ended`` says when that is done. Idempotent."""
        self.post(self._stop.set)

    def join(self) -> None:
        """Stop and wait for the end. In a forked process nothing is the child's to close."""
        if self.forked:
            return
        self.check_waiter()
        self.stop()
        self.ended.exception()
        self._thread.join()
        self.ended.result()

    # -- in the loop -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._serve())
                except BaseException as error:  # noqa: BLE001 (kept: every waiter and caller gets it)
                    self._die(error)
        except BaseException as error:  # noqa: BLE001 (winding down failed: kept likewise)
            self._die(error)
        self._over = True
        self._break_promises()
        if self._failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._closed_error())

    async def _serve(self) -> None:
        try:
            resource = await self._make()
        except BaseException as error:  # noqa: BLE001 (the caller gets it as it is)
            resolve(self.opened, error=error)
            return
        async with asyncio.TaskGroup() as group:
            self._group = group
            resolve(self.opened, resource)
            try:
                await self._stop.wait()
            finally:
                self._group = None
                await resource.close()
                # Those that waited for it have been refused; what is left waits for a caller.
                for task in self._tasks:
                    task.cancel()

    def _start(self, job: Job, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._group is not None:
            job.task = self._group.create_task(make())
            self._tasks.add(job.task)
            job.task.add_done_callback(self._tasks.discard)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or "handle" not in context:
            loop.default_exception_handler(context)  # a remark: nobody waits for anything here
            return
        self._die(error)
        self._stop.set()

    def _die(self, error: BaseException) -> None:
        self._failure = self._failure or error
        resolve(self.opened, error=error)
        # At once: nobody is to wait for the winding down, which may take as long as a read does.
        self._break_promises()

    def _break_promises(self) -> None:
        for promise in list(self._promises):
            resolve(promise, error=self._closed_error())

    def _closed_error(self) -> ClosedError:
        if self._failure is None:
            return ClosedError("the hierarchy was closed")
        error = ClosedError(f"the hierarchy's I/O thread ended by an error: {self._failure!r}")
        error.__cause__ = self._failure
        return error


class Job:
    """A coroutine in the loop; ``cancel`` it from any thread."""

    __slots__ = ("_thread", "task")

    def __init__(self, thread: LoopThread[Any]) -> None:
        self._thread = thread
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Cancel it unless it has ended; before its first step, too."""
        self._thread.post(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


def resolve(promise: Future[T], result: Any = None, *, error: BaseException | None = None) -> bool:
    """Resolve or fail ``promise``; False if that has been done, or its owner has cancelled it."""
    try:
        if error is None:
            promise.set_result(result)
        else:
            promise.set_exception(error)
    except InvalidStateError:
        return False
    return True
