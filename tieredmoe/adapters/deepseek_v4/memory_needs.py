"""How many bytes a sequence takes in a DeepSeek-V4: its state, and a step of its prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.deepseek_v4.config import CSA, SLIDING

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config

_FLOAT_NBYTES = 4
_SCORES_NBYTES_MAX = 64 << 20
"""Of one of the tensors that a block of queries takes; see ``Attention``."""


def state_nbytes(config: DeepSeekV4Config, n_context: int) -> int:
    """A state of ``n_context`` tokens, twice: a step makes the next one beside it."""
    sizes = config.attention
    n_floats = 0
    for ratio in sizes.compress_ratios[: config.n_layers]:
        n_floats += (sizes.sliding_window - 1) * sizes.head_dim
        if ratio != SLIDING:
            dims = sizes.head_dim + (sizes.indexer_dim if ratio == CSA else 0)
            # Values and gates of the open window; where windows overlap, those tokens have two, and
            # the last window is kept, too.
            n_open = (6 if ratio == CSA else 2) * ratio
            n_floats += (n_context // ratio + n_open) * dims
    return 2 * n_floats * _FLOAT_NBYTES


def activation_nbytes(config: DeepSeekV4Config, *, n_tokens: int, n_context: int) -> int:
    """What ``n_tokens`` take at most on their way through a layer.

    The factors are those measured with models of many shapes (live tensors at the worst moment:
    2.5 times the queries, 1.7 times the streams), rounded up; scores come in blocks of bounded
    size, of which three are alive.
    """
    sizes = config.attention
    n_queries = sizes.n_heads * sizes.head_dim
    n_streams = config.streams.n_streams * config.hidden_size
    n_index = sizes.indexer_heads * sizes.indexer_dim
    n_shared = config.experts.n_shared * config.experts.width
    per_token = 3 * n_queries + 2 * n_streams + 2 * n_index + 2 * n_shared + 4 * config.hidden_size
    keys = 2 * sizes.sliding_window + n_context // CSA
    scores_nbytes = n_tokens * sizes.n_heads * keys * _FLOAT_NBYTES
    return n_tokens * per_token * _FLOAT_NBYTES + 3 * min(_SCORES_NBYTES_MAX, scores_nbytes)
