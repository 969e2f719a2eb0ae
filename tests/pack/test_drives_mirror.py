"""A mirrored pack is read from all its copies and needs only one of them."""

import asyncio
import logging
import os
import shutil

import pytest
from drive_stage import (
    assert_reads_all,
    buffered,
    make_pack,
    mirror,
    read_experts,
    split,
    tree,
)
from small_moe import flip

from tieredmoe.backends import open_backend
from tieredmoe.errors import PackError, ReadError
from tieredmoe.pack import PackSource, VerifiedSource, VerifyThreads, open_pack, verify_pack
from tieredmoe.pack.drive_verify import verify_drives
from tieredmoe.pack.drives import open_drives
from tieredmoe.testing import host_arena


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("pattern"))


@pytest.fixture
def place(pattern, tmp_path, monkeypatch):
    """A pack to be changed, and its model; syncing is left out, for it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return shutil.copytree(pattern[0], tmp_path / "pack0"), pattern[1]


@pytest.fixture
def mirrored(place):
    """A pack, its model, and its copy on another drive."""
    pack, model = place
    mirror(pack, pack.parent / "copy")
    return pack, model, pack.parent / "copy"


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_copy_is_a_whole_pack_by_itself(mirrored):
    pack, _, copy = mirrored
    original = tree(pack)
    original.pop("drives.json")
    assert tree(copy) == original
    assert asyncio.run(verify_pack(copy)).damage == ()
    assert open_pack(copy).manifest == open_pack(pack).manifest


def test_reads_are_shared_between_the_copies_and_counters_add_up(mirrored):
    pack, model, copy = mirrored
    drives = assert_reads_all(open_drives(pack), model)
    assert [drive.directory for drive in drives] == [str(pack), str(copy)]
    assert all(drive.reads > 3 for drive in drives)


def test_every_expert_is_right_on_every_copy(mirrored):
    pack, model, copy = mirrored
    for only in (pack, copy):
        opened = open_drives(pack)
        one = type(opened)(opened.pack, (only,), None)
        (drive,) = assert_reads_all(one, model)
        assert drive.directory == str(only)


def test_a_copy_that_dies_in_mid_run_loses_nothing(mirrored, caplog):
    pack, _, copy = mirrored

    async def main():
        opened = open_drives(pack)
        backend = await opened.open_backend(buffered)
        keys = list(opened.spec.keys())
        before, _ = await read_experts(opened, keys, Unclosed(backend))
        for file in opened.manifest.layout.expert_files:
            with (copy / file.name).open("r+b") as data:
                data.truncate(0)
        after, counters = await read_experts(opened, keys, Unclosed(backend))
        drives = backend.drive_stats()
        await backend.close()
        assert before == after
        assert len(before) == len(keys)
        assert drives[1].failing
        assert sum(drives[1].errors.values()) == counters.retries > 0
        assert counters.read_errors == {}

    asyncio.run(main())
    (message,) = warnings(caplog)
    assert str(copy) in message


class Unclosed:
    """A backend that outlives the source that reads through it."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    async def close(self):
        await self.backend.drain()


def test_when_no_copy_can_be_read_the_error_names_both(mirrored):
    pack, _, copy = mirrored

    async def main():
        opened = open_drives(pack)
        backend = await opened.open_backend(buffered)
        for path in (pack, copy):
            (path / "experts-00000.bin").write_bytes(b"")
        with pytest.raises(ReadError) as caught:
            await read_experts(opened, list(opened.spec.keys())[:1], backend)
        assert f"{pack}/experts-00000.bin" in str(caught.value)
        assert f"{copy}/experts-00000.bin" in str(caught.value)
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("bad", ["pack0", "copy"])
def test_a_record_damaged_on_one_copy_comes_from_the_other(mirrored, bad):
    pack, model, _ = mirrored
    bad = pack.parent / bad / "experts-00000.bin"
    bad.write_bytes(bytes(bad.stat().st_size))

    async def main():
        opened = open_drives(pack)
        backend = await opened.open_backend(buffered)
        source = VerifiedSource(
            PackSource(opened, backend), opened, mode="always", worker=VerifyThreads()
        )
        arena = host_arena(1, opened.slot_nbytes)
        for expert in range(12):
            key = next(key for key in opened.spec.keys() if key.expert == expert)
            (fill,) = source.read_into([(key, arena.slot(0))])
            await fill.done
            gate = model.slabs[0, "gate", expert]
            assert arena.slot(0).view[: len(gate)] == gate
        assert source.counters.digest_mismatches > 0
        await source.close()

    asyncio.run(main())


def test_a_pack_may_have_three_copies(mirrored):
    pack, model, copy = mirrored
    report = mirror(pack, pack.parent / "third")
    assert report.copies == (pack, copy, pack.parent / "third")
    assert len(assert_reads_all(open_drives(pack), model)) == 3


def test_a_copy_inside_of_the_pack_moves_with_it(place, tmp_path):
    pack, model = place
    mirror(pack, pack / "second")
    moved = tmp_path / "moved"
    pack.rename(moved)
    assert open_drives(moved).drives == (moved, moved / "second")
    assert_reads_all(open_drives(moved), model)


@pytest.mark.parametrize("what", ["gone", "short", "no manifest", "damaged manifest"])
def test_a_copy_that_is_not_whole_is_left_out_at_warning(mirrored, caplog, what):
    pack, model, copy = mirrored
    {
        "gone": lambda: shutil.rmtree(copy),
        "short": lambda: (copy / "experts-00001.bin").write_bytes(b""),
        "no manifest": (copy / "manifest.json").unlink,
        "damaged manifest": lambda: flip(copy / "manifest.json", 3000),
    }[what]()
    opened = open_drives(pack)
    assert opened.drives == (pack,)
    (message,) = warnings(caplog)
    assert f"a copy of {pack} is left out: {copy}" in message
    assert_reads_all(opened, model)
    (damage,) = asyncio.run(verify_drives(pack)).damage
    assert f"is left out: {copy}" in str(damage)


def test_the_pack_itself_may_be_the_copy_that_lacks_its_experts(mirrored, caplog):
    pack, model, copy = mirrored
    (pack / "experts-00002.bin").unlink()
    opened = open_drives(pack)
    assert opened.drives == (copy,)
    assert f"{pack}: experts-00002.bin: No such file" in warnings(caplog)[0]
    assert opened.data_files[0].parent == copy
    for name in opened.tensors:
        opened.read(name)
    assert_reads_all(opened, model)


def test_without_a_whole_copy_the_error_says_what_is_wrong_with_each(mirrored):
    pack, _, copy = mirrored
    (pack / "experts-00002.bin").unlink()
    shutil.rmtree(copy)
    with pytest.raises(PackError) as caught:
        open_drives(pack)
    assert f"{pack}: experts-00002.bin: No such file" in str(caught.value)
    assert f"{copy}: does not exist" in str(caught.value)


def test_another_pack_in_the_place_of_a_copy_is_an_error(mirrored, tmp_path):
    pack, _, copy = mirrored
    (tmp_path / "other").mkdir()
    other, _ = make_pack(tmp_path / "other", seed=1)
    shutil.rmtree(copy)
    other.rename(copy)
    with pytest.raises(PackError, match=f"{copy} holds another pack; name a copy of this one"):
        open_drives(pack)


def test_verifying_looks_at_every_copy(mirrored):
    pack, _, copy = mirrored
    report = asyncio.run(verify_drives(pack))
    assert report.damage == ()
    assert report.read_nbytes == 2 * open_pack(pack).manifest.layout.source_nbytes
    flip(copy / "experts-00001.bin", 0)
    flip(pack / "dense-00000.bin", (pack / "dense-00000.bin").stat().st_size - 1)
    damage = asyncio.run(verify_drives(pack)).damage
    assert [each.path for each in damage] == [
        pack / "dense-00000.bin",
        copy / "experts-00001.bin",
    ]


def test_a_split_pack_is_not_mirrored_and_a_mirrored_one_not_split(place):
    pack, _ = place
    split(pack, pack.parent / "a")
    with pytest.raises(PackError, match="is split over drives, so it cannot be mirrored as well"):
        mirror(pack, pack.parent / "b")
    (pack / "drives.json").unlink()
    mirror(pack, pack.parent / "b")
    with pytest.raises(PackError, match="on several drives already"):
        split(pack, pack.parent / "c")


def test_a_directory_that_will_not_do_is_named(place, tmp_path):
    pack, _ = place
    (tmp_path / "photos").mkdir()
    with pytest.raises(PackError, match=f"cannot be mirrored: {tmp_path}/photos already exists"):
        mirror(pack, tmp_path / "photos")


def test_direct_reads_are_direct_on_every_copy(mirrored):
    pack, _, _ = mirrored

    async def main():
        backend = await open_drives(pack).open_backend(lambda files: open_backend("auto", files))
        assert backend.info.reason.startswith("mirror of 2: ")
        assert backend.info.direct or "tmpfs" in backend.info.reason
        await backend.close()

    asyncio.run(main())
