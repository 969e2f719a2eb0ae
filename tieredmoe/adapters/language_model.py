"""The high-level API: open a pack, generate text.

``open_model`` puts together what the layers below provide (pack, dense weights, tokenizer, tiers);
an engine that wants other parts uses those directly.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch

from tieredmoe.adapters.generation import Generation
from tieredmoe.adapters.prompt import require_in_vocabulary, split_prompt
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.sampling import Sampler, sampling_problems
from tieredmoe.adapters.settings import integer_from, setting_problems
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.adapters.tokenizer import Tokenizer, require_tokenizer
from tieredmoe.chain import open_hierarchy
from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.pack import Pack, open_pack

if TYPE_CHECKING:
    from types import TracebackType

    from tieredmoe.adapters.prompt import Prompt
    from tieredmoe.adapters.protocol import Adapter, Model, Progress
    from tieredmoe.config import HierarchyConfig
    from tieredmoe.hierarchy import Hierarchy
    from tieredmoe.stats import Stats


async def open_model(
    path: Path | str,
    config: HierarchyConfig | None = None,
    *,
    progress: Progress | None = None,
) -> LanguageModel:
    """Open the model in the pack directory ``path``: dense weights loaded, tiers ready.

    Close it with ``await model.close()`` or use it as an async context manager. ``progress`` is
    called in the loop's thread with (bytes loaded, bytes in all) of the dense weights. Cancelling
    it, or any error (``PackError``, ``UnsupportedModelError``, ``MetadataError``,
    ``TokenizerError``, ``BudgetError``, ``DirectIOUnavailableError``), leaves nothing open.
    """
    pack = await asyncio.to_thread(open_pack, Path(path))
    adapter = adapter_for(pack.metadata)
    adapter.check(pack)
    tokenizer = Tokenizer.from_metadata(pack.metadata)
    async with AsyncExitStack() as opened:
        # The tiers first: whether the budget suffices is known before gigabytes are loaded.
        hierarchy = await opened.enter_async_context(await open_hierarchy(pack, config))
        model = await _load(adapter, pack, progress)
        opened.pop_all()
    return LanguageModel(adapter, model, tokenizer, hierarchy)


async def _load(adapter: Adapter, pack: Pack, progress: Progress | None) -> Model[Any]:
    loop = asyncio.get_running_loop()

    def report(n_done: int, n_total: int) -> None:
        if progress is not None:
            loop.call_soon_threadsafe(progress, n_done, n_total)

    device = torch.device("cpu")
    return await asyncio.to_thread(adapter.load, pack, device=device, progress=report)


@attrs.define(eq=False)
class LanguageModel:
    """A model that generates; made by ``open_model``.

    Generations may run one after another or side by side: they share the tiers, not their states.
    """

    adapter: Adapter
    model: Model[Any]
    tokenizer: Tokenizer | None
    hierarchy: Hierarchy

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
        chunk_length: int = 512,
    ) -> Generation:
        """An async iterable of ``Piece``: ``async for piece in model.generate("…"): print(piece)``.

        ``prompt`` is a user's text, a conversation (``Message``, or mappings with role and
        content), or token ids (any integers, a 1-D array too), which are used as they are.
        ``n_context`` bounds prompt and answer together (default: what is needed, up to the model's
        own). Prefill goes in chunks of ``chunk_length`` tokens. Temperature 0 is greedy.

        Raises, before anything runs, ``ConfigError`` listing every setting that is wrong or naming
        what is no prompt, ``TokenizerError`` (text for a model without a tokenizer, an id outside
        the vocabulary), ``PromptTooLongError``.
        """
        config = self.model.config
        problems = _length_problems(
            max_new_tokens, chunk_length, n_context, n_context_max=config.context_length
        )
        problems += sampling_problems(temperature=temperature, top_p=top_p, seed=seed)
        raise_config_problems("generate", problems)
        max_new_tokens, chunk_length = index(max_new_tokens), index(chunk_length)

        ids = self.prompt_ids(prompt, thinking=thinking)
        if not ids:
            raise ConfigError("generate: the prompt has no tokens")
        require_in_vocabulary(ids, config.vocab_size)
        needed = min(config.context_length, len(ids) + max_new_tokens)
        return Generation(
            model=self.model,
            experts=TieredExperts(self.hierarchy),
            stats=self.stats,
            prompt=ids,
            sampler=Sampler(temperature=temperature, top_p=top_p, seed=seed),
            tokenizer=self.tokenizer,
            stop_ids=self.tokenizer.stop_ids if self.tokenizer else frozenset(),
            max_new_tokens=max_new_tokens,
            n_context=needed if n_context is None else index(n_context),
            chunk_length=chunk_length,
        )

    def prompt_ids(self, prompt: Prompt, *, thinking: bool = False) -> list[int]:
        """The token ids of ``prompt``; text becomes a chat turn in the model's own form."""
        messages, ids = split_prompt(prompt)
        if not messages:
            return ids
        tokenizer = require_tokenizer(self.tokenizer)
        return self.adapter.encode_chat(tokenizer, messages, thinking=thinking)

    def stats(self) -> Stats:
        """A snapshot of the hierarchy's counters."""
        return self.hierarchy.stats()

    async def close(self) -> None:
        """Drain all I/O and free the memory; generations still running end in ``ClosedError``."""
        await self.hierarchy.close()

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
