"""Attention over a sliding window and, on most layers, over a compressed past.

One latent vector per token is key and value for all heads. Queries run in blocks, so that scratch
memory is bounded however long the chunk and the context are; what a query sees does not depend on
its block. (spec: DeepSeek-V4 inference/model.py, ``Attention``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.deepseek_v4.past import Chunk, Keys
from tieredmoe.adapters.deepseek_v4.state import LayerState
from tieredmoe.adapters.norm import rms, rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config
    from tieredmoe.adapters.deepseek_v4.past import Past
    from tieredmoe.adapters.deepseek_v4.rope import Angles, Rope
    from tieredmoe.adapters.deepseek_v4.state import CompressorState
    from tieredmoe.moe.linear import Linear

_SCRATCH_FLOATS = 2**24
"""Floats (64 MiB) that a block of queries may take for scores and picked rows."""


@attrs.frozen(eq=False)
class AttentionWeights:
    """The dense weights of one layer's attention, its compressors' not included."""

    q_a: Linear
    q_a_norm: torch.Tensor
    q_b: Linear
    kv: Linear
    kv_norm: torch.Tensor
    sinks: torch.Tensor
    output_a: Linear
    output_b: Linear


class Attention:
    """One layer's attention; ``rope`` is the layer's own, ``past`` is None on sliding layers."""

    def __init__(
        self,
        weights: AttentionWeights,
        config: DeepSeekV4Config,
        *,
        rope: Rope,
        past: Past | None,
    ) -> None:
        sizes = config.attention
        self.rope = rope
        self.weights = weights
        self.past = past
        self.q_a_norm = rms_norm(weights.q_a_norm, config.rms_eps)
        self.kv_norm = rms_norm(weights.kv_norm, config.rms_eps)
        self.output_a = weights.output_a.split(sizes.output_groups)
        self.rms_eps = config.rms_eps
        self.n_heads = sizes.n_heads
        self.head_dim = sizes.head_dim
        self.n_window = sizes.sliding_window

    def new_state(self, n_context: int) -> LayerState:
        """The state before the first token of a sequence of at most ``n_context``."""
        return LayerState(
            window=self.weights.sinks.new_empty((0, self.head_dim)),
            compressed=() if self.past is None else self.past.new_state(n_context),
        )

    def __call__(
        self, u: torch.Tensor, start: int, angles: Angles, state: LayerState
    ) -> tuple[torch.Tensor, LayerState]:
        """Attend from the tokens ``u`` (normed, float32 [T, H]) that begin at position ``start``.

        ``angles`` are those of ``rope`` at the tokens' positions. Returns float32 [T, H] and the
        state after the tokens; ``state`` itself is left as it was.
        """
        chunk = Chunk(start, u, self.q_a_norm(self.weights.q_a(u)), angles)
        q = self.weights.q_b(chunk.qr).unflatten(1, (self.n_heads, self.head_dim))
        q = angles.rotate_(rms(q, self.rms_eps))
        window = torch.cat((state.window, angles.rotate_(self.kv_norm(self.weights.kv(u)))))
        compressed: tuple[CompressorState, ...] = ()
        if self.past is not None:
            compressed = self.past.advance(chunk, state.compressed)
        out = self._attend(chunk, q, window, compressed)
        # Cloned, so that a state does not keep a whole chunk's keys for the last few.
        kept = window[max(0, window.shape[0] - self.n_window + 1) :].clone()
        return self._project(angles.unrotate_(out)), LayerState(kept, compressed)

    def _attend(
        self,
        chunk: Chunk,
        q: torch.Tensor,
        window: torch.Tensor,
        compressed: tuple[CompressorState, ...],
    ) -> torch.Tensor:
        """Attention outputs, float32 [T, heads, D], block by block."""
        n_new = q.shape[0]
        past_keys = None if self.past is None else self.past.block_keys(chunk, compressed)
        n_block = self._block_length(chunk.start + n_new)
        out = torch.empty_like(q)
        for a in range(0, n_new, n_block):
            b = min(a + n_block, n_new)
            seen = [_recent(window, window.shape[0] - n_new + a, b - a, self.n_window)]
            if past_keys is not None:
                seen.append(past_keys(a, b))
            out[a:b] = _softmax_with_sinks(q[a:b], seen, self.weights.sinks)
        return out

    def _block_length(self, n_tokens: int) -> int:
        """Queries per block; above the window's length most scores would be masked."""
        floats = 2 * self.n_window * self.n_heads
        if self.past is not None:
            floats += self.past.floats_per_query(n_tokens, n_heads=self.n_heads)
        return max(1, min(self.n_window, _SCRATCH_FLOATS // floats))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Attention outputs [T, heads, D] to [T, H]: by groups of heads first, then together."""
        groups = out.flatten(1).chunk(len(self.output_a), dim=1)
        low = [part(group) for part, group in zip(self.output_a, groups, strict=True)]
        return self.weights.output_b(torch.cat(low, dim=1))


def _recent(window: torch.Tensor, first: int, n_queries: int, n_window: int) -> Keys:
    """The keys within the sliding window of ``n_queries`` tokens from row ``first`` of ``window``.

    A token sees itself and the ``n_window - 1`` before it.
    """
    lowest = max(0, first - n_window + 1)
    if n_queries == 1:
        return Keys(window[lowest : first + 1], None)
    query = torch.arange(first, first + n_queries, device=window.device).unsqueeze(1)
    key = torch.arange(lowest, first + n_queries, device=window.device)
    visible = (key <= query) & (key > query - n_window)
    return Keys(window[lowest : first + n_queries], visible)


def _softmax_with_sinks(q: torch.Tensor, seen: Sequence[Keys], sinks: torch.Tensor) -> torch.Tensor:
    """Attention of ``q`` [Q, heads, D] to all keys of ``seen`` (which are the values too).

    ``sinks`` [heads] are logits that take a share of the softmax and give nothing. The scale is
    ``1 / sqrt(D)``, without YaRN's.
    """
    scale = q.shape[2] ** -0.5
    scores = []
    for keys, visible in seen:
        scores.append((q @ keys.mT).mul_(scale))
        if visible is not None:
            scores[-1].masked_fill_(~visible.unsqueeze(1), -math.inf)
    sink = sinks.view(1, -1, 1).expand(q.shape[0], -1, 1)
    shares = torch.cat((*scores, sink), dim=2).softmax(2)
    out = torch.zeros_like(q)
    start = 0
    for keys, _ in seen:
        stop = start + keys.shape[-2]
        out += shares[:, :, start:stop] @ keys
        start = stop
    return out
