"""Makes a Kimi-K3 model from a file's metadata and dense tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from tieredmoe.adapters.decode_seat import step_capacity
from tieredmoe.adapters.dense_tensors import DenseTensors
from tieredmoe.adapters.gated_mlp import GatedMLP
from tieredmoe.adapters.kimi_k3.answer import AnswerDecoder
from tieredmoe.adapters.kimi_k3.chat import encode_chat
from tieredmoe.adapters.kimi_k3.config import ARCHITECTURE, LATENT_EPS, KimiK3Config
from tieredmoe.adapters.kimi_k3.feed_forward import (
    DenseFeedForward,
    Latent,
    LatentExperts,
    SigmoidRouter,
)
from tieredmoe.adapters.kimi_k3.heads import HeadMatrices
from tieredmoe.adapters.kimi_k3.kda import KdaWeights, KimiDeltaAttention
from tieredmoe.adapters.kimi_k3.memory_needs import activation_nbytes, state_nbytes
from tieredmoe.adapters.kimi_k3.mla import LatentAttention, MlaWeights
from tieredmoe.adapters.kimi_k3.model import Head, KimiK3Model, Layer
from tieredmoe.adapters.kimi_k3.static_state import static_nbytes
from tieredmoe.adapters.kimi_k3.tensors import dense_shapes, expert_shapes, matrix_names
from tieredmoe.adapters.metadata_ranges import constant_fault
from tieredmoe.adapters.model_needs import ModelNeeds, planned_context
from tieredmoe.adapters.norm import rms_norm
from tieredmoe.errors import ConfigError
from tieredmoe.moe.activation import SiTU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.chat import Message
    from tieredmoe.adapters.kimi_k3.feed_forward import FeedForward
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.protocol import Progress
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.adapters.tokenizer import Tokenizer
    from tieredmoe.gguf.tensors import TensorSource


class KimiK3Adapter:
    """The architecture ``kimi-k3``: Kimi-K3's text model.

    ``latent_eps`` is the epsilon of the norms of MLA's latents, which no file states: 1e-6 as in
    the published code; 1e-5 gives what llama.cpp and SGLang compute. It shows only where latents
    are tiny. Raises ``ConfigError`` for one that is no small positive number.
    """

    architecture: ClassVar[str] = ARCHITECTURE

    def __init__(self, *, latent_eps: float = LATENT_EPS) -> None:
        fault = constant_fault(latent_eps)
        if fault is not None:
            raise ConfigError(f"KimiK3Adapter: latent_eps is {latent_eps}, not {fault}")
        self._latent_eps = latent_eps

    def check(self, source: TensorSource) -> None:
        """Raise what ``load`` would raise of ``source``, without reading a weight."""
        _dense_tensors(source, self._config(source), device=torch.device("cpu"))

    def needs(
        self, source: TensorSource, *, n_context: int | None, chunk_length: int
    ) -> ModelNeeds:
        """The memory that the model of ``source`` takes beside its experts; reads no weight."""
        config = self._config(source)
        n_context = planned_context(n_context, most=config.context_length)
        return ModelNeeds(
            n_context=n_context,
            chunk_length=chunk_length,
            dense=_dense_tensors(source, config, device=torch.device("cpu")).sizes,
            state_nbytes=state_nbytes(config, n_context),
            step_nbytes=static_nbytes(config, step_capacity(n_context)),
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
    ) -> KimiK3Model:
        """Read the dense weights of ``source`` onto ``device``; routed experts are left alone.

        The matrices of the layers in ``streamed`` go there, and stay the caller's to close.

        They stay in their quantised bytes. Raises ``MetadataError`` listing everything that is
        missing or contradictory (keys, or tensors and shapes) before any weight is read, and
        ``UnsupportedModelError`` listing tensors of a type that cannot be used.
        """
        config = self._config(source)
        tensors = _dense_tensors(
            source, config, device=device, streamed=streamed, progress=progress
        )
        builder = _Builder(config, tensors)
        return KimiK3Model(
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
        return encode_chat(tokenizer, messages, thinking=thinking, effort=effort)

    def answer_decoder(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool = False,
    ) -> AnswerDecoder:
        """Text without the tags of the format; see ``answer.AnswerDecoder``."""
        return AnswerDecoder(tokenizer, thinking=thinking)

    def _config(self, source: TensorSource) -> KimiK3Config:
        return KimiK3Config.from_metadata(
            source.metadata, source.tensors, latent_eps=self._latent_eps
        )


def _dense_tensors(
    source: TensorSource,
    config: KimiK3Config,
    *,
    device: torch.device,
    streamed: StreamedLayers | None = None,
    progress: Progress | None = None,
) -> DenseTensors:
    return DenseTensors(
        source,
        floats=dense_shapes(config),
        matrices=matrix_names(config),
        integers={},
        others=expert_shapes(config),
        device=device,
        streamed=streamed,
        progress=progress,
    )


class _Builder:
    """Puts tensors where they belong."""

    def __init__(self, config: KimiK3Config, tensors: DenseTensors) -> None:
        self._config = config
        self._tensors = tensors
        self._situ = SiTU(beta=config.ffn.situ_beta, linear_beta=config.ffn.situ_linear_beta)

    def head(self) -> Head:
        """What comes after the last layer."""
        return Head(
            score=self._tensors.values("output_res_score.weight"),
            norm=self._norm("output_norm.weight"),
            output=self._tensors.matrix("output.weight"),
        )

    def layer(self, layer: int) -> Layer:
        """One layer, whatever its kinds of attention and feed-forward block."""
        prefix = f"blk.{layer}"
        return Layer(
            attention_score=self._tensors.values(f"{prefix}.attn_res_score.weight"),
            attention_norm=self._norm(f"{prefix}.attn_norm.weight"),
            attention=self._kda(prefix) if self._config.is_kda[layer] else self._mla(prefix),
            ffn_score=self._tensors.values(f"{prefix}.ffn_res_score.weight"),
            ffn_norm=self._norm(f"{prefix}.ffn_norm.weight"),
            ffn=self._ffn(prefix, layer),
        )

    def _kda(self, prefix: str) -> KimiDeltaAttention:
        matrix, values = self._tensors.matrix, self._tensors.values
        convolution = [values(f"{prefix}.ssm_conv1d_{stream}.weight") for stream in "qkv"]
        weights = KdaWeights(
            q=matrix(f"{prefix}.attn_q.weight"),
            k=matrix(f"{prefix}.attn_k.weight"),
            v=matrix(f"{prefix}.attn_v.weight"),
            convolution=torch.cat(convolution),
            decay_a=matrix(f"{prefix}.ssm_f_a.weight"),
            decay_b=matrix(f"{prefix}.ssm_f_b.weight"),
            decay_bias=values(f"{prefix}.ssm_dt.bias"),
            negative_rates=values(f"{prefix}.ssm_a"),
            strength=matrix(f"{prefix}.ssm_beta.weight"),
            gate=matrix(f"{prefix}.ssm_g.weight"),
            norm=self._norm(f"{prefix}.ssm_norm.weight"),
            output=matrix(f"{prefix}.attn_output.weight"),
        )
        return KimiDeltaAttention(weights, self._config)

    def _mla(self, prefix: str) -> LatentAttention:
        matrix, n_heads = self._tensors.matrix, self._config.mla.n_heads
        weights = MlaWeights(
            q_a=matrix(f"{prefix}.attn_q_a.weight"),
            q_a_norm=self._latent_norm(f"{prefix}.attn_q_a_norm.weight"),
            q_b=matrix(f"{prefix}.attn_q_b.weight"),
            kv_a=matrix(f"{prefix}.attn_kv_a_mqa.weight"),
            kv_a_norm=self._latent_norm(f"{prefix}.attn_kv_a_norm.weight"),
            keys=HeadMatrices(matrix(f"{prefix}.attn_k_b.weight"), n_heads),
            values=HeadMatrices(matrix(f"{prefix}.attn_v_b.weight"), n_heads),
            gate=matrix(f"{prefix}.attn_gate.weight"),
            output=matrix(f"{prefix}.attn_output.weight"),
        )
        return LatentAttention(weights, self._config)

    def _ffn(self, prefix: str, layer: int) -> FeedForward:
        ffn = self._config.ffn
        if layer < ffn.n_dense_layers:
            return DenseFeedForward(self._gated_mlp(prefix))
        matrix, values = self._tensors.matrix, self._tensors.values
        router = SigmoidRouter(
            matrix(f"{prefix}.ffn_gate_inp.weight"),
            values(f"{prefix}.exp_probs_b.bias"),
            k=ffn.top_k,
            scale=ffn.routed_scale,
        )
        latent = Latent(
            matrix(f"{prefix}.ffn_routed_down.weight"),
            self._norm(f"{prefix}.ffn_routed_norm.weight"),
            matrix(f"{prefix}.ffn_routed_up.weight"),
        )
        shared = self._gated_mlp(prefix, suffix="_shexp")
        return LatentExperts(layer, router, latent, shared, self._situ)

    def _gated_mlp(self, prefix: str, *, suffix: str = "") -> GatedMLP:
        gate, up, down = (
            self._tensors.matrix(f"{prefix}.ffn_{role}{suffix}.weight")
            for role in ("gate", "up", "down")
        )
        return GatedMLP(gate, up, down, self._situ)

    def _norm(self, name: str) -> RmsNorm:
        return rms_norm(self._tensors.values(name), self._config.rms_eps)

    def _latent_norm(self, name: str) -> RmsNorm:
        return rms_norm(self._tensors.values(name), self._config.mla.latent_eps)
