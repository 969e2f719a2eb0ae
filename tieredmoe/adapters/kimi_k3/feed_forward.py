"""The feed-forward blocks: dense in the first layers, latent experts in all others.

Routed experts work in a narrow latent space that all of them share; the way into it and out of it
is dense. (spec: Kimi-K3 modeling_kimi_linear.py, ``KimiSparseMoeBlock``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from tieredmoe.adapters.routing import choose

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.linear import Linear


class FeedForward(Protocol):
    """One layer's feed-forward block, of either kind."""

    async def __call__(self, x: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H]; cancelling it gives back what was lent."""


@attrs.frozen(eq=False)
class DenseFeedForward:
    """A layer without experts."""

    mlp: GatedMLP

    async def __call__(
        self,
        x: torch.Tensor,
        experts: ExpertProvider,  # noqa: ARG002 (the protocol's; there is nothing to ask for)
    ) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H]; asks no provider."""
        return self.mlp(x)


@attrs.frozen(eq=False)
class SigmoidRouter:
    """The ``k`` experts of highest biased score; ``gate`` [E, H], ``bias`` [E]."""

    gate: Linear
    bias: torch.Tensor
    k: int = attrs.field(kw_only=True)
    scale: float = attrs.field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> Routing:
        """From normed input ``x``, float32 [T, H], at full width."""
        return self.choose(self.gate(x))

    def choose(self, logits: torch.Tensor) -> Routing:
        """From what the gate gives, float32 [T, E]."""
        return choose(logits.sigmoid(), self.bias, k=self.k, scale=self.scale)


@attrs.frozen(eq=False)
class Latent:
    """The way into the experts' space, ``down`` [L, H], and out of it: ``norm``, ``up`` [H, L]."""

    down: Linear
    norm: RmsNorm
    up: Linear

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What every routed expert reads: [T, H] to [T, L]."""
        return self.down(x)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """From the weighted sum over all of a token's experts, [T, L], to [T, H].

        The norm is the sum's: sums of a part of the experts cannot be normed one by one.
        """
        return self.up(self.norm(y))


@attrs.frozen(eq=False)
class LatentExperts:
    """Layer ``layer``'s routed experts in ``latent`` space, and the ``shared`` ones at full width.

    ``activation`` is the routed experts'.
    """

    layer: int
    router: SigmoidRouter
    latent: Latent
    shared: GatedMLP
    activation: FusedActivation

    async def __call__(self, x: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """Normed input ``x`` [T, H] to float32 [T, H].

        Every expert chosen is executed, whatever order they come in. Cancelling it gives back what
        the provider has lent.
        """
        routed, shared = await experts.run(
            self.layer,
            self.latent.enter(x),
            self.router(x),
            self.activation,
            meanwhile=lambda: self.shared(x),
        )
        return self.latent.leave(routed) + shared
