"""The high-level API: a model that is open, and what can be asked of it.

An engine that wants other parts uses those directly; ``opening`` shows how they go together.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from operator import index
from typing import TYPE_CHECKING, Any, Self

import attrs

from tieredmoe.adapters.generation import Generation
from tieredmoe.adapters.prompt import require_in_vocabulary, split_prompt
from tieredmoe.adapters.sampling import Sampler, sampling_problems
from tieredmoe.adapters.settings import integer_from, setting_problems
from tieredmoe.adapters.tokenizer import Tokenizer, require_tokenizer
from tieredmoe.errors import ClosedError, ConfigError, raise_config_problems
from tieredmoe.hierarchy import Hierarchy

if TYPE_CHECKING:
    from types import TracebackType

    from tieredmoe.adapters.memory_plan import MemoryPlan
    from tieredmoe.adapters.prompt import Prompt
    from tieredmoe.adapters.prompt_cache import PromptCache
    from tieredmoe.adapters.protocol import Adapter, ExpertProvider, Model
    from tieredmoe.stats import Stats
    from tieredmoe.threaded import ThreadedHierarchy


@attrs.define(eq=False, repr=False)
class LanguageModel:
    """A model that generates; made by ``open_model``.

    Generations may run one after another or side by side: they share the tiers, not their states.
    ``experts`` is what they get routed experts from; ``held`` is closed with the model, once its
    hierarchy is.
    """

    adapter: Adapter
    _model: Model[Any] | None
    tokenizer: Tokenizer | None
    hierarchy: Hierarchy | ThreadedHierarchy
    """the tiers: on the host they live in the loop that opened them, for a GPU on a thread"""
    plan: MemoryPlan
    """what was planned before anything was allocated"""
    _experts: ExpertProvider | None = attrs.field(kw_only=True)
    _held: AsyncExitStack = attrs.field(kw_only=True, factory=AsyncExitStack)
    load_s: float = attrs.field(kw_only=True)
    """Seconds from the call of ``open_model`` until a prompt could be taken."""
    _last_stats: Stats | None = attrs.field(init=False, default=None)

    @property
    def model(self) -> Model[Any]:
        """What computes; ``ClosedError`` once it was closed."""
        if self._model is None:
            raise ClosedError("the model was closed")
        return self._model

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        n_context: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        thinking: bool = False,
        effort: str | None = None,
        chunk_length: int | None = None,
        cache: PromptCache | None = None,
    ) -> Generation:
        """An async iterable of ``Piece``: ``async for piece in model.generate("…"): print(piece)``.

        ``prompt`` is a user's text, a conversation (``Message``, or mappings with role and
        content), or token ids (any integers, a 1-D array too), which are used as they are.
        ``n_context`` bounds prompt and answer together (default: what is needed, up to the model's
        own). Prefill goes in chunks of ``chunk_length`` tokens (default: what the model was opened
        for). More of both than it was opened for may make a GPU's expert cache shrink. Temperature
        0 is greedy. With a ``cache``, a prompt that continues one of its snapshots is prefilled
        from there on.
        ``thinking`` asks for reasoning before the answer, ``effort`` for how much where the model's
        format can say it (Kimi-K3: low, high, max).

        Raises, before anything runs, ``ConfigError`` listing every setting that is wrong or naming
        what is no prompt, ``TokenizerError`` (text for a model without a tokenizer, an id outside
        the vocabulary), ``PromptTooLongError``.
        """
        model, config = self.model, self.model.config
        if chunk_length is None:
            chunk_length = self.plan.needs.chunk_length
        problems = _length_problems(
            max_new_tokens, chunk_length, n_context, n_context_max=config.context_length
        )
        problems += sampling_problems(temperature=temperature, top_p=top_p, seed=seed)
        raise_config_problems("generate", problems)
        max_new_tokens, chunk_length = index(max_new_tokens), index(chunk_length)

        ids = self.prompt_ids(prompt, thinking=thinking, effort=effort)
        if not ids:
            raise ConfigError("generate: the prompt has no tokens")
        require_in_vocabulary(ids, config.vocab_size)
        needed = min(config.context_length, len(ids) + max_new_tokens)
        decoder = None
        if self.tokenizer is not None:
            decoder = self.adapter.answer_decoder(self.tokenizer, thinking=thinking)
        assert self._experts is not None, "it goes with the model"
        return Generation(
            model=model,
            experts=self._experts,
            stats=self.stats,
            prompt=ids,
            sampler=Sampler(temperature=temperature, top_p=top_p, seed=seed),
            decoder=decoder,
            stop_ids=self.tokenizer.stop_ids if self.tokenizer else frozenset(),
            max_new_tokens=max_new_tokens,
            n_context=needed if n_context is None else index(n_context),
            chunk_length=chunk_length,
            cache=cache,
        )

    def prompt_ids(
        self, prompt: Prompt, *, thinking: bool = False, effort: str | None = None
    ) -> list[int]:
        """The token ids of ``prompt``; text becomes a chat turn in the model's own form."""
        messages, ids = split_prompt(prompt)
        if not messages:
            return ids
        tokenizer = require_tokenizer(self.tokenizer)
        return self.adapter.encode_chat(tokenizer, messages, thinking=thinking, effort=effort)

    def stats(self) -> Stats:
        """A snapshot of the hierarchy's counters; after the close, the last one."""
        return self._last_stats or self.hierarchy.stats()

    def __repr__(self) -> str:
        where = self.plan.machine.name
        return f"<LanguageModel {self.adapter.architecture} on {where}, {self.hierarchy!r}>"

    async def close(self) -> None:
        """Drain all I/O and free the memory; generations still running end in ``ClosedError``.

        Idempotent. Cancelled, it goes on to its end.
        """
        async with self._held:
            self._model = self._experts = None
            try:
                # Once it is closed, a hierarchy on a thread has no more to say.
                self._last_stats = self.stats()
            finally:
                if isinstance(self.hierarchy, Hierarchy):
                    await self.hierarchy.close()
                else:
                    await self.hierarchy.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()


def _length_problems(
    max_new_tokens: object, chunk_length: object, n_context: object, *, n_context_max: int
) -> list[str]:
    n_new, n_chunk = integer_from(max_new_tokens), integer_from(chunk_length)
    n_whole = integer_from(n_context)
    positive = "an integer, 1 or more"
    return setting_problems(
        [
            ("max_new_tokens", max_new_tokens, positive, n_new is not None and n_new >= 1),
            ("chunk_length", chunk_length, positive, n_chunk is not None and n_chunk >= 1),
            (
                "n_context",
                n_context,
                f"an integer from 2 to {n_context_max}",
                n_context is None or (n_whole is not None and 2 <= n_whole <= n_context_max),
            ),
        ]
    )
