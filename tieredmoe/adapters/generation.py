"""One generation: prefill in chunks, decode token by token, text in whole characters.

It holds no experts between tokens, so abandoning it at any moment leaves nothing pinned; what has
been measured so far stays readable in ``report``.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from tieredmoe.errors import ConfigError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from tieredmoe.adapters.prompt_cache import PromptCache
    from tieredmoe.adapters.protocol import AnswerDecoder, ExpertProvider, Model, State
    from tieredmoe.adapters.sampling import Sampler
    from tieredmoe.stats import Stats

StopReason = Literal["stop token", "max_new_tokens", "context", "unfinished"]


@attrs.frozen
class Piece:
    """What one step added: ``text`` (often empty inside a character) and the token's id.

    The last piece of a generation may carry left-over text and no token.
    """

    text: str
    token_id: int | None

    def __str__(self) -> str:
        return self.text


@attrs.frozen(kw_only=True)
class GenerationReport:
    """What a generation has done so far; ``prefill`` and ``decode`` are counters of each phase."""

    n_prompt_tokens: int
    n_reused: int
    """Prompt tokens whose state a ``PromptCache`` had; they are not prefilled."""
    n_prefilled: int
    n_generated: int
    prefill_s: float
    decode_s: float
    stop_reason: StopReason
    prefill: Stats
    decode: Stats

    @property
    def first_token_s(self) -> float:
        """Seconds from the start of the iteration until the first token was there."""
        return self.prefill_s

    @property
    def n_decoded(self) -> int:
        """Tokens that took a decode step: all but the first, which the prefill gives."""
        return max(0, self.n_generated - 1)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens processed per second."""
        return self.n_prefilled / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens decoded per second."""
        return self.n_decoded / self.decode_s if self.decode_s else 0.0


@attrs.define(eq=False, repr=False)
class Generation:
    """An async iterable of ``Piece``, to be iterated once; ``ConfigError`` the second time.

    Cancelling the iterating task ends it cleanly at the next await: the model's state is dropped,
    every lease is given back and ``report`` tells how far it came. Once ended, it holds nothing of
    the model: its report may outlive the model's memory.
    """

    _model: Model[Any]
    _experts: ExpertProvider
    _stats: Callable[[], Stats]
    _prompt: Sequence[int]
    _sampler: Sampler
    _decoder: AnswerDecoder | None
    _stop_ids: frozenset[int]
    _max_new_tokens: int
    _n_context: int
    _chunk_length: int
    _cache: PromptCache | None = None
    _n_reused: int = attrs.field(init=False, default=0)
    _n_prefilled: int = attrs.field(init=False, default=0)
    _generated: list[int] = attrs.field(init=False, factory=list)
    _stop_reason: StopReason = attrs.field(init=False, default="unfinished")
    _marks: list[tuple[float, Stats]] = attrs.field(init=False, factory=list)
    """Time and counters at the start, the first token, and the end."""

    def __attrs_post_init__(self) -> None:
        if len(self._prompt) + 1 > self._n_context:
            raise PromptTooLongError(
                n_prompt=len(self._prompt),
                n_context=self._n_context,
                n_context_max=self._model.config.context_length,
            )

    def __repr__(self) -> str:
        return (
            f"<Generation {self._n_reused + self._n_prefilled}/{len(self._prompt)} prompt tokens "
            f"known, {len(self._generated)} generated, {self._stop_reason}>"
        )

    @property
    def token_ids(self) -> list[int]:
        """The ids generated so far, a stop token included."""
        return list(self._generated)

    @property
    def report(self) -> GenerationReport:
        """What has been done so far, at any time."""
        marks = self._marks if len(self._marks) == 3 else [*self._marks, *[self._now()] * 3]
        start, first, end = marks[:3]
        return GenerationReport(
            n_prompt_tokens=len(self._prompt),
            n_reused=self._n_reused,
            n_prefilled=self._n_prefilled,
            n_generated=len(self._generated),
            prefill_s=first[0] - start[0],
            decode_s=end[0] - first[0],
            stop_reason=self._stop_reason,
            prefill=first[1].since(start[1]),
            decode=end[1].since(first[1]),
        )

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        if self._marks:
            raise ConfigError("a generation is iterated once; call generate() again")
        self._mark()
        state = self._begin()
        try:
            logits = await self._prefill(state)
            if self._cache is not None:
                self._cache.keep(self._model, self._prompt, state.copy())
            self._mark()
            while True:
                token_id = self._sampler(logits[-1])
                self._generated.append(token_id)
                reason = self._reason_to_stop(token_id)
                if token_id not in self._stop_ids:
                    yield Piece(self._decoder.push(token_id) if self._decoder else "", token_id)
                if reason is not None:
                    break
                logits = await self._forward([token_id], state, "last")
            self._stop_reason = reason
            if self._decoder is not None and (rest := self._decoder.finish()):
                yield Piece(rest, None)
        finally:
            while len(self._marks) < 3:
                self._mark()
            # Given to another model meanwhile, the cache must not hide why this generation ends.
            if self._cache is not None and state.n_tokens and self._cache.belongs_to(self._model):
                ids = [*self._prompt, *self._generated]
                self._cache.keep(self._model, ids[: state.n_tokens], state)
            del self._model, self._experts, self._cache, self._stats

    def _begin(self) -> State:
        """The state to go on from: a snapshot of the prompt's beginning, or an empty one."""
        if self._cache is not None:
            state = self._cache.longest(self._model, self._prompt, n_context=self._n_context)
            if state is not None:
                self._n_reused = state.n_tokens
                return state
        empty: State = self._model.new_state(self._n_context)
        return empty

    async def _prefill(self, state: State) -> torch.Tensor:
        n = len(self._prompt)
        for start in range(self._n_reused, n, self._chunk_length):
            chunk = self._prompt[start : start + self._chunk_length]
            last = start + len(chunk) == n
            logits = await self._forward(chunk, state, "last" if last else "none")
            self._n_prefilled += len(chunk)
        return logits

    async def _forward(
        self, ids: Sequence[int], state: State, rows: Literal["last", "none"]
    ) -> torch.Tensor:
        # A step whose experts are all resident never suspends; the loop still needs its turn,
        # for cancellation as for other tasks.
        await asyncio.sleep(0)
        tokens = torch.tensor(ids, dtype=torch.int64)
        return await self._model.forward(tokens, state, self._experts, logits=rows)

    def _reason_to_stop(self, token_id: int) -> StopReason | None:
        if token_id in self._stop_ids:
            return "stop token"
        if len(self._generated) >= self._max_new_tokens:
            return "max_new_tokens"
        if len(self._prompt) + len(self._generated) >= self._n_context:
            return "context"
        return None

    def _mark(self) -> None:
        self._marks.append(self._now())

    def _now(self) -> tuple[float, Stats]:
        return time.perf_counter(), self._stats()
