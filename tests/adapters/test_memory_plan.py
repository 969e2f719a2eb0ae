"""The plan of a model's memory: what it says is what is taken, and what it refuses, it explains."""

import asyncio
import itertools
import re

import pytest
import torch
from described import GiB, described, gpu, needs_of
from live_bytes import LiveBytes

from tieredmoe import (
    BudgetError,
    ConfigError,
    HierarchyConfig,
    check_model,
    format_size,
    open_checkpoint,
    open_model,
)
from tieredmoe.adapters import dense_memory
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.machine import Machine, this_machine
from tieredmoe.adapters.memory_plan import plan_memory
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.streamed_layers import layer_nbytes
from tieredmoe.gguf import open_inventory
from tieredmoe.testing import DeepSeekV4Shape, KimiK3Shape, make_deepseek_v4, make_kimi_k3

pytest.importorskip("triton", reason="a device's scratch is what its kernels say")

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("name", ["deepseek-v4-flash", "kimi-k3"])


def plan(name, free_gib, vram="21GiB", *, reserve="3GiB", ram=None, n_context=8192, **machine):
    source = described(name)
    return plan_memory(
        source,
        needs_of(source, n_context=n_context),
        HierarchyConfig(device="cuda", vram=vram, reserve=reserve, ram=ram),
        machine=gpu(free_gib * GiB, **machine),
    )


def share(made, name):
    return next(share for share in (*made.shares, *made.host_shares) if share.name == name)


# --- a device


@BOTH
def test_the_cache_gets_what_all_else_and_the_reserve_leave_and_no_more_than_asked(name):
    made = plan(name, 48, "500GiB")
    assert 3 * GiB <= 48 * GiB - made.nbytes < 3 * GiB + made.tiers.slot_nbytes
    small = plan(name, 48, "1GiB")
    assert GiB - small.tiers.slot_nbytes < small.tiers.top_nbytes <= GiB
    assert made.streamed == small.streamed == ()
    config = HierarchyConfig(device="cuda", vram="500GiB")
    assert made.hierarchy_config(config).vram == made.tiers.top_nbytes
    assert made.hierarchy_config(config).reserve_nbytes(48 * GiB) == 0


def test_a_ram_tier_gets_what_the_host_has_beside_all_else():
    made = plan("deepseek-v4-flash", 48, ram="auto", host_nbytes=64 * GiB)
    ram = share(made, "RAM tier")
    assert 56 * GiB - made.tiers.stage_slot_nbytes < made.host_nbytes <= 56 * GiB
    assert ram.nbytes == made.tiers.stage_nbytes
    config = made.hierarchy_config(HierarchyConfig(device="cuda", ram="auto"))
    assert (config.ram, config.ram_reserve_nbytes(1)) == (ram.nbytes, 0)
    assert "RAM tier" in str(made)
    none = plan("deepseek-v4-flash", 48, ram="auto", host_nbytes=8.5 * GiB)
    assert none.hierarchy_config(HierarchyConfig(device="cuda", ram="auto")).ram is None


def test_the_published_models_take_what_is_known_of_them():
    """8 and 24 GB of dense weights; 1686 slots in 21 GiB for one, 449 in 5 GiB for the other."""
    deepseek, kimi = plan("deepseek-v4-flash", 48), plan("kimi-k3", 48, "5GiB")
    assert deepseek.tiers.n_slots == 1686
    assert kimi.tiers.n_slots == 449
    assert 7e9 < share(deepseek, "dense weights").nbytes < 8e9
    assert 22e9 < share(kimi, "dense weights").nbytes < 24e9


def test_dense_layers_stream_where_they_leave_no_useful_cache_and_only_there():
    at = {gib: plan("kimi-k3", gib, "5GiB") for gib in (15.5, 23.5, 31, 39)}
    n_streamed = [len(at[gib].streamed) for gib in at]
    assert n_streamed == sorted(n_streamed, reverse=True)
    assert n_streamed[-1] == 0 < n_streamed[-2]
    cycle = 92 * 16
    for made in at.values():
        assert made.tiers.n_slots >= cycle // 4
        assert made.nbytes <= made.machine.free_nbytes - 3 * GiB
    assert plan("deepseek-v4-flash", 23.5).streamed == ()


def test_layers_that_stream_are_even_in_number_spread_evenly_and_no_more_than_needed():
    made = plan("kimi-k3", 23.5, "5GiB")
    streamed, sizes = made.streamed, made.needs.dense
    assert len(streamed) % 2 == 0
    gaps = [b - a for a, b in itertools.pairwise(streamed)]
    assert max(gaps) - min(gaps) <= 1
    assert 0 not in streamed, "the dense layer is larger than any buffer"
    buffers = 2 * max(layer_nbytes(sizes.layers[layer]) for layer in streamed)
    assert share(made, "streaming").nbytes == buffers
    two_less = sizes.resident_nbytes(streamed[2:]) - sizes.resident_nbytes(streamed)
    room = 23.5 * GiB - 3 * GiB - made.nbytes
    assert room < two_less, "two layers more would have fitted"


def test_a_small_cache_that_was_asked_for_makes_no_layer_stream():
    assert plan("kimi-k3", 31, "300MiB").streamed == ()
    assert plan("kimi-k3", 31, "5GiB").streamed != ()


def test_layers_that_stream_are_host_memory_and_cost_the_time_of_the_link():
    made = plan("kimi-k3", 23.5, "5GiB", link_bytes_per_s=20e9)
    waiting = share(made, "streamed layers")
    dense = made.needs.dense
    assert waiting.nbytes == sum(layer_nbytes(dense.layers[layer]) for layer in made.streamed)
    assert waiting.note == f"{waiting.nbytes / 20e6:.0f} ms per token at 20.0 GB/s"


@BOTH
def test_a_longer_context_takes_slots_from_the_cache_and_nothing_else(name):
    short, long = plan(name, 48, "500GiB"), plan(name, 48, "500GiB", n_context=65536)
    assert long.tiers.n_slots < short.tiers.n_slots
    assert share(long, "sequence").nbytes > share(short, "sequence").nbytes
    assert share(long, "dense weights") == share(short, "dense weights")


def test_what_does_not_fit_is_refused_with_every_number_and_every_way_out():
    with pytest.raises(BudgetError) as caught:
        plan("kimi-k3", 9, "5GiB")
    message = str(caught.value)
    assert "\n" not in message
    for fact in (
        r"0 slots and one layer needs 16",
        r"requested 5 GiB",
        r"reserve 3 GiB",
        r"slot 11.4 MiB",
        r"set the reserve to at most",
        r"left of 9 GiB of cuda:0",
        r"dense weights [\d.]+ GiB",
        r"sequence [\d.]+ GiB",
        r"scratch [\d.]+ GiB",
        r"n_context \(now 8192\)",
        r"chunk_length \(now 512\)",
    ):
        assert re.search(fact, message), fact


def test_host_memory_too_small_for_what_streams_is_refused_with_the_numbers():
    with pytest.raises(BudgetError, match=r"streamed layers 10.* 8 GiB can be taken; free another"):
        plan("kimi-k3", 23.5, "5GiB", host_nbytes=8 * GiB)


def test_a_plan_prints_as_a_table_of_every_share():
    made = plan("kimi-k3", 23.5, "5GiB")
    lines = str(made).splitlines()
    assert lines[0] == "memory of cuda:0 (a GPU): 23.5 GiB free"
    for each in (*made.shares, *made.host_shares):
        line = next(line for line in lines if line.startswith(f"  {each.name} "))
        assert format_size(each.nbytes) in line
        assert each.note in line
    assert len(lines) == 4 + len(made.shares) + len(made.host_shares)


# --- against what is really taken


@pytest.fixture(scope="module", params=["deepseek", "kimi"])
def tiny(request, tmp_path_factory):
    """A model with one layer of every kind."""
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    if request.param == "deepseek":
        ratios = (0, 4, 128)
        make_deepseek_v4(
            path, shape=DeepSeekV4Shape(num_hidden_layers=3, compress_ratios=ratios), seed=3
        )
    else:
        make_kimi_k3(path, shape=KimiK3Shape(num_hidden_layers=4), seed=3)
    return open_inventory(path)


def test_a_state_and_a_step_of_prefill_take_what_was_planned(tiny):
    """A state is planned twice (a step makes the next one beside it), scratch is a bound."""
    adapter, experts = adapter_for(tiny.metadata), DenseExperts.load(tiny)
    n_context, n_chunk = 127, 64  # a token less than would close a window and empty it
    needs = adapter.needs(tiny, n_context=n_context, chunk_length=n_chunk)
    model = adapter.load(tiny, device=CPU)
    tokens = torch.arange(n_context) % 300
    with LiveBytes() as memory:
        state = model.new_state(n_context)
        for chunk in tokens.split(n_chunk):
            before = memory.live
            memory.peak = before
            asyncio.run(model.forward(chunk, state, experts, logits="last"))
    assert 0.4 < memory.live / needs.state_nbytes <= 1
    assert memory.peak <= needs.state_nbytes + needs.activation_nbytes + needs.logits_nbytes
    assert needs.activation_nbytes < 4 * (memory.peak - before), "a bound, not a fable"


def test_dense_weights_take_what_was_planned(tiny, monkeypatch):
    taken = []
    real = dense_memory.host_memory

    def counting(sizes):
        tensors = real(sizes)
        taken.append(sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    monkeypatch.setattr("tieredmoe.adapters.dense_tensors.host_memory", counting)
    adapter = adapter_for(tiny.metadata)
    needs = adapter.needs(tiny, n_context=64, chunk_length=16)
    adapter.load(tiny, device=CPU)
    assert sum(taken) == needs.dense.file_nbytes


# --- the host


def on_host(free_nbytes):
    return Machine(
        device=CPU,
        name="the host",
        free_nbytes=free_nbytes,
        host_free_nbytes=free_nbytes,
        link_bytes_per_s=lambda: float("inf"),
    )


def test_on_the_host_all_is_of_one_memory_and_nothing_streams(tiny):
    needs = adapter_for(tiny.metadata).needs(tiny, n_context=512, chunk_length=64)
    model = open_checkpoint(tiny)
    config = HierarchyConfig(vram="1GiB", reserve=0, stage_slots=2)
    made = plan_memory(model, needs, config, machine=on_host(8 * GiB))
    assert made.host_shares == made.streamed == ()
    assert [each.name for each in made.shares] == [
        *("dense weights", "sequence", "scratch", "staging", "expert cache")
    ]
    assert made.tiers.n_slots == model.spec.n_records
    room = made.nbytes - made.tiers.top_nbytes + 30_000
    with pytest.raises(BudgetError, match=r"dense weights .*n_context \(now 512\)"):
        plan_memory(model, needs, config, machine=on_host(room))


def test_a_model_is_opened_with_the_cache_that_was_planned(tiny):
    config = HierarchyConfig(vram="1GiB", reserve=0)

    async def main():
        plan = check_model(tiny, config).plan
        async with await open_model(tiny, config) as model:
            assert model.plan.tiers == plan.tiers
            return plan.tiers, model.stats()

    tiers, stats = asyncio.run(main())
    assert stats.cache_capacity_experts == tiers.n_slots
    assert stats.cache_capacity_bytes == tiers.top_nbytes


def test_a_context_that_the_model_was_not_made_for_is_refused(tiny):
    for n_context in (1, 10**9):
        with pytest.raises(ConfigError, match=rf"n_context is {n_context}, .* from 2 to "):
            check_model(tiny, n_context=n_context)
    for name in ("n_context", "chunk_length"):
        with pytest.raises(ConfigError, match=f"{name} is 'many'"):
            asyncio.run(open_model(tiny, **{name: "many"}))


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"cuda:99.*is not there"):
        this_machine(HierarchyConfig(device="cuda:99"))
