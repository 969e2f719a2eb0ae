"""Rotary positions on the last channels of a head, in interleaved pairs.

Angles are position times frequency in float32, as the reference computes them: the model was
trained with that rounding, so a more exact product would be less faithful at long contexts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.config import RopeConfig


class Angles:
    """Unit numbers ``cos θ + i sin θ`` of every (position, channel pair): complex64 [T, pairs].

    A pair (a, b) of channels is the complex number ``a + i b``, so that to rotate is to multiply.
    """

    def __init__(self, units: torch.Tensor) -> None:
        self._units = units
        self._inverse = units.conj().resolve_conj()

    def rotate_(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the last channels of ``x`` [T, …, D] in place, by the angles at position t."""
        return _multiply_(x, self._units)

    def unrotate_(self, x: torch.Tensor) -> torch.Tensor:
        """Undo ``rotate_``: attention outputs are sums of rotated vectors, as keys are values."""
        return _multiply_(x, self._inverse)


def _multiply_(x: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    n_pairs = units.shape[1]
    turned = x[..., x.shape[-1] - 2 * n_pairs :].unflatten(-1, (n_pairs, 2))
    per_head = (-1, *(1,) * (x.dim() - 2), n_pairs)
    torch.view_as_complex(turned).mul_(units.view(per_head))
    return x


class Rope:
    """A table of frequencies, float32 [rope_dim / 2]."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.frequencies = frequencies

    @classmethod
    def plain(cls, config: RopeConfig, device: torch.device) -> Rope:
        """Frequencies of sliding layers: ``theta^(-2k/dim)``."""
        return cls(_frequencies(config.dim, config.theta).to(device))

    @classmethod
    def compressed(cls, config: RopeConfig, device: torch.device) -> Rope:
        """YaRN frequencies of compressed layers, shared by their queries, keys and indexer.

        Slow pairs turn ``factor`` times slower, fast ones do not, with a linear ramp between; the
        amplitude stays 1 (spec: DeepSeek-V4 inference/model.py, ``precompute_freqs_cis``).
        """
        fast = _frequencies(config.dim, config.compress_theta)
        slow = _frequencies(config.dim, config.compress_theta, config.yarn_factor)

        def pair_of(n_turns: float) -> float:
            """Which (fractional) pair makes ``n_turns`` turns within the original context."""
            length = config.yarn_context_length / (n_turns * 2 * math.pi)
            return config.dim * math.log(length) / (2 * math.log(config.compress_theta))

        low = max(math.floor(pair_of(config.yarn_beta_fast)), 0)
        high = min(math.ceil(pair_of(config.yarn_beta_slow)), config.dim - 1)
        width = high - low if high != low else 0.001  # as the reference avoids dividing by zero
        pairs = torch.arange(config.dim // 2, dtype=torch.float32)
        share = 1 - ((pairs - low) / width).clamp(0, 1)
        return cls((slow * (1 - share) + fast * share).to(device))

    def at(self, positions: torch.Tensor) -> Angles:
        """The angles at ``positions`` (integers [T])."""
        angles = positions.float().unsqueeze(1) * self.frequencies
        return Angles(torch.polar(torch.ones_like(angles), angles))


def _frequencies(dim: int, theta: float, factor: float = 1.0) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (factor * theta**exponents)
