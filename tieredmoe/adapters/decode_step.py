"""One token of one sequence in fixed memory: what lets a device replay it as recorded graphs.

A functional forward makes new tensors at every step, so each of its launches has to be made anew by
Python. A decode step keeps all that a sequence is in buffers with room for ``n_capacity`` tokens
and cuts the token at its routed layers, the only places where the host has a say. Whoever drives it
may run its segments as they are or record each once and replay it.

Rejected: one step for every capacity (attention would read room that is never filled), and a step
made from a state (recorded graphs are worth keeping for the next sequence, so steps are loaded).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from tieredmoe.adapters.decode_state import DecodeState, L
from tieredmoe.adapters.protocol import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tieredmoe.adapters.routing import Routing
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.moe.activation import FusedActivation


@attrs.frozen(eq=False, kw_only=True)
class RoutedLayer:
    """Where a step and its routed experts meet in one layer; all tensors are at fixed addresses.

    ``layer`` is the model's number of it. ``routing`` (ids int64 [1, k], weights float32 [1, k])
    and the experts' input ``x`` (float32 [1, H]) are written by the segment that ends here; the
    weighted sum is put into ``out`` (float32 [1, H]) before the next segment reads it.
    """

    layer: int
    activation: FusedActivation
    routing: Routing
    x: torch.Tensor
    out: torch.Tensor


class DecodeStep(Protocol[L]):
    """Decodes one sequence, a token at a time, in memory that never moves.

    For each token: ``enter``; for each routed layer i ``segment(i)``, ``meanwhile(i)`` and the sum
    of its experts; ``segment(n)``; ``leave``. A token that was entered and not left has changed
    nothing: entered again, with any token, the sequence goes on from the last one left. So a token
    writes only where the committed past is not read from.

    ``segment`` and ``meanwhile`` are recorded, so they only enqueue work on the current stream:
    they never wait for the device, copy from or to the host, or let Python depend on data or
    position, and what they allocate does not outlive the call. Tensors that one writes and another
    reads are made once, at fixed addresses.
    """

    @property
    def layers(self) -> Sequence[RoutedLayer]:
        """The n routed layers, in order of execution."""

    @property
    def streamed(self) -> StreamedLayers:
        """Where the matrices of layers come from that do not stay on the device.

        The driver says ``before(layer)`` when the segment that ends in that layer's routing begins
        and ``after(layer)`` when the next one is enqueued; neither is recorded.
        """

    @property
    def logits(self) -> torch.Tensor:
        """float32 [1, vocab], written by the last segment."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence: those loaded and those left."""

    @property
    def n_capacity(self) -> int:
        """Tokens that there is room for."""

    def load(self, layers: Sequence[L], *, n_tokens: int) -> None:
        """Become the sequence of ``n_tokens`` whose layers' states these are; they are only read.

        They fit. It takes the place of the sequence held before.
        """

    def unload(self, *, n_context: int) -> tuple[L, ...]:
        """The layers' states, in memory of their own, of a sequence that may grow to ``n_context``.

        The step keeps the sequence.
        """

    def enter(self, token_id: int) -> None:
        """Put the next token and its position where the segments find them. Not recorded.

        The sequence holds fewer than ``n_capacity`` tokens, and the id is in the vocabulary.
        """

    def segment(self, i: int) -> None:
        """From the sum of routed layer i - 1 to the routing of routed layer i, 0 <= i <= n.

        Segment 0 starts at the embedding; segment n ends in the logits.
        """

    def meanwhile(self, i: int) -> None:
        """What routed layer i computes beside its routed experts: its shared expert, usually."""

    def leave(self) -> None:
        """The token that was entered is part of the sequence from now on."""


class Stepper(Protocol):
    """Runs the tokens of one decode step, made by an ``ExpertProvider`` for it."""

    async def __call__(self, token_id: int) -> None:
        """Enter, run and leave a token: the step has its logits then.

        Raises ``ExpertLoadError`` for an expert that cannot be had. Then, or cancelled, the token
        has not been left and everything lent has been given back.
        """


class StepModel(Model[DecodeState[L]], Protocol[L]):
    """A model that can also decode in fixed memory."""

    def new_decode_step(self, n_capacity: int) -> DecodeStep[L]:
        """A step of no sequence yet, with room for ``n_capacity`` tokens, on the model's device.

        Takes all its memory now.
        """
