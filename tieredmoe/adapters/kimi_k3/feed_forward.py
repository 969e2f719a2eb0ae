"""The feed-forward blocks: dense in the first layers, latent experts in all others.

Routed experts work in a narrow latent space that all of them share; the way into it and out of it
is dense. (spec: Kimi-K3 modeling_kimi_linear.py, ``KimiSparseMoeBlock``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tieredmoe.adapters.routed_experts import run_routed
from tieredmoe.adapters.routing import choose

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.adapters.norm import Norm
    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.linear import PackedLinear
    from tieredmoe.moe.reference import Activation


class FeedForward(Protocol):
    """One layer's feed-forward block, of either kind."""

    async def __call__(self, x: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H]; cancelling it gives back what was lent."""


class DenseFeedForward:
    """A layer without experts."""

    def __init__(self, mlp: GatedMLP) -> None:
        self._mlp = mlp

    async def __call__(
        self,
        x: torch.Tensor,
        experts: ExpertProvider,  # noqa: ARG002 (the protocol's; there is nothing to ask for)
    ) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H]; asks no provider."""
        return self._mlp(x)


class SigmoidRouter:
    """The ``k`` experts of highest biased score; ``gate`` [E, H], ``bias`` [E]."""

    def __init__(self, gate: PackedLinear, bias: torch.Tensor, *, k: int, scale: float) -> None:
        self._gate = gate
        self._bias = bias
        self._k = k
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> Routing:
        """From normed input ``x``, float32 [T, H], at full width."""
        return choose(self._gate(x).sigmoid(), self._bias, k=self._k, scale=self._scale)


class Latent:
    """The way into the experts' space, ``down`` [L, H], and out of it: ``norm``, ``up`` [H, L]."""

    def __init__(self, down: PackedLinear, norm: Norm, up: PackedLinear) -> None:
        self._down = down
        self._norm = norm
        self._up = up

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What every routed expert reads: [T, H] to [T, L]."""
        return self._down(x)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """From the weighted sum over all of a token's experts, [T, L], to [T, H].

        The norm is the sum's: sums of a part of the experts cannot be normed one by one.
        """
        return self._up(self._norm(y))


class LatentExperts:
    """Layer ``layer``'s routed experts in ``latent`` space, and the ``shared`` ones at full width.

    ``activation`` is the routed experts'.
    """

    def __init__(
        self,
        layer: int,
        router: SigmoidRouter,
        latent: Latent,
        shared: GatedMLP,
        activation: Activation,
    ) -> None:
        self._layer = layer
        self._router = router
        self._latent = latent
        self._shared = shared
        self._activation = activation

    async def __call__(self, x: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H].

        Every expert chosen is executed, whatever order they come in. Cancelling it gives back what
        the provider has lent.
        """
        routed, shared = await run_routed(
            self._layer,
            self._latent.enter(x),
            self._router(x),
            self._activation,
            experts,
            meanwhile=lambda: self._shared(x),
        )
        return self._latent.leave(routed) + shared
