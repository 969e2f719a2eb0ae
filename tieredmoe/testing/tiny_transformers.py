"""The tiny DeepSeek-V4 weights under the names of Hugging Face transformers: data only, no torch.

Lets a test build the reference ``DeepseekV4ForCausalLM`` from the very floats that a GGUF's bytes
mean. Names and options: transformers.models.deepseek_v4 (5.24).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape

_ROOT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "output_hc_fn.weight": "model.hc_head.hc_fn",
        "output_hc_base.weight": "model.hc_head.hc_base",
        "output_hc_scale.weight": "model.hc_head.hc_scale",
    }
)

# What follows blk.N. in a GGUF, and what follows model.layers.N. in transformers.
_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "hc_attn_fn.weight": "attn_hc.fn",
        "hc_attn_base.weight": "attn_hc.base",
        "hc_attn_scale.weight": "attn_hc.scale",
        "hc_ffn_fn.weight": "ffn_hc.fn",
        "hc_ffn_base.weight": "ffn_hc.base",
        "hc_ffn_scale.weight": "ffn_hc.scale",
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_sinks.weight": "self_attn.sinks",
        "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_kv.weight": "self_attn.kv_proj.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
        "attn_output_a.weight": "self_attn.o_a_proj.weight",
        "attn_output_b.weight": "self_attn.o_b_proj.weight",
        "attn_compressor_kv.weight": "self_attn.compressor.kv_proj.weight",
        "attn_compressor_gate.weight": "self_attn.compressor.gate_proj.weight",
        "attn_compressor_ape.weight": "self_attn.compressor.position_bias",
        "attn_compressor_norm.weight": "self_attn.compressor.kv_norm.weight",
        "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
        "indexer_compressor_kv.weight": "self_attn.compressor.indexer.kv_proj.weight",
        "indexer_compressor_gate.weight": "self_attn.compressor.indexer.gate_proj.weight",
        "indexer_compressor_ape.weight": "self_attn.compressor.indexer.position_bias",
        "indexer_compressor_norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
    }
)


def to_transformers(
    weights: Mapping[str, NDArray[Any]], shape: DeepSeekV4Shape
) -> dict[str, NDArray[Any]]:
    """The state dict of ``DeepseekV4ForCausalLM``, from weights by their GGUF names.

    Gate and up of all experts are joined along their rows; the hash tables become int64.
    """
    state = {_ROOT_NAMES[name]: array for name, array in weights.items() if name in _ROOT_NAMES}
    for layer in range(shape.num_hidden_layers):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        for suffix, name in _LAYER_NAMES.items():
            if source + suffix in weights:
                array = weights[source + suffix]
                integer = np.issubdtype(array.dtype, np.integer)
                state[target + name] = array.astype(np.int64) if integer else array
        state[f"{target}mlp.experts.gate_up_proj"] = np.concatenate(
            [weights[f"{source}ffn_gate_exps.weight"], weights[f"{source}ffn_up_exps.weight"]],
            axis=1,
        )
    return state


def transformers_config(shape: DeepSeekV4Shape) -> dict[str, Any]:
    """Keyword arguments of ``DeepseekV4Config`` for a model of this shape."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "q_lora_rank": shape.q_lora_rank,
        "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora_rank,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "n_routed_experts": shape.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scaling_factor,
        "swiglu_limit": shape.swiglu_limit,
        "num_hash_layers": shape.num_hash_layers,
        "sliding_window": shape.sliding_window,
        "compress_ratios": list(shape.compress_ratios),
        "index_n_heads": shape.index_n_heads,
        "index_head_dim": shape.index_head_dim,
        "index_topk": shape.index_topk,
        "hc_mult": shape.hc_mult,
        "hc_sinkhorn_iters": shape.hc_sinkhorn_iters,
        "hc_eps": shape.hc_eps,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "compress_rope_theta": shape.compress_rope_theta,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": shape.rope_factor,
            "original_max_position_embeddings": shape.rope_original_positions,
            "beta_fast": shape.rope_beta_fast,
            "beta_slow": shape.rope_beta_slow,
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
