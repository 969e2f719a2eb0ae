"""Whatever is put in the place of what was left behind, nothing is mixed, and nothing is lost."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys

import pytest
from pack_faults import failing, hook
from pack_stops import NOTE, PUBLISH, TAKE, journal_of, moe, stopped
from small_moe import (
    convert,
    make_small_moe,
    names,
    pack_files,
    rebuild_source,
)

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.pack import create_pack, restore_pack, rollback_pack
from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.work_place import WorkPlace


@pytest.fixture
def model(tmp_path):
    """A model of two files whose tensors are many pages long."""
    return moe(tmp_path / "model")


# --- what is at the destination -----------------------------------------------------------------


def test_a_pack_of_another_model_is_not_taken_for_this_ones(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, PUBLISH)
    before = pack_files(tmp_path / "pack")
    other = moe(tmp_path / "other", seed=1, n_experts=2)
    with pytest.raises(PackError, match="already exists; name a new directory"):
        convert(other, tmp_path / "pack")
    assert pack_files(tmp_path / "pack") == before
    assert convert(model, tmp_path / "pack").resumed_nbytes > 0
    assert JOURNAL_NAME not in names(tmp_path / "pack")


def test_a_restored_model_is_not_taken_for_a_pack(model, tmp_path, monkeypatch):
    convert(model, tmp_path / "pack")
    with monkeypatch.context() as patch:
        hook(patch, "unlink", failing(errno.EIO))
        with pytest.raises(PackError):
            asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    before = names(tmp_path / "back")
    with pytest.raises(PackError, match="already exists; name a new directory"):
        convert(model, tmp_path / "back")
    assert names(tmp_path / "back") == before


def test_an_unfinished_model_in_the_place_of_one_that_was_given_up_is_not_removed(
    model, tmp_path, monkeypatch
):
    stopped(model, tmp_path / "pack", monkeypatch, PUBLISH, reclaim_source=True)
    shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    other = moe(tmp_path / "model", seed=1, n_experts=2)
    files = other.files
    stopped(other, tmp_path / "second", monkeypatch, TAKE, n=2, reclaim_source=True)
    left = {path: path.read_bytes() for path in other.paths}
    with pytest.raises(PackError, match="already exists"):
        convert(other, tmp_path / "pack", reclaim_source=True)
    assert {path: path.read_bytes() for path in other.paths} == left
    asyncio.run(create_pack(tmp_path / "elsewhere", tmp_path / "pack", reclaim_source=True))
    assert names(tmp_path / "elsewhere") == []
    assert {path: path.read_bytes() for path in other.paths} == left
    convert(other, tmp_path / "second", reclaim_source=True)
    assert rebuild_source(tmp_path / "second") == files


def test_a_data_file_that_is_gone_is_refused_and_not_made_of_zeros(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=2)
    partial = tmp_path / "pack.partial"
    for spoil in (lambda file: os.truncate(file, 4096), os.unlink):
        spoil(partial / "experts-00000.bin")
        with pytest.raises(PackError, match=r"experts-00000.bin .* finished.*rollback"):
            convert(model, tmp_path / "pack")
    asyncio.run(rollback_pack(tmp_path / "pack"))
    convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files


def test_a_conversion_goes_on_from_whatever_a_rollback_was_stopped_in(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=2)
    with monkeypatch.context() as patch:
        hook(patch, "unlink", failing(errno.EIO), at=1)
        with pytest.raises(PackError, match=r"removing pack.partial failed"):
            asyncio.run(rollback_pack(tmp_path / "pack"))
    convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files


def test_a_rollback_needs_no_space_to_make_some(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=2)

    def full(fd, data, offset):
        if offset + len(data) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    asyncio.run(rollback_pack(tmp_path / "pack"))
    assert names(tmp_path) == ["model"]


def test_a_restored_file_that_is_gone_is_refused_and_not_made_of_zeros(
    model, tmp_path, monkeypatch
):
    convert(model, tmp_path / "pack")
    work = lambda _, dest: asyncio.run(restore_pack(tmp_path / "pack", dest))  # noqa: E731 (one line)
    stopped(model, tmp_path / "back", monkeypatch, NOTE, work=work)
    (tmp_path / "back.partial" / "shard-00000.bin").unlink()
    with pytest.raises(PackError, match=r"shard-00000.bin cannot be looked at.* finished"):
        asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))


def test_work_that_had_finished_nothing_gives_way_to_other_work(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE)
    journal = journal_of(tmp_path / "pack")
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    other = moe(tmp_path / "other", seed=1, n_experts=2)
    convert(other, tmp_path / "pack", file_nbytes_max=9)
    assert rebuild_source(tmp_path / "pack") == other.files


def test_a_name_that_is_for_unfinished_work_is_refused(model, tmp_path):
    with pytest.raises(PackError, match=r"\.partial is for unfinished work"):
        convert(model, tmp_path / "pack.partial")


@pytest.mark.parametrize("name", ["n" * 250, "n" * 300, "n" * 300 + "/pack", "zero\0"])
@pytest.mark.parametrize("work", ["create", "restore", "restore from", "rollback"])
def test_a_path_that_the_system_will_not_look_at_is_a_clear_error(small_pack, tmp_path, name, work):
    pack, model = small_pack
    dest = tmp_path / name
    works = {
        "create": lambda: convert(model, dest),
        "restore": lambda: asyncio.run(restore_pack(pack, dest)),
        "restore from": lambda: asyncio.run(restore_pack(dest, tmp_path / "back")),
        "rollback": lambda: asyncio.run(rollback_pack(dest)),
    }
    with pytest.raises(PackError, match=r"n{250}|zero"):
        works[work]()


# --- what is at the source ----------------------------------------------------------------------


def test_a_source_whose_file_has_another_name_now_is_told_so(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=1)
    for path in model.paths:
        path.rename(path.with_name(path.name.replace("m-", "n-")))
    with pytest.raises(PackError, match=r"n-00001-of-00002.gguf was named m-00001-of-00002.gguf"):
        asyncio.run(create_pack(tmp_path / "model", tmp_path / "pack"))


@pytest.mark.parametrize("work", ["create", "rollback"])
def test_another_file_in_the_place_of_one_that_was_partly_given_up_is_left_alone(
    model, tmp_path, monkeypatch, work
):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=5, reclaim_source=True)
    other = moe(tmp_path / "other", seed=1)
    for path, new in zip(model.paths, other.paths, strict=True):
        path.rename(path.with_suffix(".old"))
        shutil.copy(new, path)
    works = {
        "create": lambda: convert(model, tmp_path / "pack", reclaim_source=True),
        "rollback": lambda: asyncio.run(rollback_pack(tmp_path / "pack")),
    }
    with pytest.raises(GGUFError, match=r"m-0000\d-of-00002.gguf: is not the file .* taken"):
        works[work]()
    assert model.files == other.files


def test_a_file_of_which_nothing_was_taken_must_not_have_changed(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=2, reclaim_source=True)
    untouched = [path for path in model.paths if path.read_bytes()[:4] == b"GGUF"]
    assert untouched
    os.utime(untouched[0], ns=(1, 1))
    with pytest.raises(PackError, match=rf"{untouched[0].name} was changed since"):
        convert(model, tmp_path / "pack", reclaim_source=True)


OPENS = """
import sys
file = open(sys.argv[1], "rb")
sys.stdout.write("!")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_program_that_opened_the_source_before_it_was_marked_keeps_it(
    model, tmp_path, monkeypatch
):
    before = {path.name: path.read_bytes() for path in model.paths}
    children = []
    real = WorkPlace.note

    def note(place, record):
        real(place, record)
        if record["state"] == "giving" and not children:
            command = [sys.executable, "-c", OPENS, model.paths[0]]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(child)
            assert child.stdout.read(1) == b"!"

    with monkeypatch.context() as patch:
        patch.setattr(WorkPlace, "note", note)
        with pytest.raises(GGUFError, match=r"00001-of-00002.gguf: is in use"):
            convert(model, tmp_path / "pack", reclaim_source=True)
    assert model.files == before
    with children[0] as child:
        child.communicate()
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert rebuild_source(tmp_path / "pack") == before


@pytest.mark.parametrize("name", ["conversion.journal", "conversion.lock"])
def test_a_source_with_a_name_that_unfinished_work_needs_is_refused(model, tmp_path, name):
    source = make_small_moe(tmp_path / "model.gguf").paths[0].rename(tmp_path / name)
    with pytest.raises(GGUFError, match="give it another"):
        asyncio.run(create_pack(source, tmp_path / "pack"))
