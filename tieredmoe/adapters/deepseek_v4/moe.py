"""The expert layer: the router, the routed experts through their provider, the shared expert.

Early layers choose experts by a table over token ids, the others by score; the weights come from
the scores in both. (spec: DeepSeek-V4 inference/model.py, ``Gate``, ``MoE``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

from tieredmoe.adapters.routed_experts import run_routed
from tieredmoe.adapters.routing import Routing, choose, chosen_weights

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.moe.linear import PackedLinear
    from tieredmoe.moe.reference import Activation


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
        """The same whatever the tokens' ids."""
        return choose(_scores(self._gate, v), self._bias, k=self._k, scale=self._scale)


class HashRouter:
    """The experts that ``table`` [vocab, k] has for the token id; ``gate`` [E, H] weighs them."""

    def __init__(self, gate: PackedLinear, table: torch.Tensor, *, scale: float) -> None:
        self._gate = gate
        self._table = table
        self._scale = scale

    def __call__(self, v: torch.Tensor, tokens: torch.Tensor) -> Routing:
        """The choice is known before the layer runs; the weights are not."""
        ids = self._table[tokens]
        return Routing(ids, chosen_weights(_scores(self._gate, v), ids, scale=self._scale))


def _scores(gate: PackedLinear, v: torch.Tensor) -> torch.Tensor:
    return functional.softplus(gate(v)).sqrt()


class ExpertLayer:
    """Layer ``layer``'s routed and shared experts; ``activation`` is the routed ones'."""

    def __init__(
        self, layer: int, router: Router, shared: GatedMLP, activation: Activation
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
        routing = self._router(v, tokens)
        routed, shared = await run_routed(
            self._layer, v, routing, self._activation, experts, meanwhile=lambda: self._shared(v)
        )
        return routed + shared
