"""A conversion that fails, is cancelled or is killed leaves its source and no trace."""

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pack_faults import failing, hook
from small_moe import MIXED, UNIFORM, convert, make_small_moe, names, pack_files, rebuild_source

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack
from tieredmoe.pack import progress as progress_module
from tieredmoe.pack import writer as writer_module

FAULTS = [
    ("pwrite", errno.ENOSPC, "writing .*No space left.*the pack needs [0-9,]+ bytes, and [0-9,]+"),
    ("pwrite", errno.EDQUOT, "writing .*quota.*needs"),
    ("pwrite", errno.EIO, r"writing (experts|dense)-00000\.bin failed: Input/output error"),
    ("ftruncate", errno.EFBIG, "making experts-00000.bin of .*File too large.*file_nbytes_max"),
    ("fsync", errno.EIO, "syncing experts-00000.bin failed: Input/output error"),
    ("fsync", errno.ENOSPC, "syncing .*No space left.*needs"),
    ("mkdir", errno.EROFS, "making pack.partial failed: Read-only file system"),
    ("rename", errno.EIO, "manifest.json failed: Input/output error"),
]


@pytest.mark.parametrize(("function", "code", "message"), FAULTS)
def test_a_write_that_fails_is_explained_and_leaves_nothing(
    model, tmp_path, monkeypatch, function, code, message
):
    before = model.files
    hook(monkeypatch, function, failing(code))
    with pytest.raises(PackError, match=message):
        convert(model, tmp_path / "pack")
    assert names(tmp_path) == sorted(path.name for path in model.paths)
    assert model.files == before


def test_a_full_disk_in_the_middle_leaves_nothing(model, tmp_path, monkeypatch):
    hook(monkeypatch, "pwrite", failing(errno.ENOSPC), at=20)
    with pytest.raises(PackError, match="No space left on device"):
        convert(model, tmp_path / "pack")
    assert names(tmp_path) == sorted(path.name for path in model.paths)


def test_short_writes_are_continued(model, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:777], offset))
    convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files


@pytest.mark.parametrize("change", ["grown", "rewritten", "truncated"])
def test_a_source_that_changes_while_it_is_read_is_refused(model, tmp_path, monkeypatch, change):
    monkeypatch.setattr(writer_module, "CHUNK_NBYTES", 2048)
    victim = model.paths[1]

    def alter():
        if change == "truncated":
            os.truncate(victim, 1000)
        else:
            with victim.open("ab" if change == "grown" else "r+b") as file:
                file.write(b"later")

    hook(monkeypatch, "pwrite", alter, at=2)
    with pytest.raises(GGUFError, match=rf"{victim.name}: (changed since|ends at byte)"):
        convert(model, tmp_path / "pack")
    assert names(tmp_path) == sorted(path.name for path in model.paths)


def test_a_source_that_changed_since_its_inventory_is_refused(model, tmp_path):
    inventory = open_inventory(model.paths[0])
    with model.paths[0].open("ab") as file:
        file.write(b"more")
    with pytest.raises(GGUFError, match="changed since it was opened"):
        asyncio.run(create_pack(inventory, tmp_path / "pack"))
    assert names(tmp_path) == sorted(path.name for path in model.paths)


def test_a_source_that_cannot_be_read_is_named(model, tmp_path, monkeypatch):
    inventory = open_inventory(model.paths[0])
    hook(monkeypatch, "preadv", failing(errno.EIO), at=1)
    with pytest.raises(GGUFError, match=r"cannot be read at byte .*Input/output error"):
        asyncio.run(create_pack(inventory, tmp_path / "pack"))
    assert names(tmp_path) == sorted(path.name for path in model.paths)


@pytest.mark.parametrize("n_cancels", [1, 3])
@pytest.mark.parametrize(("function", "at"), [("pwrite", 0), ("pwrite", 17), ("fsync", 0)])
def test_cancelling_leaves_nothing_and_returns_after_the_clean_up(
    model, tmp_path, monkeypatch, function, at, n_cancels
):
    heard = threading.Event()
    real_stop = progress_module.Reporter.stop

    def stop(reporter):
        real_stop(reporter)
        heard.set()

    monkeypatch.setattr(progress_module.Reporter, "stop", stop)
    monkeypatch.setattr(writer_module, "CHUNK_NBYTES", 1024)

    async def scenario():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(create_pack(model.paths[0], tmp_path / "pack"))

        def cancel():
            for _ in range(n_cancels):
                loop.call_soon_threadsafe(task.cancel)
            assert heard.wait(10)

        hook(monkeypatch, function, cancel, at=at)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard.is_set(), "the work was told to stop; it was not just waited for"
        assert names(tmp_path) == sorted(path.name for path in model.paths)

    asyncio.run(scenario())


KILLED_AT_EVERY_STEP = """
import asyncio, json, os, signal, sys
from pathlib import Path
from tieredmoe.pack import create_pack, open_pack, writer

source, place = Path(sys.argv[1]), Path(sys.argv[2])
writer.CHUNK_NBYTES = 20_000
STEPS = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "unlink")

def convert(dest, die_at):
    real = {name: getattr(os, name) for name in STEPS}
    n = 0
    def step(name):
        def stepped(*args, **kwargs):
            nonlocal n
            if n == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            n += 1
            # A kill is no power loss: syncing would only make this slow.
            return None if name == "fsync" else real[name](*args, **kwargs)
        return stepped
    for name in STEPS:
        setattr(os, name, step(name))
    asyncio.run(create_pack(source, dest))
    return n

outcomes = []
die_at = 0
while True:
    dest = place / f"pack{die_at}"
    child = os.fork()
    if child == 0:
        convert(dest, die_at)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    whole = dest.exists() and bool(open_pack(dest))
    if not whole:
        child = os.fork()
        if child == 0:
            convert(dest, None)
            os._exit(0)
        os.waitpid(child, 0)
    outcomes.append([killed, whole])
    if not killed:
        break
    die_at += 1
print(json.dumps(outcomes))
"""


def test_a_kill_at_any_step_leaves_no_pack_that_only_looks_whole(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", types=(UNIFORM,), n_experts=2)
    place = tmp_path / "place"
    place.mkdir()
    convert(model, tmp_path / "unharmed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, model.paths[0], place],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(writer_module.__file__).parents[2])},
    )
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 25
    assert outcomes[-1] == [False, True]
    whole = [pack for _, pack in outcomes]
    assert whole == sorted(whole), "once whole, a pack stays so"
    expected = pack_files(tmp_path / "unharmed")
    for pack in place.iterdir():
        files = pack_files(pack)
        files.pop("conversion.lock", None)
        assert files == expected, f"{pack.name}: the conversion after the kill gives the same pack"


def test_one_buffer_of_seven_bytes_is_enough(tmp_path, monkeypatch):
    model = make_small_moe(tmp_path / "model.gguf", types=MIXED[1:2], n_experts=1)
    monkeypatch.setattr(writer_module, "CHUNK_NBYTES", 7)
    monkeypatch.setattr(writer_module, "N_BUFFERS", 1)
    convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files
