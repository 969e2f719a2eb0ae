"""A hierarchy over a simulated disk, checked at every step and at the end."""

import asyncio

from tieredmoe.testing.loop import sim_run
from tieredmoe.testing.tiny_pack import TinyPack, tiny_hierarchy, tiny_spec
from tieredmoe.tier import Tier

CHAINS = [(2,), (8,), (1, 4), (2, 8), (8, 5), (6, 2, 8), (12, 1, 3)]


def payload_of(hierarchy, lease, expert):
    layout = hierarchy.spec.layouts[lease.layer]
    return bytes(lease.slots[expert].view[: layout.payload_nbytes])


def tiers(hierarchy):
    tier = hierarchy.top
    while isinstance(tier, Tier):
        yield tier
        tier = tier.source


def assert_at_rest(hierarchy, disk):
    """Nothing pinned, nothing in flight, nobody writing: what every scenario must leave behind."""
    for tier in tiers(hierarchy):
        tier.check()
        assert all(entry.pins == 0 for entry in tier.residency.entries.values()), tier
    assert disk.stats().in_flight == 0
    assert disk.violations == []


def run(scenario, slots=(2, 8), *, spec=None, **options):
    """Run ``scenario(hierarchy, pack)`` in virtual time, checking every invariant at every step."""
    pack = TinyPack(spec or tiny_spec())

    async def main():
        hierarchy, disk = tiny_hierarchy(pack, slots, **options)
        asyncio.get_running_loop().on_step(
            lambda: [tier.check() for tier in tiers(hierarchy) if not tier.closed]
        )
        async with hierarchy:
            result = await scenario(hierarchy, pack)
            await disk.drain()  # what was released in mid-read still ends
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert_at_rest(hierarchy, disk)
        assert disk.violations == []
        return result

    return sim_run(main(), collect_garbage=False)
