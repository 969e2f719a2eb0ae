"""Streams over a simulated disk: each expert once, whatever the size, and nothing kept."""

import asyncio
from contextlib import aclosing

import pytest
from hierarchy_stage import CHAINS, payload_of, run

from tieredmoe.errors import ExpertLoadError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.faults import FaultPlan
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec


@pytest.mark.parametrize("slots", CHAINS)
def test_a_stream_serves_a_set_larger_than_the_tier_once_each(slots):
    async def scenario(hierarchy, pack):
        for layer in hierarchy.spec.layers:
            seen = []
            async with aclosing(hierarchy.stream(layer, [3, *range(8), 3])) as leases:
                async for lease in leases:
                    for expert in lease.experts:
                        seen.append(expert)
                        assert payload_of(hierarchy, lease, expert) == pack.payload(
                            ExpertKey(layer, expert)
                        )
            assert sorted(seen) == list(range(8))

    run(scenario, slots)


def test_leaving_a_stream_early_gives_everything_back():
    async def scenario(hierarchy, _):
        async with aclosing(hierarchy.stream(0, range(8))) as leases:
            async for _ in leases:
                break

    run(scenario, (2, 4))


def test_a_failed_expert_ends_its_stream_with_everything_given_back():
    async def scenario(hierarchy, _):
        with pytest.raises(ExpertLoadError):
            [lease async for lease in hierarchy.stream(0, range(8))]

    pack = TinyPack(tiny_spec())
    bad = pack.locate(ExpertKey(0, 6)).offset
    run(scenario, (2, 4), faults=FaultPlan().at(0, bad))


def test_two_streams_larger_than_the_tier_take_turns():
    async def scenario(hierarchy, _):
        async def consume(layer):
            seen = []
            async with aclosing(hierarchy.stream(layer, range(8))) as leases:
                async for lease in leases:
                    seen += lease.experts
                    await asyncio.sleep(0.001)
            assert sorted(seen) == list(range(8))

        async with asyncio.TaskGroup() as tasks:
            for layer in hierarchy.spec.layers:
                tasks.create_task(consume(layer))

    run(scenario, (1, 3))
