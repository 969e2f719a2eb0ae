"""What an engine needs of a model, and what a model needs of its experts: the seam between them.

A model computes; it never loads, caches, evicts or executes a routed expert. It hands its input and
its router's choice to its ``ExpertProvider`` and gets their weighted sum. One provider holds every
record in memory, another leases them from a hierarchy of tiers, on the host or on a device; the
model cannot tell them apart, and caches and orders of arrival do not change a bit.

Rejected: handing the model a hierarchy (a model could then hold leases of its own and dead-lock
itself, and a dense run would need a fake hierarchy), and handing it the experts as they land (it
would have to know where they lie, and what may be computed there at the same time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.chat import Message
    from tieredmoe.adapters.decode_step import DecodeStep, Stepper
    from tieredmoe.adapters.model_needs import ModelNeeds
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.adapters.streamed_layers import StreamedLayers
    from tieredmoe.adapters.tokenizer import Tokenizer
    from tieredmoe.gguf.tensors import TensorSource
    from tieredmoe.moe.activation import FusedActivation

LogitRows = Literal["all", "last", "none"]
"""Which positions of a chunk get logits."""

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); the first only grows, and ends equal to the second."""


class ExpertProvider(Protocol):
    """Where routed experts come from, and where they run."""

    async def run(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: FusedActivation,
        *,
        meanwhile: Callable[[], T],
    ) -> tuple[torch.Tensor, T]:
        """The weighted sum of the outputs of the experts that a router chose, and ``meanwhile``'s.

        ``x`` is float32 [T, H], ``routing`` of T tokens; the sum is float32 [T, H], and may be
        overwritten by the next call. Every expert chosen is executed once for all its tokens, in
        whatever order they come; the order changes no bit. ``meanwhile`` is called once, while
        experts or their ids are on their way.

        Raises ``ExpertLoadError`` for an expert that cannot be had. Then, or cancelled, everything
        lent has been given back and nothing is booked as executed.
        """

    def stepper(self, step: DecodeStep[Any]) -> Stepper:
        """What runs the tokens of ``step`` with these experts; worth keeping as long as both."""


class State(Protocol):
    """What one sequence has left behind in a model: attention caches and the like."""

    @property
    def n_tokens(self) -> int:
        """Tokens already in it."""

    @property
    def n_context(self) -> int:
        """Tokens it may hold at most."""

    def copy(self, *, n_context: int | None = None) -> Self:
        """The same sequence in memory of its own: a snapshot to go on from, more than once.

        From here on neither state sees the tokens that the other takes. The copy takes memory for
        the tokens it has and may grow to ``n_context`` of them, this state's by default. Raises
        ``ConfigError`` for a context that cannot hold them or is beyond what the model was made
        for. Only whole states can be copied: recurrent layers cannot take back a token.
        """


class ModelConfig(Protocol):
    """The facts about a model that every engine asks for."""

    @property
    def vocab_size(self) -> int:
        """Rows of the logits; token ids are below it."""

    @property
    def context_length(self) -> int:
        """Tokens that the model was made for."""

    @property
    def n_layers(self) -> int:
        """Layers that ``forward`` runs."""


S = TypeVar("S", bound=State)


class Model(Protocol[S]):
    """A model with its dense weights in memory and its routed experts elsewhere."""

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""

    def new_state(self, n_context: int) -> S:
        """The state of an empty sequence that may grow to ``n_context`` tokens.

        Memory grows with the tokens, not with ``n_context``. Raises ``ConfigError`` for a length
        that is not positive or beyond what the model was made for.
        """

    async def forward(
        self, tokens: torch.Tensor, state: S, experts: ExpertProvider, *, logits: LogitRows
    ) -> torch.Tensor:
        """Append ``tokens`` (int64 [T], T ≥ 1) to the sequence; float32 logits [T, 1 or 0, vocab].

        Chunks of any length give the same results, up to rounding. When it raises or is cancelled,
        ``state`` is as it was before the call, so the call may be repeated. Raises
        ``PromptTooLongError`` when the state's context cannot hold the tokens, ``TokenizerError``
        for ids outside the vocabulary, ``ExpertLoadError`` from the provider.
        """


class AnswerDecoder(Protocol):
    """Makes text of one answer's tokens as they come, without the mark-up of the model's format."""

    def push(self, token_id: int) -> str:
        """The whole characters that ``token_id`` completes, often none."""

    def finish(self) -> str:
        """What is left, U+FFFD for a character cut short."""


class Adapter(Protocol):
    """One architecture: makes its model from a file, and its prompt from a conversation."""

    architecture: ClassVar[str]

    def check(self, source: TensorSource) -> None:
        """Raise what ``load`` would raise of ``source``, without reading a weight."""

    def needs(
        self, source: TensorSource, *, n_context: int | None, chunk_length: int
    ) -> ModelNeeds:
        """The memory that the model of ``source`` takes beside its experts; reads no weight.

        It is that of one sequence of ``n_context`` tokens (None: ``planned_context``), prefilled
        ``chunk_length`` at a time. Raises what ``load`` would raise of ``source``, and
        ``ConfigError`` for a context that the model was not made for.
        """

    def load(
        self,
        source: TensorSource,
        *,
        device: torch.device,
        streamed: StreamedLayers | None = None,
        progress: Progress | None = None,
    ) -> Model[Any]:
        """Read the dense weights of ``source`` onto ``device``; routed experts are left alone.

        The matrices of the layers in ``streamed`` go there, and stay the caller's to close.
        Raises ``MetadataError`` listing everything that is missing or contradictory (keys, tensors,
        shapes) before the first weight is read, and ``UnsupportedModelError`` for tensor types that
        cannot be used.
        """

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        thinking: bool = False,
        effort: str | None = None,
    ) -> list[int]:
        """The token ids that ask the model for the next turn of a conversation.

        ``thinking`` lets it reason first, ``effort`` says how much, in the format's own words
        (default: the format's). Raises ``ConfigError`` for a conversation that the model's format
        cannot express and ``TokenizerError`` for a tokenizer that lacks the tokens it needs.
        """

    def answer_decoder(self, tokenizer: Tokenizer, *, thinking: bool = False) -> AnswerDecoder:
        """What reads one answer to a prompt of ``encode_chat`` with the same ``thinking``.

        Reasoning, if any, is text like the rest and ends with ``</think>``.
        """
