"""A split pack serves every expert from the drive that it was put on, and nothing gets lost."""

import asyncio
import json
import os
import shutil

import pytest
from drive_stage import (
    N_EXPERTS,
    assert_opens_plainly,
    assert_reads_all,
    buffered,
    make_pack,
    split,
    tree,
)
from pack_faults import hook
from small_moe import flip, names

from tieredmoe.errors import ConfigError, PackError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, VerifiedSource, VerifyThreads, open_pack
from tieredmoe.pack import split as split_module
from tieredmoe.pack.drive_verify import verify_drives
from tieredmoe.pack.drives import open_drives
from tieredmoe.policies import make_policy
from tieredmoe.testing import host_arena
from tieredmoe.tier import Tier


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pack split by 1:3 over its own directory and another; its expert files are gone."""
    directory = tmp_path_factory.mktemp("split")
    pack, model = make_pack(directory)
    whole = directory / "whole"
    shutil.copytree(pack, whole)
    report = split(pack, pack, directory / "b", weights=[1, 3], remove_original=True)
    return pack, model, report, whole


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("pattern"))


@pytest.fixture
def place(pattern, tmp_path, monkeypatch):
    """A pack to be changed, and its model; syncing is left out, for it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return shutil.copytree(pattern[0], tmp_path / "pack0"), pattern[1]


def test_every_expert_is_read_whole_and_the_counters_add_up(made):
    pack, model, report, _ = made
    drives = assert_reads_all(open_drives(pack), model)
    assert tuple(drive.reads for drive in drives) == report.n_experts == (9, 27)
    assert [drive.directory for drive in drives] == [str(path) for path in report.drives]


def test_the_report_says_what_was_done(made):
    pack, model, report, whole = made
    assert report.path == pack
    assert report.drives == (pack / "drive-00000", pack.parent / "b")
    assert report.weights == (1, 3)
    assert report.removed_nbytes == sum(file.stat().st_size for file in open_pack(whole).data_files)
    assert report.written_nbytes >= sum(map(len, model.slabs.values()))


def test_only_experts_moved(made):
    pack, _, report, whole = made
    before, after = tree(whole), tree(pack)
    expert_files = {name for name in before if name.startswith("experts")}
    assert len(expert_files) == 3
    assert before.keys() - after.keys() == expert_files
    assert all(after[name] == before[name] for name in before.keys() - expert_files)
    assert {name for name in after if name not in before} == {
        "drives.json",
        "drive-00000/manifest.json",
        "drive-00000/experts-00000.bin",
    }
    assert names(report.drives[1]) == ["experts-00000.bin", "manifest.json"]


def test_tensors_are_read_as_from_the_whole_pack(made):
    pack, _, _, whole = made
    split_pack, whole_pack = open_drives(pack), open_pack(whole)
    for name in whole_pack.tensors:
        assert split_pack.read(name).tobytes() == whole_pack.read(name).tobytes()
    assert split_pack.metadata == whole_pack.metadata
    for name, stored in whole_pack.manifest.layout.tensors.items():
        if stored.slabs is not None:
            with pytest.raises(KeyError):
                split_pack.locate_tensor(name)
            continue
        index, offset, nbytes = split_pack.locate_tensor(name)
        data = split_pack.tensor_files[index].read_bytes()[offset : offset + nbytes]
        assert data == whole_pack.read(name).tobytes()


@pytest.mark.parametrize("mode", ["first_read", "always"])
def test_a_hierarchy_runs_on_a_split_pack_and_checks_its_reads(made, mode):
    pack, model, _, _ = made

    async def main():
        opened = open_drives(pack)
        backend = await opened.open_backend(buffered)
        source = VerifiedSource(
            PackSource(opened, backend), opened, mode=mode, worker=VerifyThreads()
        )
        spec = opened.spec
        top = Tier(
            name="top",
            source=source,
            arena=host_arena(4, opened.slot_nbytes),
            policy=make_policy("lru", n_slots=4, layers=spec.layers, top_k=spec.top_k),
        )
        async with Hierarchy(top, spec) as hierarchy:
            for layer in spec.layers:
                for first in range(0, N_EXPERTS, 4):
                    experts = range(first, first + 4)
                    async with hierarchy.acquire(layer, experts) as lease:
                        await lease.ready()
                        for expert in experts:
                            gate = model.slabs[layer, "gate", expert]
                            assert lease.slots[expert].view[: len(gate)] == gate
            assert hierarchy.stats().digest_mismatches == 0
            assert hierarchy.stats().pack_reads == 3 * N_EXPERTS

    asyncio.run(main())


def test_a_damaged_record_is_found_and_its_drive_named(made, tmp_path):
    pack, _, _, _ = made
    copy = tmp_path / "copy"
    shutil.copytree(pack, copy)
    assert asyncio.run(verify_drives(copy)).damage == ()
    flip(copy / "drive-00000" / "experts-00000.bin", 5)
    (damage,) = asyncio.run(verify_drives(copy)).damage
    assert damage.path == copy / "drive-00000" / "experts-00000.bin"
    where = open_drives(copy).locate(damage.key)
    assert (where.file_index, where.offset) == (0, 0)
    flip(copy / "dense-00000.bin", 10_000)
    kinds = {damage.key is None for damage in asyncio.run(verify_drives(copy)).damage}
    assert kinds == {True, False}


def test_the_original_stays_unless_it_is_asked_to_go(place):
    pack, model = place
    before = tree(pack)
    report = split(pack, pack.parent / "a", pack.parent / "b")
    assert report.removed_nbytes == 0
    after = tree(pack)
    assert after.pop("drives.json")
    assert after == before
    assert_opens_plainly(pack, model)
    assert_reads_all(open_drives(pack), model)


def test_one_drive_is_a_split_too(place):
    pack, model = place
    split(pack, pack.parent / "other", remove_original=True)
    assert_reads_all(open_drives(pack), model)


def test_a_split_of_the_same_pack_by_the_same_weights_is_the_same(place, tmp_path):
    pack, _ = place
    (tmp_path / "again").mkdir()
    again = shutil.copytree(pack, tmp_path / "again" / "pack")
    for path in (pack, again):
        split(path, path, path.parent / "x", path.parent / "y", weights=[3, 2, 2])
    one, other = tree(pack), tree(again)
    one_index, other_index = (json.loads(files.pop("drives.json")) for files in (one, other))
    assert one == other
    assert tree(pack.parent / "x") == tree(again.parent / "x")
    assert [drive["file"] for drive in one_index["drives"]] == [
        drive["file"] for drive in other_index["drives"]
    ]


def test_measured_bandwidth_becomes_the_weights(place, monkeypatch):
    pack, model = place
    speeds = {pack: 3.4e9, pack.parent: 6.9e9}

    async def measure_drive(directory):
        return speeds[directory]

    monkeypatch.setattr(split_module, "measure_drive", measure_drive)
    report = split(pack, pack, pack.parent / "b", weights="measured")
    assert report.weights == (493, 1000)
    assert report.n_experts == (12, 24)
    assert_reads_all(open_drives(pack), model)


def test_progress_comes_in_bytes_and_ends_at_the_total(place):
    pack, _ = place
    heard = []
    split(pack, pack.parent / "a", pack, remove_original=True, progress=heard.append)
    for phase in ("copy", "sync", "verify"):
        of_phase = [each for each in heard if each.phase == phase]
        assert of_phase[-1].done_nbytes == of_phase[-1].total_nbytes > 100_000
        assert of_phase == sorted(of_phase)


def test_pieces_may_be_smaller_than_a_record(place, monkeypatch):
    pack, model = place
    monkeypatch.setattr("tieredmoe.pack.record_copy.PIECE_NBYTES", 999)
    monkeypatch.setattr("tieredmoe.pack.record_copy.SYNC_NBYTES", 5000)
    split(pack, pack.parent / "a", pack, remove_original=True)
    assert_reads_all(open_drives(pack), model)


# ---- refusals


BAD_ARGUMENTS = [
    (([],), {}, "0 drives; from 1 to 64"),
    (([f"d{i}" for i in range(65)],), {}, "65 drives; from 1 to 64"),
    ((["a", "a"],), {}, "a directory is named twice"),
    ((["a", "x/../a"],), {}, "a directory is named twice"),
    ((["a", "b"],), {"weights": [1]}, "1 weights for 2 drives"),
    ((["a", "b"],), {"weights": [1, 0]}, "a weight of 0"),
    ((["a", "b"],), {"weights": [1, float("inf")]}, "a weight of inf"),
    ((["a", "a"],), {"weights": [1, -1, 2]}, "named twice; 3 weights for 2 drives; a weight of -1"),
    ((["a"],), {"weights": "fastest"}, "weights='fastest': it is numbers, 'measured' or nothing"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), BAD_ARGUMENTS)
def test_wrong_arguments_are_listed(place, tmp_path, monkeypatch, arguments, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=message):
        split(place[0], *arguments[0], **options)
    assert tree(tmp_path) == before


def test_every_directory_that_will_not_do_is_named(place):
    pack, _ = place
    directory = pack.parent
    (directory / "full").mkdir()
    (directory / "full" / "photo.jpg").write_bytes(b"precious")
    before = tree(directory)
    with pytest.raises(PackError) as caught:
        split(pack, directory / "full", directory / "no" / "where", directory / "fine")
    message = str(caught.value)
    assert "cannot be split" in message
    assert f"{directory}/full already exists" in message
    assert f"{directory}/no/where cannot be made: {directory}/no is not a directory" in message
    assert "fine" not in message
    assert tree(directory) == before


def test_drives_on_one_file_system_must_fit_together(place, monkeypatch):
    pack, _ = place
    nbytes = sum(file.stat().st_size for file in open_pack(pack).data_files)
    monkeypatch.setattr("tieredmoe.pack.partial.free_nbytes", lambda _: nbytes - 1)
    with pytest.raises(PackError, match=f"needs {nbytes:,} bytes, but .* has {nbytes - 1:,} free"):
        split(pack, pack.parent / "a", pack.parent / "b")


def test_a_weight_that_gets_no_expert_is_refused(place):
    pack, _ = place
    with pytest.raises(PackError, match="/b would get no expert by its weight"):
        split(pack, pack.parent / "a", pack.parent / "b", weights=[1000, 1])


def test_a_pack_is_split_once(place):
    pack, _ = place
    split(pack, pack.parent / "a")
    before = tree(pack.parent)
    with pytest.raises(PackError, match=r"on several drives already, by the drives\.json in it"):
        split(pack, pack.parent / "b")
    assert tree(pack.parent) == before


def test_what_is_no_pack_is_not_split(tmp_path):
    with pytest.raises(PackError, match=r"is not a pack: manifest\.json: No such file"):
        split(tmp_path, tmp_path / "a")


def test_two_splits_of_one_pack_at_once_are_one_too_many(place, monkeypatch):
    pack, model = place
    outcome = []

    def second():
        with pytest.raises(PackError, match="is being split or mirrored by another process"):
            split(pack, pack.parent / "b")
        outcome.append("refused")

    hook(monkeypatch, "pwrite", second, at=3)
    split(pack, pack.parent / "a")
    assert outcome == ["refused"]
    assert_reads_all(open_drives(pack), model)
