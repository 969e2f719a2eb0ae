"""The experts that a router chose, on their way from the device to the host."""

from __future__ import annotations

import torch


class HostIds:
    """Brings ids to the host: ``send`` enqueues it, ``wait`` blocks until they are there.

    One set at a time. What is enqueued after ``send`` runs while ``wait`` waits; the interpreter's
    lock is not held meanwhile. ``send`` may be recorded once it has been called with as many ids.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        self._memory = torch.empty(0, dtype=torch.int64)
        self._ids = self._memory
        if not self._on_host:
            # Recorded graphs record it, too: that is what an external one may.
            self._event = torch.cuda.Event(external=True)

    def send(self, ids: torch.Tensor) -> None:
        """Enqueue the copy of ``ids``, int64 of any shape, on the current stream."""
        if ids.numel() > self._memory.numel():
            self._memory = torch.empty(ids.numel(), dtype=torch.int64, pin_memory=not self._on_host)
        self._ids = self._memory[: ids.numel()].view(ids.shape)
        self._ids.copy_(ids, non_blocking=True)
        if not self._on_host:
            self._event.record()

    def wait(self) -> list[list[int]]:
        """The ids that were sent last, [T, k]."""
        if not self._on_host:
            self._event.synchronize()
        rows: list[list[int]] = self._ids.tolist()
        return rows
