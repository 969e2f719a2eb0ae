"""A virtual pack serves, from untouched GGUF shards, the very records of the pack made of them."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q
from small_moe import MIXED, UNIFORM, convert, make_small_moe

from tieredmoe import (
    ConfigError,
    ExpertLoadError,
    GGUFError,
    HierarchyConfig,
    ReadError,
    create_pack,
    open_hierarchy,
    open_inventory,
    open_pack,
)
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.pack import Extent, PackSource, open_virtual_pack, spec_as_read
from tieredmoe.policies import make_policy
from tieredmoe.spec import PAGE_NBYTES, ExpertKey
from tieredmoe.testing import FaultySource, host_arena
from tieredmoe.tier import Tier


def record_of(pack, key):
    """The payload of an expert's record, from a pack's file."""
    where = pack.locate(key)
    data = pack.data_files[where.file_index].read_bytes()[where.offset :]
    return data[: pack.spec.layouts[key.layer].payload_nbytes]


async def all_records(hierarchy):
    """Every expert's roles end to end, one by one."""
    records = {}
    for key in hierarchy.spec.keys():
        async with hierarchy.acquire(key.layer, [key.expert]) as lease:
            await lease.ready()
            view = lease.slots[key.expert].view
            roles = hierarchy.spec.layouts[key.layer].roles
            records[key] = b"".join(view[r.offset : r.offset + r.nbytes] for r in roles)
    return records


def served(model, **settings):
    """Every record as a hierarchy over ``model`` serves it, and its counters."""

    async def main():
        settings.setdefault("vram", "1GiB")
        async with await open_hierarchy(model, HierarchyConfig(reserve=0, **settings)) as tiers:
            records = await all_records(tiers)
            tiers.check()
            return records, tiers.stats()

    return asyncio.run(main())


WHOLE_PAGES = (dict.fromkeys(UNIFORM, Q.F32), dict.fromkeys(UNIFORM, Q.F16))
MODELS = {
    "one file": {},
    "two shards": {"n_shards": 2},
    "seven shards": {"n_shards": 7, "types": MIXED},
    "types per layer": {"types": MIXED},
    "alignment 8": {"alignment": 8, "n_shards": 3},
    "alignment 64": {"alignment": 64, "n_shards": 4, "types": (UNIFORM, MIXED[1])},
    "alignment 4096": {"alignment": 4096, "n_shards": 5},
    "whole pages": {"types": WHOLE_PAGES, "n_shards": 3},
    "bytes at the end": {"trailing": b"x" * 5000, "n_shards": 6},
}


@pytest.mark.parametrize("stage_slots", [0, 1, 8])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_every_expert_is_byte_for_byte_the_packed_one(tmp_path, options, stage_slots):
    model = make_small_moe(tmp_path / "m.gguf", **options)
    convert(model, tmp_path / "pack")
    pack = open_pack(tmp_path / "pack")
    got, _ = served(model.paths[-1], stage_slots=stage_slots)
    assert got == {key: record_of(pack, key) for key in pack.spec.keys()}


def test_slabs_of_whole_pages_are_used_where_they_were_read_to(tmp_path, monkeypatch):
    model = make_small_moe(tmp_path / "m.gguf", types=WHOLE_PAGES, n_shards=3)
    virtual = open_virtual_pack(model.paths[0])
    expected, _ = served(model.paths[0], stage_slots=1)

    def moved(*_):
        raise AssertionError("a record was moved")

    monkeypatch.setattr("tieredmoe.pack.source.arrange", moved)
    assert served(model.paths[0])[0] == expected
    as_read = spec_as_read(virtual)
    for layer, layout in as_read.layouts.items():
        parts = virtual.extents(ExpertKey(layer, 3)).parts
        assert [role.offset for role in layout.roles] == [part.source_offset for part in parts]
    assert as_read.slot_nbytes == virtual.slot_nbytes > virtual.spec.slot_nbytes


def test_slabs_that_lie_differently_have_no_layout_as_read(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", types=MIXED)
    assert spec_as_read(open_virtual_pack(model.paths[0])) is None


def test_a_pack_is_read_as_it_is_laid_out(tmp_path):
    convert(make_small_moe(tmp_path / "m.gguf", types=MIXED), tmp_path / "pack")
    pack = open_pack(tmp_path / "pack")
    assert spec_as_read(pack) == pack.spec


@pytest.mark.parametrize("backend", ["threads", "buffered"])
@pytest.mark.parametrize("vram", [2 * 40960, 5 * 40960])
def test_small_caches_and_other_backends_serve_the_same(tmp_path, backend, vram):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=3, types=MIXED)
    expected, _ = served(model.paths[0])
    for stage_slots in (0, 2):
        got, _ = served(tmp_path, backend=backend, vram=vram, stage_slots=stage_slots)
        assert got == expected


def test_a_gguf_is_not_touched_and_nothing_is_written_beside_it(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    before = model.files
    served(tmp_path)
    assert model.files == before
    assert sorted(tmp_path.iterdir()) == sorted(model.paths)


def test_an_inventory_is_served_too(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    assert served(open_inventory(model.paths[0]))[0] == served(model.paths[0])[0]


def test_envelopes_are_whole_pages_around_each_role_and_at_most_8_kib_more(tmp_path):
    for options in MODELS.values():
        model = make_small_moe(tmp_path / "m.gguf", **options)
        virtual = open_virtual_pack(model.paths[0])
        for key in virtual.spec.keys():
            extents = virtual.extents(key)
            assert extents.nbytes <= virtual.slot_nbytes
            assert len(extents.envelopes) == 3
            roles = virtual.spec.layouts[key.layer].roles
            for envelope, part, role in zip(extents.envelopes, extents.parts, roles, strict=True):
                assert envelope.offset % PAGE_NBYTES == envelope.nbytes % PAGE_NBYTES == 0
                assert envelope.nbytes - role.nbytes <= 2 * PAGE_NBYTES - 2
                assert (part.target_offset, part.nbytes) == (role.offset, role.nbytes)
                file_index, offset = extents.place(role.offset)
                assert file_index == envelope.file_index
                with model.paths[file_index].open("rb") as file:
                    file.seek(offset)
                    assert file.read(role.nbytes) == model.slabs[key.layer, role.name, key.expert]
        for path in model.paths:
            path.unlink()


@pytest.mark.parametrize("key", [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_an_expert_that_does_not_exist_is_a_key_error(tmp_path, key):
    model = make_small_moe(tmp_path / "m.gguf")
    with pytest.raises(KeyError):
        open_virtual_pack(model.paths[0]).extents(ExpertKey(*key))


def test_counters_count_experts_what_was_asked_and_what_was_wanted(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=3, types=MIXED)
    virtual = open_virtual_pack(model.paths[0])
    keys = list(virtual.spec.keys())
    for stage_slots in (0, 4):
        _, stats = served(model.paths[0], stage_slots=stage_slots)
        assert stats.pack_reads == stats.cache_misses == len(keys)
        assert stats.pack_read_bytes == sum(virtual.extents(key).nbytes for key in keys)
        payload = sum(virtual.spec.layouts[key.layer].payload_nbytes for key in keys)
        assert stats.pack_payload_bytes == payload
        assert stats.pack_read_bytes <= payload + len(keys) * 3 * 2 * PAGE_NBYTES


# --- one acquire on its way, from memory


class Watched(MemoryBackend):
    """Keeps the batches that it was given."""

    def __init__(self, files):
        super().__init__(files, alignment=PAGE_NBYTES)
        self.batches = []

    def submit(self, batch, **options):
        self.batches.append([(op.file_index, op.offset, op.target.nbytes) for op in batch])
        return super().submit(batch, **options)


@pytest.mark.parametrize("slots", [(4,), (4, 4)])
def test_one_acquire_is_one_submission_of_three_reads_per_expert(tmp_path, slots):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    virtual = open_virtual_pack(model.paths[0])

    async def main():
        backend = Watched([path.read_bytes() for path in model.paths])
        top = chain(virtual, backend, slots)
        entries = top.try_admit([ExpertKey(1, e) for e in (3, 0, 2)])
        assert entries is not None
        await top.transfers.drain()
        await top.close()
        return backend.batches

    (batch,) = asyncio.run(main())
    expected = [tuple(e)[:3] for x in (3, 0, 2) for e in virtual.extents(ExpertKey(1, x)).envelopes]
    assert batch == expected
    assert len(batch) == 9


def chain(records, backend, slots):
    """Tiers over ``records``; every slot is poisoned before it is filled."""
    source = PackSource(records, backend, arranged=len(slots) == 1)
    spec = records.spec
    for i, n_slots in enumerate(slots):
        source = Tier(
            name=f"tier {i}",
            source=FaultySource(source),
            arena=host_arena(n_slots, records.slot_nbytes if i == 0 else spec.slot_nbytes),
            policy=make_policy("lru", n_slots=n_slots, layers=spec.layers, top_k=spec.top_k),
        )
    return source


def test_a_slot_without_room_for_the_reads_is_refused_with_the_numbers(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf")
    virtual = open_virtual_pack(model.paths[0])

    async def main():
        source = PackSource(virtual, MemoryBackend([model.paths[0].read_bytes()]))
        slot = host_arena(1, virtual.spec.slot_nbytes).slot(0)
        with pytest.raises(ConfigError, match=r"slot of 4,096 bytes has no room for the 12,288"):
            source.read_into([(ExpertKey(0, 0), slot)])
        await source.close()

    asyncio.run(main())


# --- files that are not what they were


def n_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_shard_that_changed_between_opening_and_serving_is_named(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    virtual = open_virtual_pack(model.paths[0])
    os.utime(model.paths[1], ns=(1, 1))
    n_open = n_open_files()
    with pytest.raises(GGUFError, match=r"m-00002-of-00002.gguf: changed since it was opened"):
        served(virtual)
    assert n_open_files() == n_open


def test_a_shard_that_vanished_is_named(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    virtual = open_virtual_pack(model.paths[0])
    model.paths[1].unlink()
    with pytest.raises((GGUFError, ReadError), match=r"m-00002-of-00002\.gguf"):
        served(virtual)


def test_a_shard_truncated_under_a_running_hierarchy_fails_its_experts_alone(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2, n_experts=8)
    expected, _ = served(tmp_path)

    async def main():
        config = HierarchyConfig(vram="1GiB", reserve=0)
        async with await open_hierarchy(tmp_path, config) as tiers:
            extents = open_virtual_pack(tmp_path).extents(ExpertKey(1, 7))
            cut = extents.envelopes[1]
            os.truncate(model.paths[cut.file_index], cut.offset)
            async with tiers.acquire(1, [7]) as lease:
                with pytest.raises(ExpertLoadError, match="was truncated") as caught:
                    await lease.ready()
            error = caught.value.__cause__
            assert (error.path, error.offset) == (model.paths[cut.file_index], cut.offset)
            async with tiers.acquire(0, [0]) as lease:
                await lease.ready()
                got = bytes(lease.slots[0].view[: len(expected[ExpertKey(0, 0)])])
            return got, tiers.stats()

    got, stats = asyncio.run(main())
    assert got == expected[ExpertKey(0, 0)]
    assert dict(stats.read_errors) == {"eof": 1}
    assert stats.io_errors == 1


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"verify": "first_read"}, "verify='first_read'"),
        ({"verify": "always"}, "verify='always'"),
        ({"verify": "always", "repair_from": "m.gguf"}, "with repair_from"),
    ],
)
def test_digests_asked_of_a_gguf_are_refused_by_name_with_the_way_out(tmp_path, settings, fact):
    model = make_small_moe(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=rf"{fact}.*m.gguf carries no digests.*pack create"):
        served(model.paths[0], **settings)


def test_fused_gate_and_up_are_refused_by_name(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf")
    data = model.paths[0].read_bytes()
    fused = data.replace(b"blk.0.ffn_gate_exps.weight", b"blk.0.ffn_gate_up_exps.wei", 1)
    model.paths[0].write_bytes(fused)
    with pytest.raises(GGUFError, match="lacks the gate experts"):
        served(model.paths[0])


def test_tensors_are_those_of_the_file(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    virtual = open_virtual_pack(tmp_path)
    asyncio.run(create_pack(tmp_path, tmp_path / "pack"))
    pack = open_pack(tmp_path / "pack")
    assert virtual.tensors.keys() == pack.tensors.keys()
    for name in virtual.tensors:
        assert np.array_equal(virtual.read(name), pack.read(name))
    extent = virtual.locate_tensor("output.weight")
    assert isinstance(extent, Extent)
    data = model.paths[extent.file_index].read_bytes()
    assert data[extent.offset :][: extent.nbytes] == virtual.read("output.weight").tobytes()


def test_layers_of_different_sizes_share_slots_as_large_as_the_largest_reads(tmp_path):
    small = {"gate": Q.Q4_0, "up": Q.Q4_0, "down": Q.Q4_0}
    model = make_small_moe(tmp_path / "m.gguf", types=(small, MIXED[2]))
    virtual = open_virtual_pack(model.paths[0])
    largest = max(virtual.extents(key).nbytes for key in virtual.spec.keys())
    assert largest <= virtual.slot_nbytes <= largest + 3 * PAGE_NBYTES
