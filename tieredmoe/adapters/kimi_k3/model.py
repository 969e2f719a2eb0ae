"""The forward pass of Kimi-K3: embedding, layers over block residuals, head; float32 throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from tieredmoe.adapters.decode_state import DecodeState
from tieredmoe.adapters.kimi_k3.decode import KimiK3Step
from tieredmoe.adapters.kimi_k3.operations_choice import operations_for
from tieredmoe.adapters.kimi_k3.residuals import Bank
from tieredmoe.adapters.tokens import require_step_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tieredmoe.adapters.embedding import Embedding
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.adapters.kimi_k3.feed_forward import FeedForward
    from tieredmoe.adapters.kimi_k3.state import KdaState
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.protocol import ExpertProvider, LogitRows
    from tieredmoe.adapters.rows import Rows
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.moe.linear import Linear

    State = DecodeState[KdaState | Rows]


class Attention(Protocol):
    """One layer's attention, of either kind; only it understands the states that it makes."""

    def new_state(self, n_context: int) -> Any:
        """The state before the first token of a sequence of at most ``n_context``."""

    def __call__(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """From the next tokens' normed ``x`` [T, H] to [T, H] and the state after them."""


@attrs.frozen(eq=False, kw_only=True)
class Layer:
    """One layer: two sub-blocks, each with the score of its residual mix and its input's norm."""

    attention_score: torch.Tensor
    attention_norm: RmsNorm
    attention: Attention
    ffn_score: torch.Tensor
    ffn_norm: RmsNorm
    ffn: FeedForward


@attrs.frozen(eq=False, kw_only=True)
class Head:
    """From the last block's stream and the bank to logits."""

    score: torch.Tensor
    norm: RmsNorm
    output: Linear


class KimiK3Model:
    """A Kimi-K3 with its dense weights in memory; routed experts come from a provider.

    It holds nothing of any sequence: any number of them may use it, each one step at a time.
    """

    def __init__(
        self,
        config: KimiK3Config,
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
    def config(self) -> KimiK3Config:
        """Sizes and constants."""
        return self._config

    def new_state(self, n_context: int) -> State:
        """The state of an empty sequence that may grow to ``n_context`` tokens.

        Raises ``ConfigError`` for a length that is not positive or beyond the model's context.
        """
        return DecodeState(
            [layer.attention.new_state(n_context) for layer in self._layers],
            n_context=n_context,
            n_context_max=self._config.context_length,
        )

    def new_decode_step(self, n_capacity: int) -> KimiK3Step:
        """A step of no sequence yet, with room for ``n_capacity`` tokens, on the model's device.

        Takes ``static_state.static_nbytes`` now, and little more.
        """
        return KimiK3Step(
            self._config,
            embedding=self._embedding,
            layers=self._layers,
            head=self._head,
            streamed=self.streamed,
            operations=operations_for(self._config, self._head.output, device=self._device),
            n_capacity=n_capacity,
            device=self._device,
        )

    async def forward(
        self,
        tokens: torch.Tensor,
        state: State,
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
        bank = Bank(self._config.rms_eps)
        after = []
        for number, (layer, layer_state) in enumerate(zip(self._layers, state.layers, strict=True)):
            self.streamed.before(number)
            starts_block = number % self._config.block_size == 0
            read = bank.mix(x, layer.attention_score)
            if starts_block:
                bank.keep(x)
            y, layer_after = layer.attention(layer.attention_norm(read), layer_state)
            x = y if starts_block else x + y
            read = bank.mix(x, layer.ffn_score)
            x = x + await layer.ffn(layer.ffn_norm(read), experts)
            self.streamed.after(number)
            after.append(layer_after)

        if logits == "none":
            rows = x.new_empty((0, self._config.vocab_size))
        else:
            read = bank.mix(x, self._head.score)
            rows = self._head.output(self._head.norm(read if logits == "all" else read[-1:]))
        state.commit(after, start=start, n_new=n_new)
        return rows

    def __repr__(self) -> str:
        return f"<KimiK3Model {len(self._layers)} layers on {self._device}>"
