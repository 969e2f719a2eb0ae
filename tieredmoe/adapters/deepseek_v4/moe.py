"""The expert layer: the router, the routed experts through their provider, the shared expert.

Early layers choose experts by a table over token ids, the others by score; the weights come from
the scores in both. (spec: DeepSeek-V4 inference/model.py, ``Gate``, ``MoE``)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch.nn import functional

from tieredmoe.adapters.top_k import top_k
from tieredmoe.moe.reference import RoutedBatch, expert_matrices

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.moe.linear import PackedLinear
    from tieredmoe.moe.reference import Activation


class Routing(NamedTuple):
    """The experts of each token and the weights of their outputs, both [T, k] in routing order."""

    ids: torch.Tensor
    weights: torch.Tensor


class Router(Protocol):
    """Chooses ``top_k`` experts for each token."""

    def __call__(self, v: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """From normed input ``v`` [T, H] and the tokens' ids [T]."""


class ScoreRouter:
    """The ``k`` experts of highest biased score; ``gate`` [E, H], ``bias`` [E]."""

    def __init__(self, gate: PackedLinear, bias: torch.Tensor, *, k: int, scale: float) -> None:
        self._gate = gate
        self._bias = bias
        self._k = k
        self._scale = scale

    def __call__(self, v: torch.Tensor, tokens: torch.Tensor) -> Routing:  # noqa: ARG002 (Router's)
        """The bias decides who is chosen, not how much they weigh."""
        scores = _scores(self._gate, v)
        ids = top_k(scores + self._bias, self._k)
        return Routing(ids, _weights(scores, ids, self._scale))


class HashRouter:
    """The experts that ``table`` [vocab, k] has for the token id; ``gate`` [E, H] weighs them."""

    def __init__(self, gate: PackedLinear, table: torch.Tensor, *, scale: float) -> None:
        self._gate = gate
        self._table = table
        self._scale = scale

    def __call__(self, v: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """The choice is known before the layer runs; the weights are not."""
        ids = self._table[tokens]
        return Routing(ids, _weights(_scores(self._gate, v), ids, self._scale))


def _scores(gate: PackedLinear, v: torch.Tensor) -> torch.Tensor:
    return functional.softplus(gate(v)).sqrt()


def _weights(scores: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale


class SharedExpert:
    """The expert that every token passes, from dense weights."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: Activation
    ) -> None:
        self._gate = gate
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """float32 [T, H] to [T, H]."""
        return self._down(self._activation(self._gate(v), self._up(v)))


class ExpertLayer:
    """Layer ``layer``'s routed and shared experts; ``activation`` is the routed ones'."""

    def __init__(
        self, layer: int, router: Router, shared: SharedExpert, activation: Activation
    ) -> None:
        self._layer = layer
        self._router = router
        self._shared = shared
        self._activation = activation

    async def __call__(
        self, v: torch.Tensor, tokens: torch.Tensor, experts: ExpertProvider
    ) -> torch.Tensor:
        """Normed input ``v`` [T, H] of the tokens with ids ``tokens`` [T] to float32 [T, H].

        Every expert chosen is executed, whatever order they come in. Cancelling it gives back what
        the provider has lent.
        """
        ids, weights = self._router(v, tokens)
        experts.routed(self._layer, ids, weights)
        batch = RoutedBatch(v, ids, weights, self._activation)
        layout = experts.spec.layouts[self._layer]
        async with contextlib.aclosing(experts.stream(self._layer, batch.experts)) as portions:
            shared = self._shared(v)  # while the first experts are on their way
            async for portion in portions:
                for expert, record in portion:
                    batch.add(expert, *expert_matrices(record, layout))
        routed = batch.finish()
        experts.executed(self._layer, batch.n_executed)
        return routed + shared
