"""What an engine needs of a model, and what a model needs of its experts: the seam between them.

A model computes; it never loads, caches or evicts an expert. It asks its ``ExpertProvider`` for the
experts that its router chose, in any order and in any portions, and lets go of each portion before
it asks for the next. One provider holds every record in memory (``DenseExperts``), another leases
them from a hierarchy of tiers; the model cannot tell them apart, and its results do not differ.

Rejected: handing the model a hierarchy (a model could then hold leases of its own and dead-lock
itself, and a dense run would need a fake hierarchy), and calling a function per expert (portions
let a device wait for one copy fence instead of many).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

from tieredmoe.moe.reference import Record

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.chat import Message
    from tieredmoe.adapters.tokenizer import Tokenizer
    from tieredmoe.gguf.tensors import TensorSource
    from tieredmoe.spec import MoESpec

Portion = Iterable[tuple[int, Record]]
"""Experts that are there now, with their records; usable until the iteration goes on."""

LogitRows = Literal["all", "last", "none"]
"""Which positions of a chunk get logits."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); the first only grows, and ends equal to the second."""


class ExpertProvider(Protocol):
    """Where routed experts come from."""

    @property
    def spec(self) -> MoESpec:
        """Layouts of the records that ``stream`` hands out."""

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """A router has chosen: ``ids`` int64 [T, k] and ``weights`` float32 [T, k], routing order.

        Called once per layer of a step, before ``stream``. For traces and prediction; the tensors
        are only to be read.
        """

    def executed(self, layer: int, n_pairs: int) -> None:
        """``n_pairs`` (token, expert) pairs of ``layer`` have been computed: the audit of top-k."""

    def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[Portion, None]:
        """Yield portions that together hold each of ``experts`` (distinct) exactly once.

        Transfers may begin at the call, so it pays to compute something before iterating. A portion
        is given back when the iteration goes on or the generator is closed: whoever stops early
        calls ``aclose`` (``contextlib.aclosing``). Raises ``ExpertLoadError`` for an expert that
        cannot be had.
        """


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

    def load(
        self, source: TensorSource, *, device: torch.device, progress: Progress | None = None
    ) -> Model[Any]:
        """Read the dense weights of ``source`` onto ``device``; routed experts are left alone.

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
