"""A pack gives its source back, byte for byte, or says which of its own bytes are wrong."""

import asyncio
import errno
import os

import pytest
from pack_faults import failing, hook
from small_moe import MIXED, convert, flip, make_small_moe, names, pack_files

from tieredmoe.errors import PackError
from tieredmoe.pack import create_pack, mirror_pack, restore_pack, rollback_pack, split_pack
from tieredmoe.pack import stream_copy as stream_copy_module


def restore(pack, dest, **options):
    return asyncio.run(restore_pack(pack, dest, **options))


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("window_nbytes", [4096, 8 << 20])
def test_restored_files_are_the_source(tmp_path, monkeypatch, n_shards, window_nbytes):
    model = make_small_moe(
        tmp_path / "m.gguf", types=MIXED, n_shards=n_shards, alignment=64, trailing=b"end"
    )
    convert(model, tmp_path / "pack")
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", window_nbytes)
    report = restore(tmp_path / "pack", tmp_path / "back")
    assert pack_files(tmp_path / "back") == model.files
    assert report.files == tmp_path_files(tmp_path / "back", model)
    assert report.fallbacks == ()


def tmp_path_files(folder, model):
    return tuple(folder / path.name for path in model.paths)


def test_a_pack_whose_experts_are_on_drives_is_restored(pack, small_pack, tmp_path):
    drives = [tmp_path / "a", tmp_path / "b"]
    asyncio.run(split_pack(pack, drives, weights=[1, 2], remove_original=True))
    restore(pack, tmp_path / "back")
    assert pack_files(tmp_path / "back") == small_pack[1].files


def test_a_mirrored_pack_is_restored(pack, small_pack, tmp_path):
    asyncio.run(mirror_pack(pack, tmp_path / "copy"))
    restore(pack, tmp_path / "back")
    assert pack_files(tmp_path / "back") == small_pack[1].files


@pytest.mark.parametrize("file", ["experts-00000.bin", "dense-00000.bin"])
def test_damage_is_named_and_nothing_is_published(pack, tmp_path, file):
    nbytes = (pack / file).stat().st_size
    flip(pack / file, nbytes - 3 if file.startswith("dense") else 1000)
    with pytest.raises(PackError, match=rf"{file}: is damaged: [0-9,]+ bytes at [0-9,]+ do not"):
        restore(pack, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_whole_files_are_not_written_again(pack, small_pack, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO))
        with pytest.raises(PackError, match=r"naming files in back\.partial failed"):
            restore(pack, tmp_path / "back")
    report = restore(pack, tmp_path / "back")
    assert report.written_nbytes == 0
    assert report.resumed_nbytes == sum(map(len, small_pack[1].files.values()))
    assert pack_files(tmp_path / "back") == small_pack[1].files


def test_a_full_disk_says_how_much_is_missing(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_copy_module, "N_READERS", 1)
    monkeypatch.setattr(stream_copy_module, "N_WRITERS", 1)
    hook(monkeypatch, "pwrite", failing(errno.ENOSPC), at=1)
    with pytest.raises(PackError, match=r"No space left on device; [0-9,]+ bytes are still to be"):
        restore(pack, tmp_path / "back")
    assert not (tmp_path / "back.partial").exists()


def test_every_problem_of_a_destination_is_named_before_a_byte_is_written(
    pack, tmp_path, monkeypatch
):
    (tmp_path / "back").mkdir()
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*full[:3], 1, 1, *full[5:])))
    with pytest.raises(PackError, match=r"already exists.*make room for"):
        restore(pack, tmp_path / "back")


def test_unfinished_work_of_another_pack_is_refused(pack, tmp_path, monkeypatch):
    other = make_small_moe(tmp_path / "other.gguf", seed=5)
    convert(other, tmp_path / "other")
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO))
        with pytest.raises(PackError):
            restore(tmp_path / "other", tmp_path / "back")
    with pytest.raises(PackError, match="holds other unfinished work"):
        restore(pack, tmp_path / "back")


def test_a_kill_after_the_rename_is_caught_up_on(pack, small_pack, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        hook(patch, "unlink", failing(errno.EIO))
        with pytest.raises(PackError, match="removing the journal failed"):
            restore(pack, tmp_path / "back")
    report = restore(pack, tmp_path / "back")
    assert report.resumed_nbytes == sum(map(len, small_pack[1].files.values()))
    assert pack_files(tmp_path / "back") == small_pack[1].files


def test_a_conversion_does_not_go_on_with_a_restore_nor_the_other_way(
    pack, small_pack, tmp_path, monkeypatch
):
    source = small_pack[1].paths[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_fails)
        for dest, work in [
            ("back", restore_pack(pack, tmp_path / "back")),
            ("new", create_pack(source, tmp_path / "new")),
        ]:
            with pytest.raises(PackError, match=f"{dest}.*failed"):
                asyncio.run(work)
    with pytest.raises(PackError, match="cannot go on so: it is a restore"):
        asyncio.run(create_pack(source, tmp_path / "back"))
    with pytest.raises(PackError, match="holds other unfinished work"):
        restore(pack, tmp_path / "new")
    with pytest.raises(PackError, match="is no conversion"):
        asyncio.run(rollback_pack(tmp_path / "back"))


def rename_fails(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_progress_counts_every_byte_of_the_source(pack, small_pack, tmp_path):
    seen = []
    restore(pack, tmp_path / "back", progress=seen.append)
    total = sum(map(len, small_pack[1].files.values()))
    assert (seen[0].done_nbytes, max(each.done_nbytes for each in seen)) == (0, total)


def test_a_restored_model_becomes_the_same_pack(pack, tmp_path):
    restore(pack, tmp_path / "back")
    first = tmp_path / "back" / names(tmp_path / "back")[0]
    asyncio.run(create_pack(first, tmp_path / "again"))
    assert pack_files(tmp_path / "again") == pack_files(pack)


def test_what_is_half_restored_passes_for_no_model(pack, tmp_path):
    flip(pack / "experts-00000.bin", 5000)
    with pytest.raises(PackError, match="is damaged"):
        restore(pack, tmp_path / "back")
    if (tmp_path / "back.partial").exists():
        assert not [name for name in names(tmp_path / "back.partial") if name.endswith(".gguf")]


def test_a_kill_between_naming_the_files_and_the_directory_is_caught_up_on(
    pack, small_pack, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO), at=2)
        with pytest.raises(PackError, match=r"renaming back.partial to back failed"):
            restore(pack, tmp_path / "back")
    assert restore(pack, tmp_path / "back").written_nbytes == 0
    assert pack_files(tmp_path / "back") == small_pack[1].files
