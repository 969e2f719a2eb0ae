"""The expert layer: the router, the routed experts through their provider, the shared expert.

Early layers choose experts by a table over token ids, the others by score; the weights come from
the scores in both. (spec: DeepSeek-V4 inference/model.py, ``Gate``, ``MoE``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

from tieredmoe.adapters.routing import Routing, choose, chosen_weights

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.linear import Linear


class Router(Protocol):
    """Chooses ``top_k`` experts for each token; ``gate`` [E, H] makes logits of its input."""

    @property
    def gate(self) -> Linear:
        """From normed input to logits."""

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """From the gate's ``logits`` [T, E] and the tokens' ids [T]."""


class ScoreRouter:
    """The ``k`` experts of highest biased score; ``gate`` [E, H], ``bias`` [E]."""

    def __init__(self, gate: Linear, bias: torch.Tensor, *, k: int, scale: float) -> None:
        self.gate = gate
        self.bias = bias
        self.k = k
        self.scale = scale

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor) -> Routing:  # noqa: ARG002 (Router's)
        """The same whatever the tokens' ids."""
        return choose(_scores(logits), self.bias, k=self.k, scale=self.scale)


class HashRouter:
    """The experts that ``table`` [vocab, k] has for the token id; ``gate`` [E, H] weighs them."""

    def __init__(self, gate: Linear, table: torch.Tensor, *, scale: float) -> None:
        self.gate = gate
        self.table = table
        self.scale = scale

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """The choice is known before the layer runs; the weights are not."""
        ids = self.table[tokens]
        return Routing(ids, chosen_weights(_scores(logits), ids, scale=self.scale))


def _scores(logits: torch.Tensor) -> torch.Tensor:
    return functional.softplus(logits).sqrt()


class ExpertLayer:
    """Layer ``layer``'s routed and shared experts; ``activation`` is the routed ones'."""

    def __init__(
        self, layer: int, router: Router, shared: GatedMLP, activation: FusedActivation
    ) -> None:
        self._layer = layer
        self.router = router
        self.shared = shared
        self.activation = activation

    async def __call__(
        self, v: torch.Tensor, tokens: torch.Tensor, experts: ExpertProvider
    ) -> torch.Tensor:
        """Normed input ``v`` [T, H] of the tokens with ids ``tokens`` [T] to float32 [T, H].

        Every expert chosen is executed, whatever order they come in. Cancelling it gives back what
        the provider has lent.
        """
        routing = self.router.choose(self.router.gate(v), tokens)
        routed, shared = await experts.run(
            self._layer, v, routing, self.activation, meanwhile=lambda: self.shared(v)
        )
        return routed + shared
