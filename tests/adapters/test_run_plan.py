"""What a machine that is not there would make of a model: slots, ceilings and costs that agree."""

import pytest
from gguf import GGMLQuantizationType as Q

from tieredmoe.adapters.run_plan import plan_run
from tieredmoe.errors import BudgetError, UnsupportedModelError
from tieredmoe.pack import open_checkpoint
from tieredmoe.pack.token_costs import Rates
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3
from tieredmoe.testing.tiny_container import write_shards

GPU = Rates(disk=12e9, link=25e9, memory=1000e9)
HOST = Rates(disk=12e9, link=None, memory=60e9)
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four routed layers of 16 experts, top-4: a token uses 16."""
    shape = KimiK3Shape(
        num_hidden_layers=5, vocab_size=300, num_experts=16, num_experts_per_token=4
    )
    path = tmp_path_factory.mktemp("plan") / "m.gguf"
    return make_kimi_k3(path, shape=shape, types=KimiK3Types.uniform(Q.Q8_0)).paths[0]


def vram_for(model, n_slots):
    """Free memory of a GPU that leaves room for just so many slots."""
    memory = plan_run(model, GPU, ram_nbytes=1 << 40, vram_nbytes=1 << 40, reserve=0).memory
    fixed = memory.nbytes - memory.tiers.top_nbytes
    return fixed + n_slots * memory.tiers.slot_nbytes


def planned(model, n_slots, *, ram_nbytes=1 << 40):
    return plan_run(
        model, GPU, ram_nbytes=ram_nbytes, vram_nbytes=vram_for(model, n_slots), reserve=0
    )


def test_no_gpu_is_needed_to_plan_one(model):
    made = planned(model, 8)
    assert (made.top_slots, made.n_experts, made.token_experts) == (8, 64, 16)
    spec = open_checkpoint(model).spec
    assert made.token_bytes.experts == 4 * sum(x.payload_nbytes for x in spec.layouts.values())
    assert made.token_bytes.reads >= made.token_bytes.experts


def test_below_the_token_cycle_the_ceiling_is_slots_over_it_and_ends_the_table(model):
    made = planned(model, 8)
    assert made.top_ceiling == 0.5
    assert [cost.top_hits for cost in made.costs] == [0.0, 0.25, 0.5]
    assert made.ceiling == 1


def test_above_the_token_cycle_any_hit_rate_may_be(model):
    assert [cost.top_hits for cost in planned(model, 20).costs] == [0, 0.25, 0.5, 0.75, 0.9, 1]


def test_where_all_experts_fit_there_is_nothing_left_to_ask(model):
    made = planned(model, 64)
    assert made.host_slots == 0
    (only,) = made.costs
    assert (only.top_hits, only.disk_nbytes, only.bound) == (1.0, 0, "memory")
    assert made.best == only


def test_ram_that_is_left_counts_as_slots_below_the_gpu(model):
    whole = planned(model, 8)
    assert whole.host_slots == 64 - 8
    tight = whole.memory.host_nbytes + 4 * whole.memory.tiers.stage_slot_nbytes
    made = planned(model, 8, ram_nbytes=tight)
    assert made.host_slots == 4
    assert made.ceiling == (8 + 4) / 16
    last = made.costs_with_host[-1]
    assert (last.top_hits, last.host_hits) == (0.5, 0.25)
    assert last.disk_nbytes == round(0.25 * made.token_bytes.reads)
    assert made.best == last


def test_without_ram_to_spare_there_is_no_second_column(model):
    whole = planned(model, 8)
    made = planned(model, 8, ram_nbytes=whole.memory.host_nbytes)
    assert (made.host_slots, made.costs_with_host) == (0, ())
    assert made.best == made.costs[-1]


def test_on_a_host_the_cache_is_in_its_own_memory_and_nothing_crosses_a_link(model):
    made = plan_run(model, HOST, ram_nbytes=1 << 40, reserve=0)
    assert (made.top_slots, made.host_slots) == (64, 0)
    assert made.best.link_nbytes == 0


def test_dense_layers_that_stream_cross_the_link_for_every_token(model):
    whole = planned(model, 4)
    dense = whole.memory.needs.dense
    nbytes = vram_for(model, 4) - sum(sum(each.values()) for each in dense.layers.values()) // 3
    made = plan_run(model, GPU, ram_nbytes=1 << 40, vram_nbytes=nbytes, reserve=0)
    assert made.memory.streamed
    streamed = sum(sum(dense.layers[layer].values()) for layer in made.memory.streamed)
    assert made.token_bytes.streamed == streamed > 0
    assert made.costs[0].link_nbytes == made.token_bytes.experts + streamed


def test_a_machine_that_is_too_small_is_refused_with_the_numbers(model):
    with pytest.raises(BudgetError, match="one layer needs 4"):
        plan_run(model, GPU, ram_nbytes=1 << 40, vram_nbytes=700 * MIB, reserve="600MiB")
    with pytest.raises(BudgetError, match="host memory"):
        plan_run(model, GPU, ram_nbytes=1 * MIB, vram_nbytes=1 << 40, reserve=0)


def test_a_model_that_does_not_run_is_not_planned(tmp_path):
    path = write_shards(tmp_path / "x.gguf", architecture="llama", metadata={}, shards=[[]])[0]
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported"):
        plan_run(path, GPU, ram_nbytes=1 << 40, vram_nbytes=1 << 40)
