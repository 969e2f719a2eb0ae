"""The operations of a decode step in kernels: one or two launches each, on a device.

The two large products of attention stay with torch; what is between them is one kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from triton import next_power_of_2 as power_of_2

from tieredmoe.adapters.deepseek_v4.attention_kernels import (
    compress,
    keep_key,
    share_out,
    turn_heads,
)
from tieredmoe.adapters.deepseek_v4.choice_kernels import (
    rank_rows,
    route_by_score,
    route_by_token,
    score_rows,
)
from tieredmoe.adapters.deepseek_v4.moe import HashRouter, ScoreRouter
from tieredmoe.adapters.deepseek_v4.step_operations import StreamBuffers
from tieredmoe.adapters.deepseek_v4.stream_kernels import join_streams, split_streams
from tieredmoe.adapters.device_products import DeviceProducts
from tieredmoe.adapters.top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from tieredmoe.adapters.deepseek_v4.config import AttentionConfig
    from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
    from tieredmoe.adapters.deepseek_v4.moe import Router
    from tieredmoe.adapters.deepseek_v4.static_state import Moment, StaticCompressor
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.products import Products
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.kernels import LinearWorkspace

_CHANNELS = 32
"""Channels of a program that joins streams: 128 programs for the published width."""

_WIDE = 256
"""Channels from which on a head is worth several warps."""

_RANKED_MAX = 2**13
"""Rows up to which counting who is better costs less than sorting: the cost is quadratic, and about
0.1 ms for twice as many on an H200."""


class KernelOperations:
    """``StepOperations`` in Triton; ``workspace`` is that of the model's matrices."""

    def __init__(self, config: AttentionConfig, workspace: LinearWorkspace) -> None:
        n_groups = config.output_groups
        self._products = DeviceProducts(
            workspace,
            n_parts=n_groups,
            n_part_inputs=config.n_heads * config.head_dim // n_groups,
        )
        self._kernels = workspace.kernels

    @property
    def products(self) -> Products:
        """On packed weights."""
        return self._products

    def connect(
        self,
        hyper: HyperConnection,
        before: StreamBuffers,
        outputs: Sequence[torch.Tensor],
        after: StreamBuffers,
    ) -> None:
        """Two launches."""
        parts = self._join(hyper, before, outputs, after.streams)
        n_sinkhorn = hyper.config.sinkhorn_iterations
        self._split(hyper, after.streams, parts, after, n_sinkhorn=n_sinkhorn)

    def collect(
        self, head: StreamHead, before: StreamBuffers, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Two launches."""
        streams, x = torch.empty_like(before.streams), torch.empty_like(before.x)
        parts = self._join(head, before, outputs, streams)
        after = StreamBuffers(streams=streams, post=before.post, comb=before.comb, x=x)
        self._split(head, streams, parts, after, n_sinkhorn=0)
        return x

    def turn_(
        self,
        x: torch.Tensor,
        moment: Moment,
        turn: int,
        *,
        rms_eps: float | None = None,
        back: bool = False,
    ) -> torch.Tensor:
        """One launch, a program per head."""
        n_heads, dim = x.shape
        turns = moment.turns[turn]
        self._launch(
            turn_heads,
            (n_heads, 1),
            (x, turns, rms_eps or 0.0, -1.0 if back else 1.0),
            (dim, power_of_2(dim // 2), turns.shape[0], rms_eps is not None),
            {"num_warps": 4 if dim >= _WIDE else 1},
        )
        return x

    def keep_key(
        self,
        kv: torch.Tensor,
        norm: RmsNorm,
        window: torch.Tensor,
        moment: Moment,
        turn: int,
    ) -> None:
        """One launch of one program."""
        n_window, dim = window.shape
        turns = moment.turns[turn]
        self._launch(
            keep_key,
            (1, 1),
            (kv, norm.weight, turns, moment.position, window, norm.eps),
            (n_window, dim, power_of_2(dim // 2), turns.shape[0]),
            {"num_warps": 4},
        )

    def compress(
        self, values: torch.Tensor, gates: torch.Tensor, static: StaticCompressor, moment: Moment
    ) -> None:
        """One launch of one program, which is long only where a window closes."""
        compressor = static.compressor
        ratio, norm = compressor.ratio, compressor.norm
        turns = moment.turns[moment.window_turn(ratio)]
        pairs = power_of_2(compressor.dim // 2)
        state = (compressor.bias, static.values, static.gates)
        self._launch(
            compress,
            (1, 1),
            (values, gates, *state, norm.weight, turns, moment.position, static.rows, norm.eps),
            (ratio, compressor.overlaps, compressor.dim, pairs, turns.shape[0], min(ratio, 16)),
            {"num_warps": 8 if compressor.dim >= _WIDE else 4},
        )

    def pick(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        static: StaticCompressor,
        moment: Moment,
        picks: torch.Tensor,
    ) -> None:
        """A product and two launches; more where rows are too many to compare each with each."""
        n_heads, dim = q.shape
        products = q @ static.rows.T
        n_rows = products.shape[1]
        scores = torch.empty(n_rows, device=q.device)
        n_block = 64
        self._launch(
            score_rows,
            (-(-n_rows // n_block), 1),
            (products, weights, moment.position, scores, 1 / math.sqrt(dim * n_heads)),
            (n_rows, n_heads, power_of_2(n_heads), static.compressor.ratio, n_block),
            {"num_warps": 4},
        )
        n_picks = picks.shape[0]
        if n_rows > _RANKED_MAX:
            picks.copy_(top_k(scores, n_picks))
            return
        n_block, n_others = 16, 256
        self._launch(
            rank_rows,
            (-(-n_rows // n_block), 1),
            (scores, picks),
            (n_rows, n_picks, n_block, n_others),
            {"num_warps": 4},
        )

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
        """Two products and a launch between them, after one that gathers what was picked."""
        if picks is not None:
            keys = torch.cat((keys[:n_window], keys[n_window:].index_select(0, picks)))
        scores = q @ keys.T
        n_heads, n_keys = scores.shape
        scale, unread = q.shape[1] ** -0.5, scores
        self._launch(
            share_out,
            (n_heads, 1),
            (scores, sinks, unread if picks is None else picks, moment.position, scale),
            (n_keys, n_window, ratio, picks is not None, min(1024, power_of_2(n_keys))),
            {"num_warps": 4},
        )
        return scores @ keys

    def route(self, router: Router, logits: torch.Tensor, moment: Moment, routing: Routing) -> None:
        """One launch of one program."""
        top_k = routing.ids.shape[1]
        assert isinstance(router, HashRouter | ScoreRouter), router
        n_experts = logits.shape[1]
        out = (routing.ids, routing.weights, router.scale)
        if isinstance(router, HashRouter):
            self._launch(
                route_by_token,
                (1, 1),
                (logits, router.table, moment.token, *out),
                (top_k, power_of_2(top_k)),
                {"num_warps": 1},
            )
        else:
            self._launch(
                route_by_score,
                (1, 1),
                (logits, router.bias, *out),
                (n_experts, power_of_2(n_experts), top_k, power_of_2(top_k)),
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
        # Binaries are found by their constants, and compiled for tensors at multiples of 16.
        unaligned = [
            a.shape for a in arguments if isinstance(a, torch.Tensor) and a.data_ptr() % 16
        ]
        assert not unaligned, (kernel, unaligned)
        self._kernels.launch(kernel, grid, arguments, constants, options)

    def _join(
        self,
        hyper: HyperConnection | StreamHead,
        before: StreamBuffers,
        outputs: Sequence[torch.Tensor],
        joined: torch.Tensor,
    ) -> torch.Tensor:
        """The new streams to ``joined``; parts of the logits, [programs, width], to the caller."""
        _, n, hidden = before.streams.shape
        n_logits = hyper.fn.shape[0]
        n_programs, width = -(-hidden // _CHANNELS), power_of_2(n_logits + 1)
        parts = torch.empty((n_programs, width), device=joined.device)
        first, second = (*outputs, before.x, before.x)[:2]
        self._launch(
            join_streams,
            (n_programs, 1),
            (before.streams, before.post, before.comb, first, second, hyper.fn, joined, parts),
            (hidden, n, len(outputs), n_logits, width, _CHANNELS),
            {"num_warps": 4},
        )
        return parts

    def _split(
        self,
        hyper: HyperConnection | StreamHead,
        streams: torch.Tensor,
        parts: torch.Tensor,
        after: StreamBuffers,
        *,
        n_sinkhorn: int,
    ) -> None:
        """The input of the sub-block and how its output is to join; of a head the input alone."""
        _, n, hidden = streams.shape
        n_programs, width = parts.shape
        weights = (hyper.scale, hyper.base, hyper.norm.weight)
        out = (after.x, after.post, after.comb)
        self._launch(
            split_streams,
            (2 if n_sinkhorn else 1, 1),
            (streams, parts, *weights, *out, hyper.norm.eps, hyper.config.eps),
            (
                hidden,
                n,
                hyper.fn.shape[0],
                width,
                n_programs,
                power_of_2(n_programs),
                power_of_2(hidden),
                n_sinkhorn,
            ),
            {"num_warps": 8},
        )
