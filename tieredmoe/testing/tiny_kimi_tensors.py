"""The tensors of a Kimi-K3 GGUF: names, sizes, types and how to draw them, in the order of a file.

Apart from the drawing, so that the list can be had for sizes that nobody would draw. Names and
axes are those of llama.cpp's converter for ``kimi-k3``; sizes are in numpy order, the reverse of
ggml's. Scales are chosen so that the random net shows what a wrong one would hide: both bounds of
SiTU bite, the selection bias changes which experts are picked, decays span their range, MLA latents
are so small that their norm's epsilon matters, logits are of variance 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tieredmoe.testing.tiny_kimi_shape import KimiK3Shape, KimiK3Types

Draw = Callable[[np.random.Generator, tuple[int, ...]], "NDArray[Any]"]

F32 = GGMLQuantizationType.F32

ConvAxes = Literal[3, 4]
"""Convolutions are [channels, 1, width], or the same with a leading axis of 1."""


class PlannedTensor(NamedTuple):
    """One tensor: its size in numpy order, its type, and what draws its values."""

    name: str
    size: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    draw: Draw


def planned_tensors(
    shape: KimiK3Shape, types: KimiK3Types, *, conv_axes: ConvAxes = 4
) -> Iterator[PlannedTensor]:
    """Every tensor of a file, in its order."""
    V, H = shape.vocab_size, shape.hidden_size

    def matrix(name: str, *size: int, kind: str, gain: float = 1.0) -> PlannedTensor:
        return PlannedTensor(name, size, types.of(name, kind), _scaled(gain))

    yield matrix("token_embd.weight", V, H, kind="embed", gain=0.7 * H**0.5)
    yield matrix("output.weight", V, H, kind="output")
    yield PlannedTensor("output_norm.weight", (H,), F32, _NORM)
    yield PlannedTensor("output_res_score.weight", (H,), F32, _residual_scores)
    for layer in range(shape.num_hidden_layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            yield PlannedTensor(f"{block}{name}.weight", (H,), F32, _NORM)
        for name in ("attn_res_score", "ffn_res_score"):
            yield PlannedTensor(f"{block}{name}.weight", (H,), F32, _residual_scores)
        if shape.is_kda(layer):
            yield from _kda(block, shape, matrix, conv_axes)
        else:
            yield from _mla(block, shape, matrix)
        yield from (_routed if shape.is_routed(layer) else _dense)(block, shape, matrix)


_Matrix = Callable[..., PlannedTensor]


def _kda(
    block: str, shape: KimiK3Shape, matrix: _Matrix, conv_axes: ConvAxes
) -> Iterator[PlannedTensor]:
    H, NH, D = shape.hidden_size, shape.kda_num_heads, shape.kda_head_dim
    conv = (NH * D, 1, shape.short_conv_kernel_size)
    yield matrix(f"{block}attn_q.weight", NH * D, H, kind="attention")
    yield matrix(f"{block}attn_k.weight", NH * D, H, kind="attention")
    yield matrix(f"{block}attn_v.weight", NH * D, H, kind="values")
    for name in "qkv":
        size = conv if conv_axes == 3 else (1, *conv)
        yield PlannedTensor(f"{block}ssm_conv1d_{name}.weight", size, F32, _normal(0, 0.5))
    yield matrix(f"{block}ssm_f_a.weight", D, H, kind="attention")
    yield matrix(f"{block}ssm_f_b.weight", NH * D, D, kind="narrow")
    yield matrix(f"{block}ssm_beta.weight", NH, H, kind="attention")
    yield PlannedTensor(f"{block}ssm_a", (NH,), F32, _negated_decays)
    yield PlannedTensor(f"{block}ssm_dt.bias", (NH * D,), F32, _normal(-0.5, 0.5))
    yield matrix(f"{block}ssm_g.weight", NH * D, H, kind="attention")
    yield PlannedTensor(f"{block}ssm_norm.weight", (D,), F32, _NORM)
    yield matrix(f"{block}attn_output.weight", H, NH * D, kind="values")


def _mla(block: str, shape: KimiK3Shape, matrix: _Matrix) -> Iterator[PlannedTensor]:
    H, NH = shape.hidden_size, shape.num_attention_heads
    Q, R = shape.q_lora_rank, shape.kv_lora_rank
    N, P, D = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
    yield matrix(f"{block}attn_q_a.weight", Q, H, kind="attention", gain=_SMALL_LATENT)
    yield PlannedTensor(f"{block}attn_q_a_norm.weight", (Q,), F32, _NORM)
    yield matrix(f"{block}attn_q_b.weight", NH * (N + P), Q, kind="attention", gain=2.0)
    yield matrix(f"{block}attn_kv_a_mqa.weight", R + P, H, kind="attention", gain=_SMALL_LATENT)
    yield PlannedTensor(f"{block}attn_kv_a_norm.weight", (R,), F32, _NORM)
    # The key half of kv_b is stored transposed: its rows run over the latent.
    yield matrix(f"{block}attn_k_b.weight", NH, R, N, kind="narrow", gain=(N / R) ** 0.5)
    yield matrix(f"{block}attn_v_b.weight", NH, D, R, kind="attention")
    yield matrix(f"{block}attn_gate.weight", NH * D, H, kind="attention")
    yield matrix(f"{block}attn_output.weight", H, NH * D, kind="values")


def _dense(block: str, shape: KimiK3Shape, matrix: _Matrix) -> Iterator[PlannedTensor]:
    yield from _mlp(block, "", shape.hidden_size, shape.intermediate_size, matrix)


def _routed(block: str, shape: KimiK3Shape, matrix: _Matrix) -> Iterator[PlannedTensor]:
    H, E = shape.hidden_size, shape.num_experts
    Z, F = shape.routed_expert_hidden_size, shape.moe_intermediate_size
    yield matrix(f"{block}ffn_gate_inp.weight", E, H, kind="router")
    yield PlannedTensor(f"{block}exp_probs_b.bias", (E,), F32, _normal(0, 0.15))
    yield matrix(f"{block}ffn_gate_exps.weight", E, F, Z, kind="gate", gain=_GATE)
    yield matrix(f"{block}ffn_up_exps.weight", E, F, Z, kind="up", gain=_UP)
    yield matrix(f"{block}ffn_down_exps.weight", E, Z, F, kind="down", gain=_DOWN)
    yield matrix(f"{block}ffn_routed_down.weight", Z, H, kind="latent")
    yield matrix(f"{block}ffn_routed_up.weight", H, Z, kind="latent")
    yield PlannedTensor(f"{block}ffn_routed_norm.weight", (Z,), F32, _NORM)
    yield from _mlp(block, "_shexp", H, F * shape.num_shared_experts, matrix)


def _mlp(block: str, suffix: str, H: int, F: int, matrix: _Matrix) -> Iterator[PlannedTensor]:
    yield matrix(f"{block}ffn_gate{suffix}.weight", F, H, kind="dense", gain=_GATE)
    yield matrix(f"{block}ffn_up{suffix}.weight", F, H, kind="dense", gain=_UP)
    yield matrix(f"{block}ffn_down{suffix}.weight", H, F, kind="dense_down", gain=_DOWN)


_GATE, _UP, _DOWN = 3.0, 14.0, 0.3
_SMALL_LATENT = 0.018


def _normal(mean: float, std: float) -> Draw:
    return lambda rng, size: mean + std * rng.standard_normal(size)


def _scaled(gain: float) -> Draw:
    """Normal values that map unit variance to ``gain``²."""
    return lambda rng, size: gain / size[-1] ** 0.5 * rng.standard_normal(size)


_NORM = _normal(1, 0.3)


def _residual_scores(rng: np.random.Generator, size: tuple[int, ...]) -> NDArray[Any]:
    """A norm's weights times a projection's: a file has the two fused."""
    scores: NDArray[Any] = _NORM(rng, size) * _normal(0, 0.15)(rng, size)
    return scores


def _negated_decays(rng: np.random.Generator, size: tuple[int, ...]) -> NDArray[Any]:
    """-exp(A_log): a file has the exponential taken."""
    return -rng.uniform(1, 16, size)
