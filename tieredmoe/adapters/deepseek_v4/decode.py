"""Decoding one token of DeepSeek-V4 in fixed memory, cut at its routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.decode_step import RoutedLayer
from tieredmoe.adapters.deepseek_v4.static_attention import StaticAttention
from tieredmoe.adapters.deepseek_v4.static_state import Moment
from tieredmoe.adapters.deepseek_v4.step_operations import StreamBuffers
from tieredmoe.adapters.routing import Routing
from tieredmoe.adapters.token_input import TokenInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config
    from tieredmoe.adapters.deepseek_v4.model import Head, Layer
    from tieredmoe.adapters.deepseek_v4.state import LayerState
    from tieredmoe.adapters.deepseek_v4.step_operations import StepOperations
    from tieredmoe.adapters.embedding import Embedding
    from tieredmoe.adapters.streamed_layers import StreamedLayers


class DeepSeekV4Step:
    """``DecodeStep`` of a DeepSeek-V4, for up to ``n_capacity`` tokens of one sequence.

    A segment writes nothing that it reads, so even a segment alone may be run twice: the buffers of
    consecutive layers alternate.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        head: Head,
        streamed: StreamedLayers,
        operations: StepOperations,
        n_capacity: int,
        device: torch.device,
    ) -> None:
        self.streamed = streamed
        self._n_capacity = n_capacity
        self._n_tokens = 0
        self._input = entered = TokenInput(embedding, device=device)
        self._model_layers = tuple(layers)
        self._head = head
        self._run = operations
        self._moment = moment = Moment(config, token=entered.token, position=entered.position)
        self._attentions = [
            StaticAttention(layer.attention, operations, moment, n_capacity=n_capacity)
            for layer in layers
        ]
        sizes = (config.streams.n_streams, config.hidden_size, device)
        self._start = StreamBuffers.empty(*sizes)
        self._attended = StreamBuffers.empty(*sizes)
        self._routed = tuple(StreamBuffers.empty(*sizes) for _ in range(2))
        self._shared = torch.zeros((2, 1, config.hidden_size), device=device)
        out = torch.zeros_like(self._shared)
        shape = (1, config.experts.top_k)
        routing = [
            Routing(
                torch.zeros(shape, dtype=torch.int64, device=device),
                torch.zeros(shape, device=device),
            )
            for _ in range(2)
        ]
        self._layers = tuple(
            RoutedLayer(
                layer=i,
                activation=layer.experts.activation,
                routing=routing[i % 2],
                x=self._routed[i % 2].x,
                out=out[i % 2],
            )
            for i, layer in enumerate(layers)
        )
        self._logits = torch.zeros((1, config.vocab_size), device=device)

    @property
    def layers(self) -> Sequence[RoutedLayer]:
        """All layers, for each has routed experts; neighbours never share a tensor."""
        return self._layers

    @property
    def logits(self) -> torch.Tensor:
        """float32 [1, vocab]."""
        return self._logits

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence."""
        return self._n_tokens

    @property
    def n_capacity(self) -> int:
        """Tokens that there is room for."""
        return self._n_capacity

    def load(self, layers: Sequence[LayerState], *, n_tokens: int) -> None:
        """Become the sequence of ``n_tokens`` whose layers' states these are."""
        assert n_tokens <= self._n_capacity, (n_tokens, self)
        for attention, state in zip(self._attentions, layers, strict=True):
            attention.state.load(state, n_tokens=n_tokens)
        self._n_tokens = n_tokens

    def unload(self, *, n_context: int) -> tuple[LayerState, ...]:
        """The layers' states, in memory of their own."""
        return tuple(
            attention.state.unload(n_tokens=self._n_tokens, n_context=n_context)
            for attention in self._attentions
        )

    def enter(self, token_id: int) -> None:
        """Put the next token where the segments find it."""
        assert self._n_tokens < self._n_capacity, self
        self._input.put(token_id=token_id, position=self._n_tokens)

    def segment(self, i: int) -> None:
        """From layer i - 1's routed sum to layer i's routing."""
        run, moment = self._run, self._moment
        before, outputs = self._start, list[torch.Tensor]()
        if i == 0:
            moment.turn()
            self._start.streams.copy_(self._input.row().unsqueeze(1))
        else:
            before = self._routed[(i - 1) % 2]
            outputs = [self._layers[i - 1].out, self._shared[(i - 1) % 2]]
        if i == len(self._layers):
            self._logits.copy_(self._head.output(run.collect(self._head.streams, before, outputs)))
            return
        layer, routed = self._model_layers[i], self._routed[i % 2]
        run.connect(layer.attention_streams, before, outputs, self._attended)
        y = self._attentions[i](self._attended.x)
        run.connect(layer.expert_streams, self._attended, (y,), routed)
        router = layer.experts.router
        (logits,) = run.products.shared(routed.x, (router.gate,))
        run.route(router, logits, moment, self._layers[i].routing)

    def meanwhile(self, i: int) -> None:
        """The shared expert of layer i."""
        shared = self._model_layers[i].experts.shared
        self._shared[i % 2].copy_(self._run.products.gated(self._routed[i % 2].x, shared))

    def leave(self) -> None:
        """Count the token."""
        self._n_tokens += 1

    def __repr__(self) -> str:
        return f"<DeepSeekV4Step {self._n_tokens}/{self._n_capacity} tokens>"
