"""The sizes and tensor types of a tiny DeepSeek-V4: frozen data; the defaults run anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from gguf.constants import GGMLQuantizationType

from tieredmoe.errors import raise_config_problems

_RATIOS = (0, 4, 128)


@attrs.frozen(kw_only=True)
class DeepSeekV4Shape:
    """Every size of a DeepSeek-V4, under transformers' names where it has one.

    The defaults are tiny but keep every kind of layer: sliding, CSA and HCA attention, hash-routed
    and top-k-routed experts. ``compress_ratios`` has one entry per layer. Raises ``ConfigError``
    with every contradiction.
    """

    vocab_size: int = 320
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 64
    o_groups: int = 2
    o_lora_rank: int = 32
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 2.0  # small, so that the clamp is felt
    num_hash_layers: int = attrs.field()
    sliding_window: int = 32
    compress_ratios: tuple[int, ...] = attrs.field(converter=tuple)
    index_n_heads: int = (
        16  # with few heads all scores can be 0, and exact ties have no right order
    )
    index_head_dim: int = 64
    index_topk: int = 16
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 65536
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original_positions: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0

    @num_hash_layers.default
    def _default_hash_layers(self) -> int:
        return min(3, self.num_hidden_layers)

    @compress_ratios.default
    def _default_ratios(self) -> tuple[int, ...]:
        """Two sliding layers, then CSA and HCA in turn, as in the real model."""
        return tuple(0 if i < 2 else _RATIOS[1 + i % 2] for i in range(self.num_hidden_layers))

    def __attrs_post_init__(self) -> None:
        raise_config_problems("tiny DeepSeek-V4", self._problems())

    def _problems(self) -> list[str]:
        problems = [
            f"{field.name} must be positive, not {getattr(self, field.name)}"
            for field in attrs.fields(type(self))
            if field.name not in {"num_hash_layers", "compress_ratios"}
            and getattr(self, field.name) <= 0
        ]
        if problems:
            return problems
        if not 0 <= self.num_hash_layers <= self.num_hidden_layers:
            problems.append(f"num_hash_layers {self.num_hash_layers} exceeds the layers")
        if len(self.compress_ratios) != self.num_hidden_layers:
            problems.append(
                f"compress_ratios has {len(self.compress_ratios)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        if not set(self.compress_ratios) <= set(_RATIOS):
            problems.append(f"compress_ratios {self.compress_ratios} must each be 0, 4 or 128")
        if self.num_experts_per_tok > self.n_routed_experts:
            problems.append(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds n_routed_experts "
                f"{self.n_routed_experts}"
            )
        if self.num_attention_heads % self.o_groups:
            problems.append(
                f"{self.num_attention_heads} heads do not make {self.o_groups} equal o_groups"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(
            self.head_dim, self.index_head_dim
        ):
            problems.append(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and fit in head_dim "
                f"{self.head_dim} and index_head_dim {self.index_head_dim}"
            )
        return problems


ExpertTypes = (
    Mapping[tuple[int, str], GGMLQuantizationType]
    | Callable[[int, str], GGMLQuantizationType | None]
)
"""Types by (layer, role), role one of gate, up and down; absent or None means the mix's own."""


@attrs.frozen(kw_only=True)
class TypeMix:
    """The ggml type of each class of tensors; the defaults are those of the real files.

    Norms, biases, hyper-connection bases and scales, sinks and position biases are always F32, the
    hash tables I32. ``hyper`` is the type of the hyper-connection matrices, ``experts`` makes
    exceptions for single layers and roles.
    """

    embed: GGMLQuantizationType = GGMLQuantizationType.BF16
    output: GGMLQuantizationType = GGMLQuantizationType.BF16
    attention: GGMLQuantizationType = GGMLQuantizationType.Q8_0
    compressor: GGMLQuantizationType = GGMLQuantizationType.BF16
    router: GGMLQuantizationType = GGMLQuantizationType.BF16
    gate: GGMLQuantizationType = GGMLQuantizationType.MXFP4
    up: GGMLQuantizationType = GGMLQuantizationType.MXFP4
    down: GGMLQuantizationType = GGMLQuantizationType.MXFP4
    shared: GGMLQuantizationType = GGMLQuantizationType.Q8_0
    hyper: GGMLQuantizationType = GGMLQuantizationType.F32
    experts: ExpertTypes | None = None

    @classmethod
    def uniform(cls, ggml_type: GGMLQuantizationType) -> TypeMix:
        """One type for every matrix."""
        return cls(
            embed=ggml_type,
            output=ggml_type,
            attention=ggml_type,
            compressor=ggml_type,
            router=ggml_type,
            gate=ggml_type,
            up=ggml_type,
            down=ggml_type,
            shared=ggml_type,
            hyper=ggml_type,
        )

    def expert_type(self, layer: int, role: str) -> GGMLQuantizationType:
        """The type of the routed experts of one layer and role."""
        own: GGMLQuantizationType = getattr(self, role)
        if self.experts is None:
            return own
        if isinstance(self.experts, Mapping):
            return self.experts.get((layer, role), own)
        return self.experts(layer, role) or own
