"""Makes a DeepSeek-V4 model from a file's metadata and dense tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from tieredmoe.adapters.decode_seat import step_capacity
from tieredmoe.adapters.deepseek_v4.attention import Attention, AttentionWeights
from tieredmoe.adapters.deepseek_v4.chat import encode_chat
from tieredmoe.adapters.deepseek_v4.compressor import Compressor
from tieredmoe.adapters.deepseek_v4.config import ARCHITECTURE, CSA, SLIDING, DeepSeekV4Config
from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
from tieredmoe.adapters.deepseek_v4.indexer import Indexer
from tieredmoe.adapters.deepseek_v4.memory_needs import activation_nbytes, state_nbytes
from tieredmoe.adapters.deepseek_v4.model import DeepSeekV4Model, Head, Layer
from tieredmoe.adapters.deepseek_v4.moe import ExpertLayer, HashRouter, ScoreRouter
from tieredmoe.adapters.deepseek_v4.past import HeavilyCompressedPast, SparsePast
from tieredmoe.adapters.deepseek_v4.rope import Rope
from tieredmoe.adapters.deepseek_v4.static_state import static_state_nbytes
from tieredmoe.adapters.deepseek_v4.tensors import (
    dense_shapes,
    expert_shapes,
    matrix_names,
    table_shapes,
)
from tieredmoe.adapters.dense_tensors import DenseTensors
from tieredmoe.adapters.gated_mlp import GatedMLP
from tieredmoe.adapters.model_needs import ModelNeeds, planned_context
from tieredmoe.errors import ConfigError, MetadataError
from tieredmoe.moe.activation import SwiGLU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.chat import Message
    from tieredmoe.adapters.deepseek_v4.moe import Router
    from tieredmoe.adapters.deepseek_v4.past import Past
    from tieredmoe.adapters.protocol import Progress
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.adapters.tokenizer import StreamDecoder, Tokenizer
    from tieredmoe.gguf.tensors import TensorSource


class DeepSeekV4Adapter:
    """The architecture ``deepseek4``: DeepSeek-V4, without its multi-token prediction."""

    architecture: ClassVar[str] = ARCHITECTURE

    def check(self, source: TensorSource) -> None:
        """Raise what ``load`` would raise of ``source``, without reading a weight."""
        config = DeepSeekV4Config.from_metadata(source.metadata, source.tensors)
        _dense_tensors(source, config, device=torch.device("cpu"))

    def needs(
        self, source: TensorSource, *, n_context: int | None, chunk_length: int
    ) -> ModelNeeds:
        """The memory that the model of ``source`` takes beside its experts; reads no weight."""
        config = DeepSeekV4Config.from_metadata(source.metadata, source.tensors)
        n_context = planned_context(n_context, most=config.context_length)
        return ModelNeeds(
            n_context=n_context,
            chunk_length=chunk_length,
            dense=_dense_tensors(source, config, device=torch.device("cpu")).sizes,
            state_nbytes=state_nbytes(config, n_context),
            step_nbytes=static_state_nbytes(config, step_capacity(n_context)),
            activation_nbytes=activation_nbytes(config, n_tokens=chunk_length, n_context=n_context),
            logits_nbytes=2 * 4 * config.vocab_size,
        )

    def load(
        self,
        source: TensorSource,
        *,
        device: torch.device,
        streamed: StreamedLayers | None = None,
        progress: Progress | None = None,
    ) -> DeepSeekV4Model:
        """Read the dense weights of ``source`` onto ``device``; routed experts are left alone.

        The matrices of the layers in ``streamed`` go there, and stay the caller's to close.

        Raises ``MetadataError`` listing everything that is missing or contradictory (keys, or
        tensors and shapes) before any weight is read, and ``UnsupportedModelError`` listing tensors
        of a type that cannot be used.
        """
        config = DeepSeekV4Config.from_metadata(source.metadata, source.tensors)
        tensors = _dense_tensors(
            source, config, device=device, streamed=streamed, progress=progress
        )
        builder = _Builder(config, tensors, device)
        return DeepSeekV4Model(
            config,
            embedding=tensors.embedding(),
            layers=[builder.layer(layer) for layer in range(config.n_layers)],
            head=builder.head(),
            streamed=tensors.streamed,
            device=device,
        )

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        thinking: bool = False,
        effort: str | None = None,
    ) -> list[int]:
        """The ids of a conversation up to the answer; raises what ``chat.encode_chat`` raises."""
        if effort is not None:
            raise ConfigError(
                f"chat prompt: effort is {effort!r}, and DeepSeek-V4's prompt has no place for it; "
                "leave it out"
            )
        return encode_chat(tokenizer, messages, thinking=thinking)

    def answer_decoder(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool = False,  # noqa: ARG002 (another format needs it)
    ) -> StreamDecoder:
        """Text as the tokenizer has it: ``</think>``, if the model says it, is a token of text."""
        return tokenizer.stream_decoder()


def _dense_tensors(
    source: TensorSource,
    config: DeepSeekV4Config,
    *,
    device: torch.device,
    streamed: StreamedLayers | None = None,
    progress: Progress | None = None,
) -> DenseTensors:
    return DenseTensors(
        source,
        floats=dense_shapes(config),
        matrices=matrix_names(config),
        integers=table_shapes(config),
        others=expert_shapes(config),
        device=device,
        streamed=streamed,
        progress=progress,
    )


class _Builder:
    """Puts tensors where they belong."""

    def __init__(
        self, config: DeepSeekV4Config, tensors: DenseTensors, device: torch.device
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._plain_rope = Rope.plain(config.rope, device)
        self._compressed_rope = Rope.compressed(config.rope, device)

    def head(self) -> Head:
        """What comes after the last layer."""
        tensors, config = self._tensors, self._config
        return Head(
            streams=StreamHead(
                tensors.values("output_hc_fn.weight"),
                tensors.values("output_hc_base.weight"),
                tensors.values("output_hc_scale.weight"),
                tensors.values("output_norm.weight"),
                config=config.streams,
                rms_eps=config.rms_eps,
            ),
            output=tensors.matrix("output.weight"),
        )

    def layer(self, layer: int) -> Layer:
        """One layer, whatever its kinds of attention and router."""
        prefix = f"blk.{layer}"
        return Layer(
            attention_streams=self._streams(prefix, "attn"),
            attention=self._attention(prefix, self._config.attention.compress_ratios[layer]),
            expert_streams=self._streams(prefix, "ffn"),
            experts=self._experts(prefix, layer),
        )

    def _streams(self, prefix: str, block: str) -> HyperConnection:
        values = self._tensors.values
        return HyperConnection(
            values(f"{prefix}.hc_{block}_fn.weight"),
            values(f"{prefix}.hc_{block}_base.weight"),
            values(f"{prefix}.hc_{block}_scale.weight"),
            values(f"{prefix}.{block}_norm.weight"),
            config=self._config.streams,
            rms_eps=self._config.rms_eps,
        )

    def _attention(self, prefix: str, ratio: int) -> Attention:
        matrix, values = self._tensors.matrix, self._tensors.values
        weights = AttentionWeights(
            q_a=matrix(f"{prefix}.attn_q_a.weight"),
            q_a_norm=values(f"{prefix}.attn_q_a_norm.weight"),
            q_b=matrix(f"{prefix}.attn_q_b.weight"),
            kv=matrix(f"{prefix}.attn_kv.weight"),
            kv_norm=values(f"{prefix}.attn_kv_a_norm.weight"),
            sinks=values(f"{prefix}.attn_sinks.weight"),
            output_a=matrix(f"{prefix}.attn_output_a.weight"),
            output_b=matrix(f"{prefix}.attn_output_b.weight"),
        )
        rope = self._plain_rope if ratio == SLIDING else self._compressed_rope
        return Attention(weights, self._config, rope=rope, past=self._past(prefix, ratio))

    def _past(self, prefix: str, ratio: int) -> Past | None:
        if ratio == SLIDING:
            return None
        compressor = self._compressor(f"{prefix}.attn_compressor")
        if ratio != CSA:
            return HeavilyCompressedPast(compressor)
        sizes = self._config.attention
        indexer = Indexer(
            self._tensors.matrix(f"{prefix}.indexer.attn_q_b.weight"),
            self._tensors.matrix(f"{prefix}.indexer.proj.weight"),
            self._compressor(f"{prefix}.indexer_compressor"),
            n_picks=sizes.indexer_top_k,
        )
        return SparsePast(compressor, indexer, head_dim=sizes.head_dim)

    def _compressor(self, prefix: str) -> Compressor:
        return Compressor(
            self._tensors.matrix(f"{prefix}_kv.weight"),
            self._tensors.matrix(f"{prefix}_gate.weight"),
            self._tensors.values(f"{prefix}_ape.weight"),
            self._tensors.values(f"{prefix}_norm.weight"),
            rope=self._compressed_rope,
            rms_eps=self._config.rms_eps,
        )

    def _experts(self, prefix: str, layer: int) -> ExpertLayer:
        matrix, sizes = self._tensors.matrix, self._config.experts
        shared = GatedMLP(
            matrix(f"{prefix}.ffn_gate_shexp.weight"),
            matrix(f"{prefix}.ffn_up_shexp.weight"),
            matrix(f"{prefix}.ffn_down_shexp.weight"),
            SwiGLU(sizes.shared_limits[layer]),
        )
        activation = SwiGLU(sizes.routed_limits[layer])
        return ExpertLayer(layer, self._router(prefix, layer), shared, activation)

    def _router(self, prefix: str, layer: int) -> Router:
        sizes = self._config.experts
        gate = self._tensors.matrix(f"{prefix}.ffn_gate_inp.weight")
        if layer >= sizes.n_hash_layers:
            bias = self._tensors.values(f"{prefix}.exp_probs_b.bias")
            return ScoreRouter(gate, bias, k=sizes.top_k, scale=sizes.routed_scale)
        name = f"{prefix}.ffn_gate_tid2eid.weight"
        table = self._tensors.table(name)
        lowest, highest = table.min().item(), table.max().item()
        if lowest < 0 or highest >= sizes.n_experts:
            raise MetadataError(
                f"{name} names experts {lowest} to {highest}, but there are {sizes.n_experts}"
            )
        return HashRouter(gate, table, scale=sizes.routed_scale)
