"""What a decode step does between its matrix products: one interface, in torch and in kernels.

In torch each of these is many launches, which cost more than the work of a single token; a kernel
does it in one or two. Both write the same buffers, so either may run a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
    from tieredmoe.adapters.deepseek_v4.moe import Router
    from tieredmoe.adapters.deepseek_v4.static_state import Moment, StaticCompressor
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.products import Products
    from tieredmoe.adapters.routing import Routing


@attrs.frozen(eq=False)
class StreamBuffers:
    """The streams before a sub-block, its input, and how its output is to join them.

    float32: ``streams`` [1, n, H], ``post`` [1, n], ``comb`` [1, n, n], ``x`` [1, H].
    """

    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    x: torch.Tensor

    @classmethod
    def empty(cls, n_streams: int, hidden_size: int, device: torch.device) -> StreamBuffers:
        """Buffers that hold nothing yet."""
        return cls(
            streams=torch.zeros((1, n_streams, hidden_size), device=device),
            post=torch.zeros((1, n_streams), device=device),
            comb=torch.zeros((1, n_streams, n_streams), device=device),
            x=torch.zeros((1, hidden_size), device=device),
        )


class StepOperations(Protocol):
    """Operations on one token; all tensors are float32 and on one device, none waits for it."""

    @property
    def products(self) -> Products:
        """How matrices that read the same vector are multiplied with it."""

    def connect(
        self,
        hyper: HyperConnection,
        before: StreamBuffers,
        outputs: Sequence[torch.Tensor],
        after: StreamBuffers,
    ) -> None:
        """From the outputs of one sub-block to the input of the next: fills ``after``.

        The sum of ``outputs`` (each [1, H]) joins the streams of ``before``; without outputs those
        streams are taken as they are.
        """

    def collect(
        self, head: StreamHead, before: StreamBuffers, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The same at the end of the last layer: the streams as one, normed, [1, H]."""

    def turn_(
        self,
        x: torch.Tensor,
        moment: Moment,
        turn: int,
        *,
        rms_eps: float | None = None,
        back: bool = False,
    ) -> torch.Tensor:
        """Rotate ``x`` [heads, D] in place by row ``turn`` of the moment's turns, or ``back``.

        With ``rms_eps`` each head is first normed (without a weight).
        """

    def keep_key(
        self,
        kv: torch.Tensor,
        norm: RmsNorm,
        window: torch.Tensor,
        moment: Moment,
        turn: int,
    ) -> None:
        """Put ``kv`` [1, D], normed and rotated, in its place in the ring ``window`` [n, D]."""

    def compress(
        self, values: torch.Tensor, gates: torch.Tensor, static: StaticCompressor, moment: Moment
    ) -> None:
        """Append a token's values and gates [1, width]; if it closes its window, the row is made.

        If not, that row may hold anything finite.
        """

    def pick(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        static: StaticCompressor,
        moment: Moment,
        picks: torch.Tensor,
    ) -> None:
        """Write the numbers of the visible rows that score highest to ``picks`` (int64 [n]).

        Scores and order: ``Indexer.pick``. ``q`` is [heads, d], ``weights`` [1, heads] not yet
        scaled. Where fewer are visible the rest is any other rows.
        """

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        sinks: torch.Tensor,
        moment: Moment,
        *,
        n_window: int,
        ratio: int,
        picks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of ``q`` [heads, D] to the ring and the rows of ``keys``, with sinks.

        The rows are those of ``picks`` (numbers of rows), or all; unwritten places of the ring and
        rows that are not visible have no share. ``ratio`` is 0 where there are no rows.
        """

    def route(self, router: Router, logits: torch.Tensor, moment: Moment, routing: Routing) -> None:
        """Fill ``routing`` with what ``router`` chooses for the token and its ``logits`` [1, E]."""
