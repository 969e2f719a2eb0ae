"""An asyncio event loop on virtual time, where a hang is an error.

Tests of waiting code want three things that a real loop cannot give: time that costs nothing, an
immediate verdict when every task waits for another, and a place between any two callbacks to look
at invariants or to cancel something. ``SimLoop`` is a real ``asyncio`` loop (tasks, futures,
timeouts and task groups behave as they always do) with its clock and its idle wait replaced: when
nothing is ready, the clock jumps to the next timer; when there is no timer either, no future can
ever resolve, and ``SimDeadlock`` says who waits where.

Rejected: shuffling ready callbacks (asyncio promises first in, first out; a shuffled run shows bugs
that no real loop can have), patching ``time`` under a real loop (a selector still sleeps), and
"advance until idle" helpers (a hang then ends a test as quietly as success).

One thread only: threads run on real time, which a virtual clock cannot wait for. Executors, sockets
and calls from another thread are refused.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import inspect
import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

from tieredmoe.testing.waiting import describe_task

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Coroutine, Iterator
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_STEPS = 1_000_000
"""Callbacks one run may take by default; far above any scenario, far below an endless wait."""


_N_TIMERS_MIN = 100
"""So many timers may be set before cancelled ones are looked for."""
_FROZEN_MAX = 10_000
"""An interpreter may freeze some hundred objects of its own at start; a frozen heap has more."""


class SimError(AssertionError):
    """The program under test broke a rule of the simulation; base of the four below."""


class SimDeadlock(SimError):  # noqa: N818 (a deadlock is the finding, not a failing of the loop)
    """Nothing is ready and no timer is set, yet the program has not ended."""


class SimStepLimitError(SimError):
    """The program took more than ``max_steps`` callbacks: it spins, or the limit is too low."""


class SimLeakError(SimError):
    """Tasks were still pending when the main coroutine had returned."""


class SimCallbackError(SimError):
    """An exception reached the loop's exception handler; ``__cause__`` is that exception."""


def sim_run(
    main: Coroutine[Any, Any, T],
    *,
    max_steps: int = MAX_STEPS,
    on_step: Callable[[], object] | None = None,
    allow_leaks: bool = False,
    collect_garbage: bool = True,
) -> T:
    """Run ``main`` on a fresh ``SimLoop`` and return its result; arguments as there."""
    loop = SimLoop(max_steps=max_steps, collect_garbage=collect_garbage)
    if on_step is not None:
        loop.on_step(on_step)
    return loop.run(main, allow_leaks=allow_leaks)


class SimLoop(asyncio.BaseEventLoop):
    """Runs one program on virtual time, step by step; the same program makes the same steps.

    A step is one callback. ``steps`` counts them: it is *n* during and after the n-th. Timers that
    fall due together run in the order in which they were set. ``collect_garbage`` ends the run with
    a collection of what it left, so that exceptions nobody fetched are found in this run; a harness
    of very many short runs may do without.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, *, max_steps: int = MAX_STEPS, collect_garbage: bool = True) -> None:
        super().__init__()
        self.steps = 0
        self._max_steps = max_steps
        self._collect_garbage = collect_garbage
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = count()
        self._n_timers_max = _N_TIMERS_MIN
        self._hooks: list[Callable[[], object]] = []
        self._at_step: dict[int, list[Callable[[], object]]] = {}
        self._failures: list[dict[str, Any]] = []
        self._in_run = False

    def run(self, main: Coroutine[Any, Any, T], *, allow_leaks: bool = False) -> T:
        """Run ``main`` to its end, wind down and close the loop: one loop, one run.

        Raises what ``main`` raises; ``SimDeadlock``, ``SimStepLimitError`` and ``SimCallbackError``
        as soon as they are seen; ``SimLeakError`` if tasks outlive ``main``, unless
        ``allow_leaks``. Whatever happens, pending tasks are cancelled and asynchronous generators
        closed before this returns; what goes wrong meanwhile is raised, or noted on the error that
        is already on its way.
        """
        try:
            _refuse_nesting()
            self._in_run = True
            with _only_new_garbage():
                try:
                    self._fire_at_step()
                    result = self.run_until_complete(main)
                except BaseException as error:
                    for problem in self._wind_down():
                        error.add_note(f"then, while winding down: {problem!r}")
                    raise
                leaked = [describe_task(task) for task in self._pending_tasks()]
                problems = self._wind_down()
        finally:
            self._in_run = False
            if inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
                main.close()
            self.close()
        if leaked and not allow_leaks:
            raise SimLeakError(_listing("still pending after main returned", leaked))
        if problems:
            raise problems[0]
        return result

    def on_step(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` after every step of the run; an exception from it ends the run."""
        self._hooks.append(hook)

    def at_step(self, step: int, action: Callable[[], object]) -> None:
        """Call ``action`` once, right after step ``step`` (0: before the first) and before hooks.

        It runs between callbacks, outside every task. A run that ends sooner never calls it.
        """
        if step < self.steps:
            raise ValueError(f"step {step} is over, the loop has made {self.steps}")
        self._at_step.setdefault(step, []).append(action)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer, as any loop does; equal times keep their order."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        if len(self._timers) > self._n_timers_max:
            self._drop_cancelled_timers()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """``call_soon``; refused from any thread but the loop's own."""
        owner = self._thread_id
        if owner is not None and owner != threading.get_ident():
            raise RuntimeError("SimLoop runs on virtual time and takes no calls of other threads")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, _executor: object, func: object, *_args: object) -> NoReturn:
        """Refused: a thread works in real time, for which virtual time cannot wait."""
        raise RuntimeError(f"SimLoop has no threads to run {func!r} in; await a coroutine instead")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Make every unhandled exception fail the run; after it, log as any loop does."""
        if self._in_run:
            self._failures.append(context)
        else:
            super().default_exception_handler(context)

    def close(self) -> None:
        """Close the loop; timers still set are dropped."""
        super().close()
        self._timers.clear()

    # ---- what asyncio.BaseEventLoop asks of a loop; names and calls are the same in 3.11 to 3.14

    _thread_id: int | None

    def _run_once(self) -> None:
        self._make_timers_ready()
        # Callbacks made ready by these run the next time round, as on any loop.
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._step(handle)

    # ---- steps

    def _make_timers_ready(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not self._ready and not self._stopping:
            if not timers:
                waiting = [describe_task(task) for task in self._pending_tasks()]
                raise SimDeadlock(
                    _listing(f"nothing can ever happen again at t={self._now:g} s", waiting)
                )
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _drop_cancelled_timers(self) -> None:
        """Unused time-outs must not pile up; the limit grows with what is in use."""
        self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
        heapq.heapify(self._timers)
        self._n_timers_max = max(_N_TIMERS_MIN, 2 * len(self._timers))

    def _step(self, handle: asyncio.Handle) -> None:
        if self.steps >= self._max_steps:
            waiting = [describe_task(task) for task in self._pending_tasks()]
            raise SimStepLimitError(_listing(f"no end after {self.steps} steps", waiting))
        self.steps += 1
        handle._run()  # noqa: SLF001 (running handles is what a loop is for)
        self._fire_at_step()
        for hook in self._hooks:
            hook()
        if self._failures:
            raise self._take_failure()

    def _fire_at_step(self) -> None:
        while actions := self._at_step.pop(self.steps, None):
            for action in actions:
                action()

    def _take_failure(self) -> SimCallbackError:
        context = self._failures.pop(0)
        self._failures.clear()
        about = ", ".join(
            f"{name}: {value!r}" for name, value in context.items() if name != "message"
        )
        error = SimCallbackError(f"{context['message']} ({about})")
        error.__cause__ = context.get("exception")
        return error

    # ---- the end of a run

    def _pending_tasks(self) -> list[asyncio.Task[Any]]:
        return sorted(
            asyncio.all_tasks(self), key=lambda task: (len(task.get_name()), task.get_name())
        )

    def _wind_down(self) -> list[SimError]:
        """Cancel tasks, close generators, find lost exceptions; returns what went wrong."""
        self._hooks.clear()
        self._at_step.clear()
        self._max_steps += self.steps
        problems: list[SimError] = []
        try:
            self.run_until_complete(self._cancel_pending())
            self.run_until_complete(self.shutdown_asyncgens())
        except SimError as problem:
            problems.append(problem)
        if self._collect_garbage:
            gc.collect()  # a lost exception is reported when its future goes
        if self._failures:
            problems.append(self._take_failure())
        return problems

    async def _cancel_pending(self) -> None:
        tasks = [task for task in self._pending_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, asyncio.CancelledError
            ):
                message = "exception in a task while it was cancelled at the end of the run"
                self.call_exception_handler({"message": message, "exception": outcome})


def _refuse_nesting() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("a SimLoop cannot run inside a running event loop")


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Within, collections look only at what was made within.

    The collection that ends a run then costs what the run was worth, not what the process holds: of
    ten thousand scenarios each would otherwise pay for every module ever imported.
    """
    if gc.get_freeze_count() > _FROZEN_MAX:  # the process froze its heap, which is as good
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _listing(fact: str, lines: list[str]) -> str:
    return "\n  ".join([f"{fact}; {len(lines)} tasks pending", *lines])
