"""The high-level API: open a model, generate text.

``open_model`` puts together what the layers below provide (files, dense weights, tokenizer, tiers);
an engine that wants other parts uses those directly.
"""

from __future__ import annotations

import asyncio
import time
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
from tieredmoe.config import BACKENDS, HierarchyConfig
from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.gguf import GGUFInventory
from tieredmoe.pack import open_checkpoint
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.tensors import TensorLoader

if TYPE_CHECKING:
    from types import TracebackType

    from tieredmoe.adapters.prompt import Prompt
    from tieredmoe.adapters.prompt_cache import PromptCache
    from tieredmoe.adapters.protocol import Adapter, Model, Progress
    from tieredmoe.hierarchy import Hierarchy
    from tieredmoe.pack import Checkpoint
    from tieredmoe.stats import Stats


async def open_model(
    source: Checkpoint | GGUFInventory | Path | str,
    config: HierarchyConfig | None = None,
    *,
    adapter: Adapter | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Open a model: dense weights loaded, tiers ready.

    ``source`` is a pack's directory, or a GGUF (a file, any shard, their directory) that runs as it
    is. Dense weights come through the backend of ``config``, beside which 64 MiB are taken while
    they load. Close the model with ``await model.close()`` or use it as an async context manager.
    ``adapter`` replaces the one that the model's architecture has by default, to set what a file
    does not say (``KimiK3Adapter(latent_eps=1e-5)``).
    ``progress`` is called in the loop's thread, a few times a second, with (bytes loaded, bytes in
    all) of the dense weights. Cancelling it returns when nothing runs any more, and like any error
    (``PackError``, ``GGUFError``, ``UnsupportedModelError``, ``MetadataError``, ``TokenizerError``,
    ``BudgetError``, ``DirectIOUnavailableError``, ``ReadError``) leaves nothing open.
    """
    start_s = time.perf_counter()
    config = config or HierarchyConfig()
    if isinstance(source, Path | str | GGUFInventory):
        source = await asyncio.to_thread(open_checkpoint, source)
    adapter = _adapter(source, adapter)
    adapter.check(source)
    tokenizer = Tokenizer.from_metadata(source.metadata)
    async with AsyncExitStack() as opened:
        # The tiers first: whether the budget suffices is known before gigabytes are loaded.
        hierarchy = await opened.enter_async_context(await open_hierarchy(source, config))
        # What the tiers could get: a step down is warned of once.
        found = hierarchy.stats().backend
        loader = TensorLoader(
            source,
            backend=found if found in BACKENDS else config.backend,
            otherwise=config.backend,
            allow_buffered=config.allow_buffered,
            strict=config.strict,
        )
        model = await _load(adapter, loader, progress)
        opened.pop_all()
    load_s = time.perf_counter() - start_s
    return LanguageModel(adapter, model, tokenizer, hierarchy, load_s=load_s)


def _adapter(source: Checkpoint, wanted: Adapter | None) -> Adapter:
    found = adapter_for(source.metadata)
    if wanted is not None and wanted.architecture != found.architecture:
        raise ConfigError(
            f"open_model: {source.path} is a {found.architecture!r}, and the adapter given is for "
            f"{wanted.architecture!r}"
        )
    return wanted or found


async def _load(adapter: Adapter, loader: TensorLoader, progress: Progress | None) -> Model[Any]:
    def load(reporter: Reporter) -> Model[Any]:
        def report(n_done: int, n_total: int) -> None:
            reporter.report("load", done_nbytes=n_done, total_nbytes=n_total)

        return adapter.load(loader, device=torch.device("cpu"), progress=report)

    def show(done: PackProgress) -> None:
        if progress is not None:
            progress(done.done_nbytes, done.total_nbytes)

    return await run_in_thread(load, show)


@attrs.define(eq=False, repr=False)
class LanguageModel:
    """A model that generates; made by ``open_model``.

    Generations may run one after another or side by side: they share the tiers, not their states.
    """

    adapter: Adapter
    model: Model[Any]
    tokenizer: Tokenizer | None
    hierarchy: Hierarchy
    load_s: float = attrs.field(kw_only=True)
    """Seconds from the call of ``open_model`` until a prompt could be taken."""

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
        chunk_length: int = 512,
        cache: PromptCache | None = None,
    ) -> Generation:
        """An async iterable of ``Piece``: ``async for piece in model.generate("…"): print(piece)``.

        ``prompt`` is a user's text, a conversation (``Message``, or mappings with role and
        content), or token ids (any integers, a 1-D array too), which are used as they are.
        ``n_context`` bounds prompt and answer together (default: what is needed, up to the model's
        own). Prefill goes in chunks of ``chunk_length`` tokens. Temperature 0 is greedy. With a
        ``cache``, a prompt that continues one of its snapshots is prefilled from there on.
        ``thinking`` asks for reasoning before the answer, ``effort`` for how much where the model's
        format can say it (Kimi-K3: low, high, max).

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

        ids = self.prompt_ids(prompt, thinking=thinking, effort=effort)
        if not ids:
            raise ConfigError("generate: the prompt has no tokens")
        require_in_vocabulary(ids, config.vocab_size)
        needed = min(config.context_length, len(ids) + max_new_tokens)
        decoder = None
        if self.tokenizer is not None:
            decoder = self.adapter.answer_decoder(self.tokenizer, thinking=thinking)
        return Generation(
            model=self.model,
            experts=TieredExperts(self.hierarchy),
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
        """A snapshot of the hierarchy's counters."""
        return self.hierarchy.stats()

    def __repr__(self) -> str:
        return f"<LanguageModel {self.adapter.architecture}, {self.hierarchy!r}>"

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
