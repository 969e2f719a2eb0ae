"""Which tensors a Kimi-K3 file must have: llama.cpp's names, and shapes in numpy order.

The names of a layer follow the kinds of its attention and of its feed-forward block, so what is
here is also the list of what ``load`` reads. There is no key that says whether a file has the norm
of the expert latents or the output gates; Kimi-K3 has them, so their tensors must be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config

Shapes = dict[str, tuple[int, ...]]


def dense_shapes(config: KimiK3Config) -> Shapes:
    """Every tensor of weights that is not a routed expert's."""
    H = config.hidden_size
    shapes: Shapes = {
        "token_embd.weight": (config.vocab_size, H),
        "output_res_score.weight": (H,),
        "output_norm.weight": (H,),
        "output.weight": (config.vocab_size, H),
    }
    for layer in range(config.n_layers):
        names: Shapes = {
            f"{block}_{name}.weight": (H,)
            for block in ("attn", "ffn")
            for name in ("res_score", "norm")
        }
        names |= _kda(config) if config.is_kda[layer] else _mla(config)
        names |= _dense(config) if layer < config.ffn.n_dense_layers else _latent_experts(config)
        shapes.update({f"blk.{layer}.{name}": shape for name, shape in names.items()})
    return shapes


def matrix_names(config: KimiK3Config) -> frozenset[str]:
    """Those of ``dense_shapes`` that stay in their quantised bytes; all others become floats."""
    return frozenset(
        name
        for name, shape in dense_shapes(config).items()
        if len(shape) == 2 and "ssm_conv1d" not in name
    )


def expert_shapes(config: KimiK3Config) -> Shapes:
    """The routed experts, which are not read with the dense weights."""
    ffn = config.ffn
    inner = (ffn.n_experts, ffn.expert_width, ffn.latent_size)
    outer = (ffn.n_experts, ffn.latent_size, ffn.expert_width)
    roles = {"gate": inner, "up": inner, "down": outer}
    return {
        f"blk.{layer}.ffn_{role}_exps.weight": shape
        for layer in range(ffn.n_dense_layers, config.n_layers)
        for role, shape in roles.items()
    }


def _kda(config: KimiK3Config) -> Shapes:
    H, kda = config.hidden_size, config.kda
    return {
        # What reads the same vector comes first and in one type, to lie back to back in memory.
        "attn_q.weight": (kda.width, H),
        "attn_k.weight": (kda.width, H),
        "ssm_g.weight": (kda.width, H),
        "ssm_f_a.weight": (kda.head_dim, H),
        "ssm_beta.weight": (kda.n_heads, H),
        "attn_v.weight": (kda.width, H),
        "ssm_f_b.weight": (kda.width, kda.head_dim),
        **{f"ssm_conv1d_{stream}.weight": (kda.width, kda.conv_kernel) for stream in "qkv"},
        "ssm_dt.bias": (kda.width,),
        "ssm_a": (kda.n_heads,),
        "ssm_norm.weight": (kda.head_dim,),
        "attn_output.weight": (H, kda.width),
    }


def _mla(config: KimiK3Config) -> Shapes:
    H, mla = config.hidden_size, config.mla
    n_values = mla.n_heads * mla.value_dim
    return {
        "attn_q_a.weight": (mla.q_lora_rank, H),
        "attn_kv_a_mqa.weight": (mla.row_width, H),
        "attn_gate.weight": (n_values, H),
        "attn_q_b.weight": (mla.n_heads * mla.key_dim, mla.q_lora_rank),
        "attn_k_b.weight": (mla.n_heads * mla.kv_lora_rank, mla.own_dim),
        "attn_v_b.weight": (n_values, mla.kv_lora_rank),
        "attn_q_a_norm.weight": (mla.q_lora_rank,),
        "attn_kv_a_norm.weight": (mla.kv_lora_rank,),
        "attn_output.weight": (H, n_values),
    }


def _dense(config: KimiK3Config) -> Shapes:
    return _gated_mlp(config.hidden_size, config.ffn.dense_width)


def _latent_experts(config: KimiK3Config) -> Shapes:
    H, ffn = config.hidden_size, config.ffn
    return {
        "ffn_gate_inp.weight": (ffn.n_experts, H),
        "exp_probs_b.bias": (ffn.n_experts,),
        "ffn_routed_down.weight": (ffn.latent_size, H),
        "ffn_routed_norm.weight": (ffn.latent_size,),
        "ffn_routed_up.weight": (H, ffn.latent_size),
        **_gated_mlp(H, ffn.n_shared * ffn.expert_width, suffix="_shexp"),
    }


def _gated_mlp(H: int, width: int, *, suffix: str = "") -> Shapes:
    return {
        f"ffn_gate{suffix}.weight": (width, H),
        f"ffn_up{suffix}.weight": (width, H),
        f"ffn_down{suffix}.weight": (H, width),
    }
