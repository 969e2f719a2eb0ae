"""Opens a model: the plan of its memory, its tiers, its dense weights, and what computes with them.

``open_model`` puts together what the layers below provide; an engine that wants other parts uses
those directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_link import DeviceLink, pinning
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.elastic_model import ElasticModel
from tieredmoe.adapters.language_model import LanguageModel
from tieredmoe.adapters.model_needs import CHUNK_LENGTH
from tieredmoe.adapters.preflight import check_model
from tieredmoe.adapters.streamed_layers import HostLink, StreamedLayers
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.chain import open_hierarchy
from tieredmoe.config import BACKENDS, HierarchyConfig
from tieredmoe.errors import BudgetError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.tensors import TensorLoader
from tieredmoe.threaded import ThreadedHierarchy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tieredmoe.adapters.device_batches import DeviceArena
    from tieredmoe.adapters.memory_plan import MemoryPlan
    from tieredmoe.adapters.protocol import Adapter, ExpertProvider, Model, Progress
    from tieredmoe.adapters.streamed_layers import Link
    from tieredmoe.gguf import GGUFInventory
    from tieredmoe.pack import Checkpoint

_log = logging.getLogger(__name__)


async def open_model(
    source: Checkpoint | GGUFInventory | Path | str,
    config: HierarchyConfig | None = None,
    *,
    adapter: Adapter | None = None,
    n_context: int | None = None,
    chunk_length: int = CHUNK_LENGTH,
    progress: Progress | None = None,
) -> LanguageModel:
    """Open a model on ``config.device``: dense weights loaded, tiers ready.

    ``source`` is a pack's directory, or a GGUF (a file, any shard, their directory) that runs as it
    is. Memory is set aside for one sequence of ``n_context`` tokens (default: 8192, or all that the
    model can take) whose prompt goes in chunks of ``chunk_length``; the expert cache gets what its
    budget and all else leave (``LanguageModel.plan``). Dense weights come through the backend of
    ``config``, beside which 64 MiB are taken while they load. On a GPU it becomes the calling
    thread's current device. Close the model with ``await model.close()`` or use it as an async
    context manager. ``adapter`` replaces the one that the model's architecture has by default, to
    set what a file does not say (``KimiK3Adapter(latent_eps=1e-5)``). ``progress`` is called in the
    loop's thread, a few times a second, with (bytes loaded, bytes in all) of the dense weights.

    Cancelling it returns when nothing runs any more, and like any error (those of ``check_model``,
    ``DeviceError``, ``DirectIOUnavailableError``, ``ReadError``) leaves nothing open.
    """
    start_s = time.perf_counter()
    config = config or HierarchyConfig()
    checked = await asyncio.to_thread(
        check_model,
        source,
        config,
        adapter=adapter,
        n_context=n_context,
        chunk_length=chunk_length,
    )
    source, adapter, tokenizer, plan = checked
    _log.debug("opening %s\n%s", source.path, plan)
    async with AsyncExitStack() as held, AsyncExitStack() as opened:
        link: Link = HostLink()
        if plan.machine.is_device:
            link = _device_link(plan, config, held)
        # The tiers first: what they cannot have is known before gigabytes are loaded.
        tiers = await _open_tiers(source, config, plan)
        await opened.enter_async_context(tiers)
        load = partial(_load, adapter, _loader(source, config, plan, tiers), plan, link)
        experts: ExpertProvider
        try:
            model = await _in_thread(load, progress)
            if isinstance(tiers, Hierarchy):
                experts = TieredExperts(tiers)
            else:
                model, experts = _on_device(model, tiers, plan, held)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{plan.machine.name} ran out of memory while the model was opened, though there "
                f"was room for it before; is another process using it? ({error})"
            ) from error
        opened.pop_all()
        return LanguageModel(
            adapter,
            model,
            tokenizer,
            tiers,
            plan,
            experts=experts,
            held=held.pop_all(),
            load_s=time.perf_counter() - start_s,
        )


def _device_link(plan: MemoryPlan, config: HierarchyConfig, held: AsyncExitStack) -> DeviceLink:
    device = plan.machine.device
    torch.cuda.set_device(device)
    held.callback(torch.cuda.empty_cache)
    link = DeviceLink(device, pin=pinning(device, strict=config.strict))
    held.callback(link.close)
    return link


async def _open_tiers(
    source: Checkpoint, config: HierarchyConfig, plan: MemoryPlan
) -> Hierarchy | ThreadedHierarchy:
    make = partial(open_hierarchy, source, plan.hierarchy_config(config))
    # A model that waits for its device, or computes in Python, would stop the loop that reads.
    return await (ThreadedHierarchy.aopen(make) if plan.machine.is_device else make())


def _loader(
    source: Checkpoint,
    config: HierarchyConfig,
    plan: MemoryPlan,
    tiers: Hierarchy | ThreadedHierarchy,
) -> TensorLoader:
    # What the tiers could get: a step down is warned of once.
    found = tiers.stats().backend
    device = plan.machine.device
    return TensorLoader(
        source,
        backend=found if found in BACKENDS else config.backend,
        otherwise=config.backend,
        allow_buffered=config.allow_buffered,
        strict=config.strict,
        pin=pinning(device, strict=config.strict) if plan.machine.is_device else None,
    )


def _load(
    adapter: Adapter, loader: TensorLoader, plan: MemoryPlan, link: Link, progress: Progress
) -> Model[Any]:
    layers = plan.needs.dense.layers
    streamed = StreamedLayers({layer: layers[layer] for layer in plan.streamed}, link=link)
    return adapter.load(loader, device=plan.machine.device, streamed=streamed, progress=progress)


async def _in_thread(
    load: Callable[[Progress], Model[Any]], progress: Progress | None
) -> Model[Any]:
    def work(reporter: Reporter) -> Model[Any]:
        return load(
            lambda n_done, n_total: reporter.report(
                "load", done_nbytes=n_done, total_nbytes=n_total
            )
        )

    def show(done: PackProgress) -> None:
        if progress is not None:
            progress(done.done_nbytes, done.total_nbytes)

    return await run_in_thread(work, show)


def _on_device(
    model: Any, tiers: ThreadedHierarchy, plan: MemoryPlan, held: AsyncExitStack
) -> tuple[ElasticModel, DeviceExperts]:
    """What computes on a GPU, and where its routed experts are and run."""
    from tieredmoe.adapters.device_batches import (  # noqa: PLC0415 (Triton, which hosts may lack)
        DeviceBatches,
    )
    from tieredmoe.moe.kernels import Workspace  # noqa: PLC0415 (likewise)

    spec = tiers.spec
    workspace = Workspace(
        spec.layouts.values(),
        n_tokens=plan.needs.chunk_length,
        top_k=spec.top_k,
        device=plan.machine.device,
    )
    experts = DeviceExperts(tiers, DeviceBatches(spec, cast("DeviceArena", tiers.arena), workspace))
    # What goes through the host cannot be recorded.
    stepped = DeviceModel(model, in_steps=not plan.needs.dense.unpacked_by_host)
    held.push_async_callback(stepped.close)
    return ElasticModel(stepped, tiers), experts
