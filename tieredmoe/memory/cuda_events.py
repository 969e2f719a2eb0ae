"""Fences that are CUDA events, and the threads that look whether they have passed.

The loop must not block in a driver, and must hear of a copy's end. So each stream whose fences
somebody waits for has a thread: while there are any, it looks at the next one every tenth of a
millisecond, takes along all that have passed by then, and wakes the loop once for them. Fences of
one stream pass in order, so one thread is enough for it; in a run there is the one of the copies,
and others only when memory is given back.

Rejected: sleeping in the driver (an event that can be slept on makes the enqueueing of the copies
behind it block: measured, 218 µs instead of 3 for each, which is the copy itself), spinning in the
driver (a core), polling from the loop (it has better things to do), and host functions in the
stream (the copy engine would wait for the interpreter's lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, cast

import torch

from tieredmoe.memory.fences import PASSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.memory.protocol import Fence

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1e-4


class EventFence:
    """All that a stream had been given when the fence was made.

    ``number`` grows with the order in which fences are begun: it is drawn before the event is
    recorded, so of two fences of one stream the one with the higher number is behind everything
    that the holders of both had enqueued before they asked.
    """

    __slots__ = ("_callbacks", "_event", "_watched", "_watchers", "number", "stream_handle")

    def __init__(self, watchers: Watchers, stream: torch.cuda.Stream) -> None:
        """Record a fence behind all work of ``stream`` so far. Raises what the driver reports."""
        self._watchers = watchers
        self.stream_handle = stream.cuda_stream
        self.number = next(watchers.numbers)
        self._watched = False
        self._callbacks: list[Callable[[], None]] = []
        event = torch.cuda.Event()
        event.record(stream)
        self._event: torch.cuda.Event | None = event

    def passed(self) -> bool:
        """Whether all work before the fence has ended: a look at a flag once that is known."""
        if self._event is None:
            return True
        if self._watched or not self.reached():  # of a watched one, its watcher says when
            return False
        self._event = None
        return True

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the running loop once the fence has passed; at once if it has."""
        if self.passed():
            callback()
            return
        self._callbacks.append(callback)
        self.watch()

    def wait_on(self, stream: object) -> None:
        """Order all later work of ``stream``, a ``torch.cuda.Stream``, after this fence."""
        event = self._event
        if event is not None:
            cast("torch.cuda.Stream", stream).wait_event(event)

    def covers(self, other: Fence) -> bool:
        """Whether ``other`` is of the same stream and not later, or has nothing before it."""
        if isinstance(other, EventFence):
            return other.number <= self.number and other.stream_handle == self.stream_handle
        return other is PASSED

    def watch(self) -> None:
        """Let a thread say when the fence has passed; in the loop that is to hear of it."""
        if not self._watched:
            self._watched = True
            self._watchers.watch(self)

    def reached(self) -> bool:
        """Whether the stream is there already. Never blocks."""
        event = self._event
        try:
            return event is None or event.query()
        except RuntimeError as error:
            self._watchers.broke(error)
        return True

    def mark(self) -> None:
        """The fence has passed; in a watcher."""
        self._event = None

    def tell(self) -> None:
        """Call everyone who waits, once; in the loop."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Watchers:
    """The watching threads of one arena, by stream, bound to the loop of the first watched fence.

    ``failure`` is what the driver reported first, if it did: then nothing runs on the device any
    more, all fences count as passed, and who asks for a copy is told.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.failure: BaseException | None = None
        self._watchers: dict[int, _Watcher] = {}

    def watch(self, fence: EventFence) -> None:
        """Have ``fence`` told when it has passed."""
        watcher = self._watchers.get(fence.stream_handle)
        if watcher is None:
            watcher = _Watcher(self, asyncio.get_running_loop())
            self._watchers[fence.stream_handle] = watcher
        watcher.fences.put(fence)

    def broke(self, error: BaseException) -> None:
        """The driver reported ``error``, which concerns the device, not one call."""
        if self.failure is None:
            self.failure = error
            _log.warning("the GPU failed; restart the process to use it again: %s", error)

    def close(self) -> None:
        """End the threads. Nobody waits for a fence any more."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers.clear()


class _Watcher:
    """One thread for the fences of one stream, in the order in which they were recorded."""

    def __init__(self, owner: Watchers, loop: asyncio.AbstractEventLoop) -> None:
        self.fences: queue.SimpleQueue[EventFence | None] = queue.SimpleQueue()
        self._owner = owner
        self._loop = loop
        # A daemon: a forgotten close must not hang the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="tieredmoe-fences", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.fences.put(None)
        self._thread.join()

    def _run(self) -> None:
        fence = self.fences.get()
        while fence is not None:
            while not fence.reached():
                time.sleep(_LOOK_EVERY_S)
            batch = [fence]
            following = False
            while not (following or self.fences.empty()):
                fence = self.fences.get()
                following = fence is None or not fence.reached()
                if fence is not None and not following:
                    batch.append(fence)
            for passed in batch:
                passed.mark()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_tell, batch)
            if not following:
                fence = self.fences.get()


def _tell(batch: list[EventFence]) -> None:
    for fence in batch:
        fence.tell()
