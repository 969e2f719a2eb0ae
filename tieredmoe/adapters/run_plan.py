"""What a machine that need not be there would make of a model: slots, hit ceilings, token costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.machine import Machine
from tieredmoe.adapters.memory_plan import plan_memory
from tieredmoe.adapters.model_needs import CHUNK_LENGTH
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.config import HierarchyConfig
from tieredmoe.pack import open_checkpoint
from tieredmoe.pack.token_costs import Rates, TokenBytes, TokenCost, hit_ceiling, token_cost
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from tieredmoe.adapters.memory_plan import MemoryPlan
    from tieredmoe.pack import Checkpoint

_HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9)


@attrs.frozen(kw_only=True)
class RunPlan:
    """What a machine would make of a model. Sizes are bytes; every field is stable."""

    path: Path
    architecture: str
    token_experts: int
    """the token cycle W: routed layers × top-k"""
    token_bytes: TokenBytes
    n_experts: int
    """routed experts of the whole model"""
    slot_nbytes: int
    top_slots: int
    """experts that find room where the model computes"""
    host_slots: int
    """more that find room in the RAM that is left, as a tier of its own"""
    top_ceiling: float
    """no policy hits more than slots / W"""
    ceiling: float
    """the same with the host's slots"""
    rates: Rates
    costs: tuple[TokenCost, ...]
    """by hit rate where it computes, everything else from disk"""
    costs_with_host: tuple[TokenCost, ...]
    """the same with all that can be in RAM found there; empty without host slots"""
    best: TokenCost
    memory: MemoryPlan


def plan_run(
    source: Checkpoint | Path | str,
    rates: Rates,
    *,
    ram_nbytes: int,
    vram_nbytes: int | None = None,
    reserve: int | str = "3GiB",
    n_context: int | None = None,
) -> RunPlan:
    """What ``source`` costs per token on a machine of these ``rates`` and sizes; reads headers.

    With ``vram_nbytes`` of free memory a GPU computes, which need not be there; without it the host
    does, and ``rates.link`` must be None. The expert cache gets all that is left. Blocks. Raises
    what keeps the model from being opened or run at all, and ``BudgetError`` with every number
    where it does not fit.
    """
    assert (vram_nbytes is None) == (rates.link is None), "a link leads to a GPU"
    model = open_checkpoint(source) if isinstance(source, Path | str) else source
    needs = adapter_for(model.metadata).needs(model, n_context=n_context, chunk_length=CHUNK_LENGTH)
    device = "host" if vram_nbytes is None else "cuda"
    config = HierarchyConfig(device=device, vram="100%", reserve=reserve)
    machine = _machine(ram_nbytes, vram_nbytes, rates)
    return _costs(model, plan_memory(model, needs, config, machine=machine), rates)


def _costs(model: Checkpoint, memory: MemoryPlan, rates: Rates) -> RunPlan:
    spec, dense = model.spec, memory.needs.dense
    cycle = len(spec.layers) * spec.top_k
    token = TokenBytes(
        experts=spec.top_k * sum(each.payload_nbytes for each in spec.layouts.values()),
        reads=spec.top_k * sum(model.extents(ExpertKey(layer, 0)).nbytes for layer in spec.layers),
        dense=dense.file_nbytes - dense.embedding_nbytes,
        streamed=sum(sum(dense.layers[layer].values()) for layer in memory.streamed),
    )
    top_slots, host_slots = memory.tiers.n_slots, 0
    if memory.machine.is_device:
        left_nbytes = memory.machine.host_free_nbytes - memory.host_nbytes
        n_left = spec.n_records - top_slots
        host_slots = min(n_left, max(0, left_nbytes // memory.tiers.stage_slot_nbytes))
    is_whole = top_slots >= spec.n_records
    top_ceiling = hit_ceiling(top_slots, cycle)
    hit_rates = [rate for rate in _HIT_RATES if rate < top_ceiling and not is_whole]
    cost = partial(token_cost, token, rates)
    in_host = host_slots / cycle
    costs = [cost(top_hits=rate) for rate in (*hit_rates, top_ceiling)]
    with_host = [
        cost(top_hits=each.top_hits, host_hits=min(in_host, 1 - each.top_hits)) for each in costs
    ]
    return RunPlan(
        path=model.path,
        architecture=spec.architecture,
        token_experts=cycle,
        token_bytes=token,
        n_experts=spec.n_records,
        slot_nbytes=spec.slot_nbytes,
        top_slots=top_slots,
        host_slots=host_slots,
        top_ceiling=top_ceiling,
        ceiling=hit_ceiling(top_slots + host_slots, cycle),
        rates=rates,
        costs=tuple(costs),
        costs_with_host=tuple(with_host) if host_slots else (),
        best=(with_host if host_slots else costs)[-1],
        memory=memory,
    )


def _machine(ram_nbytes: int, vram_nbytes: int | None, rates: Rates) -> Machine:
    if vram_nbytes is None:
        return Machine(
            device=torch.device("cpu"),
            name="the host",
            free_nbytes=ram_nbytes,
            host_free_nbytes=ram_nbytes,
            link_bytes_per_s=lambda: float("inf"),
        )
    link = rates.link
    assert link is not None, "a GPU has one"
    return Machine(
        device=torch.device("cuda"),
        name="the GPU",
        free_nbytes=vram_nbytes,
        host_free_nbytes=ram_nbytes,
        link_bytes_per_s=lambda: link,
    )
