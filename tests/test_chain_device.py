"""The chain in front of a GPU, with host memory in the GPU's place: budget, staging, failures."""

import asyncio
import threading

import pytest

from tieredmoe import HierarchyConfig, chain, open_hierarchy
from tieredmoe.budget import parse_size
from tieredmoe.errors import BudgetError, ConfigError, DeviceError
from tieredmoe.testing import make_deepseek_v4
from tieredmoe.testing.tiny_pack import host_arena, tiny_spec
from tieredmoe.tier_plan import plan, stage_slots_before_device

FREE_NBYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """6 routed layers, 8 experts, top-3."""
    return make_deepseek_v4(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1).paths[0]


class FakeDevice:
    """Makes arenas in host memory, and remembers what it was asked."""

    def __init__(self, refused=()):
        self.refused = refused
        self.arenas = []
        self.planned = None
        self.pool = None
        self.strict = None
        self.hurry = threading.Event()
        self.hurry.set()
        self.asked = threading.Event()

    def free_nbytes(self):
        return FREE_NBYTES

    def arena_over(self, pool, planned, spec, *, strict):
        self.pool, self.planned, self.strict = pool, planned, strict
        self.asked.set()
        self.hurry.wait()
        if isinstance(self.refused, Exception):
            raise self.refused
        self.arenas.append(host_arena(planned.n_slots, planned.slot_nbytes))
        return self.arenas[-1], self.refused


@pytest.fixture
def device(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(chain, "_device", lambda _: device)
    return device


def config(**settings):
    return HierarchyConfig(device="cuda", **({"vram": "1MiB", "reserve": 0} | settings))


async def fill(hierarchy):
    for layer in hierarchy.spec.layers:
        async with hierarchy.acquire(layer, range(3)) as lease:
            await lease.ready()


def test_there_is_staging_in_front_of_a_gpu_and_the_pool_is_all_staging(model, device):
    async def main():
        async with await open_hierarchy(model, config()) as hierarchy:
            await fill(hierarchy)
            staging = hierarchy.top.source
            assert staging.name == "staging"
            assert staging.residency.n_slots == device.planned.stage_slots == 48
            assert hierarchy.arena is device.arenas[0]
            assert device.planned.n_slots == 48  # all there are
            assert hierarchy.stats().h2d_bytes > 0
            staging_nbytes = device.planned.stage_slots * device.planned.stage_slot_nbytes
            assert device.planned.nbytes == staging_nbytes
            assert device.planned.top_nbytes == device.planned.n_slots * hierarchy.spec.slot_nbytes

    asyncio.run(main())


def test_experts_come_in_their_uniform_layout(model, device):
    """The host's reads leave a GGUF's roles with gaps; a copy to a device closes them."""

    async def main():
        async with await open_hierarchy(model, config()) as hierarchy:
            assert all(layout.roles[0].offset == 0 for layout in hierarchy.spec.layouts.values())

    asyncio.run(main())


def test_what_could_not_be_registered_is_counted_as_a_fallback(model, device):
    device.refused = ("pinned: the driver said no",)

    async def main():
        async with await open_hierarchy(model, config()) as hierarchy:
            assert hierarchy.stats().fallbacks[-1] == "pinned: the driver said no"
            assert not device.strict

    asyncio.run(main())


def test_strict_is_passed_on_and_its_refusal_leaves_nothing_open(model, device):
    device.refused = DeviceError("cuMemHostRegister_v2", 304, "CUDA_ERROR_OPERATING_SYSTEM")

    async def main():
        with pytest.raises(DeviceError, match="cuMemHostRegister_v2"):
            await open_hierarchy(model, config(strict=True, backend="threads"))

    asyncio.run(main())
    assert device.strict
    assert device.pool._mapping is None


def test_a_cancelled_opening_closes_the_arena_once_it_is_made(model, device):
    device.hurry.clear()

    async def main():
        opening = asyncio.ensure_future(open_hierarchy(model, config()))
        await asyncio.to_thread(device.asked.wait)
        opening.cancel()
        await asyncio.sleep(0)
        device.hurry.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(main())
    assert device.arenas[0]._region is None
    assert device.pool._mapping is None


def test_a_gpu_without_room_for_one_layer_is_refused_with_its_numbers(model, device):
    with pytest.raises(BudgetError, match=r"free 64 MiB .*reserve 63\.99 MiB"):
        asyncio.run(open_hierarchy(model, config(vram="80%", reserve=FREE_NBYTES - 9000)))
    assert device.planned is None


def test_shares_are_of_what_the_gpu_has_free():
    spec = tiny_spec(n_experts=4096)
    settings = HierarchyConfig(device="cuda", vram="25%", reserve="16MiB")
    planned = plan(spec, settings, free_nbytes=FREE_NBYTES)
    assert planned.n_slots == (16 << 20) // 4096
    assert planned.on_device


@pytest.mark.parametrize(
    ("record_nbytes", "n_drives", "window", "n_slots"),
    [
        (13369344, 1, None, 8),
        (13369344, 2, None, 14),
        (1 << 20, 1, None, 66),
        (1 << 20, 1, "4MiB", 8),
        (1 << 20, 4, "16MiB", 66),
        (4096, 1, None, 1024),
    ],
)
def test_staging_holds_every_drives_window_and_two_copies(record_nbytes, n_drives, window, n_slots):
    settings = HierarchyConfig(device="cuda", window=window)
    assert stage_slots_before_device(settings, record_nbytes, n_drives=n_drives) == n_slots
    if window is not None:
        assert n_drives * parse_size(window) <= n_slots * record_nbytes


def test_staging_is_what_the_configuration_says():
    settings = HierarchyConfig(device="cuda", stage_slots=300)
    assert stage_slots_before_device(settings, 4096, n_drives=1) == 300
    planned = plan(tiny_spec(), settings, free_nbytes=2**40)
    assert planned.stage_slots == 300


def test_there_is_never_more_staging_than_experts_by_default():
    planned = plan(tiny_spec(), HierarchyConfig(device="cuda"), free_nbytes=2**40)
    assert planned.stage_slots == tiny_spec().n_records


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", 0, None, "cuda:1000"])
def test_a_device_that_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"device: .* is not one of host, cuda"):
        HierarchyConfig(device=name)


def test_a_gpu_without_staging_is_refused():
    with pytest.raises(ConfigError, match="stage_slots: a disk cannot read into a GPU's memory"):
        HierarchyConfig(device="cuda:1", stage_slots=0)
