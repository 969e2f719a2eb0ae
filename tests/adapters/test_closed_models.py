"""What a closed model was made of is gone at once, and waits for no garbage collector.

Opened as for a device, with tiers on a thread, decode steps and recordings, but in host memory. The
hierarchy itself is not looked at: its close gives its memory back, whoever holds it.
"""

import asyncio
import gc
import weakref
from functools import partial

import pytest
import torch
from toy_step import ReferenceBatches

pytest.importorskip("triton", reason="what computes on a device is written in Triton")

from tieredmoe import HierarchyConfig, open_model
from tieredmoe.adapters import device_batches, opening
from tieredmoe.chain import open_hierarchy
from tieredmoe.testing import make_deepseek_v4, make_kimi_k3
from tieredmoe.threaded import ThreadedHierarchy

PROMPT = list(range(3, 20))
N_NEW = 5


@pytest.fixture(scope="module", params=[make_deepseek_v4, make_kimi_k3], ids=["deepseek", "kimi"])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("closed") / "tiny.gguf"
    request.param(path, seed=2, tokenizer=None)
    return path


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """The parts of a model on a GPU, in host memory; garbage stays where it is."""
    hierarchies = []

    async def tiers(source, config, plan):
        make = partial(open_hierarchy, source, plan.hierarchy_config(config))
        threaded = await ThreadedHierarchy.aopen(make)
        hierarchies.append(threaded._hierarchy)
        return threaded

    class Batches(ReferenceBatches):
        def __init__(self, spec, arena, workspace):
            super().__init__(hierarchies.pop(), n_tokens=workspace.n_tokens)
            self.workspace = workspace

    monkeypatch.setattr(opening, "_open_tiers", tiers)
    monkeypatch.setattr(device_batches, "DeviceBatches", Batches)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts(language):
    """Weak references to all that holds memory of an open model."""
    elastic, experts, tiers = language.model, language._experts, language.hierarchy
    device_model = elastic._model
    model, (step, _, stepper) = device_model._model, device_model._stepper
    held = {
        "language": language,
        "elastic": elastic,
        "device model": device_model,
        "seat": device_model._seat,
        "model": model,
        "embedding": model._embedding,
        "layer": model._layers[1],
        "head": model._head,
        "streamed": model.streamed,
        "step": step,
        "logits": step.logits,
        "stepper": stepper,
        "ids": stepper._ids,
        "experts": experts,
        "batches": experts.batches,
        "workspace": experts.batches.workspace,
        "scratch": experts.batches.workspace.scratch,
        "tiers": tiers,
    }
    return {name: weakref.ref(part) for name, part in held.items()}


async def ended(language):
    generation = language.generate(PROMPT, max_new_tokens=N_NEW)
    async for _ in generation:
        pass
    return generation


async def left(language):
    generation = language.generate(PROMPT, max_new_tokens=N_NEW)
    pieces = aiter(generation)
    for _ in range(3):
        await anext(pieces)
    await pieces.aclose()
    return generation


async def cancelled(language):
    generation = language.generate(PROMPT, max_new_tokens=N_NEW)
    pieces = aiter(generation)
    for _ in range(3):
        await anext(pieces)
    task = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    return generation


@pytest.mark.parametrize("end", [ended, left, cancelled])
def test_a_closed_model_is_gone_at_once_whatever_became_of_its_generation(path, end):
    async def main():
        language = await open_model(path, HierarchyConfig(vram="1GiB", reserve=0), n_context=64)
        async with language:
            generation = await end(language)
            held = parts(language)
        return held, generation

    held, generation = asyncio.run(main())
    assert len(generation.token_ids) >= 3
    assert [name for name, part in held.items() if part() is not None] == []
