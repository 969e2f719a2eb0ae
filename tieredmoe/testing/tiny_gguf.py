"""Makes tiny DeepSeek-V4 GGUF files of any shape and type mix, and tells the floats in them.

Names, keys and order of tensors are those of llama.cpp's converter for ``deepseek4``. Scales are
chosen so that the random net behaves like a trained one where it matters to a test: router and
indexer gaps well above float noise, clamps that are felt, sinks and biases that change the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tieredmoe.errors import raise_config_problems
from tieredmoe.testing.tiny_model import (
    TinyWeights,
    WeightDraw,
    require_vocabulary_size,
    write_model,
)
from tieredmoe.testing.tiny_shape import DeepSeekV4Shape, TypeMix
from tieredmoe.testing.tiny_tokenizer import TinyVocabulary, tiny_vocabulary, tokenizer_metadata
from tieredmoe.testing.tiny_transformers import to_transformers, transformers_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tieredmoe.testing.tiny_model import DrawnTensor

__all__ = [
    "DeepSeekV4Shape",
    "DeepSeekV4Weights",
    "TypeMix",
    "make_deepseek_v4",
    "to_transformers",
    "transformers_config",
]

ARCHITECTURE = "deepseek4"

_SQRT_SOFTPLUS = 4
"""``expert_gating_func`` of DeepSeek-V4 in llama.cpp's numbering."""


DeepSeekV4Weights = TinyWeights[DeepSeekV4Shape]
"""What a made DeepSeek-V4 means."""


def make_deepseek_v4(
    path: Path | str,
    *,
    shape: DeepSeekV4Shape | None = None,
    types: TypeMix | None = None,
    seed: int = 0,
    tokenizer: TinyVocabulary | Literal["tiny"] | None = "tiny",
    n_shards: int = 1,
    alignment: int = 32,
    metadata: Mapping[str, object] | None = None,
    drop_keys: Collection[str] = (),
    drop_tensors: Collection[str] = (),
) -> DeepSeekV4Weights:
    """Write a whole model and return the exact weights that a reader must decode from it.

    The same arguments give the same bytes. With ``n_shards`` > 1 the files are
    ``STEM-00001-of-0000N.gguf`` beside ``path``. ``tokenizer=None`` writes the tokenizer model
    "none", as for a model that takes ids only. ``metadata`` adds keys or replaces values (numpy
    scalars and arrays choose their own width), ``drop_keys`` and ``drop_tensors`` leave things out
    of the file, for tests of what is missing.

    Raises ``ConfigError`` with every problem of shape and types before a file is touched, and
    ``GGUFError`` if a file cannot be written; then none of the files is left.
    """
    shape = shape or DeepSeekV4Shape()
    if tokenizer == "tiny":
        tokenizer = tiny_vocabulary(shape.vocab_size)
    require_vocabulary_size(tokenizer, shape.vocab_size)
    return write_model(
        Path(path),
        _Draw(shape, types or TypeMix(), seed).model(),
        shape,
        architecture=ARCHITECTURE,
        metadata={**model_metadata(shape, tokenizer), **(metadata or {})},
        n_shards=n_shards,
        alignment=alignment,
        drop_keys=drop_keys,
        drop_tensors=drop_tensors,
    )


def model_metadata(shape: DeepSeekV4Shape, tokenizer: TinyVocabulary | None) -> dict[str, object]:
    """The metadata of llama.cpp's converter; ints stand for u32 and floats for f32."""
    layers = shape.num_hidden_layers
    own: dict[str, object] = {
        "block_count": layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": 1,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": shape.rope_factor,
        "rope.scaling.original_context_length": shape.rope_original_positions,
        "rope.scaling.yarn_beta_fast": shape.rope_beta_fast,
        "rope.scaling.yarn_beta_slow": shape.rope_beta_slow,
        "rope.freq_base": shape.rope_theta,
        "attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        "expert_used_count": shape.num_experts_per_tok,
        "expert_count": shape.n_routed_experts,
        "expert_gating_func": _SQRT_SOFTPLUS,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rope.dimension_count": shape.qk_rope_head_dim,
        "attention.q_lora_rank": shape.q_lora_rank,
        "attention.sliding_window": shape.sliding_window,
        "expert_feed_forward_length": shape.moe_intermediate_size,
        "expert_shared_count": 1,
        "expert_weights_scale": shape.routed_scaling_factor,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": np.full(layers, shape.swiglu_limit, dtype=np.float32),
        "swiglu_clamp_shexp": np.full(layers, shape.swiglu_limit, dtype=np.float32),
        "attention.indexer.head_count": shape.index_n_heads,
        "attention.indexer.key_length": shape.index_head_dim,
        "attention.indexer.top_k": shape.index_topk,
        "attention.output_group_count": shape.o_groups,
        "attention.output_lora_rank": shape.o_lora_rank,
        # One entry more than layers: the last is that of the MTP block, also where there is none.
        "attention.compress_ratios": np.array([*shape.compress_ratios, 0], dtype=np.int32),
        "attention.compress_rope_freq_base": shape.compress_rope_theta,
        "hyper_connection.count": shape.hc_mult,
        "hyper_connection.sinkhorn_iterations": shape.hc_sinkhorn_iters,
        "hyper_connection.epsilon": shape.hc_eps,
        "hash_layer_count": shape.num_hash_layers,
        "embedding_length_out": shape.hidden_size * shape.hc_mult,
    }
    return {
        "general.type": "model",
        "general.name": "tiny DeepSeek-V4",
        "general.quantization_version": 2,
        **{f"{ARCHITECTURE}.{key}": value for key, value in own.items()},
        **tokenizer_metadata(tokenizer),
    }


class _Draw:
    """Draws a model's weights in the order of the file."""

    def __init__(self, shape: DeepSeekV4Shape, types: TypeMix, seed: int) -> None:
        self._shape = shape
        self._types = types
        self._draw = WeightDraw(seed)
        self._matrix, self._vector = self._draw.matrix, self._draw.vector

    def model(self) -> dict[str, DrawnTensor]:
        """Every tensor by name, in the order of the file."""
        shape, types = self._shape, self._types
        V, H, hc = shape.vocab_size, shape.hidden_size, shape.hc_mult
        self._matrix("token_embd.weight", V, H, ggml_type=types.embed, gain=H**0.5)
        self._vector("output_norm.weight", H, mean=1, std=0.1)
        self._matrix("output.weight", V, H, ggml_type=types.output, gain=2.0)
        self._matrix("output_hc_fn.weight", hc, hc * H, ggml_type=types.hyper, gain=2.0)
        self._vector("output_hc_base.weight", hc, std=0.5)
        self._vector("output_hc_scale.weight", 1, mean=1, std=0.1)
        for layer in range(shape.num_hidden_layers):
            block = f"blk.{layer}."
            self._hyper(block)
            self._attention(block)
            if shape.compress_ratios[layer]:
                self._compressor(block, shape.compress_ratios[layer])
            if shape.compress_ratios[layer] == 4:
                self._indexer(block)
            self._experts(block, layer)
        raise_config_problems("tiny DeepSeek-V4", self._draw.problems)
        return self._draw.tensors

    def _hyper(self, block: str) -> None:
        H, hc = self._shape.hidden_size, self._shape.hc_mult
        mix = (2 + hc) * hc
        for part in ("attn", "ffn"):
            name = f"{block}hc_{part}"
            self._matrix(f"{name}_fn.weight", mix, hc * H, ggml_type=self._types.hyper, gain=2.0)
            self._vector(f"{name}_base.weight", mix, std=0.7)
            self._vector(f"{name}_scale.weight", 3, mean=1, std=0.1)

    def _attention(self, block: str) -> None:
        shape, ggml_type = self._shape, self._types.attention
        H, R, D, NH = (
            shape.hidden_size,
            shape.q_lora_rank,
            shape.head_dim,
            shape.num_attention_heads,
        )
        G, OR = shape.o_groups, shape.o_lora_rank
        self._vector(f"{block}attn_norm.weight", H, mean=1, std=0.1)
        self._vector(f"{block}attn_sinks.weight", NH)
        self._matrix(f"{block}attn_q_a.weight", R, H, ggml_type=ggml_type)
        self._vector(f"{block}attn_q_a_norm.weight", R, mean=1, std=0.1)
        self._matrix(f"{block}attn_q_b.weight", NH * D, R, ggml_type=ggml_type)
        self._matrix(f"{block}attn_kv.weight", D, H, ggml_type=ggml_type)
        self._vector(f"{block}attn_kv_a_norm.weight", D, mean=1.5, std=0.2)
        n_group = NH * D // G
        self._matrix(f"{block}attn_output_a.weight", G * OR, n_group, ggml_type=ggml_type, gain=2.0)
        self._matrix(f"{block}attn_output_b.weight", H, G * OR, ggml_type=ggml_type, gain=2.0)

    def _compressor(self, block: str, ratio: int) -> None:
        H, D, ggml_type = self._shape.hidden_size, self._shape.head_dim, self._types.compressor
        n_out = D * (2 if ratio == 4 else 1)
        name = f"{block}attn_compressor"
        self._matrix(f"{name}_kv.weight", n_out, H, ggml_type=ggml_type)
        self._matrix(f"{name}_gate.weight", n_out, H, ggml_type=ggml_type, gain=2.0)
        self._vector(f"{name}_ape.weight", ratio, n_out)
        self._vector(f"{name}_norm.weight", D, mean=1.5, std=0.2)

    def _indexer(self, block: str) -> None:
        shape, types = self._shape, self._types
        H, R, IH, ID = (
            shape.hidden_size,
            shape.q_lora_rank,
            shape.index_n_heads,
            shape.index_head_dim,
        )
        self._matrix(f"{block}indexer.proj.weight", IH, H, ggml_type=types.compressor)
        self._matrix(f"{block}indexer.attn_q_b.weight", IH * ID, R, ggml_type=types.attention)
        name = f"{block}indexer_compressor"
        self._matrix(f"{name}_kv.weight", 2 * ID, H, ggml_type=types.compressor)
        self._matrix(f"{name}_gate.weight", 2 * ID, H, ggml_type=types.compressor, gain=2.0)
        self._vector(f"{name}_ape.weight", 4, 2 * ID)
        self._vector(f"{name}_norm.weight", ID, mean=1, std=0.1)

    def _experts(self, block: str, layer: int) -> None:
        shape, types = self._shape, self._types
        H, F, E = shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts
        self._vector(f"{block}ffn_norm.weight", H, mean=1, std=0.1)
        self._matrix(f"{block}ffn_gate_inp.weight", E, H, ggml_type=types.router, gain=2.0)
        if layer < shape.num_hash_layers:
            self._hash_table(f"{block}ffn_gate_tid2eid.weight")
        else:
            self._vector(f"{block}exp_probs_b.bias", E, std=0.5)
        sizes = {"gate": (F, H), "up": (F, H), "down": (H, F)}
        for role, size in sizes.items():
            ggml_type = types.expert_type(layer, role)
            self._matrix(f"{block}ffn_{role}_exps.weight", E, *size, ggml_type=ggml_type, gain=2.0)
        for role, size in sizes.items():
            name = f"{block}ffn_{role}_shexp.weight"
            self._matrix(name, *size, ggml_type=types.shared, gain=2.0)

    def _hash_table(self, name: str) -> None:
        """Distinct experts for every token id."""
        shape = self._shape
        rows = [
            self._draw.rng.permutation(shape.n_routed_experts)[: shape.num_experts_per_tok]
            for _ in range(shape.vocab_size)
        ]
        self._draw.integers(name, np.stack(rows))
