"""The tensors of a DeepSeek-V4-Flash of few layers: the real widths and types, in a file's order.

Types are those of the 155.10 GB file: large dense matrices Q8_0, the router BF16, experts MXFP4.
Routing is skewed by selection biases, and drifts slowly because attention, which averages over many
tokens, weighs more in a router's input than the token itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from tieredmoe.testing.synthetic.tensors import SyntheticTensor, normal, scaled
from tieredmoe.testing.tiny_shape import DeepSeekV4Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

F32, I32 = GGMLQuantizationType.F32, GGMLQuantizationType.I32
BF16, Q8_0 = GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0
MXFP4 = GGMLQuantizationType.MXFP4

N_LAYERS, N_HASH_LAYERS = 43, 3
"""Of the published model."""

_ATTENTION_GAIN = 1.2
_BIAS_STD = 0.25


def deepseek_v4_shape(
    *, n_layers: int, n_experts: int = 256, vocab_size: int = 129280
) -> DeepSeekV4Shape:
    """The published sizes with ``n_layers`` layers, among which is every kind that can be.

    The published order of attentions is two sliding layers, then CSA and HCA in turn; with less
    than four layers it is the last of sliding, CSA, HCA. Hash-routed layers are as large a share of
    all as published, one at least where there are two layers.
    """
    ratios = (0, 4, 128)[-n_layers:]
    if n_layers > 3:
        ratios = tuple(0 if i < 2 else 128 if i % 2 else 4 for i in range(n_layers))
    n_hash = max(1, round(n_layers * N_HASH_LAYERS / N_LAYERS)) if n_layers > 1 else 0
    return DeepSeekV4Shape(
        vocab_size=vocab_size,
        hidden_size=4096,
        num_hidden_layers=n_layers,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        moe_intermediate_size=2048,
        n_routed_experts=n_experts,
        num_experts_per_tok=6,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        num_hash_layers=n_hash,
        sliding_window=128,
        compress_ratios=ratios,  # type: ignore[arg-type]  # attrs does not bind tuple's variable
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        max_position_embeddings=1048576,
        rope_original_positions=65536,
    )


def deepseek_v4_tensors(shape: DeepSeekV4Shape) -> Iterator[SyntheticTensor]:
    """Every tensor of a file, in its order."""
    V, H, hc = shape.vocab_size, shape.hidden_size, shape.hc_mult
    yield SyntheticTensor("token_embd.weight", (V, H), Q8_0, normal(0, 1))
    yield SyntheticTensor("output_norm.weight", (H,), F32, _NORM)
    yield SyntheticTensor("output.weight", (V, H), Q8_0, scaled(2))
    yield SyntheticTensor("output_hc_fn.weight", (hc, hc * H), F32, scaled(1))
    yield SyntheticTensor("output_hc_base.weight", (hc,), F32, normal(0, 0.5))
    yield SyntheticTensor("output_hc_scale.weight", (1,), F32, _NORM)
    for layer, ratio in enumerate(shape.compress_ratios):
        block = f"blk.{layer}."
        yield from _hyper(block, shape)
        yield from _attention(block, shape)
        if ratio:
            yield from _compressor(f"{block}attn_compressor", H, shape.head_dim, ratio)
        if ratio == 4:
            yield from _indexer(block, shape)
        yield from _experts(block, shape, is_hash=layer < shape.num_hash_layers)


def _hyper(block: str, shape: DeepSeekV4Shape) -> Iterator[SyntheticTensor]:
    H, hc = shape.hidden_size, shape.hc_mult
    mix = (2 + hc) * hc
    for part in ("attn", "ffn"):
        name = f"{block}hc_{part}"
        yield SyntheticTensor(f"{name}_fn.weight", (mix, hc * H), F32, scaled(1))
        yield SyntheticTensor(f"{name}_base.weight", (mix,), F32, normal(0, 0.7))
        yield SyntheticTensor(f"{name}_scale.weight", (3,), F32, _NORM)


def _attention(block: str, shape: DeepSeekV4Shape) -> Iterator[SyntheticTensor]:
    H, R, D = shape.hidden_size, shape.q_lora_rank, shape.head_dim
    NH, G, OR = shape.num_attention_heads, shape.o_groups, shape.o_lora_rank
    yield SyntheticTensor(f"{block}attn_norm.weight", (H,), F32, _NORM)
    yield SyntheticTensor(f"{block}attn_sinks.weight", (NH,), F32, normal(0, 1))
    yield SyntheticTensor(f"{block}attn_q_a.weight", (R, H), Q8_0, scaled(1))
    yield SyntheticTensor(f"{block}attn_q_a_norm.weight", (R,), F32, _NORM)
    yield SyntheticTensor(f"{block}attn_q_b.weight", (NH * D, R), Q8_0, scaled(1))
    yield SyntheticTensor(f"{block}attn_kv.weight", (D, H), Q8_0, scaled(1))
    yield SyntheticTensor(f"{block}attn_kv_a_norm.weight", (D,), F32, _NORM)
    a, b = (G * OR, NH * D // G), (H, G * OR)
    yield SyntheticTensor(f"{block}attn_output_a.weight", a, Q8_0, scaled(_ATTENTION_GAIN))
    yield SyntheticTensor(f"{block}attn_output_b.weight", b, Q8_0, scaled(_ATTENTION_GAIN))


def _compressor(name: str, H: int, D: int, ratio: int) -> Iterator[SyntheticTensor]:
    n_out = D * (2 if ratio == 4 else 1)
    yield SyntheticTensor(f"{name}_kv.weight", (n_out, H), Q8_0, scaled(1))
    yield SyntheticTensor(f"{name}_gate.weight", (n_out, H), Q8_0, scaled(1))
    yield SyntheticTensor(f"{name}_ape.weight", (ratio, n_out), F32, normal(0, 1))
    yield SyntheticTensor(f"{name}_norm.weight", (D,), F32, _NORM)


def _indexer(block: str, shape: DeepSeekV4Shape) -> Iterator[SyntheticTensor]:
    H, R = shape.hidden_size, shape.q_lora_rank
    IH, ID = shape.index_n_heads, shape.index_head_dim
    yield SyntheticTensor(f"{block}indexer.proj.weight", (IH, H), Q8_0, scaled(1))
    yield SyntheticTensor(f"{block}indexer.attn_q_b.weight", (IH * ID, R), Q8_0, scaled(1))
    yield from _compressor(f"{block}indexer_compressor", H, ID, 4)


def _experts(block: str, shape: DeepSeekV4Shape, *, is_hash: bool) -> Iterator[SyntheticTensor]:
    H, F, E = shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts
    yield SyntheticTensor(f"{block}ffn_norm.weight", (H,), F32, _NORM)
    yield SyntheticTensor(f"{block}ffn_gate_inp.weight", (E, H), BF16, scaled(2))
    if is_hash:
        size = (shape.vocab_size, shape.num_experts_per_tok)
        table = _HashTable(E)
        yield SyntheticTensor(f"{block}ffn_gate_tid2eid.weight", size, I32, table)
    else:
        yield SyntheticTensor(f"{block}exp_probs_b.bias", (E,), F32, normal(0, _BIAS_STD))
    sizes = {"gate": (F, H), "up": (F, H), "down": (H, F)}
    for role, size in sizes.items():
        yield SyntheticTensor(f"{block}ffn_{role}_exps.weight", (E, *size), MXFP4, scaled(1))
    for role, size in sizes.items():
        yield SyntheticTensor(f"{block}ffn_{role}_shexp.weight", size, Q8_0, scaled(1))


class _HashTable:
    """Draws distinct experts for each token id, each expert as likely as any other."""

    def __init__(self, n_experts: int) -> None:
        self._n_experts = n_experts

    def __call__(self, rng: np.random.Generator, size: tuple[int, ...]) -> NDArray[Any]:
        n_tokens, k = size
        rows = [
            np.argsort(rng.random((min(4096, n_tokens - start), self._n_experts)), axis=1)[:, :k]
            for start in range(0, n_tokens, 4096)
        ]
        return np.concatenate(rows)


_NORM = normal(1, 0.1)
