"""The tensors of a Kimi-K3 of few layers: the real widths, and llama-quantize's types for Q2_K.

Names, sizes, types and distributions are those of the tiny model's list, but for what makes routing
like a real one's: wider selection biases, and attention that weighs more than the token itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.testing.synthetic.tensors import Draw, SyntheticTensor, normal, scaled
from tieredmoe.testing.tiny_kimi_shape import KimiK3Shape, KimiK3Types
from tieredmoe.testing.tiny_kimi_tensors import planned_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def kimi_k3_shape(*, n_layers: int, n_experts: int = 896, vocab_size: int = 163840) -> KimiK3Shape:
    """The published sizes with ``n_layers`` layers, the first dense, every fourth and the last MLA.

    With less than twelve layers the residual stream never restarts after the first.
    """
    return KimiK3Shape(
        vocab_size=vocab_size,
        hidden_size=7168,
        num_hidden_layers=n_layers,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kda_head_dim=128,
        intermediate_size=33792,
        num_experts=n_experts,
        num_experts_per_token=16,
        routed_expert_hidden_size=3584,
        moe_intermediate_size=3072,
        attn_res_block_size=12,
        max_position_embeddings=1048576,
    )


def kimi_k3_tensors(shape: KimiK3Shape) -> Iterator[SyntheticTensor]:
    """Every tensor of a file, in its order."""
    for planned in planned_tensors(shape, KimiK3Types()):
        suffix = planned.name.split(".", 2)[-1]
        draw = _OWN.get(suffix, planned.draw)
        yield SyntheticTensor(planned.name, planned.size, planned.ggml_type, draw)


_OWN: Mapping[str, Draw] = {
    "exp_probs_b.bias": normal(0, 0.08),
    "attn_output.weight": scaled(0.5),
}
