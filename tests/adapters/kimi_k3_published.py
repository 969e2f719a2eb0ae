"""The published Kimi-K3's shape and tensor table: sizes alone, no weights.

The table is written down by itself, not computed as the adapter computes it. Sizes and names:
Kimi-K3's config.json and llama.cpp's ``kimi-k3``; types: what its quantiser gives each tensor.
"""

import gguf
from gguf import GGMLQuantizationType as T
from kimi_k3_reference import K3Shape
from kimi_k3_source import metadata

from tieredmoe.gguf import Metadata, TensorInfo

PUBLISHED = K3Shape(
    n_layers=93,
    vocab=163840,
    hidden=7168,
    mla_layers=(*range(3, 92, 4), 92),
    block=12,
    kda_heads=96,
    kda_dim=128,
    heads=96,
    q_rank=1536,
    kv_rank=512,
    own_dim=128,
    shared_dim=64,
    value_dim=128,
    dense_width=33792,
    n_experts=896,
    top_k=16,
    width=3072,
    latent=3584,
    context=1048576,
)

H, D, E = 7168, 12288, 896

_ALL = {
    "attn_norm.weight": ((H,), T.F32),
    "ffn_norm.weight": ((H,), T.F32),
    "attn_res_score.weight": ((H,), T.F32),
    "ffn_res_score.weight": ((H,), T.F32),
}
_KDA = {
    "attn_q.weight": ((D, H), T.Q2_K),
    "attn_k.weight": ((D, H), T.Q2_K),
    "attn_v.weight": ((D, H), T.Q3_K),
    "attn_output.weight": ((H, D), T.Q3_K),
    "ssm_conv1d_q.weight": ((D, 1, 4), T.F32),
    "ssm_conv1d_k.weight": ((D, 1, 4), T.F32),
    "ssm_conv1d_v.weight": ((D, 1, 4), T.F32),
    "ssm_f_a.weight": ((128, H), T.Q2_K),
    "ssm_f_b.weight": ((D, 128), T.Q4_0),
    "ssm_beta.weight": ((96, H), T.Q2_K),
    "ssm_g.weight": ((D, H), T.Q2_K),
    "ssm_a": ((96,), T.F32),
    "ssm_dt.bias": ((D,), T.F32),
    "ssm_norm.weight": ((128,), T.F32),
}
_MLA = {
    "attn_q_a.weight": ((1536, H), T.Q2_K),
    "attn_q_b.weight": ((18432, 1536), T.Q2_K),
    "attn_kv_a_mqa.weight": ((576, H), T.Q2_K),
    "attn_q_a_norm.weight": ((1536,), T.F32),
    "attn_kv_a_norm.weight": ((512,), T.F32),
    "attn_k_b.weight": ((96, 512, 128), T.Q4_0),
    "attn_v_b.weight": ((96, 128, 512), T.Q2_K),
    "attn_gate.weight": ((D, H), T.Q2_K),
    "attn_output.weight": ((H, D), T.Q3_K),
}
_DENSE = {
    "ffn_gate.weight": ((33792, H), T.Q2_K),
    "ffn_up.weight": ((33792, H), T.Q2_K),
    "ffn_down.weight": ((H, 33792), T.Q3_K),
}
_MOE = {
    "ffn_gate_inp.weight": ((E, H), T.F32),
    "exp_probs_b.bias": ((E,), T.F32),
    "ffn_gate_exps.weight": ((E, 3072, 3584), T.Q2_K),
    "ffn_up_exps.weight": ((E, 3072, 3584), T.Q2_K),
    "ffn_down_exps.weight": ((E, 3584, 3072), T.Q3_K),
    "ffn_routed_down.weight": ((3584, H), T.Q2_K),
    "ffn_routed_up.weight": ((H, 3584), T.Q2_K),
    "ffn_routed_norm.weight": ((3584,), T.F32),
    "ffn_gate_shexp.weight": ((6144, H), T.Q2_K),
    "ffn_up_shexp.weight": ((6144, H), T.Q2_K),
    "ffn_down_shexp.weight": ((H, 6144), T.Q3_K),
}


class PublishedSource:
    """A ``TensorSource`` of headers; there is nothing to read."""

    def __init__(self):
        table = {
            "token_embd.weight": ((163840, H), T.Q2_K),
            "output.weight": ((163840, H), T.Q6_K),
            "output_norm.weight": ((H,), T.F32),
            "output_res_score.weight": ((H,), T.F32),
        }
        for layer in range(93):
            parts = (
                _ALL,
                _MLA if layer in PUBLISHED.mla_layers else _KDA,
                _MOE if layer else _DENSE,
            )
            table |= {f"blk.{layer}.{name}": row for part in parts for name, row in part.items()}
        self.metadata = Metadata(metadata(PUBLISHED))
        self.tensors = {name: _info(name, shape, kind) for name, (shape, kind) in table.items()}

    def read(self, name):
        raise AssertionError(f"{name} was read")


def _info(name, shape, kind):
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n = 1
    for size in shape:
        n *= size
    return TensorInfo(name, int(kind), shape, n // n_weights * n_bytes, 0, 0)
