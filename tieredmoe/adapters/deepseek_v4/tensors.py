"""Which tensors a DeepSeek-V4 file must have: llama.cpp's names, and shapes in numpy order.

The names of a layer follow the kind of its attention and of its router, so what is here is also the
list of what ``load`` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.deepseek_v4.config import CSA, SLIDING

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config

Shapes = dict[str, tuple[int, ...]]


def dense_shapes(config: DeepSeekV4Config) -> Shapes:
    """Every tensor of weights that is not a routed expert's."""
    H, n = config.hidden_size, config.streams.n_streams
    shapes: Shapes = {
        "token_embd.weight": (config.vocab_size, H),
        "output_hc_fn.weight": (n, n * H),
        "output_hc_base.weight": (n,),
        "output_hc_scale.weight": (1,),
        "output_norm.weight": (H,),
        "output.weight": (config.vocab_size, H),
    }
    for layer in range(config.n_layers):
        ratio = config.attention.compress_ratios[layer]
        names = {
            **_streams(config),
            # What reads the same vector follows each other: it may be multiplied as one.
            **_attention_inputs(config),
            **_compressors(config, ratio),
            **_queries(config, ratio),
            **_attention_outputs(config),
            **_experts(config),
        }
        if layer >= config.experts.n_hash_layers:
            names["exp_probs_b.bias"] = (config.experts.n_experts,)
        shapes.update({f"blk.{layer}.{name}": shape for name, shape in names.items()})
    return shapes


def matrix_names(config: DeepSeekV4Config) -> frozenset[str]:
    """Those of ``dense_shapes`` that stay in their quantised bytes; all others become floats."""
    return frozenset(
        name
        for name, shape in dense_shapes(config).items()
        if len(shape) == 2 and not name.endswith(("_ape.weight", "_fn.weight"))
    )


def table_shapes(config: DeepSeekV4Config) -> Shapes:
    """The tables of the hash-routed layers: integers."""
    return {
        f"blk.{layer}.ffn_gate_tid2eid.weight": (config.vocab_size, config.experts.top_k)
        for layer in range(config.experts.n_hash_layers)
    }


def expert_shapes(config: DeepSeekV4Config) -> Shapes:
    """The routed experts, which are not read with the dense weights."""
    H, F, E = config.hidden_size, config.experts.width, config.experts.n_experts
    roles = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
    return {
        f"blk.{layer}.ffn_{role}_exps.weight": shape
        for layer in range(config.n_layers)
        for role, shape in roles.items()
    }


def _streams(config: DeepSeekV4Config) -> Shapes:
    H, n = config.hidden_size, config.streams.n_streams
    n_logits = (2 + n) * n
    shapes: Shapes = {}
    for block in ("attn", "ffn"):
        shapes[f"hc_{block}_fn.weight"] = (n_logits, n * H)
        shapes[f"hc_{block}_base.weight"] = (n_logits,)
        shapes[f"hc_{block}_scale.weight"] = (3,)
        shapes[f"{block}_norm.weight"] = (H,)
    return shapes


def _attention_inputs(config: DeepSeekV4Config) -> Shapes:
    H, sizes = config.hidden_size, config.attention
    return {
        "attn_q_a.weight": (sizes.q_lora_rank, H),
        "attn_kv.weight": (sizes.head_dim, H),
        "attn_q_a_norm.weight": (sizes.q_lora_rank,),
        "attn_kv_a_norm.weight": (sizes.head_dim,),
        "attn_sinks.weight": (sizes.n_heads,),
    }


def _compressors(config: DeepSeekV4Config, ratio: int) -> Shapes:
    H, sizes = config.hidden_size, config.attention
    if ratio == SLIDING:
        return {}
    n_halves = 2 if ratio == CSA else 1  # with overlap: one value for the next window, too
    owners = {"attn": sizes.head_dim, **({"indexer": sizes.indexer_dim} if ratio == CSA else {})}
    shapes: Shapes = {}
    for owner, dim in owners.items():
        shapes[f"{owner}_compressor_kv.weight"] = (n_halves * dim, H)
        shapes[f"{owner}_compressor_gate.weight"] = (n_halves * dim, H)
    if ratio == CSA:
        shapes["indexer.proj.weight"] = (sizes.indexer_heads, H)
    for owner, dim in owners.items():
        shapes[f"{owner}_compressor_ape.weight"] = (ratio, n_halves * dim)
        shapes[f"{owner}_compressor_norm.weight"] = (dim,)
    return shapes


def _queries(config: DeepSeekV4Config, ratio: int) -> Shapes:
    sizes = config.attention
    R = sizes.q_lora_rank
    shapes: Shapes = {"attn_q_b.weight": (sizes.n_heads * sizes.head_dim, R)}
    if ratio == CSA:
        shapes["indexer.attn_q_b.weight"] = (sizes.indexer_heads * sizes.indexer_dim, R)
    return shapes


def _attention_outputs(config: DeepSeekV4Config) -> Shapes:
    H, sizes = config.hidden_size, config.attention
    n_low = sizes.output_groups * sizes.output_lora_rank
    n_group = sizes.n_heads * sizes.head_dim // sizes.output_groups
    return {
        "attn_output_a.weight": (n_low, n_group),
        "attn_output_b.weight": (H, n_low),
    }


def _experts(config: DeepSeekV4Config) -> Shapes:
    H, F = config.hidden_size, config.experts.width * config.experts.n_shared
    return {
        "ffn_gate_inp.weight": (config.experts.n_experts, H),
        "ffn_gate_shexp.weight": (F, H),
        "ffn_up_shexp.weight": (F, H),
        "ffn_down_shexp.weight": (H, F),
    }
