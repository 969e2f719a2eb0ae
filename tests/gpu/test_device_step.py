"""Decode steps on a GPU: recorded is eager, and no bit depends on caches, arrivals or company."""

import asyncio

import pytest
import torch
from gguf import GGMLQuantizationType as T
from toy_step import LAYERS, TOP_K, ToyModel, ToyPack, decoded, toy_spec

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.dense_tiers import DenseTiers
from tieredmoe.adapters.device_batches import DeviceBatches
from tieredmoe.adapters.device_experts import DeviceExperts
from tieredmoe.adapters.device_graphs import Recorder
from tieredmoe.adapters.device_model import DeviceModel
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.moe.kernels import Workspace
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_pack import host_arena
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier import Tier

pytestmark = pytest.mark.gpu

HIDDEN = 64
N_TOKENS = 40
TOKENS = torch.randint(0, 13, (N_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
PACKS = {
    kind: ToyPack(toy_spec(hidden=HIDDEN, width=32, ggml_type=kind)) for kind in (T.MXFP4, T.F32)
}
"""F32 has no kernel: its layers never run recorded."""

KINDS = pytest.mark.parametrize("kind", PACKS, ids=lambda kind: kind.name)


async def tiers(pack, n_slots, device, *, n_staging=2):
    from tieredmoe.memory.cuda import CudaArena  # noqa: PLC0415 (needs a device)

    spec = pack.spec
    source = PackSource(pack, MemoryBackend([pack.image]))
    arenas = [
        host_arena(n_staging, spec.slot_nbytes),
        CudaArena(
            n_slots=n_slots,
            slot_nbytes=spec.slot_nbytes,
            layers=spec.layers,
            n_experts=spec.n_experts,
            device=device,
        ),
    ]
    for name, arena in zip(("staging", "top"), arenas, strict=True):
        policy = make_policy("lru", n_slots=arena.n_slots, layers=spec.layers, top_k=spec.top_k)
        source = Tier(name=name, source=source, arena=arena, policy=policy, policy_name="lru")
    return Hierarchy(source, spec)


def experts_of(hierarchy, arena, spec, device, *, n_tokens=16):
    workspace = Workspace(spec.layouts.values(), n_tokens=n_tokens, top_k=spec.top_k, device=device)
    return DeviceExperts(hierarchy, DeviceBatches(spec, arena, workspace))


class Eagerly:
    """``experts`` whose steps are not recorded."""

    def __init__(self, experts):
        self.run = experts.run
        self.stepper = lambda step: EagerStepper(step, self)


def dense(pack):
    records = {
        layer: torch.stack(
            [
                torch.frombuffer(bytearray(pack.image), dtype=torch.uint8)[e.offset :][: e.nbytes]
                for e in (
                    pack.locate(ExpertKey(layer, expert)) for expert in range(pack.spec.n_experts)
                )
            ]
        )
        for layer in pack.spec.layers
    }
    return DenseExperts(pack.spec, records)


def at_rest(hierarchy):
    hierarchy.check()
    assert "0 leases" in repr(hierarchy)
    assert not any(entry.pins for entry in hierarchy.top.residency.entries.values())


@pytest.fixture(scope="module")
def wanted():
    """Logits on the device with every expert there, step by step, nothing recorded."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    found = {}
    for kind, pack in PACKS.items():
        slots = DenseTiers(dense(pack), device)
        experts = Eagerly(experts_of(slots, slots, pack.spec, device))
        model = DeviceModel(ToyModel(device, hidden=HIDDEN))
        found[kind] = asyncio.run(decoded(model, model.new_state(99), experts, TOKENS))
    return found


@KINDS
def test_steps_on_the_device_match_the_reference_on_the_host(wanted, kind, cuda):
    model = ToyModel(hidden=HIDDEN)
    logits = asyncio.run(decoded(model, model.new_state(99), dense(PACKS[kind]), TOKENS))
    error = (wanted[kind].cpu() - logits).norm() / logits.norm()
    assert error < (2e-3 if kind == T.MXFP4 else 1e-4)


def test_steps_run_packed_experts_tiny(device):
    """Also under Triton's interpreter, where nothing is recorded."""
    pack = ToyPack(toy_spec(hidden=32, width=32, ggml_type=T.MXFP4, layers=(1,)))
    slots = DenseTiers(dense(pack), device)
    experts = experts_of(slots, slots, pack.spec, device, n_tokens=1)
    model, host = (ToyModel(where, hidden=32, layers=(1,)) for where in (device, "cpu"))
    logits = asyncio.run(decoded(DeviceModel(model), model.new_state(99), experts, [3, 1]))
    wanted = asyncio.run(decoded(host, host.new_state(99), dense(pack), [3, 1]))
    torch.testing.assert_close(logits.cpu(), wanted, atol=2e-3, rtol=2e-3)


@KINDS
def test_recorded_steps_equal_eager_ones_bit_for_bit(wanted, kind, cuda):
    slots = DenseTiers(dense(PACKS[kind]), cuda)
    experts = experts_of(slots, slots, PACKS[kind].spec, cuda)
    model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))
    for _ in range(2):  # the second sequence finds everything recorded
        logits = asyncio.run(decoded(model, model.new_state(99), experts, TOKENS))
        assert torch.equal(logits, wanted[kind])


@KINDS
@pytest.mark.parametrize("n_slots", [TOP_K, 3, 5, 9, 18])
def test_no_bit_depends_on_how_much_is_cached(wanted, kind, n_slots, cuda):
    async def main():
        async with await tiers(PACKS[kind], n_slots, cuda) as hierarchy:
            experts = experts_of(hierarchy, hierarchy.arena, hierarchy.spec, cuda)
            model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))
            logits = await decoded(model, model.new_state(99), experts, TOKENS)
            assert torch.equal(logits, wanted[kind])
            at_rest(hierarchy)
            executed = dict(hierarchy.stats().executed_experts)
            assert executed == dict.fromkeys(LAYERS, TOP_K * N_TOKENS)
            torch.cuda.synchronize()

    asyncio.run(main())


@KINDS
@pytest.mark.parametrize("n_slots", [TOP_K, 5, 18])
def test_nor_on_the_thread_in_which_the_tiers_run(wanted, kind, n_slots, cuda):
    async def main():
        async with await ThreadedHierarchy.aopen(
            lambda: tiers(PACKS[kind], n_slots, cuda)
        ) as hierarchy:
            experts = experts_of(hierarchy, hierarchy.arena, hierarchy.spec, cuda)
            model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))
            logits = await decoded(model, model.new_state(99), experts, TOKENS)
            assert torch.equal(logits, wanted[kind])
            torch.cuda.synchronize()

    asyncio.run(main())


@KINDS
def test_sequences_side_by_side_with_prompts_in_between_do_not_see_each_other(wanted, kind, cuda):
    async def main():
        async with await tiers(PACKS[kind], 4, cuda) as hierarchy:
            experts = experts_of(hierarchy, hierarchy.arena, hierarchy.spec, cuda, n_tokens=3)
            model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))

            async def sequence(n_prompt):
                state, tokens = model.new_state(99), torch.tensor(TOKENS)
                first = await model.forward(tokens[:n_prompt], state, experts, logits="all")
                return torch.cat([first, await decoded(model, state, experts, TOKENS[n_prompt:])])

            async with asyncio.TaskGroup() as tasks:
                runs = [tasks.create_task(sequence(n)) for n in (1, 5, 17)]
            for run in runs:
                assert torch.equal(run.result(), wanted[kind])
            at_rest(hierarchy)
            torch.cuda.synchronize()

    asyncio.run(main())


@KINDS
def test_a_cancelled_token_holds_nothing_and_can_be_repeated(wanted, kind, cuda):
    async def main():
        async with await tiers(PACKS[kind], 3, cuda, n_staging=1) as hierarchy:
            experts = experts_of(hierarchy, hierarchy.arena, hierarchy.spec, cuda)
            model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))
            state, logits, n_cancelled = model.new_state(99), [], 0
            for i, token in enumerate(TOKENS):
                step = asyncio.create_task(decoded(model, state, experts, [token]))
                for _ in range(i):
                    await asyncio.sleep(0)
                step.cancel()
                try:
                    logits.append(await step)
                except asyncio.CancelledError:
                    n_cancelled += 1
                    at_rest(hierarchy)
                    logits.append(await decoded(model, state, experts, [token]))
            assert n_cancelled > 3
            assert torch.equal(torch.cat(logits), wanted[kind])
            at_rest(hierarchy)
            torch.cuda.synchronize()

    asyncio.run(main())


def test_a_recorded_token_allocates_nothing_that_stays(cuda):
    async def main():
        slots = DenseTiers(dense(PACKS[T.MXFP4]), cuda)
        experts = experts_of(slots, slots, PACKS[T.MXFP4].spec, cuda)
        model = DeviceModel(ToyModel(cuda, hidden=HIDDEN))
        state = model.new_state(999)
        await decoded(model, state, experts, TOKENS[:5])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(cuda)
        for token in TOKENS * 3:
            await decoded(model, state, experts, [token])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated(cuda) == before

    asyncio.run(main())


def test_a_recording_that_failed_can_be_repeated(cuda):
    x, calls = torch.zeros(4, device=cuda), []

    def work():
        calls.append(x + 1)
        if len(calls) == 2:
            raise MemoryError
        x.copy_(calls[-1])

    recording = Recorder(cuda).recording(work)
    recording()
    with pytest.raises(MemoryError):
        recording()
    recording()
    recording()
    assert len(calls) == 3
    assert x.tolist() == [3.0] * 4
