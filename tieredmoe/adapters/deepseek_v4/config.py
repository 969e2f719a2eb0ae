"""DeepSeek-V4's sizes and constants, from GGUF metadata.

Files differ in age: early converters left keys out or spelt them otherwise. A key that some of them
lack falls back to the published configuration, all others are required, and everything that is
missing or contradictory is reported at once. The tensors' shapes are checked against the result at
load, so a fallback that does not fit cannot pass for one that does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

import attrs

from tieredmoe.adapters.metadata_ranges import (
    FLOAT_MAX,
    SIZE_MAX,
    constant_fault,
    number_problems,
    size_fault,
)
from tieredmoe.errors import MetadataError
from tieredmoe.gguf.metadata import MetadataReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tieredmoe.gguf.metadata import Metadata
    from tieredmoe.gguf.tensors import TensorInfo

ARCHITECTURE = "deepseek4"

SLIDING, CSA, HCA = 0, 4, 128
"""Compression ratios, which name the kinds of attention: sliding window only, compressed sparse
attention (overlapping windows, with an indexer), heavily compressed attention."""

_SQRT_SOFTPLUS = 4
"""llama.cpp's number of the gating function sqrt(softplus(x))."""

_NO_CLAMP = 1e-6
"""A clamp at or below this is llama.cpp's way of writing that there is none."""

_SINKHORN_MAX = 1000
"""Twenty are published; no tensor bounds the number, and a step runs them for each sub-block."""

_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "n_layers": "block_count",
    "hidden_size": "embedding_length",
    "rms_eps": "attention.layer_norm_rms_epsilon",
    "n_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "q_lora_rank": "attention.q_lora_rank",
    "output_groups": "attention.output_group_count",
    "output_lora_rank": "attention.output_lora_rank",
    "sliding_window": "attention.sliding_window",
    "indexer_heads": "attention.indexer.head_count",
    "indexer_dim": "attention.indexer.key_length",
    "indexer_top_k": "attention.indexer.top_k",
    "dim": "rope.dimension_count",
    "theta": "rope.freq_base",
    "compress_theta": "attention.compress_rope_freq_base",
    "yarn_factor": "rope.scaling.factor",
    "yarn_context_length": "rope.scaling.original_context_length",
    "yarn_beta_fast": "rope.scaling.yarn_beta_fast",
    "yarn_beta_slow": "rope.scaling.yarn_beta_slow",
    "n_experts": "expert_count",
    "top_k": "expert_used_count",
    "width": "expert_feed_forward_length",
    "n_shared": "expert_shared_count",
    "n_hash_layers": "hash_layer_count",
    "routed_scale": "expert_weights_scale",
    "n_streams": "hyper_connection.count",
    "sinkhorn_iterations": "hyper_connection.sinkhorn_iterations",
    "eps": "hyper_connection.epsilon",
}
"""The metadata key of every number of the configuration, by the name of its field."""

_MTP_TENSOR = re.compile(r"blk\.(\d{1,9})\.nextn\.")


@attrs.frozen
class AttentionConfig:
    """Sizes of the attention; ``compress_ratios`` has one entry per layer."""

    n_heads: int
    head_dim: int
    q_lora_rank: int
    output_groups: int
    output_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    indexer_heads: int
    indexer_dim: int
    indexer_top_k: int

    @classmethod
    def read(cls, reader: MetadataReader, n_layers: int) -> Self:
        """Take what belongs here from ``reader``."""
        # Published: two sliding layers, then CSA on even layers and HCA on odd ones.
        published = tuple(SLIDING if i < 2 else HCA if i % 2 else CSA for i in range(n_layers))
        return cls(
            n_heads=reader.integer("attention.head_count"),
            head_dim=reader.integer("attention.key_length", default=512),
            q_lora_rank=reader.integer("attention.q_lora_rank"),
            output_groups=reader.integer("attention.output_group_count"),
            output_lora_rank=reader.integer("attention.output_lora_rank"),
            sliding_window=reader.integer("attention.sliding_window"),
            compress_ratios=reader.integers(
                "attention.compress_ratios", length=n_layers, default=published
            ),
            indexer_heads=reader.integer("attention.indexer.head_count"),
            indexer_dim=reader.integer("attention.indexer.key_length"),
            indexer_top_k=reader.integer("attention.indexer.top_k"),
        )


@attrs.frozen
class RopeConfig:
    """Rotary positions: ``theta`` on sliding layers, ``compress_theta`` with YaRN on all others.

    A ``yarn_factor`` of 1 means no scaling. There is no amplitude factor anywhere.
    """

    dim: int
    theta: float
    compress_theta: float
    yarn_factor: float
    yarn_context_length: int
    yarn_beta_fast: float
    yarn_beta_slow: float

    @classmethod
    def read(cls, reader: MetadataReader) -> Self:
        """Take what belongs here from ``reader``."""
        scaled = reader.text("rope.scaling.type", default="yarn") != "none"
        factor = reader.number("rope.scaling.factor", default=16.0)
        return cls(
            dim=reader.integer("rope.dimension_count"),
            theta=reader.number("rope.freq_base"),
            compress_theta=reader.number(
                "attention.compress_rope_freq_base", "rope.freq_base_swa", default=160000.0
            ),
            yarn_factor=factor if scaled else 1.0,
            yarn_context_length=reader.integer(
                "rope.scaling.original_context_length", default=65536
            ),
            yarn_beta_fast=reader.number("rope.scaling.yarn_beta_fast", default=32.0),
            yarn_beta_slow=reader.number("rope.scaling.yarn_beta_slow", default=1.0),
        )


@attrs.frozen
class ExpertConfig:
    """Sizes of the expert layers; limits have one entry per layer, None where nothing is clamped.

    The first ``n_hash_layers`` layers choose experts by token id.
    """

    n_experts: int
    top_k: int
    width: int
    n_shared: int
    n_hash_layers: int
    routed_scale: float
    routed_limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]

    @classmethod
    def read(cls, reader: MetadataReader, n_layers: int) -> Self:
        """Take what belongs here from ``reader``."""
        published = (10.0,) * n_layers
        routed = reader.numbers("swiglu_clamp_exp", length=n_layers, default=published)
        shared = reader.numbers("swiglu_clamp_shexp", length=n_layers, default=routed)
        return cls(
            n_experts=reader.integer("expert_count"),
            top_k=reader.integer("expert_used_count"),
            width=reader.integer("expert_feed_forward_length"),
            n_shared=reader.integer("expert_shared_count", default=1),
            n_hash_layers=reader.integer("hash_layer_count", default=min(3, n_layers)),
            routed_scale=reader.number("expert_weights_scale", default=1.5),
            routed_limits=tuple(limit if limit > _NO_CLAMP else None for limit in routed),
            shared_limits=tuple(limit if limit > _NO_CLAMP else None for limit in shared),
        )


@attrs.frozen
class StreamConfig:
    """Hyper-connections: how many residual streams there are and how they are mixed."""

    n_streams: int
    sinkhorn_iterations: int
    eps: float

    @classmethod
    def read(cls, reader: MetadataReader) -> Self:
        """Take what belongs here from ``reader``."""
        return cls(
            n_streams=reader.integer("hyper_connection.count"),
            sinkhorn_iterations=reader.integer("hyper_connection.sinkhorn_iterations", default=20),
            eps=reader.number("hyper_connection.epsilon", default=1e-6),
        )


@attrs.frozen
class DeepSeekV4Config:
    """Sizes and constants of one model."""

    vocab_size: int
    context_length: int
    n_layers: int
    hidden_size: int
    rms_eps: float
    attention: AttentionConfig
    rope: RopeConfig
    experts: ExpertConfig
    streams: StreamConfig

    @classmethod
    def from_metadata(cls, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> Self:
        """Read ``metadata``; ``tensors`` tell layers from multi-token-prediction blocks.

        Raises ``MetadataError`` that lists all missing keys, or else all contradictions.
        """
        reader = MetadataReader(metadata, ARCHITECTURE)
        n_layers = _n_layers(reader.layer_count(n_tensors=len(tensors)), tensors)
        embedding = tensors.get("token_embd.weight")
        n_embeddings = embedding.shape[0] if embedding is not None and embedding.shape else 129280
        config = cls(
            vocab_size=reader.integer("vocab_size", default=n_embeddings),
            context_length=reader.integer("context_length"),
            n_layers=n_layers,
            hidden_size=reader.integer("embedding_length"),
            rms_eps=reader.number("attention.layer_norm_rms_epsilon"),
            attention=AttentionConfig.read(reader, n_layers),
            rope=RopeConfig.read(reader),
            experts=ExpertConfig.read(reader, n_layers),
            streams=StreamConfig.read(reader),
        )
        problems = [*_unsupported(reader), *_contradictions(config)]
        reader.finish()
        if problems:
            where = "" if metadata.path is None else f"{metadata.path}: "
            raise MetadataError(f"{where}{ARCHITECTURE} metadata: " + "; ".join(problems))
        return config


def _n_layers(block_count: int, tensors: Mapping[str, TensorInfo]) -> int:
    """The model's own layers: some files count multi-token-prediction blocks as blocks."""
    mtp_blocks = {int(match[1]) for name in tensors if (match := _MTP_TENSOR.match(name))}
    while block_count - 1 in mtp_blocks:
        block_count -= 1
    return block_count


def _unsupported(reader: MetadataReader) -> Iterator[str]:
    """Values that a file may have, but that are not DeepSeek-V4 as published."""
    only = (
        ("attention.head_count_kv", 1),
        ("attention.value_length", reader.integer("attention.key_length", default=512)),
        ("expert_gating_func", _SQRT_SOFTPLUS),
        ("expert_weights_norm", 1),
    )
    for name, value in only:
        found = reader.integer(name, default=value)
        if found != value:
            yield f"{reader.key(name)} is {found}, only {value} is supported"
    n_groups = reader.integer("expert_group_count", default=0)
    if n_groups > 1:
        yield f"{reader.key('expert_group_count')} is {n_groups}, groups are not supported"
    scaling = reader.text("rope.scaling.type", default="yarn")
    if scaling not in ("yarn", "none"):
        yield f"{reader.key('rope.scaling.type')} is {scaling!r}, only yarn and none are supported"


def _contradictions(config: DeepSeekV4Config) -> Iterator[str]:
    """What cannot be true at once."""
    attention, rope, experts = config.attention, config.rope, config.experts
    parts = (config, attention, rope, experts, config.streams)
    unusable = list(number_problems(parts, _KEYS, _fault, architecture=ARCHITECTURE))
    yield from unusable
    if unusable:
        return
    kinds = (SLIDING, CSA, HCA)
    odd = sorted(set(attention.compress_ratios).difference(kinds))
    if odd:
        yield f"compress ratios {odd} are none of {kinds}"
    if attention.n_heads % attention.output_groups:
        yield f"{attention.n_heads} heads cannot form {attention.output_groups} output groups"
    has_indexer = CSA in attention.compress_ratios
    head_dims = [attention.head_dim, *([attention.indexer_dim] if has_indexer else [])]
    if rope.dim % 2 or rope.dim > min(head_dims):
        yield f"rope dimension {rope.dim} is odd or wider than a head of {min(head_dims)}"
    if experts.top_k > experts.n_experts:
        yield f"{experts.top_k} experts used of {experts.n_experts}"
    if experts.n_hash_layers > config.n_layers:
        yield f"{experts.n_hash_layers} hash-routed layers of {config.n_layers}"


def _fault(name: str, value: float) -> str | None:
    """What the number of the field ``name`` should be and is not, None for nothing."""
    if isinstance(value, int):
        if name == "n_hash_layers":
            return size_fault(value, least=0)
        return size_fault(value, most=_SINKHORN_MAX if name == "sinkhorn_iterations" else SIZE_MAX)
    if name in ("theta", "compress_theta"):
        return None if 1 < value <= FLOAT_MAX else f"more than 1 and at most {FLOAT_MAX}"
    return constant_fault(value)
