"""What a model takes beside its routed experts, in bytes, known from its metadata alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from tieredmoe.adapters.dense_sizes import DenseSizes


N_CONTEXT = 8192
"""Tokens that memory is set aside for if nobody says how many: a long question, a long answer."""

CHUNK_LENGTH = 512
"""Tokens of a prompt that are taken at a time: enough for experts to be read once for many."""


@attrs.frozen(kw_only=True)
class ModelNeeds:
    """For one sequence of ``n_context`` tokens, prefilled ``chunk_length`` tokens at a time."""

    n_context: int
    chunk_length: int
    dense: DenseSizes
    state_nbytes: int
    """the sequence's state, and the next one beside it while a step runs"""
    step_nbytes: int
    """the buffers in which it is decoded on a device"""
    activation_nbytes: int
    """what a chunk takes between the embedding and the logits, routed experts not included"""
    logits_nbytes: int
    """of the last token, and a copy of them"""


def planned_context(n_context: int | None, *, most: int) -> int:
    """Tokens to plan for: ``n_context``, by default ``N_CONTEXT`` or all that the model can take.

    Raises ``ConfigError`` for what the model was not made for.
    """
    if n_context is None:
        return min(N_CONTEXT, most)
    if not 2 <= n_context <= most:
        raise ConfigError(f"n_context is {n_context}, it must be an integer from 2 to {most}")
    return n_context
