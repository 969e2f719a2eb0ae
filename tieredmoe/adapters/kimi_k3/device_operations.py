"""What a decode step computes between its matrices, fused for a device: a launch for each method.

Imports Triton, so only what runs on a device imports this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.device_products import DeviceProducts
from tieredmoe.adapters.kimi_k3 import kernels
from tieredmoe.adapters.kimi_k3.kda import UNIT_EPS

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from typing import Any

    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.adapters.kimi_k3.feed_forward import SigmoidRouter
    from tieredmoe.adapters.kimi_k3.kda import KdaWeights
    from tieredmoe.adapters.kimi_k3.operations import KdaProducts
    from tieredmoe.adapters.kimi_k3.static_state import StaticKda
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.products import Products
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.kernels import LinearWorkspace

_MIX_CHANNELS = 2048
"""Channels of the streams that the mix takes at a time: four for each lane of 16 warps."""


class DeviceOperations:
    """The same as ``PlainOperations`` up to rounding; ``workspace`` is that of the matrices."""

    def __init__(self, config: KimiK3Config, workspace: LinearWorkspace) -> None:
        mla = config.mla
        self._config = config
        self._work = workspace
        self._products = DeviceProducts(
            workspace, n_parts=mla.n_heads, n_part_inputs=max(mla.own_dim, mla.kv_lora_rank)
        )

    @property
    def products(self) -> Products:
        """On packed weights."""
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
        first = terms[0] if terms else out
        second = terms[1] if len(terms) > 1 else out
        self._launch(
            kernels.mix,
            (1, 1),
            (streams, first, second, score, norm.weight, out, last, len(terms), int(restart)),
            (streams.shape[1], (max(last, 1) - 1).bit_length(), norm.eps, _MIX_CHANNELS),
            {"num_warps": 16},
        )

    def recur(
        self, made: KdaProducts, state: StaticKda, weights: KdaWeights, position: torch.Tensor
    ) -> torch.Tensor:
        """One token of Kimi Delta Attention up to its gate."""
        kda, w = self._config.kda, weights
        out = torch.empty_like(made.gate)
        small = (w.convolution, w.decay_bias, w.negative_rates, w.norm.weight)
        self._launch(
            kernels.recur,
            (kda.n_heads, 1),
            (*made, *small, state.ring, state.memory, position, out),
            (
                kda.n_heads,
                kda.head_dim,
                _power(kda.head_dim),
                kda.conv_kernel,
                kda.gate_lower_bound,
                w.norm.eps,
                UNIT_EPS,
            ),
            # With more, the compiler loads the vectors again in every lane that needs them.
            {"num_warps": 4},
        )
        return out

    def choose(self, logits: torch.Tensor, router: SigmoidRouter, out: Routing) -> None:
        """Put the experts that ``logits`` choose into ``out``."""
        n_experts = logits.shape[1]
        self._launch(
            kernels.choose,
            (1, 1),
            (logits, router.bias, out.ids, out.weights),
            (n_experts, _power(n_experts), router.k, _power(router.k), router.scale),
            {"num_warps": 1},
        )

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        arguments: tuple[object, ...],
        constants: tuple[Hashable, ...],
        options: Mapping[str, Any],
    ) -> None:
        # Binaries are compiled for tensors at multiples of 16 and found by their constants alone.
        unaligned = [
            a.shape for a in arguments if isinstance(a, torch.Tensor) and a.data_ptr() % 16
        ]
        assert not unaligned, (kernel, unaligned)
        self._work.kernels.launch(kernel, grid, arguments, constants, options)


def _power(n: int) -> int:
    """The power of two at or above ``n``."""
    return 1 << (n - 1).bit_length()
