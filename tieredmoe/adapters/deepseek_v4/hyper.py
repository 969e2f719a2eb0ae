"""Manifold-constrained hyper-connections: the residual is several streams, mixed at each sub-block.

A sub-block reads one weighted sum of the streams, and its output is added to all of them after they
have been mixed by a matrix that Sinkhorn's iteration makes doubly stochastic. The weights of all
three come from the streams themselves. (spec: DeepSeek-V4 inference/model.py, ``hc_pre``,
``hc_post``; "Manifold-Constrained Hyper-Connections", Xie et al.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tieredmoe.adapters.norm import rms, rms_norm

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.config import StreamConfig


class Mixed(NamedTuple):
    """What a sub-block reads, and how its output joins the streams."""

    x: torch.Tensor
    """float32 [T, H], normed"""
    post: torch.Tensor
    """float32 [T, n]: how much of the output each stream gets."""
    comb: torch.Tensor
    """float32 [T, n, n]: stream d becomes the sum over s of ``comb[s, d]`` times stream s."""


class HyperConnection:
    """One sub-block's: ``fn`` is [(2 + n) n, n H], ``base`` [(2 + n) n] and ``scale`` [3].

    ``norm`` [H] weighs the input of the sub-block once it is a sum of streams. All float32.
    """

    def __init__(
        self,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm: torch.Tensor,
        *,
        config: StreamConfig,
        rms_eps: float,
    ) -> None:
        n = config.n_streams
        self.fn = fn
        self.base = base
        self.scale = torch.cat([s.expand(m) for s, m in zip(scale, (n, n, n * n), strict=True)])
        self.norm = rms_norm(norm, rms_eps)
        self.config = config
        self._sinkhorn = _Sinkhorn(config, base.device)

    def split(self, streams: torch.Tensor) -> Mixed:
        """Weigh ``streams`` [T, n, H] into the input of the sub-block."""
        n, eps = self.config.n_streams, self.config.eps
        logits = rms(streams.flatten(1), self.norm.eps) @ self.fn.T * self.scale + self.base
        pre, post, comb = logits.split((n, n, n * n), dim=1)
        return Mixed(
            x=self.norm(_weighted_sum(pre.sigmoid() + eps, streams)),
            post=2 * post.sigmoid(),
            comb=self._sinkhorn(comb.reshape(-1, n, n).softmax(2) + eps),
        )

    @staticmethod
    def join(streams: torch.Tensor, y: torch.Tensor, mixed: Mixed) -> torch.Tensor:
        """The new streams [T, n, H] after a sub-block that turned ``mixed.x`` into ``y`` [T, H]."""
        return mixed.post.unsqueeze(2) * y.unsqueeze(1) + mixed.comb.mT @ streams


class StreamHead:
    """The last layer's streams as one: ``fn`` [n, n H], ``base`` [n], ``scale`` [1], ``norm`` [H].

    All float32.
    """

    def __init__(
        self,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm: torch.Tensor,
        *,
        config: StreamConfig,
        rms_eps: float,
    ) -> None:
        self.fn = fn
        self.base = base
        self.scale = scale.expand(config.n_streams).contiguous()
        self.norm = rms_norm(norm, rms_eps)
        self.config = config

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """``streams`` [T, n, H] to [T, H], normed."""
        logits = rms(streams.flatten(1), self.norm.eps) @ self.fn.T * self.scale + self.base
        return self.norm(_weighted_sum(logits.sigmoid() + self.config.eps, streams))


def _weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(2) * streams).sum(1)


class _Sinkhorn:
    """Makes matrices nearly doubly stochastic: columns first, then rows and columns in turn.

    A matrix is held as a row of n² numbers, so that its sums over columns and over rows are
    products with constant matrices: faster than reductions over axes this short, of which there
    are forty for each sub-block.
    """

    def __init__(self, config: StreamConfig, device: torch.device) -> None:
        index = torch.arange(config.n_streams**2, device=device)
        column, row = index % config.n_streams, index // config.n_streams
        self._same_column = column.unsqueeze(1).eq(column).float()
        self._same_row = row.unsqueeze(1).eq(row).float()
        self._eps = torch.full((1,), config.eps, device=device)
        self._n_iterations = config.sinkhorn_iterations

    def __call__(self, comb: torch.Tensor) -> torch.Tensor:
        """float32 [T, n, n], positive, to the same shape."""
        flat = comb.flatten(1)
        flat = flat / torch.addmm(self._eps, flat, self._same_column)
        for _ in range(self._n_iterations - 1):
            flat = flat / torch.addmm(self._eps, flat, self._same_row)
            flat = flat / torch.addmm(self._eps, flat, self._same_column)
        return flat.view_as(comb)
