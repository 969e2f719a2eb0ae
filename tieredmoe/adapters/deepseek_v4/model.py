"""The forward pass of DeepSeek-V4: embedding, layers, head; float32 throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.decode_state import DecodeState
from tieredmoe.adapters.deepseek_v4.decode import DeepSeekV4Step
from tieredmoe.adapters.deepseek_v4.operations_choice import operations_for
from tieredmoe.adapters.tokens import require_step_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.deepseek_v4.attention import Attention
    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config
    from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
    from tieredmoe.adapters.deepseek_v4.moe import ExpertLayer
    from tieredmoe.adapters.deepseek_v4.state import LayerState
    from tieredmoe.adapters.embedding import Embedding
    from tieredmoe.adapters.protocol import ExpertProvider, LogitRows
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.moe.linear import Linear


@attrs.frozen(eq=False)
class Layer:
    """One layer: two sub-blocks, each behind its hyper-connection."""

    attention_streams: HyperConnection
    attention: Attention
    expert_streams: HyperConnection
    experts: ExpertLayer


@attrs.frozen(eq=False)
class Head:
    """From the streams after the last layer to logits."""

    streams: StreamHead
    output: Linear

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """``streams`` [T, n, H] to logits [T, vocab]."""
        return self.output(self.streams(streams))


class DeepSeekV4Model:
    """A DeepSeek-V4 with its dense weights in memory; routed experts come from a provider.

    It holds nothing of any sequence: any number of them may use it, each one step at a time.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        head: Head,
        streamed: StreamedLayers,
        device: torch.device,
    ) -> None:
        self.streamed = streamed
        self._config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._head = head
        self._device = device

    @property
    def config(self) -> DeepSeekV4Config:
        """Sizes and constants."""
        return self._config

    def new_state(self, n_context: int) -> DecodeState[LayerState]:
        """The state of an empty sequence that may grow to ``n_context`` tokens.

        Raises ``ConfigError`` for a length that is not positive or beyond the model's context.
        """
        return DecodeState(
            [layer.attention.new_state(n_context) for layer in self._layers],
            n_context=n_context,
            n_context_max=self._config.context_length,
        )

    def new_decode_step(self, n_capacity: int) -> DeepSeekV4Step:
        """A step of no sequence yet, with room for ``n_capacity`` tokens, on the model's device."""
        return DeepSeekV4Step(
            self._config,
            embedding=self._embedding,
            layers=self._layers,
            head=self._head,
            streamed=self.streamed,
            operations=operations_for(
                self._config.attention, self._head.output, device=self._device
            ),
            n_capacity=n_capacity,
            device=self._device,
        )

    async def forward(
        self,
        tokens: torch.Tensor,
        state: DecodeState[LayerState],
        experts: ExpertProvider,
        *,
        logits: LogitRows,
    ) -> torch.Tensor:
        """Append ``tokens`` (int64 [T], T ≥ 1) to the sequence; float32 logits [T, 1 or 0, vocab].

        Scratch memory grows linearly with T, so long prompts come in chunks; chunks of any length
        give the same results up to rounding. When it raises or is cancelled, ``state`` is as it was
        before. Raises ``PromptTooLongError``, ``TokenizerError`` for an id outside the vocabulary,
        and what the provider raises.
        """
        n_new, start = tokens.shape[0], state.n_tokens
        require_step_tokens(tokens, self._config.vocab_size)
        state.check_room(n_new)
        x = self._embedding.rows(tokens)
        tokens = tokens.to(self._device)
        positions = torch.arange(start, start + n_new, device=self._device)
        angles = {
            rope: rope.at(positions) for rope in {layer.attention.rope for layer in self._layers}
        }

        streams = x.unsqueeze(1).expand(-1, self._config.streams.n_streams, -1)
        after = []
        for number, (layer, layer_state) in enumerate(zip(self._layers, state.layers, strict=True)):
            self.streamed.before(number)
            mixed = layer.attention_streams.split(streams)
            y, layer_after = layer.attention(
                mixed.x, start, angles[layer.attention.rope], layer_state
            )
            streams = layer.attention_streams.join(streams, y, mixed)

            mixed = layer.expert_streams.split(streams)
            y = await layer.experts(mixed.x, tokens, experts)
            streams = layer.expert_streams.join(streams, y, mixed)
            self.streamed.after(number)
            after.append(layer_after)

        if logits == "none":
            rows = x.new_empty((0, self._config.vocab_size))
        else:
            rows = self._head(streams if logits == "all" else streams[-1:])
        state.commit(after, start=start, n_new=n_new)
        return rows

    def __repr__(self) -> str:
        return f"<DeepSeekV4Model {len(self._layers)} layers on {self._device}>"
