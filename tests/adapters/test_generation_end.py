"""A generation that has ended, however it did, keeps its report and nothing of the model."""

import asyncio
import gc
import weakref

import pytest
from toy_step import ToyModel, ToyPack, toy_spec

from tieredmoe.adapters.generation import Generation
from tieredmoe.adapters.sampling import Sampler
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.errors import ClosedError, ConfigError
from tieredmoe.testing.tiny_pack import tiny_hierarchy

PACK = ToyPack(toy_spec())


def generation_over(hierarchy):
    model = ToyModel()
    generation = Generation(
        model=model,
        experts=TieredExperts(hierarchy),
        stats=hierarchy.stats,
        prompt=[3, 1, 4, 1, 5],
        sampler=Sampler(),
        decoder=None,
        stop_ids=frozenset(),
        max_new_tokens=6,
        n_context=20,
        chunk_length=2,
    )
    return generation, weakref.ref(model)


async def to_its_end(generation, hierarchy):
    async for _ in generation:
        pass


async def left_after_two(generation, hierarchy):
    pieces = aiter(generation)
    await anext(pieces)
    await anext(pieces)
    await pieces.aclose()


async def cancelled(generation, hierarchy):
    task = asyncio.create_task(to_its_end(generation, hierarchy))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def closed_under_it(generation, hierarchy):
    await hierarchy.close()
    with pytest.raises(ClosedError):
        await to_its_end(generation, hierarchy)


@pytest.mark.parametrize("end", [to_its_end, left_after_two, cancelled, closed_under_it])
def test_an_ended_generation_keeps_its_report_and_nothing_of_the_model(end):
    async def main():
        hierarchy, _ = tiny_hierarchy(PACK, (18,))
        async with hierarchy:
            generation, model = generation_over(hierarchy)
            await end(generation, hierarchy)
            gc.collect()
            assert model() is None
            report = generation.report
            assert generation.report == report
            assert report.n_generated == len(generation.token_ids)
            with pytest.raises(ConfigError):
                await to_its_end(generation, hierarchy)

    asyncio.run(main())
