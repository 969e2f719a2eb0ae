"""Tokens through a decode step: right, repeatable, and nothing held, whatever becomes of them."""

import asyncio

import pytest
import torch
from toy_step import (
    ACTIVATION,
    LAYERS,
    TOP_K,
    TOY_PACK,
    VOCAB,
    FenceStream,
    ReferenceBatches,
    ToyModel,
    decoded,
)

from tieredmoe.adapters import device_experts, device_stepper
from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.errors import ClosedError, ExpertLoadError, PromptTooLongError, TokenizerError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.testing.arena import LateArena
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.faults import FaultPlan
from tieredmoe.testing.loop import sim_run
from tieredmoe.testing.tiny_pack import host_arena, tiny_hierarchy
from tieredmoe.tier import Tier

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SIZES = [(2,), (3,), (2, 5), (1, 2), (18,), (4, 18)]
"""Slots of the tiers, from the disk up: from top-k to everything."""


@pytest.fixture(scope="module")
def wanted():
    """The logits of the functional forward."""

    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (18,))
        async with hierarchy:
            model = ToyModel()
            return await decoded(model, model.new_state(20), TieredExperts(hierarchy), TOKENS)

    return sim_run(main())


def at_rest(hierarchy):
    """Assert that nothing is held and nobody waits."""
    hierarchy.check()
    assert "0 leases" in repr(hierarchy)
    assert not any(entry.pins for entry in hierarchy.top.residency.entries.values())


def late_hierarchy(n_staging, n_slots):
    """A hierarchy whose top tier is a device, with copies that take their time."""
    spec = TOY_PACK.spec
    source = PackSource(TOY_PACK, SimDisk([TOY_PACK.image]))
    arenas = [
        host_arena(n_staging, spec.slot_nbytes),
        LateArena(n_slots, spec.slot_nbytes, latency_s=0.01),
    ]
    for arena in arenas:
        policy = make_policy("lru", n_slots=arena.n_slots, layers=spec.layers, top_k=spec.top_k)
        source = Tier(name="tier", source=source, arena=arena, policy=policy, policy_name="lru")
    return Hierarchy(source, spec)


def providers(hierarchy):
    return [
        TieredExperts(hierarchy),
        DeviceExperts(hierarchy, ReferenceBatches(hierarchy)),
        DeviceExperts(hierarchy, ReferenceBatches(hierarchy, kernels=False)),
    ]


@pytest.mark.parametrize("slots", SIZES)
@pytest.mark.parametrize("n", range(3), ids=["eager", "device", "device-without-kernels"])
def test_steps_equal_the_functional_forward_at_every_cache_size(wanted, slots, n):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, slots, seed=n)
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = providers(hierarchy)[n]
            logits = await decoded(model, model.new_state(20), experts, TOKENS)
            assert torch.equal(logits, wanted)
            at_rest(hierarchy)
            executed = hierarchy.stats().executed_experts
            assert dict(executed) == dict.fromkeys(LAYERS, TOP_K * len(TOKENS))

    sim_run(main())


def test_hits_are_launched_at_once_and_misses_as_they_land(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (18,), seed=4)
        async with hierarchy:
            batches = ReferenceBatches(hierarchy)
            model, experts = DeviceModel(ToyModel()), DeviceExperts(hierarchy, batches)
            logits = await decoded(model, model.new_state(20), experts, TOKENS)
            assert torch.equal(logits, wanted)
            return batches.log

    log = sim_run(main())
    assert [layer for layer, _ in log] == list(LAYERS) * len(TOKENS)
    # Nothing was there, so nothing was launched until the one and then the other had come.
    assert [len(portion) for portion in log[0][1]] == [0, 1, 1]
    runs = [run for _, run in log[1:]]
    assert "resident" in runs
    assert [1, 1] in [[len(portion) for portion in run] for run in runs]


@pytest.fixture
def stream(monkeypatch):
    """The stream that everything is enqueued on."""
    stream = FenceStream()
    for module in (device_experts, device_stepper):
        monkeypatch.setattr(module, "current_stream", lambda device: stream)
    return stream


def test_what_is_resident_is_launched_behind_the_copies_that_still_run(wanted, stream):
    async def main():
        async with late_hierarchy(4, 18) as hierarchy:
            for layer in LAYERS:
                async with hierarchy.acquire(layer, range(6)) as lease:
                    await lease.ready()
            assert hierarchy.top.arena.copies
            batches = ReferenceBatches(hierarchy, stream=stream)
            model, experts = DeviceModel(ToyModel()), DeviceExperts(hierarchy, batches)
            logits = await decoded(model, model.new_state(20), experts, TOKENS)
            torch.testing.assert_close(logits, wanted)
            assert {run for _, run in batches.log} == {"resident"}
            at_rest(hierarchy)

    sim_run(main())


@pytest.mark.parametrize("slots", [(2, 2), (1, 3), (4, 18)])
def test_what_is_launched_is_behind_the_copies_it_reads(wanted, slots, stream):
    async def main():
        async with late_hierarchy(*slots) as hierarchy:
            batches = ReferenceBatches(hierarchy, stream=stream)
            model, experts = DeviceModel(ToyModel()), DeviceExperts(hierarchy, batches)
            state, tokens = model.new_state(20), torch.tensor(TOKENS)
            first = await model.forward(tokens[:4], state, experts, logits="all")
            rest = await decoded(model, state, experts, TOKENS[4:])
            torch.testing.assert_close(torch.cat([first, rest]), wanted)
            assert stream.waited_for
            at_rest(hierarchy)

    sim_run(main())


def test_prompts_in_any_chunks_between_steps_change_nothing(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (2, 5))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            for cuts in ([5, 1, 1, 5], [1, 1, 4, 1, 3, 1, 1], [11, 1]):
                state = model.new_state(20)
                chunks = torch.tensor(TOKENS).split(cuts)
                logits = [await model.forward(c, state, experts, logits="all") for c in chunks]
                assert torch.equal(torch.cat(logits), wanted)

    sim_run(main())


def test_sequences_side_by_side_do_not_see_each_other(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (2, 4))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            states = [model.new_state(20) for _ in range(3)]
            async with asyncio.TaskGroup() as tasks:
                runs = [
                    tasks.create_task(decoded(model, state, experts, TOKENS)) for state in states
                ]
            for run in runs:
                assert torch.equal(run.result(), wanted)
            at_rest(hierarchy)

    sim_run(main())


def test_a_copy_of_a_sequence_in_the_step_goes_its_own_way(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (18,))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            state = model.new_state(20)
            await decoded(model, state, experts, TOKENS[:6])
            copy = state.copy()
            await decoded(model, state, experts, [0, 0])
            assert torch.equal(await decoded(model, copy, experts, TOKENS[6:]), wanted[6:])

    sim_run(main())


@pytest.mark.parametrize("n", [1, 2], ids=["device", "device-without-kernels"])
def test_a_token_cancelled_at_any_step_of_the_loop_holds_nothing_and_can_be_repeated(wanted, n):
    async def cancelled_after(n_steps):
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (1, 3))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = providers(hierarchy)[n]
            state = model.new_state(20)
            await decoded(model, state, experts, TOKENS[:1])
            token = torch.tensor(TOKENS[1:2])
            step = asyncio.create_task(model.forward(token, state, experts, logits="last"))
            loop = asyncio.get_running_loop()
            loop.at_step(loop.steps + n_steps, step.cancel)
            try:
                await step
            except asyncio.CancelledError:
                at_rest(hierarchy)
                assert state.n_tokens == 1
                # Another sequence may come in between.
                await decoded(model, model.new_state(20), experts, [7])
                await model.forward(token, state, experts, logits="last")
            assert torch.equal(await decoded(model, state, experts, TOKENS[2:4]), wanted[2:4])
            at_rest(hierarchy)
            return step.cancelled()

    n_steps = 0
    while sim_run(cancelled_after(n_steps), collect_garbage=False):
        n_steps += 1
    assert n_steps > 20


def test_cancelled_while_it_waits_for_its_turn_a_token_has_done_nothing(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (1, 3))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            first, second = model.new_state(20), model.new_state(20)
            running = asyncio.create_task(decoded(model, first, experts, TOKENS))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(decoded(model, second, experts, TOKENS))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert second.n_tokens == 0
            assert torch.equal(await running, wanted)

    sim_run(main())


@pytest.mark.parametrize("n", range(3), ids=["eager", "device", "device-without-kernels"])
def test_a_token_whose_expert_cannot_be_read_is_repeatable(wanted, n):
    async def main():
        faults = FaultPlan(rate=0.25, seed=n)
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (1, 2), faults=faults)
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = providers(hierarchy)[n]
            state = model.new_state(20)
            n_failed, logits = 0, []
            while state.n_tokens < len(TOKENS):
                at = state.n_tokens
                try:
                    logits.append(await decoded(model, state, experts, [TOKENS[at]]))
                except ExpertLoadError:
                    n_failed += 1
                    assert state.n_tokens == at
                at_rest(hierarchy)
            assert n_failed >= 3
            assert torch.equal(torch.cat(logits), wanted)

    sim_run(main())


def test_what_no_step_can_take_is_refused_before_it_runs():
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (4,))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            state = model.new_state(2)
            with pytest.raises(TokenizerError):
                await decoded(model, state, experts, [VOCAB])
            await decoded(model, state, experts, [1, 2])
            with pytest.raises(PromptTooLongError):
                await decoded(model, state, experts, [3])
            assert state.n_tokens == 2

    sim_run(main())


def test_a_batch_larger_than_the_workspace_goes_in_several():
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (2, 5))
        async with hierarchy:
            model = ToyModel()
            generator = torch.Generator().manual_seed(1)
            x, routing = model.enter_layer(0, torch.randn(11, 8, generator=generator))
            sums = []
            for n_tokens in (11, 4, 1):
                batches = ReferenceBatches(hierarchy, n_tokens=n_tokens)
                total, other = await DeviceExperts(hierarchy, batches).run(
                    1, x, routing, ACTIVATION, meanwhile=lambda: "meanwhile"
                )
                assert other == "meanwhile"
                sums.append(total)
            torch.testing.assert_close(sums[1], sums[0])
            torch.testing.assert_close(sums[2], sums[0])
            assert hierarchy.stats().executed_experts[1] == 3 * 11 * TOP_K

    sim_run(main())


def test_a_closed_model_waits_for_its_turn_and_then_refuses(wanted):
    async def main():
        hierarchy, _ = tiny_hierarchy(TOY_PACK, (1, 3))
        async with hierarchy:
            model = DeviceModel(ToyModel())
            experts = DeviceExperts(hierarchy, ReferenceBatches(hierarchy))
            state = model.new_state(20)
            step = asyncio.create_task(decoded(model, state, experts, TOKENS[:1]))
            await asyncio.sleep(0)
            await model.close()
            assert torch.equal(await step, wanted[:1])
            with pytest.raises(ClosedError):
                await decoded(model, state, experts, TOKENS[:1])
            # What the sequence was, it still is.
            assert state.n_tokens == 1
            model = DeviceModel(ToyModel())
            assert torch.equal(await decoded(model, state, experts, TOKENS[1:]), wanted[1:])

    sim_run(main())
