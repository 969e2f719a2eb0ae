"""Layers whose matrices do not fit on the device: kept on the host, streamed through two buffers.

The matrices of a streamed layer always lie at the same place in one of two buffers, layers taking
turns, so they are ordinary matrices to everybody: to eager code, and to a recorded graph. What has
to be said is where a layer begins and ends. While one layer computes, the next one is on its way.

Rejected: a matrix at a time (a hundred fences per layer, and copies too small for the link), one
buffer (no overlap), and a buffer for every layer in flight (addresses would change between tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIGNMENT_NBYTES = 256
"""Where matrices begin: what a device's own allocations are aligned to."""


class Link(Protocol):
    """The way from host memory to a device."""

    @property
    def device(self) -> torch.device:
        """Where it leads."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the host, fit to be copied from; the link's until it is closed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Enqueue a copy after all work that the current stream has now; returns its fence."""

    def wait(self, fence: Any) -> None:
        """Order later work of the current stream after the copy. Never blocks the host."""

    def close(self) -> None:
        """Wait for all copies and let go of the host memory. Idempotent."""


class HostLink:
    """The link of a "device" that is host memory itself: copies are done when ``copy`` returns."""

    device = torch.device("cpu")

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def wait(self, fence: None) -> None:
        """Order nothing: the copy is done."""

    def close(self) -> None:
        """Let go of nothing: the tensors own their memory."""


class _Buffer:
    """One of the two: which layer (by position) it holds or is being filled with, and the fence."""

    __slots__ = ("fence", "position", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.position: int | None = None
        self.fence: Any = None


class StreamedLayers:
    """The matrices of some layers, of which two at a time are on the device.

    ``layers`` maps each layer's number, in order of execution, to its matrices' names and bytes;
    there is an even number of them (so that layers take turns from token to token, too), or none:
    then nothing streams, and ``before`` and ``after`` cost a look-up. Takes all its memory now,
    through ``link``. One step of the model uses it at a time. A step that ends half-way leaves it
    usable.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, int]], *, link: Link) -> None:
        assert len(layers) % 2 == 0, "an odd layer would have to take the place of its predecessor"
        self.layers = tuple(layers)
        self._link = link
        self._positions = {layer: position for position, layer in enumerate(self.layers)}
        self._places = {
            name: (position, start, stop)
            for position, matrices in enumerate(layers.values())
            for name, start, stop in _places(matrices)
        }
        nbytes = [layer_nbytes(matrices) for matrices in layers.values()]
        self._buffers: tuple[_Buffer, ...] = ()
        self._sources: list[torch.Tensor] = []
        if layers:
            memory = torch.zeros((2, max(nbytes)), dtype=torch.uint8, device=link.device)
            self._buffers = tuple(map(_Buffer, memory))
        try:
            self._sources += map(link.host_memory, nbytes)
        except BaseException:
            self.close()
            raise

    @classmethod
    def none(cls) -> Self:
        """Those of a model whose matrices are all where it computes."""
        return cls({}, link=HostLink())

    def __contains__(self, name: object) -> bool:
        """Whether the matrix of that name streams."""
        return name in self._places

    def source(self, name: str) -> torch.Tensor:
        """Where the matrix's bytes are to be put before the first step: uint8 on the host."""
        position, start, stop = self._places[name]
        return self._sources[position][start:stop]

    def target(self, name: str) -> torch.Tensor:
        """Where they are between ``before`` and ``after`` of their layer: uint8 on the device."""
        position, start, stop = self._places[name]
        return self._buffers[position % 2].tensor[start:stop]

    def before(self, layer: int) -> None:
        """Order later work of the current stream after the arrival of the layer's matrices.

        Never blocks the host, and is no part of a recorded graph.
        """
        position = self._positions.get(layer)
        if position is None:
            return
        buffer = self._buffers[position % 2]
        # Otherwise it is the first step, or the last one ended before it came to ``after``.
        if buffer.position != position:
            self._fill(buffer, position)
        self._link.wait(buffer.fence)

    def after(self, layer: int) -> None:
        """All that reads the layer's matrices is enqueued: the layer after next may take its place.

        After the last two layers that is the first and second, for the next token.
        """
        position = self._positions.get(layer)
        if position is not None and len(self.layers) > 2:
            self._fill(self._buffers[position % 2], (position + 2) % len(self.layers))

    @property
    def device_nbytes(self) -> int:
        """Bytes of the two buffers."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers)

    @property
    def host_nbytes(self) -> int:
        """Bytes that wait on the host, and cross the link once per token."""
        return sum(source.nbytes for source in self._sources)

    def close(self) -> None:
        """Wait for all copies and let go of the host memory; idempotent. No step comes after it."""
        self._link.close()
        self._sources.clear()
        self._positions.clear()

    def __repr__(self) -> str:
        return f"<StreamedLayers {len(self.layers)} layers, {self.host_nbytes} bytes per token>"

    def _fill(self, buffer: _Buffer, position: int) -> None:
        source = self._sources[position]
        buffer.position = None  # what an error in the copy would leave there
        buffer.fence = self._link.copy(buffer.tensor[: source.numel()], source)
        buffer.position = position


def layer_nbytes(matrices: Mapping[str, int]) -> int:
    """Bytes of a layer's matrices, one behind the other, each aligned."""
    return sum(map(aligned, matrices.values()))


def aligned(nbytes: int) -> int:
    """``nbytes`` up to where the next matrix may begin."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _places(matrices: Mapping[str, int]) -> list[tuple[str, int, int]]:
    places, start = [], 0
    for name, nbytes in matrices.items():
        places.append((name, start, start + nbytes))
        start += aligned(nbytes)
    return places
