"""Recordings: work enqueued once by Python, then again and again by the device's driver.

A launch made by Python takes the host some ten microseconds, a token has thousands; a recorded
graph of any length takes one launch. On the host there is nothing to record, so there a recording
just runs.

Rejected: ``torch.cuda.graph``, which synchronises the device and collects garbage for every one of
a model's hundreds of recordings.
"""

from __future__ import annotations

import functools
import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which torch enqueues the caller's work now; None for the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@attrs.frozen(eq=False)
class CaptureStream:
    """A stream to capture on, which nothing runs on, and who may capture there now."""

    stream: torch.cuda.Stream
    turn: threading.Lock = attrs.field(factory=threading.Lock)


@functools.cache
def capture_stream(
    device: torch.device,
    replayed_on: int,  # noqa: ARG001 (half of the key that finds it)
) -> CaptureStream:
    """The one for all recordings that run on the stream of handle ``replayed_on``; made once.

    For each stream that products are computed on, cuBLAS is given 32 MiB of workspace, and keeps
    it to the end of the process, since graphs may use it. With a stream for each recorder every
    model that was opened and closed left that much behind. Graphs that share one must not run at
    the same time, and those that run on one stream do not.
    """
    return CaptureStream(torch.cuda.Stream(device))


class Recorder:
    """Makes recordings on ``device`` that run one at a time, in any order, on one stream.

    That is the stream which is current when it is made. They share one pool of memory: what one
    allocates is free again when it ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_recording_device = device.type == "cuda"
        if self.is_recording_device:
            replayed_on = torch.cuda.current_stream(device).cuda_stream
            self._capturing = capture_stream(device, replayed_on)
            self._pool = torch.cuda.graph_pool_handle()
            square = torch.zeros((8, 8), device=device)
            with torch.cuda.stream(self._capturing.stream):
                # The library's workspace for this stream, outside of the pool.
                torch.mm(square, square)
            # A pool lives as long as its last graph; so a first capture that fails costs nothing.
            self._keeper = self.capture(square.zero_)

    def recording(self, enqueue: Callable[[], object]) -> Recording:
        """What ``enqueue`` enqueues on the current stream, to be enqueued many times."""
        return Recording(enqueue, self)

    def capture(self, enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of what ``enqueue`` enqueues; nothing of it runs."""
        graph, capturing = torch.cuda.CUDAGraph(), self._capturing
        with _no_collection(), capturing.turn, torch.cuda.stream(capturing.stream):
            # Other threads copy experts meanwhile, and may.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        return graph


class Recording:
    """Runs the first time as it is (kernels are compiled, libraries loaded), then as a graph."""

    __slots__ = ("_enqueue", "_graph", "_has_run", "_recorder")

    def __init__(self, enqueue: Callable[[], object], recorder: Recorder) -> None:
        self._enqueue = enqueue
        self._recorder = recorder
        self._has_run = not recorder.is_recording_device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Enqueue the work on the current stream."""
        if self._graph is not None:
            self._graph.replay()
        elif self._recorder.is_recording_device and self._has_run:
            self._graph = self._recorder.capture(self._enqueue)
            self._graph.replay()
        else:
            self._enqueue()
            self._has_run = True


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: freeing some kinds of device objects would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
