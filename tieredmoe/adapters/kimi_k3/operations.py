"""What a decode step computes between its matrices, in plain torch; a device has it fused.

One token, static buffers, positions in tensors. The device's kernels are held against these
functions, and these against the functional forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional

from tieredmoe.adapters.kimi_k3.delta_rule import delta_rule
from tieredmoe.adapters.kimi_k3.kda import gated_heads, recurrence_inputs
from tieredmoe.adapters.kimi_k3.residuals import Bank
from tieredmoe.adapters.products import PlainProducts, Products

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.kimi_k3.config import KdaConfig
    from tieredmoe.adapters.kimi_k3.feed_forward import SigmoidRouter
    from tieredmoe.adapters.kimi_k3.kda import KdaWeights
    from tieredmoe.adapters.kimi_k3.static_state import StaticKda
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.routing import Routing


class KdaProducts(NamedTuple):
    """What the matrices of a KDA layer make of one token: float32 [1, width], strengths [1, heads].

    ``q``, ``k`` and ``v`` are not convolved yet.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decays: torch.Tensor
    strengths: torch.Tensor
    gate: torch.Tensor


class Operations(Protocol):
    """The arithmetic of a decode step; every method only enqueues."""

    @property
    def products(self) -> Products:
        """How dense weights meet the token."""

    def mix(
        self,
        streams: torch.Tensor,
        last: int,
        terms: Sequence[torch.Tensor],
        score: torch.Tensor,
        norm: RmsNorm,
        *,
        restart: bool,
        out: torch.Tensor,
    ) -> None:
        """Add to the stream, then put the normed residual mix into ``out`` [1, H].

        ``streams`` [blocks, H] has the stream in row ``last`` and the bank in the rows before.
        ``terms``, at most two of [1, H], are added to the stream, or become it with ``restart``.
        """

    def recur(
        self, made: KdaProducts, state: StaticKda, weights: KdaWeights, position: torch.Tensor
    ) -> torch.Tensor:
        """One token of Kimi Delta Attention up to its gate, float32 [1, width].

        ``position`` int64 [1] is the token's; its writes go where no token before it is read from.
        """

    def choose(self, logits: torch.Tensor, router: SigmoidRouter, out: Routing) -> None:
        """Put the experts that ``logits`` [1, E] choose into ``out``."""


class PlainOperations:
    """In torch, on any device."""

    def __init__(self, config: KdaConfig) -> None:
        self._config = config
        self._products = PlainProducts()

    @property
    def products(self) -> Products:
        """One launch or more for each."""
        return self._products

    def mix(
        self,
        streams: torch.Tensor,
        last: int,
        terms: Sequence[torch.Tensor],
        score: torch.Tensor,
        norm: RmsNorm,
        *,
        restart: bool,
        out: torch.Tensor,
    ) -> None:
        """Add to the stream, then put the normed residual mix into ``out``."""
        if terms:
            total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
            streams[last] = total[0] if restart else streams[last] + total[0]
        bank = Bank(norm.eps)
        for stream in streams[:last]:
            bank.keep(stream.unsqueeze(0))
        out.copy_(norm(bank.mix(streams[last : last + 1], score)))

    def recur(
        self, made: KdaProducts, state: StaticKda, weights: KdaWeights, position: torch.Tensor
    ) -> torch.Tensor:
        """One token of Kimi Delta Attention up to its gate."""
        ring, n_ring = state.ring, len(state.ring)
        ring.index_copy_(0, position % n_ring, torch.cat((made.q, made.k, made.v), dim=1))
        oldest_first = (position + 1 + torch.arange(n_ring, device=ring.device)) % n_ring
        total = torch.zeros_like(ring[:1])
        for row, tap in zip(ring.index_select(0, oldest_first), weights.convolution.T, strict=True):
            total.addcmul_(row, tap)
        streams = functional.silu(total)
        inputs = recurrence_inputs(streams, made.decays, made.strengths, weights, self._config)
        before = state.memory.index_select(0, position % 2).squeeze(0)
        heads, after = delta_rule(inputs, before, n_sub_chunk=1)
        state.memory.index_copy_(0, (position + 1) % 2, after.unsqueeze(0))
        return gated_heads(heads, made.gate, weights.norm)

    def choose(self, logits: torch.Tensor, router: SigmoidRouter, out: Routing) -> None:
        """Put the experts that ``logits`` choose into ``out``."""
        chosen = router.choose(logits)
        out.ids.copy_(chosen.ids)
        out.weights.copy_(chosen.weights)
