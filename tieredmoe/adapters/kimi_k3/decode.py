"""One token of Kimi-K3 in static buffers, cut at its routed layers.

Routed layer i is decoder layer ``n_dense_layers + i``. A segment begins with the way out of the
latent space of one routed layer and ends with the way into that of the next, so it reads matrices
of two decoder layers (the first one also those of the dense layers, the last one the head).

The residual streams of all blocks lie below each other, the embedding first, so that a bank is the
rows before the current stream's and nothing is moved when a block ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.decode_step import RoutedLayer
from tieredmoe.adapters.kimi_k3.feed_forward import DenseFeedForward, LatentExperts
from tieredmoe.adapters.kimi_k3.kda import KimiDeltaAttention
from tieredmoe.adapters.kimi_k3.mla import LatentAttention
from tieredmoe.adapters.kimi_k3.static_attention import Position, StaticAttention
from tieredmoe.adapters.kimi_k3.static_state import StaticKda, StaticRows, StaticState
from tieredmoe.adapters.routing import Routing
from tieredmoe.adapters.token_input import TokenInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.embedding import Embedding
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.adapters.kimi_k3.model import Head, Layer
    from tieredmoe.adapters.kimi_k3.operations import Operations
    from tieredmoe.adapters.kimi_k3.state import KdaState
    from tieredmoe.adapters.rows import Rows
    from tieredmoe.adapters.streamed_layers import StreamedLayers


class KimiK3Step:
    """A ``DecodeStep`` of one model with room for ``n_capacity`` tokens; takes its memory now.

    A whole token may be repeated, a single segment may not: it adds to the stream in place.
    """

    def __init__(
        self,
        config: KimiK3Config,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        head: Head,
        streamed: StreamedLayers,
        operations: Operations,
        n_capacity: int,
        device: torch.device,
    ) -> None:
        ffn, H = config.ffn, config.hidden_size
        n_blocks = -(-config.n_layers // config.block_size)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.streamed = streamed
        self._config = config
        self._input = TokenInput(embedding, device=device)
        self._layers = tuple(layers)
        self._head = head
        self._do = operations
        self._state = StaticState(config, n_capacity, device=device)
        self._position = Position(self._input.position, n_capacity)
        self._attention = StaticAttention(config.mla, self._position, operations)
        self._n_tokens = 0
        self._streams = zeros(1 + n_blocks, H)
        self._x, self._shared, self._latent = zeros(1, H), zeros(1, H), zeros(1, ffn.latent_size)
        self._routed, self._logits = zeros(1, ffn.latent_size), zeros(1, config.vocab_size)
        ids = torch.zeros((1, ffn.top_k), dtype=torch.int64, device=device)
        self._routing = Routing(ids, zeros(1, ffn.top_k))
        self._routed_layers = tuple(
            RoutedLayer(
                layer=layer.ffn.layer,
                activation=layer.ffn.activation,
                routing=self._routing,
                x=self._latent,
                out=self._routed,
            )
            for layer in layers
            if isinstance(layer.ffn, LatentExperts)
        )

    @property
    def layers(self) -> Sequence[RoutedLayer]:
        """The routed layers; all share the same tensors, which one segment reads and refills."""
        return self._routed_layers

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
        return self._state.n_capacity

    def load(self, layers: Sequence[KdaState | Rows], *, n_tokens: int) -> None:
        """Become the sequence of ``n_tokens`` whose layers' states these are; copies them."""
        self._state.load(layers, n_tokens=n_tokens)
        self._n_tokens = n_tokens

    def unload(self, *, n_context: int) -> tuple[KdaState | Rows, ...]:
        """The layers' states in memory of their own, for a sequence of at most ``n_context``."""
        return self._state.unload(n_tokens=self._n_tokens, n_context=n_context)

    def enter(self, token_id: int) -> None:
        """Put the token and its position where the segments find them."""
        assert self._n_tokens < self.n_capacity, self
        self._input.put(token_id=token_id, position=self._n_tokens)

    def segment(self, i: int) -> None:
        """From the sum of routed layer i - 1 to the routing of routed layer i."""
        first = self._config.ffn.n_dense_layers
        terms: tuple[torch.Tensor, ...] = ()
        if i == 0:
            self._position.update()
            self._streams[:1].copy_(self._input.row())
            for number in range(first):
                self._attend(number, terms)
                terms = (self._dense(number),)
        else:
            terms = (self._leave_experts(first + i - 1), self._shared)
        if i < len(self._routed_layers):
            self._attend(first + i, terms)
            self._enter_experts(first + i)
        else:
            self._finish(terms)

    def meanwhile(self, i: int) -> None:
        """The shared expert of routed layer i."""
        experts = self._experts(self._config.ffn.n_dense_layers + i)
        self._shared.copy_(self._do.products.gated(self._x, experts.shared))

    def leave(self) -> None:
        """The token that was entered is part of the sequence from now on."""
        self._n_tokens += 1

    def __repr__(self) -> str:
        return f"<KimiK3Step {self._n_tokens}/{self.n_capacity} tokens>"

    def _attend(self, number: int, terms: tuple[torch.Tensor, ...]) -> None:
        """From what the layer before adds to its stream to the normed input of the layer's FFN."""
        layer, block_size = self._layers[number], self._config.block_size
        before, after = -(-number // block_size), 1 + number // block_size
        norm, score = layer.attention_norm, layer.attention_score
        self._do.mix(self._streams, before, terms, score, norm, restart=False, out=self._x)
        y = self._attended(number)
        norm, score = layer.ffn_norm, layer.ffn_score
        restart = number % block_size == 0
        self._do.mix(self._streams, after, (y,), score, norm, restart=restart, out=self._x)

    def _attended(self, number: int) -> torch.Tensor:
        attention, state = self._layers[number].attention, self._state.layers[number]
        if isinstance(attention, KimiDeltaAttention):
            assert isinstance(state, StaticKda)
            return self._attention.linear(self._x, attention.weights, state)
        assert isinstance(attention, LatentAttention)
        assert isinstance(state, StaticRows)
        return self._attention.full(self._x, attention.weights, state)

    def _dense(self, number: int) -> torch.Tensor:
        block = self._layers[number].ffn
        assert isinstance(block, DenseFeedForward)
        return self._do.products.gated(self._x, block.mlp)

    def _experts(self, number: int) -> LatentExperts:
        block = self._layers[number].ffn
        assert isinstance(block, LatentExperts)
        return block

    def _enter_experts(self, number: int) -> None:
        experts = self._experts(number)
        router, latent = experts.router, experts.latent
        logits, x = self._do.products.shared(self._x, (router.gate, latent.down))
        self._do.choose(logits, router, self._routing)
        self._latent.copy_(x)

    def _leave_experts(self, number: int) -> torch.Tensor:
        latent = self._experts(number).latent
        (y,) = self._do.products.shared(latent.norm(self._routed), (latent.up,))
        return y

    def _finish(self, terms: tuple[torch.Tensor, ...]) -> None:
        head, last = self._head, len(self._streams) - 1
        self._do.mix(self._streams, last, terms, head.score, head.norm, restart=False, out=self._x)
        (logits,) = self._do.products.shared(self._x, (head.output,))
        self._logits.copy_(logits)
