"""The sizes and tensor types of a tiny Kimi-K3: frozen data; the defaults run anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from gguf.constants import GGMLQuantizationType

from tieredmoe.errors import raise_config_problems

_CHECKED_APART = ("full_attn_layers", "gate_lower_bound", "first_k_dense_replace")


@attrs.frozen(kw_only=True)
class KimiK3Shape:
    """Every size of a Kimi-K3, under the names of its ``config.json`` where it has one.

    The defaults are tiny but keep what the real model has: KDA and MLA layers, two MLA layers in a
    row at the end, a dense first layer, a last block of the attention residuals that is not full,
    rows long enough for K-quants. ``full_attn_layers`` counts layers from 1, as the configuration
    does; by default it is every fourth layer and the last. ``kda_*`` are the sizes of
    ``linear_attn_config``. Raises ``ConfigError`` with every contradiction.
    """

    vocab_size: int = 512
    hidden_size: int = 256
    num_hidden_layers: int = 9
    full_attn_layers: tuple[int, ...] = attrs.field(converter=tuple)
    num_attention_heads: int = 4
    q_lora_rank: int = 256
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    kda_num_heads: int = attrs.field()
    kda_head_dim: int = 64
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    num_experts: int = 8
    num_experts_per_token: int = 3
    routed_expert_hidden_size: int = 256
    moe_intermediate_size: int = 256
    num_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int = 4
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    @full_attn_layers.default
    def _default_full_attention(self) -> tuple[int, ...]:
        n_layers = self.num_hidden_layers
        return tuple(sorted({*range(4, n_layers + 1, 4), n_layers}))

    @kda_num_heads.default
    def _default_kda_heads(self) -> int:
        return self.num_attention_heads

    def __attrs_post_init__(self) -> None:
        raise_config_problems("tiny Kimi-K3", self._problems())

    def is_kda(self, layer: int) -> bool:
        """Whether ``layer``, counted from 0, has linear attention."""
        return layer + 1 not in self.full_attn_layers

    def is_routed(self, layer: int) -> bool:
        """Whether ``layer``, counted from 0, has routed experts."""
        return layer >= self.first_k_dense_replace

    def _problems(self) -> list[str]:
        problems = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name not in _CHECKED_APART and value <= 0:
                problems.append(f"{field.name} must be positive, not {value}")
        n_layers = self.num_hidden_layers
        problems += [
            f"full_attn_layers has {layer}, of {n_layers} layers counted from 1"
            for layer in self.full_attn_layers
            if not 1 <= layer <= n_layers
        ]
        if self.num_experts_per_token > self.num_experts:
            problems.append(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts "
                f"{self.num_experts}"
            )
        if not 0 <= self.first_k_dense_replace < n_layers:
            problems.append(
                f"first_k_dense_replace {self.first_k_dense_replace} leaves no routed layer of "
                f"{n_layers}"
            )
        if self.gate_lower_bound >= 0:
            problems.append(f"gate_lower_bound must be negative, not {self.gate_lower_bound}")
        return problems


TensorTypes = Mapping[str, GGMLQuantizationType] | Callable[[str], GGMLQuantizationType | None]
"""Types by the name of a tensor; absent or None means the mix's own."""


@attrs.frozen(kw_only=True)
class KimiK3Types:
    """The ggml type of each class of tensors; the defaults are llama-quantize's rule for Q2_K.

    ``values`` are the KDA value and both attention output projections, ``narrow`` the matrices of
    rows as short as one head (no K-quant fits those of the real model), ``latent`` the projections
    around the routed experts, ``dense`` and ``dense_down`` the first layer's and the shared
    experts' matrices. Norms, biases, convolutions, decays and residual scores are always F32.
    ``tensors`` makes exceptions for single tensors.
    """

    embed: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    output: GGMLQuantizationType = GGMLQuantizationType.Q6_K
    attention: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    values: GGMLQuantizationType = GGMLQuantizationType.Q3_K
    narrow: GGMLQuantizationType = GGMLQuantizationType.Q4_0
    router: GGMLQuantizationType = GGMLQuantizationType.F32
    latent: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    gate: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    up: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    down: GGMLQuantizationType = GGMLQuantizationType.Q3_K
    dense: GGMLQuantizationType = GGMLQuantizationType.Q2_K
    dense_down: GGMLQuantizationType = GGMLQuantizationType.Q3_K
    tensors: TensorTypes | None = None

    @classmethod
    def uniform(cls, ggml_type: GGMLQuantizationType) -> KimiK3Types:
        """One type for every matrix but the router's, which stays F32 as in every real file."""
        return cls(
            embed=ggml_type,
            output=ggml_type,
            attention=ggml_type,
            values=ggml_type,
            narrow=ggml_type,
            latent=ggml_type,
            gate=ggml_type,
            up=ggml_type,
            down=ggml_type,
            dense=ggml_type,
            dense_down=ggml_type,
        )

    def of(self, name: str, kind: str) -> GGMLQuantizationType:
        """The type of the tensor ``name``, which is one of the class ``kind``."""
        own: GGMLQuantizationType = getattr(self, kind)
        if self.tensors is None:
            return own
        if isinstance(self.tensors, Mapping):
            return self.tensors.get(name, own)
        return self.tensors(name) or own
