"""The chain with a RAM tier: its budget, and that experts keep their bytes through it."""

import asyncio
import random

import pytest

from tieredmoe import HierarchyConfig, chain, open_hierarchy
from tieredmoe.errors import BudgetError, ConfigError
from tieredmoe.testing import make_deepseek_v4
from tieredmoe.testing.tiny_pack import host_arena, tiny_spec
from tieredmoe.tier_plan import plan

GIB = 1 << 30
SPEC = tiny_spec(n_experts=4096)


class HostDevice:
    """Host memory in a GPU's place."""

    def free_nbytes(self):
        return 64 << 20

    def arena_over(self, pool, planned, spec, *, strict):
        return host_arena(planned.n_slots, planned.slot_nbytes), ()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """6 routed layers, 8 experts, top-3; 48 experts."""
    return make_deepseek_v4(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1).paths[0]


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(chain, "_device", lambda _: HostDevice())


def planned(host_free_nbytes=100 * GIB, **settings):
    config = HierarchyConfig(device="cuda", reserve=0, **{"vram": "40KiB", **settings})
    return plan(SPEC, config, free_nbytes=GIB, host_free_nbytes=host_free_nbytes)


def test_without_one_there_is_staging():
    assert not planned().keeps


def test_a_ram_tier_has_the_slots_of_its_budget_and_takes_the_place_of_staging():
    found = planned(ram="8MiB")
    assert found.keeps
    assert found.stage_slots == (8 << 20) // found.stage_slot_nbytes
    assert found.nbytes == found.stage_nbytes == 8 << 20


def test_auto_takes_what_the_host_has_free_but_for_the_reserve():
    found = planned(ram="auto", ram_reserve="99.99GiB")
    assert found.keeps
    assert found.stage_slots == (100 * GIB - int(99.99 * GIB)) // found.stage_slot_nbytes


def test_auto_takes_no_more_than_all_experts_need():
    assert planned(ram="auto").stage_slots == SPEC.n_records


def test_auto_is_staging_where_a_tier_would_be_too_small_to_read_into():
    found = planned(ram="auto", ram_reserve="100GiB", stage_slots=None)
    assert not found.keeps
    assert found.stage_slots == planned().stage_slots


def test_shares_are_of_what_the_host_has_free():
    assert planned(host_free_nbytes=80 << 20, ram="10%", ram_reserve="8MiB").nbytes == 8 << 20


def test_more_than_there_is_beside_the_reserve_is_refused_with_the_numbers():
    with pytest.raises(BudgetError, match=r"64 MiB free, of which ram_reserve keeps 62 MiB"):
        planned(host_free_nbytes=64 << 20, ram="4MiB", ram_reserve="62MiB")


def test_a_tier_too_small_to_read_into_is_refused_with_what_it_needs():
    needed = planned().stage_slots
    with pytest.raises(
        BudgetError, match=rf"would have 2 slots and needs {needed} .* ram is 8 KiB"
    ):
        planned(ram="8KiB")


def test_a_ram_tier_in_the_memory_of_the_top_tier_is_taken_off_first():
    config = HierarchyConfig(vram="1GiB", reserve=0, ram="1MiB", ram_reserve=0)
    found = plan(tiny_spec(), config, free_nbytes=2 << 20)
    assert found.keeps
    assert found.nbytes <= 2 << 20
    config = HierarchyConfig(vram="1GiB", reserve=0, ram="48KiB", ram_reserve=0)
    with pytest.raises(BudgetError, match="slots of the RAM tier take 48 KiB first"):
        plan(tiny_spec(), config, free_nbytes=49152)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ram": "much"}, "ram: 'much' is not a size"),
        ({"ram": True}, "ram: True is neither"),
        ({"ram_reserve": None}, "ram_reserve: None is neither"),
        ({"ram": "1GiB", "stage_slots": 8}, "stage_slots: reads land in the RAM tier"),
        ({"ram": "auto"}, "ram: 'auto' is for a GPU"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        HierarchyConfig(**settings)


def test_experts_keep_their_bytes_through_every_tier(model, device):
    """Over a GGUF, whose roles lie in the pages around them: back down they go where they lay."""

    async def main():
        on_gpu = HierarchyConfig(
            device="cuda",
            vram=f"{5 * 40960}",
            reserve=0,
            ram="720KiB",
            ram_reserve=0,
            window="72KiB",
        )
        reference = HierarchyConfig(vram="64MiB", reserve=0, stage_slots=4)
        rng = random.Random(1)
        async with (
            await open_hierarchy(model, on_gpu) as hierarchy,
            await open_hierarchy(model, reference) as right,
        ):
            assert hierarchy.top.source.name == "ram"
            for _ in range(300):
                layer = rng.choice(hierarchy.spec.layers)
                experts = rng.sample(range(8), 3)
                nbytes = hierarchy.spec.layouts[layer].payload_nbytes
                async with (
                    hierarchy.acquire(layer, experts) as lease,
                    right.acquire(layer, experts) as other,
                ):
                    await lease.ready()
                    await other.ready()
                    for expert in experts:
                        seen = lease.slots[expert].view[:nbytes]
                        assert bytes(seen) == bytes(other.slots[expert].view[:nbytes])
            hierarchy.check()
            stats = hierarchy.stats()
            assert [tier.name for tier in stats.tiers] == ["top", "ram"]
            assert stats.ram_hits > 50
            assert stats.copied_back > 50
            assert stats.pack_reads == stats.cache_misses - stats.ram_hits

    asyncio.run(main())


def test_what_was_counted_between_two_snapshots_is_counted_per_tier(model, device):
    async def main():
        config = HierarchyConfig(
            device="cuda", vram="200KiB", reserve=0, ram="720KiB", window="72KiB"
        )
        async with await open_hierarchy(model, config) as hierarchy:
            snapshots = []
            for _ in range(2):
                for layer in hierarchy.spec.layers:
                    async with hierarchy.acquire(layer, [0, 1, 2]) as lease:
                        await lease.ready()
                snapshots.append(hierarchy.stats())
            first, both = snapshots
            later = both.since(first)
            for now, then, between in zip(both.tiers, first.tiers, later.tiers, strict=True):
                assert between.hits == now.hits - then.hits
                assert between.slots == now.slots
            as_json = both.as_dict()
            assert as_json["ram_hits"] == both.tiers[1].hits == as_json["tiers"][1]["hits"]
            assert as_json["d2h_bytes"] == both.tiers[1].copied_back_bytes

    asyncio.run(main())
