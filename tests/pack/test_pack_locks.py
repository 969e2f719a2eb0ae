"""Who uses a model keeps it from being given up; whoever is gone keeps nobody from anything."""

import asyncio
import errno
import fcntl
import os
import subprocess
import sys

import pytest
from small_moe import MIXED, convert, make_small_moe, rebuild_source

from tieredmoe.backends import open_backend
from tieredmoe.errors import GGUFError, PackError
from tieredmoe.pack import conversion as conversion_module
from tieredmoe.pack import create_pack, open_virtual_pack, restore_pack


@pytest.fixture
def model(tmp_path):
    """A model of two files whose tensors are many pages long."""
    (tmp_path / "model").mkdir()
    return make_small_moe(tmp_path / "model" / "m.gguf", types=MIXED[1:], n_experts=4, n_shards=2)


async def while_running(model, work):
    """``work`` while a backend has the model's files open, as a hierarchy does."""
    backend = open_backend("threads", model.paths, allow_buffered=True)
    try:
        return await work
    finally:
        await backend.close()


def test_a_model_that_runs_is_not_given_up(model, tmp_path):
    before = model.files
    conversion = create_pack(model.paths[0], tmp_path / "pack", reclaim_source=True)
    with pytest.raises(GGUFError, match=r"gguf: is in use: a model runs from it"):
        asyncio.run(while_running(model, conversion))
    assert model.files == before
    assert not (tmp_path / "pack.partial").exists()


def test_a_model_that_runs_may_be_converted(model, tmp_path):
    asyncio.run(while_running(model, create_pack(model.paths[0], tmp_path / "pack")))
    assert rebuild_source(tmp_path / "pack") == model.files


MAPS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sys.stdout.write("!")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_file_that_a_program_without_locks_has_mapped_is_not_given_up(model, tmp_path):
    before = model.files
    command = [sys.executable, "-c", MAPS, model.paths[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.read(1) == b"!"
        with pytest.raises(GGUFError, match=r"00002-of-00002.gguf: is in use"):
            convert(model, tmp_path / "pack", reclaim_source=True)
        child.communicate()
    assert model.files == before
    convert(model, tmp_path / "pack", reclaim_source=True)


def test_a_model_that_is_being_given_up_cannot_be_run(model, tmp_path, monkeypatch):
    seen = []
    real = conversion_module.find_damage

    async def run():
        open_backend("threads", model.paths, allow_buffered=True)

    def find(*arguments, **options):
        for attempt in (lambda: asyncio.run(run()), lambda: open_virtual_pack(model.paths[0])):
            try:
                attempt()
            except GGUFError as error:
                seen.append(str(error))
        yield from real(*arguments, **options)

    monkeypatch.setattr(conversion_module, "find_damage", find)
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert "is being given up for a pack by another process; wait" in seen[0]
    assert any("is being given up for a pack, and parts of it" in each for each in seen)


def test_a_second_conversion_of_a_source_that_is_being_given_up_is_refused(
    model, tmp_path, monkeypatch
):
    errors = []
    real = conversion_module.find_damage

    def find(*arguments, **options):
        for reclaim in (False, True):
            try:
                convert(model, tmp_path / "second", reclaim_source=reclaim)
            except (GGUFError, PackError) as error:
                errors.append(str(error))
        yield from real(*arguments, **options)

    before = model.files
    monkeypatch.setattr(conversion_module, "find_damage", find)
    convert(model, tmp_path / "pack", reclaim_source=True)
    assert len(errors) >= 2
    assert not (tmp_path / "second").exists()
    assert rebuild_source(tmp_path / "pack") == before


def test_a_lock_of_a_process_that_is_gone_is_none(model, tmp_path):
    code = (
        "import fcntl, os, sys\n"
        "for path in sys.argv[1:]: fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, *model.paths], check=False)
    convert(model, tmp_path / "pack", reclaim_source=True)


def unlockable(monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_place_that_cannot_be_locked_is_said_and_refused(model, tmp_path, monkeypatch):
    unlockable(monkeypatch)
    with pytest.raises(PackError, match=r"cannot be locked \(No locks available\).*NFS"):
        convert(model, tmp_path / "pack")


def test_a_source_that_cannot_be_locked_is_not_given_up(model, tmp_path, monkeypatch):
    unlockable(monkeypatch)
    with pytest.raises(GGUFError, match=r"cannot be locked \(No locks available\).*network"):
        convert(model, tmp_path / "pack", reclaim_source=True)


def test_a_model_that_cannot_be_locked_runs_with_a_warning(model, monkeypatch, caplog):
    unlockable(monkeypatch)

    async def nothing():
        pass

    asyncio.run(while_running(model, nothing()))
    assert "cannot be locked (No locks available): let nothing" in caplog.text


def test_two_restores_to_one_place_are_refused(model, tmp_path, monkeypatch):
    convert(model, tmp_path / "pack")
    second = []
    real = os.pwrite

    def write(*arguments):
        if not second:
            second.append("")
            try:
                asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
            except PackError as error:
                second[0] = str(error)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", write)
    asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    assert "is being written by another conversion" in second[0]
