"""Kimi-K3's sizes and constants, from GGUF metadata.

Nothing falls back to a published value: a wrong constant here (a gate without its bound, a block of
another length) gives fluent text that is wrong, so a missing key is refused by its name, and
everything that is missing or contradictory is reported at once. Early files spelt four keys
otherwise; both spellings count. What metadata do not say, the number of KDA heads, the tensors do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs

from tieredmoe.adapters.metadata_ranges import (
    FLOAT_MIN,
    constant_fault,
    number_problems,
    size_fault,
)
from tieredmoe.errors import MetadataError
from tieredmoe.gguf.metadata import MetadataReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tieredmoe.gguf.metadata import Metadata
    from tieredmoe.gguf.tensors import TensorInfo

ARCHITECTURE = "kimi-k3"

LATENT_EPS = 1e-6
"""The epsilon of the norms of MLA's latents in the published code, where it is a class's default:
no GGUF has a key for it. llama.cpp and SGLang use the model's general one (1e-5) there."""

_SIGMOID = 2
"""llama.cpp's number of the gating function sigmoid(x)."""

_BOUND_MIN = -80.0
"""A decay of exp(-80) is nothing; one much beyond it is zero in float32."""

_BLOCK_SIZE = ("attn_res.block_size", "attn_res_block_size")
_SITU_BETA = ("activation.situ_beta", "situ_beta")
_SITU_LINEAR_BETA = ("activation.situ_linear_beta", "situ_linear_beta")
_GATE_LOWER_BOUND = ("kda.gate_lower_bound", "gate_lower_bound")
_DENSE_WIDTH = "feed_forward_length"
_EXPERT_WIDTH = "expert_feed_forward_length"

_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "n_layers": "block_count",
    "hidden_size": "embedding_length",
    "rms_eps": "attention.layer_norm_rms_epsilon",
    "block_size": _BLOCK_SIZE[0],
    "head_dim": "kda.head_dim",
    "conv_kernel": "ssm.conv_kernel",
    "gate_lower_bound": _GATE_LOWER_BOUND[0],
    "n_heads": "attention.head_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "key_dim": "attention.key_length_mla",
    "shared_dim": "rope.dimension_count",
    "value_dim": "attention.value_length_mla",
    "n_dense_layers": "leading_dense_block_count",
    "dense_width": _DENSE_WIDTH,
    "n_experts": "expert_count",
    "top_k": "expert_used_count",
    "expert_width": _EXPERT_WIDTH,
    "n_shared": "expert_shared_count",
    "latent_size": "expert_latent_length",
    "routed_scale": "expert_weights_scale",
    "situ_beta": _SITU_BETA[0],
    "situ_linear_beta": _SITU_LINEAR_BETA[0],
}
"""The metadata key of every number of the configuration, by the name of its field."""


@attrs.frozen(kw_only=True)
class KdaConfig:
    """Kimi Delta Attention: linear attention with a decay for each head and key channel.

    A log-decay is ``gate_lower_bound * sigmoid(…)``, within (gate_lower_bound, 0). The bound takes
    the place of Kimi-Linear's softplus gate; it does not clamp it.
    """

    n_heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float

    @classmethod
    def read(cls, reader: MetadataReader, *, n_heads: int) -> Self:
        """Take what belongs here from ``reader``."""
        return cls(
            n_heads=n_heads,
            head_dim=reader.integer("kda.head_dim"),
            conv_kernel=reader.integer("ssm.conv_kernel"),
            gate_lower_bound=reader.number(*_GATE_LOWER_BOUND),
        )

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.n_heads * self.head_dim

    @property
    def state_nbytes(self) -> int:
        """float32 bytes that a layer keeps of a sequence of any length: state and windows.

        The published model's 69 layers take 6.29 MB + 0.44 MB each, 465 MB in all.
        """
        return 4 * self.width * (self.head_dim + 3 * (self.conv_kernel - 1))


@attrs.frozen(kw_only=True)
class MlaConfig:
    """Multi-head latent attention without positions; ``latent_eps`` is that of its two norms."""

    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    key_dim: int
    """of a head, both parts"""
    shared_dim: int
    """of the part of a key that all heads share: the published code's "rope" part, not rotated"""
    value_dim: int
    latent_eps: float

    @classmethod
    def read(cls, reader: MetadataReader, *, latent_eps: float) -> Self:
        """Take what belongs here from ``reader``."""
        return cls(
            n_heads=reader.integer("attention.head_count"),
            q_lora_rank=reader.integer("attention.q_lora_rank"),
            kv_lora_rank=reader.integer("attention.kv_lora_rank"),
            key_dim=reader.integer("attention.key_length_mla"),
            shared_dim=reader.integer("rope.dimension_count"),
            value_dim=reader.integer("attention.value_length_mla"),
            latent_eps=latent_eps,
        )

    @property
    def own_dim(self) -> int:
        """Channels of the part of a key that each head has for itself."""
        return self.key_dim - self.shared_dim

    @property
    def row_width(self) -> int:
        """float32 numbers that a layer keeps of each token."""
        return self.kv_lora_rank + self.shared_dim


@attrs.frozen(kw_only=True)
class FeedForwardConfig:
    """The first ``n_dense_layers`` layers are ``dense_width`` wide, all others route.

    Routed experts work on ``latent_size`` channels, the shared ones (fused to one) on all.
    """

    n_dense_layers: int
    dense_width: int
    n_experts: int
    top_k: int
    expert_width: int
    n_shared: int
    latent_size: int
    routed_scale: float
    situ_beta: float
    situ_linear_beta: float

    @classmethod
    def read(
        cls, reader: MetadataReader, *, n_dense: int, dense: set[int], routed: set[int]
    ) -> Self:
        """Take what belongs here from ``reader``; ``dense`` and ``routed`` are layers' widths."""
        return cls(
            n_dense_layers=n_dense,
            dense_width=max(dense),
            n_experts=reader.integer("expert_count"),
            top_k=reader.integer("expert_used_count"),
            expert_width=max(routed),
            n_shared=reader.integer("expert_shared_count"),
            latent_size=reader.integer("expert_latent_length"),
            routed_scale=reader.number("expert_weights_scale"),
            situ_beta=reader.number(*_SITU_BETA),
            situ_linear_beta=reader.number(*_SITU_LINEAR_BETA),
        )


@attrs.frozen(kw_only=True)
class KimiK3Config:
    """Sizes and constants of one model; ``is_kda`` tells for each layer which attention it has.

    A block of the attention residuals is ``block_size`` layers long, the last one may be shorter.
    """

    vocab_size: int
    context_length: int
    n_layers: int
    hidden_size: int
    rms_eps: float
    block_size: int
    is_kda: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    ffn: FeedForwardConfig

    @classmethod
    def from_metadata(
        cls,
        metadata: Metadata,
        tensors: Mapping[str, TensorInfo],
        *,
        latent_eps: float = LATENT_EPS,
    ) -> Self:
        """Read ``metadata``; ``tensors`` tell how many KDA heads there are.

        Raises ``MetadataError`` that lists all missing keys, or else all contradictions.
        """
        reader = MetadataReader(metadata, ARCHITECTURE)
        n_layers = reader.layer_count(n_tensors=len(tensors))
        kv_heads = reader.integers("attention.head_count_kv", length=n_layers)
        is_kda = tuple(count == 0 for count in kv_heads)
        mla = MlaConfig.read(reader, latent_eps=latent_eps)
        n_dense = reader.integer("leading_dense_block_count")
        dense, routed = _widths(reader, n_dense=n_dense, n_layers=n_layers)
        config = cls(
            vocab_size=_vocab_size(reader, tensors),
            context_length=reader.integer("context_length"),
            n_layers=n_layers,
            hidden_size=reader.integer("embedding_length"),
            rms_eps=reader.number("attention.layer_norm_rms_epsilon"),
            block_size=reader.integer(*_BLOCK_SIZE),
            is_kda=is_kda,
            kda=KdaConfig.read(reader, n_heads=_kda_heads(tensors, is_kda) or mla.n_heads),
            mla=mla,
            ffn=FeedForwardConfig.read(reader, n_dense=n_dense, dense=dense, routed=routed),
        )
        problems = [*_unsupported(reader), *_contradictions(config)]
        if min(kv_heads) < 0:
            problems.append(f"{reader.key('attention.head_count_kv')} has {min(kv_heads)}")
        for name, widths in ((_DENSE_WIDTH, dense), (_EXPERT_WIDTH, routed)):
            if len(widths) > 1:
                problems.append(f"{reader.key(name)} differs between layers: {sorted(widths)}")
        reader.finish()
        if problems:
            where = "" if metadata.path is None else f"{metadata.path}: "
            raise MetadataError(f"{where}{ARCHITECTURE} metadata: " + "; ".join(problems))
        return config


def _vocab_size(reader: MetadataReader, tensors: Mapping[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        return reader.integer("vocab_size")
    return reader.integer("vocab_size", default=embedding.shape[0])


def _kda_heads(tensors: Mapping[str, TensorInfo], is_kda: Sequence[bool]) -> int | None:
    """Each KDA head has a row in the matrix of write strengths; None where that tensor is not."""
    for layer, kda in enumerate(is_kda):
        info = tensors.get(f"blk.{layer}.ssm_beta.weight")
        if kda and info is not None and info.shape:
            return info.shape[0]
    return None


def _widths(reader: MetadataReader, *, n_dense: int, n_layers: int) -> tuple[set[int], set[int]]:
    """The widths of the dense layers and of the routed ones' experts: one each, or the file is odd.

    A file gives a width once, or for each layer. 1 stands for one that is not there, or that no
    layer needs.
    """
    first = n_dense if 0 <= n_dense <= n_layers else 0
    found = []
    for name, layers in ((_DENSE_WIDTH, slice(first)), (_EXPERT_WIDTH, slice(first, n_layers))):
        values = reader.integers(name)
        found.append(set(values[layers] if len(values) >= n_layers else values) or {1})
    return found[0], found[1]


def _unsupported(reader: MetadataReader) -> Iterator[str]:
    """Values that a file may have, but that are not Kimi-K3 as published."""
    gating = reader.integer("expert_gating_func")
    if gating != _SIGMOID:
        yield f"{reader.key('expert_gating_func')} is {gating}, only {_SIGMOID} is supported"
    if not reader.flag("expert_weights_norm"):
        yield f"{reader.key('expert_weights_norm')} is false, only true is supported"
    n_groups = reader.integer("expert_group_count", default=0)
    if n_groups > 1:
        yield f"{reader.key('expert_group_count')} is {n_groups}, groups are not supported"


def _contradictions(config: KimiK3Config) -> Iterator[str]:
    """What no model has, or what cannot be true at once."""
    mla, ffn = config.mla, config.ffn
    parts = (config, config.kda, mla, ffn)
    yield from number_problems(parts, _KEYS, _fault, architecture=ARCHITECTURE)
    if mla.shared_dim >= mla.key_dim:
        yield f"a key of {mla.key_dim} channels cannot share {mla.shared_dim} between heads"
    if ffn.top_k > ffn.n_experts:
        yield f"{ffn.top_k} experts used of {ffn.n_experts}"
    if ffn.n_dense_layers >= config.n_layers:
        yield f"{ffn.n_dense_layers} dense layers of {config.n_layers} leave none to route"


def _fault(name: str, value: float) -> str | None:
    """What the number of the field ``name`` should be and is not, None for nothing."""
    if name == "gate_lower_bound":
        return None if _BOUND_MIN <= value <= -FLOAT_MIN else f"{_BOUND_MIN} to {-FLOAT_MIN}"
    if isinstance(value, int):
        return size_fault(value, least=0 if name == "n_dense_layers" else 1)
    return constant_fault(value)
