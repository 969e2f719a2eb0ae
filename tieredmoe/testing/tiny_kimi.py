"""Makes tiny Kimi-K3 GGUF files of any shape, type mix and number of shards, with their floats.

Keys are those of llama.cpp's converter for ``kimi-k3``, or, on request, of files that are older
than its final form: readers must take both.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np

from tieredmoe.errors import raise_config_problems
from tieredmoe.testing.tiny_kimi_shape import KimiK3Shape, KimiK3Types
from tieredmoe.testing.tiny_kimi_tensors import planned_tensors
from tieredmoe.testing.tiny_model import (
    TinyWeights,
    WeightDraw,
    require_vocabulary_size,
    write_model,
)
from tieredmoe.testing.tiny_tokenizer import TinyVocabulary, tiny_vocabulary, tokenizer_metadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tieredmoe.testing.tiny_kimi_tensors import ConvAxes

ARCHITECTURE = "kimi-k3"

KimiK3Weights = TinyWeights[KimiK3Shape]
"""What a made Kimi-K3 means."""

_SIGMOID = 2
"""``expert_gating_func`` of Kimi-K3 in llama.cpp's numbering."""

_EARLY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_res.block_size": "attn_res_block_size",
        "activation.situ_beta": "situ_beta",
        "activation.situ_linear_beta": "situ_linear_beta",
        "kda.gate_lower_bound": "gate_lower_bound",
    }
)
_NOT_IN_EARLY_FILES = ("attention.key_length", "attention.value_length")


def make_kimi_k3(
    path: Path | str,
    *,
    shape: KimiK3Shape | None = None,
    types: KimiK3Types | None = None,
    seed: int = 0,
    tokenizer: TinyVocabulary | Literal["tiny"] | None = "tiny",
    n_shards: int = 1,
    alignment: int = 32,
    conv_axes: ConvAxes = 4,
    early: bool = False,
    n_tensors_claimed: int | None = None,
    metadata: Mapping[str, object] | None = None,
    drop_keys: Collection[str] = (),
    drop_tensors: Collection[str] = (),
) -> KimiK3Weights:
    """Write a whole model and return the exact weights that a reader must decode from it.

    The same arguments give the same bytes; types, shards and the form of the metadata do not change
    the draw. With ``n_shards`` > 1 the files are ``STEM-00001-of-0000N.gguf`` beside ``path``.
    ``tokenizer=None`` writes the tokenizer model "none". ``early`` writes the metadata as files of
    the time before the architecture's final form have it: flat names of four keys, no key and value
    length, ``[EOS]`` as the end of sequence. ``n_tensors_claimed`` is what shards say of the number
    of tensors, if not the truth. ``metadata`` adds or replaces values (numpy scalars and arrays
    choose their width), ``drop_keys`` and ``drop_tensors`` leave things out of the file.

    Raises ``ConfigError`` with every problem of shape and types before a file is touched, and
    ``GGUFError`` if a file cannot be written; then none of the files is left.
    """
    shape = shape or KimiK3Shape()
    if tokenizer == "tiny":
        tokenizer = tiny_vocabulary(shape.vocab_size, "kimi-k3")
    require_vocabulary_size(tokenizer, shape.vocab_size)
    draw = WeightDraw(seed)
    for planned in planned_tensors(shape, types or KimiK3Types(), conv_axes=conv_axes):
        values = planned.draw(draw.rng, planned.size)
        draw.weights(planned.name, values, ggml_type=planned.ggml_type)
    raise_config_problems("tiny Kimi-K3", draw.problems)
    return write_model(
        Path(path),
        draw.tensors,
        shape,
        architecture=ARCHITECTURE,
        metadata={**model_metadata(shape, tokenizer, early=early), **(metadata or {})},
        n_shards=n_shards,
        alignment=alignment,
        drop_keys=drop_keys,
        drop_tensors=drop_tensors,
        n_tensors_claimed=n_tensors_claimed,
    )


def model_metadata(
    shape: KimiK3Shape, tokenizer: TinyVocabulary | None, *, early: bool = False
) -> dict[str, object]:
    """The metadata of a converter; ints stand for u32 and floats for f32."""
    own = _architecture_metadata(shape)
    named = tokenizer_metadata(tokenizer)
    if early:
        own = {
            _EARLY_NAMES.get(key, key): value
            for key, value in own.items()
            if key not in _NOT_IN_EARLY_FILES
        }
        if tokenizer is not None and "[EOS]" in tokenizer.tokens:
            named["tokenizer.ggml.eos_token_id"] = tokenizer.id_of("[EOS]")
    return {
        "general.type": "model",
        "general.name": "tiny Kimi-K3",
        "general.quantization_version": 2,
        **{f"{ARCHITECTURE}.{key}": value for key, value in own.items()},
        **named,
    }


def _architecture_metadata(shape: KimiK3Shape) -> dict[str, object]:
    is_mla = [not shape.is_kda(layer) for layer in range(shape.num_hidden_layers)]
    return {
        "block_count": shape.num_hidden_layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": np.array(is_mla, dtype=np.int32),
        "rope.freq_base": 10000.0,  # written by the converter, used by nobody
        "attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        "expert_count": shape.num_experts,
        "expert_used_count": shape.num_experts_per_token,
        "expert_group_used_count": 1,
        "expert_gating_func": _SIGMOID,
        "attention.key_length": shape.kv_lora_rank + shape.qk_rope_head_dim,
        "attention.value_length": shape.kv_lora_rank,
        "vocab_size": shape.vocab_size,
        "ssm.conv_kernel": shape.short_conv_kernel_size,
        "kda.head_dim": shape.kda_head_dim,
        "kda.gate_lower_bound": shape.gate_lower_bound,
        "attention.q_lora_rank": shape.q_lora_rank,
        "attention.kv_lora_rank": shape.kv_lora_rank,
        "rope.dimension_count": shape.qk_rope_head_dim,
        "attention.key_length_mla": shape.qk_nope_head_dim + shape.qk_rope_head_dim,
        "attention.value_length_mla": shape.v_head_dim,
        "expert_feed_forward_length": shape.moe_intermediate_size,
        "expert_shared_count": shape.num_shared_experts,
        "leading_dense_block_count": shape.first_k_dense_replace,
        "expert_weights_scale": shape.routed_scaling_factor,
        "expert_weights_norm": True,
        "expert_latent_length": shape.routed_expert_hidden_size,
        "activation.situ_beta": shape.activation_situ_beta,
        "activation.situ_linear_beta": shape.activation_situ_linear_beta,
        "attn_res.block_size": shape.attn_res_block_size,
    }
