"""How many bytes a sequence takes in a Kimi-K3: its state, and a step of its prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config

_FLOAT_NBYTES = 4
_SCORES_NBYTES_MAX = 64 << 20
"""Of one of the tensors that a block of queries takes; see ``LatentAttention``."""


def state_nbytes(config: KimiK3Config, n_context: int) -> int:
    """A state of ``n_context`` tokens, twice: a step makes the next one beside it."""
    kda, n_kda = config.kda, sum(config.is_kda)
    n_recurrent = n_kda * kda.width * (kda.head_dim + 3 * (kda.conv_kernel - 1))
    n_rows = (config.n_layers - n_kda) * n_context * config.mla.row_width
    return 2 * (n_recurrent + n_rows) * _FLOAT_NBYTES


def activation_nbytes(config: KimiK3Config, *, n_tokens: int, n_context: int) -> int:
    """What ``n_tokens`` take at most on their way through a layer.

    The factors are those measured with models of many shapes (live tensors at the worst moment: 23
    times the width of KDA, 6 times that of a dense layer, 4 times the queries of MLA), rounded up;
    scores come in blocks of bounded size, of which three are alive.
    """
    n_bank = -(-config.n_layers // config.block_size)
    n_heads, H = config.mla.n_heads, config.hidden_size
    of_block = max(
        24 * config.kda.width,
        4 * n_heads * config.mla.row_width,
        6 * config.ffn.dense_width,
        3 * (n_bank + 1) * H,
    )
    per_token = of_block + (n_bank + 4) * H
    scores_nbytes = n_tokens * n_heads * n_context * _FLOAT_NBYTES
    return n_tokens * per_token * _FLOAT_NBYTES + 3 * min(_SCORES_NBYTES_MAX, scores_nbytes)
