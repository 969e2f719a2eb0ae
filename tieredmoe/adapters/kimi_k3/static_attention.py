"""Both attentions for one token of a sequence in static buffers.

The matrices and formulas are those of ``kda`` and ``mla``; what differs is where the past lies, and
that nothing depends on the position but numbers on the device. Full attention therefore scores all
rows that there is room for, the empty ones with minus infinity.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.kimi_k3.operations import KdaProducts

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import MlaConfig
    from tieredmoe.adapters.kimi_k3.kda import KdaWeights
    from tieredmoe.adapters.kimi_k3.mla import MlaWeights
    from tieredmoe.adapters.kimi_k3.operations import Operations
    from tieredmoe.adapters.kimi_k3.static_state import StaticKda, StaticRows


class Position:
    """Where the token stands: ``index`` int64 [1], and what full attention adds to its scores.

    Others put the position into ``index``; all is on its device.

    ``hidden`` is float32 [1, capacity]: 0 up to the token itself, minus infinity beyond it.
    """

    def __init__(self, index: torch.Tensor, n_capacity: int) -> None:
        device = index.device
        self.index = index
        self.hidden = torch.zeros((1, n_capacity), dtype=torch.float32, device=device)
        self._rows = torch.arange(n_capacity, device=device)

    def update(self) -> None:
        """Make ``hidden`` that of the ``index`` on the device."""
        self.hidden.zero_()
        self.hidden.masked_fill_((self._rows > self.index).unsqueeze(0), -math.inf)


class StaticAttention:
    """Attends for the token at ``position``, from its normed ``x`` [1, H] to float32 [1, H]."""

    def __init__(self, config: MlaConfig, position: Position, operations: Operations) -> None:
        self._config = config
        self._position = position
        self._do = operations

    def linear(self, x: torch.Tensor, weights: KdaWeights, state: StaticKda) -> torch.Tensor:
        """Kimi Delta Attention."""
        w, shared = weights, self._do.products.shared
        # In the order in which they lie, so that those of one type are one product.
        of_x = (w.q, w.k, w.gate, w.decay_a, w.strength, w.v)
        q, k, gate, narrow, strengths, v = shared(x, of_x)
        (decays,) = shared(narrow, (w.decay_b,))
        made = KdaProducts(q, k, v, decays, strengths, gate)
        (out,) = shared(self._do.recur(made, state, w, self._position.index), (w.output,))
        return out

    def full(self, x: torch.Tensor, weights: MlaWeights, state: StaticRows) -> torch.Tensor:
        """Multi-head latent attention."""
        w, mla = weights, self._config
        shared, each = self._do.products.shared, self._do.products.each
        narrow, row, gate = shared(x, (w.q_a, w.kv_a, w.gate))
        latent, shared_key = row.split((mla.kv_lora_rank, mla.shared_dim), dim=1)
        row = torch.cat((w.kv_a_norm(latent), shared_key), dim=1)
        state.rows.index_copy_(0, self._position.index, row)

        (q,) = shared(w.q_a_norm(narrow), (w.q_b,))
        own, of_shared = q.unflatten(1, (mla.n_heads, mla.key_dim)).split(
            (mla.own_dim, mla.shared_dim), dim=2
        )
        queries = torch.cat((each(own[0], w.keys.matrix), of_shared[0]), dim=1)
        hidden = self._position.hidden
        scores = torch.addmm(hidden, queries, state.rows.T, alpha=mla.key_dim**-0.5)
        latents = scores.softmax(1) @ state.rows[:, : mla.kv_lora_rank]
        values = each(latents, w.values.matrix)
        (out,) = shared(values.view(1, -1) * gate.sigmoid(), (w.output,))
        return out
