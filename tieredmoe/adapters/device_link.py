"""The link of a CUDA device: registered huge pages, and copies on a stream of their own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from tieredmoe.memory import HostPool, cuda_device

if TYPE_CHECKING:
    from tieredmoe.pack.tensors import Pin

COPY_NBYTES = 16 << 20
"""Bytes of one copy: experts share the link and the device's copy engines, and on their way to a
token that waits they should not stand behind a whole layer (a quarter of a gigabyte)."""


class DeviceLink:
    """Copies to ``device``; ``pin`` registers host memory, one pool at a time.

    Memory that could not be registered is copied from all the same, at half the speed and with the
    host waiting.
    """

    def __init__(self, device: torch.device, *, pin: Pin) -> None:
        self.device = device
        self._pin = pin
        self._stream = torch.cuda.Stream(device)
        self._held = ExitStack()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Huge pages, registered as one piece: a copy must not span two. Raises ``BudgetError``."""
        pool = HostPool.allocate(nbytes)
        memory = torch.frombuffer(pool.carve(pool.nbytes).view, dtype=torch.uint8)[:nbytes]
        self._held.callback(pool.close)
        self._held.callback(self._pin(pool).close)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Enqueue a copy after all work that the current stream has now; returns its fence."""
        used = torch.cuda.Event()
        used.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(used)
        with torch.cuda.stream(self._stream):
            for start in range(0, source.numel(), COPY_NBYTES):
                stop = start + COPY_NBYTES
                target[start:stop].copy_(source[start:stop], non_blocking=True)
        landed = torch.cuda.Event()
        landed.record(self._stream)
        return landed

    def wait(self, fence: torch.cuda.Event) -> None:
        """Order later work of the current stream after the copy."""
        torch.cuda.current_stream(self.device).wait_event(fence)

    def close(self) -> None:
        """Wait for all copies and let go of the host memory. Idempotent."""
        self._stream.synchronize()
        self._held.close()


def pinning(device: torch.device, *, strict: bool) -> Pin:
    """What registers whole pools with ``device``; refused, it warns, or raises if ``strict``."""
    return lambda pool: cuda_device.pin(
        pool, device=device, record_nbytes=pool.nbytes, strict=strict
    )


def link_bytes_per_s(device: torch.device, *, pin: Pin) -> float:
    """What the link to ``device`` moves, measured with 5 copies of 64 MiB of registered memory."""
    nbytes = 64 << 20
    link = DeviceLink(device, pin=pin)
    try:
        source = link.host_memory(nbytes)
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        link.wait(link.copy(target, source))
        stream = torch.cuda.current_stream(device)
        start.record(stream)
        for _ in range(5):
            link.wait(link.copy(target, source))
        end.record(stream)
        end.synchronize()
    finally:
        link.close()
    elapsed_s = float(start.elapsed_time(end)) / 1e3
    return 5 * nbytes / elapsed_s
