"""The reference routed-expert FFN: its bits depend on input, routing and weights, nothing else.

Tokens are grouped by expert within one call; every (token, k) writes an output row of its own, and
the rows are summed in routing order at the end. So the order in which experts arrive, the waves
they come in and the size of any cache never change a bit, and dense and tiered runs share this one
class. Rejected: adding to the output as experts finish (float addition is not associative, so the
order of arrival would show), and one batched product over stacked experts (it needs all at once).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tieredmoe.moe.linear import PackedLinear
from tieredmoe.spec import ROLES, ExpertLayout

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the gate's and the up matrix's outputs to the input of down, element by element."""

Matrix = Callable[[torch.Tensor], torch.Tensor]
"""``x`` [n, inputs] to ``x @ W.T`` [n, outputs]; a ``PackedLinear`` is one."""

Record = torch.Tensor | memoryview | NDArray[np.uint8]
"""One expert's bytes: uint8, one dimension, contiguous, writable, at least the payload long."""


class ExpertMatrices(NamedTuple):
    """The three matrices of one routed expert."""

    gate: Matrix
    up: Matrix
    down: Matrix


def expert_matrices(record: Record, layout: ExpertLayout) -> ExpertMatrices:
    """The matrices in ``record``, viewed in place: valid as long as the record's memory is.

    Raises ``ValueError`` for a record shorter than the payload and ``UnsupportedModelError`` for a
    type that cannot be dequantised.
    """
    flat = (
        record
        if isinstance(record, torch.Tensor)
        else torch.frombuffer(record, dtype=torch.uint8)  # shares memory, keeps the record alive
    )
    if flat.numel() < layout.payload_nbytes:
        raise ValueError(
            f"an expert record of {flat.numel()} bytes cannot hold a payload of "
            f"{layout.payload_nbytes}"
        )
    roles = (layout.by_name[name] for name in ROLES)
    return ExpertMatrices(
        *(
            PackedLinear(flat[role.offset : role.offset + role.nbytes], role.ggml_type, role.shape)
            for role in roles
        )
    )


def clamped_swiglu(limit: float | None) -> Activation:
    """``silu(min(g, limit)) * clamp(u, -limit, limit)``; plain SwiGLU where ``limit`` is None.

    The clamp comes before silu and cuts the gate from above only (spec: DeepSeek-V4
    inference/model.py, ``Expert.forward``).
    """

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if limit is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(min=-limit, max=limit)
        return functional.silu(gate) * up

    return activation


class RoutedBatch:
    """One layer's routed experts over one chunk: executes each chosen expert once, in any order.

    ``x`` is float32 [T, H]; ``ids`` int64 [T, k] the experts of each token in routing order, and
    ``weights`` float32 [T, k] what multiplies their outputs. Call ``add`` once for each of
    ``experts``, then ``finish``. An id may occur twice for a token (hash tables may say so); it
    then counts twice.
    """

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: Activation,
    ) -> None:
        self._x = x
        self._weights = weights
        self._activation = activation
        # One row per (token, k); a pair's number is token * top_k + k.
        self._outputs = x.new_empty((ids.numel(), x.shape[1]))
        flat = ids.flatten()
        pairs = torch.argsort(flat, stable=True)
        experts, counts = torch.unique_consecutive(flat[pairs], return_counts=True)
        sizes = counts.tolist()
        groups = zip(pairs.split(sizes), (pairs // ids.shape[1]).split(sizes), strict=True)
        self._groups = dict(zip(experts.tolist(), groups, strict=True))
        self._waiting = set(self._groups)
        self.n_executed = 0
        """(token, expert) pairs computed so far."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct experts chosen, ascending: the working set."""
        return tuple(self._groups)

    def add(self, expert: int, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """Execute ``expert`` on all its tokens; the matrices are not kept."""
        assert expert in self._waiting, f"expert {expert} was not chosen, or is here again"
        self._waiting.remove(expert)
        pairs, tokens = self._groups[expert]
        x = self._x[tokens]
        self._outputs[pairs] = down(self._activation(gate(x), up(x)))
        self.n_executed += len(x)

    def finish(self) -> torch.Tensor:
        """The weighted sum over k in routing order, float32 [T, H]; every expert has been added."""
        assert not self._waiting, f"experts {sorted(self._waiting)} were chosen but not executed"
        outputs = self._outputs.view(*self._weights.shape, -1)
        total = outputs[:, 0] * self._weights[:, :1]
        for k in range(1, self._weights.shape[1]):
            total = total + outputs[:, k] * self._weights[:, k : k + 1]
        return total

    def __repr__(self) -> str:
        n_tokens, top_k = self._weights.shape
        n_done = len(self._groups) - len(self._waiting)
        done = f"{n_done}/{len(self._groups)} experts done"
        return f"<RoutedBatch {n_tokens} tokens, top-{top_k}, {done}>"
