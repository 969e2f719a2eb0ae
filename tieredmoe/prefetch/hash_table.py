"""Layers that are routed by the token: their experts are known as soon as the token is.

Some models route their first layers by a table from token to experts instead of a router
(DeepSeek-V4-Flash: ``ffn.gate.tid2eid`` of layers 0 to 2). There is nothing to guess: a prefetch of
these is certain, and in prefill all of them are known before the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt


class HashTable:
    """A ``Predictor`` whose signal are token ids, and which is never wrong about its layers."""

    def __init__(self, tables: Mapping[int, npt.ArrayLike], *, n_experts: int) -> None:
        """``tables`` has, for each such layer, integers [vocabulary, k]: a token's experts.

        Raises ``ValueError`` for a table of another kind, and for experts that do not exist.
        """
        self._n_experts = n_experts
        self._tables = {
            layer: _checked(np.asarray(table), layer, n_experts)
            for layer, table in sorted(tables.items())
        }

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a table, ascending."""
        return tuple(self._tables)

    @property
    def width(self) -> int:
        """The most keys that one prediction has: many tokens may want every expert."""
        return self._n_experts

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """Learn nothing: all is known."""

    def predict(self, layer: int, signal: object = None) -> Sequence[ExpertKey]:
        """The experts of the token ids ``signal`` (one or many), those of the first token first.

        Tokens that the table does not have are ignored.
        """
        table = self._tables.get(layer)
        tokens = None if table is None else _tokens(signal)
        if table is None or tokens is None:
            return ()
        known = tokens[(tokens >= 0) & (tokens < len(table))]
        experts = dict.fromkeys(table[known].ravel().tolist())
        return tuple(ExpertKey(layer, expert) for expert in experts)

    def __repr__(self) -> str:
        return f"<HashTable of layers {', '.join(map(str, self._tables))}>"


def _checked(table: npt.NDArray[np.generic], layer: int, n_experts: int) -> npt.NDArray[np.int32]:
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"layer {layer}: a table of experts is integers [vocabulary, k], "
            f"not {table.dtype} {list(table.shape)}"
        )
    if table.size and not 0 <= int(table.min()) <= int(table.max()) < n_experts:
        raise ValueError(
            f"layer {layer}: the table names experts {table.min()}..{table.max()}, "
            f"and there are 0..{n_experts - 1}"
        )
    return table.astype(np.int32)


def _tokens(signal: object) -> npt.NDArray[np.int64] | None:
    """``signal`` as token ids, None if it is something else."""
    try:
        tokens = np.asarray(signal).ravel()
    except (TypeError, ValueError):
        return None
    if not np.issubdtype(tokens.dtype, np.integer):
        return None
    return tokens.astype(np.int64)
