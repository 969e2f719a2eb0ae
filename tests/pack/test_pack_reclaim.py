"""A source is given up only as the pack is known to have it, and never half."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from pack_faults import failing, hook
from small_moe import MIXED, convert, flip, make_small_moe, names, pack_files, rebuild_source

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import conversion as conversion_module
from tieredmoe.pack import create_pack, holes, open_pack, open_virtual_pack, rollback_pack
from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.pack.planning import plan_inventory
from tieredmoe.pack.reclaim import GivenUp, peak_nbytes
from tieredmoe.pack.units import segment_starts, units_of
from tieredmoe.spec import PAGE_NBYTES


@pytest.fixture
def model(tmp_path):
    """A model of two files whose tensors are many pages long."""
    (tmp_path / "model").mkdir()
    return make_small_moe(tmp_path / "model" / "m.gguf", types=MIXED[1:], n_experts=4, n_shards=2)


@pytest.fixture
def unharmed(model, tmp_path):
    """The pack that a conversion makes that gives nothing up."""
    convert(model, tmp_path / "unharmed")
    return pack_files(tmp_path / "unharmed")


def allocated(paths):
    return sum(512 * path.stat().st_blocks for path in paths if path.exists())


def stopped(model, dest, monkeypatch):
    """A conversion that ended when the whole source was given up, and the pack had no name yet."""
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO))
        with pytest.raises(PackError):
            convert(model, dest, reclaim_source=True)


def test_a_source_that_is_given_up_is_all_in_the_pack(model, tmp_path, unharmed):
    before = model.files
    report = convert(model, tmp_path / "pack", reclaim_source=True)
    assert pack_files(tmp_path / "pack") == unharmed
    assert rebuild_source(tmp_path / "pack") == before
    assert names(tmp_path / "model") == []
    assert report.reclaimed_nbytes > 0.8 * sum(map(len, before.values()))


def test_source_and_pack_take_the_space_of_one_unit_more_than_the_source(
    model, tmp_path, monkeypatch
):
    seen = []
    real = holes.fallocate

    def watching(fd, mode, offset, nbytes):
        real(fd, mode, offset, nbytes)
        seen.append(allocated([*model.paths, *(tmp_path / "pack.partial").glob("*.bin")]))

    at_start = allocated(model.paths)
    layout = plan_inventory(open_inventory(model.paths[0]))
    units = units_of(layout)
    monkeypatch.setattr(holes, "fallocate", watching)
    convert(model, tmp_path / "pack", reclaim_source=True)
    edges = PAGE_NBYTES * 2 * sum(len(unit.segments) for unit in units)
    assert max(seen) - at_start <= max(unit.nbytes for unit in units) + edges
    most = peak_nbytes(layout, units, source_shrinks=True)
    assert max(seen) - at_start <= most + PAGE_NBYTES * len(units)
    assert peak_nbytes(layout, units, source_shrinks=False) == layout.data_nbytes


@pytest.mark.usefixtures("unharmed")
def test_holes_are_whole_pages_of_units_that_are_given_and_in_the_end_all_of_them(model):
    layout = plan_inventory(open_inventory(model.paths[0]))
    units, starts = units_of(layout), segment_starts(layout)
    given = GivenUp(layout, source=None)
    gone = [set() for _ in layout.shards]
    safe = [set() for _ in layout.shards]
    for unit in units[::-1]:
        for key in unit.segments:
            if key.segment_index:
                nbytes = layout.shards[key.shard_index].segments[key.segment_index].nbytes
                start = starts[key]
                safe[key.shard_index] |= set(range(start, start + nbytes))
        for shard_index, begin, end in given.add(unit):
            assert begin % PAGE_NBYTES == 0
            assert end % PAGE_NBYTES == 0
            last = min(end, layout.shards[shard_index].nbytes)
            gone[shard_index] |= set(range(begin, last))
        assert all(g <= s for g, s in zip(gone, safe, strict=True))
    for shard, holes_in in zip(layout.shards, gone, strict=True):
        first = -(-shard.segments[0].nbytes // PAGE_NBYTES) * PAGE_NBYTES
        assert holes_in == set(range(first, shard.nbytes))


def test_nothing_is_given_up_that_the_disk_did_not_keep(model, tmp_path, monkeypatch):
    before = model.files
    real = conversion_module.find_damage

    def damaged(runs, paths, reporter, **options):
        flip(paths[0], 100)
        return real(runs, paths, reporter, **options)

    with monkeypatch.context() as patch:
        patch.setattr(conversion_module, "find_damage", damaged)
        with pytest.raises(PackError, match=r"did not keep what was written: .*does not match.*"):
            convert(model, tmp_path / "pack", reclaim_source=True)
    assert model.files == before
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert rebuild_source(tmp_path / "pack") == before


def test_the_check_reads_the_pack_and_not_the_source(model, tmp_path, monkeypatch):
    read = []
    real_preadv, real_find = os.preadv, conversion_module.find_damage

    def watching(fd, *arguments):
        read.append(Path(f"/proc/self/fd/{fd}").readlink())
        return real_preadv(fd, *arguments)

    def find(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", watching)
            yield from real_find(*arguments, **options)

    monkeypatch.setattr(conversion_module, "find_damage", find)
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert read
    assert {path.parent for path in read} == {tmp_path / "pack.partial"}


def test_a_source_with_holes_is_no_model_to_anybody(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch)
    for path in model.paths:
        assert path.read_bytes()[:4] != b"GGUF"
        with pytest.raises(GGUFError, match=r"being given up for a pack.*--reclaim-source"):
            open_virtual_pack(path)


def test_going_on_without_giving_up_is_refused_once_some_is_gone(model, tmp_path, monkeypatch):
    before = model.files
    stopped(model, tmp_path / "pack", monkeypatch)
    with pytest.raises(PackError, match=r"partly given up by now: go on with --reclaim-source"):
        convert(model, tmp_path / "pack")
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert rebuild_source(tmp_path / "pack") == before


def test_a_conversion_that_gave_nothing_up_may_begin_to(model, tmp_path, monkeypatch):
    before = model.files
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO))
        with pytest.raises(PackError):
            convert(model, tmp_path / "pack")
    report = convert(model, tmp_path / "pack", reclaim_source=True)
    assert report.source_read_nbytes == 0
    assert rebuild_source(tmp_path / "pack") == before
    assert names(tmp_path / "model") == []


def refused(model, dest, match):
    before = model.files
    with pytest.raises((PackError, GGUFError), match=match):
        convert(model, dest, reclaim_source=True)
    assert model.files == before
    assert not dest.exists()
    assert not dest.with_name("pack.partial").exists()


def test_a_file_system_without_holes_is_refused_before_anything(model, tmp_path, monkeypatch):
    def unable(fd, mode, offset, nbytes):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(holes, "fallocate", unable)
    refused(model, tmp_path / "pack", r"no hole can be made in a file of .*not supported.*ext4")


def test_a_file_with_another_name_is_refused(model, tmp_path):
    os.link(model.paths[1], tmp_path / "other.gguf")
    refused(model, tmp_path / "pack", r"00002.gguf has another name \(a hard link\)")


def test_a_file_that_is_not_writable_is_refused(model, tmp_path, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: "gguf" not in str(p) and real(p, mode))
    refused(model, tmp_path / "pack", "m-00001-of-00002.gguf is not writable.*m-00002")


def test_a_folder_that_nothing_can_be_removed_from_is_refused(model, tmp_path, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, m: p != tmp_path / "model" and real(p, m))
    refused(model, tmp_path / "pack", "model is not writable, so nothing can be removed")


def test_a_link_to_a_source_goes_with_it(model, tmp_path):
    before = model.files
    (tmp_path / "links").mkdir()
    for path in model.paths:
        (tmp_path / "links" / path.name).symlink_to(path)
    asyncio.run(create_pack(tmp_path / "links", tmp_path / "pack", reclaim_source=True))
    assert names(tmp_path / "links") == names(tmp_path / "model") == []
    assert rebuild_source(tmp_path / "pack") == before


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_hole_that_fails_is_named_and_the_next_run_goes_on(
    model, tmp_path, monkeypatch, unharmed, at
):
    real, n = holes.punch, iter(range(1000))

    def failing_punch(fd, offset, nbytes):
        if next(n) == at:
            raise OSError(errno.EIO, "Input/output error")
        real(fd, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr("tieredmoe.pack.reclaim.punch", failing_punch)
        with pytest.raises(GGUFError, match=r"gguf: giving up [0-9,]+ bytes at [0-9,]+ failed"):
            convert(model, tmp_path / "pack", reclaim_source=True)
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert pack_files(tmp_path / "pack") == unharmed


def test_a_kill_after_the_rename_leaves_a_pack_and_its_last_clean_up_is_caught_up_on(
    model, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        hook(patch, "unlink", failing(errno.EIO))
        with pytest.raises(GGUFError, match="what is left of it cannot be removed"):
            convert(model, tmp_path / "pack", reclaim_source=True)
    assert open_pack(tmp_path / "pack").spec.n_experts == 4
    assert len(names(tmp_path / "model")) == 2
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert names(tmp_path / "model") == []
    assert "conversion.journal" not in names(tmp_path / "pack")


# --- and back ---------------------------------------------------------------------------------


def test_a_rollback_makes_the_source_what_it_was(model, tmp_path, monkeypatch):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.paths}
    stopped(model, tmp_path / "pack", monkeypatch)
    assert model.files != {path.name: data for path, (data, _) in before.items()}
    report = asyncio.run(rollback_pack(tmp_path / "pack"))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.paths} == before
    assert report.files == model.paths
    assert report.returned_nbytes > 0
    assert names(tmp_path) == ["model"]


def test_a_rollback_finds_a_source_that_was_moved(model, tmp_path, monkeypatch):
    before = model.files
    stopped(model, tmp_path / "pack", monkeypatch)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(GGUFError, match="missing"):
        asyncio.run(rollback_pack(tmp_path / "pack"))
    asyncio.run(rollback_pack(tmp_path / "pack", source=tmp_path / "moved"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "moved").iterdir()} == before


def test_a_rollback_of_what_gave_nothing_up_removes_it(model, tmp_path, monkeypatch):
    before = model.files
    hook(monkeypatch, "rename", failing(errno.EIO))
    with pytest.raises(PackError):
        convert(model, tmp_path / "pack")
    assert asyncio.run(rollback_pack(tmp_path / "pack")).returned_nbytes == 0
    assert names(tmp_path) == ["model"]
    assert model.files == before


def test_a_rollback_of_nothing_says_so(tmp_path):
    with pytest.raises(PackError, match="has no interrupted conversion"):
        asyncio.run(rollback_pack(tmp_path / "pack"))


def test_a_rollback_needs_the_packs_bytes_to_be_right(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch)
    flip(tmp_path / "pack.partial" / "experts-00000.bin", 5000)
    with pytest.raises(PackError, match=r"experts-00000.bin: is damaged: layer 0, expert 0"):
        asyncio.run(rollback_pack(tmp_path / "pack"))
    flip(tmp_path / "pack.partial" / "experts-00000.bin", 5000)
    asyncio.run(rollback_pack(tmp_path / "pack"))
    assert len(names(tmp_path / "model")) == 2


@pytest.mark.parametrize(
    ("function", "code", "fact"),
    [("pwrite", errno.ENOSPC, "giving back .* failed: No space"), ("fdatasync", errno.EIO, "sync")],
)
def test_a_rollback_that_fails_is_explained_and_goes_on(
    model, tmp_path, monkeypatch, function, code, fact
):
    before = model.files
    stopped(model, tmp_path / "pack", monkeypatch)
    with monkeypatch.context() as patch:
        hook(patch, function, failing(code), at=1)  # after the journal's
        with pytest.raises(GGUFError, match=fact):
            asyncio.run(rollback_pack(tmp_path / "pack"))
    asyncio.run(rollback_pack(tmp_path / "pack"))
    assert model.files == before


def test_windows_of_one_page_give_up_as_well(model, tmp_path, monkeypatch):
    before = model.files
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", PAGE_NBYTES)
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert rebuild_source(tmp_path / "pack") == before
