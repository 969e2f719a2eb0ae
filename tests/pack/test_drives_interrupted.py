"""A split or a mirror that fails, is cancelled or killed leaves the pack as it was."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from drive_stage import (
    assert_opens_plainly,
    assert_reads_all,
    attach,
    make_pack,
    mirror,
    split,
    tree,
)
from pack_faults import failing, hook
from small_moe import UNIFORM, flip

from tieredmoe.errors import PackError
from tieredmoe.pack import open_pack
from tieredmoe.pack import progress as progress_module
from tieredmoe.pack import record_copy as record_copy_module
from tieredmoe.pack import split as split_module
from tieredmoe.pack.drives import has_drives, open_drives
from tieredmoe.pack.mirror import mirror_pack
from tieredmoe.pack.split import split_pack


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("pattern"))


@pytest.fixture
def place(pattern, tmp_path, monkeypatch):
    """A pack to be changed, and its model; syncing is left out, for it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return shutil.copytree(pattern[0], tmp_path / "pack0"), pattern[1]


def split_over_three(pack, **options):
    split(pack, pack.parent / "a", pack, pack.parent / "b", **options)


def split_and_remove(pack):
    split_over_three(pack, remove_original=True)


def mirror_to_a(pack):
    mirror(pack, pack.parent / "a")


FAULTS = [
    ("pwrite", 0, errno.ENOSPC, r"writing experts-0000\d\.bin|writing dense.*: No space left"),
    ("pwrite", 20, errno.ENOSPC, "/a: writing .* failed: No space left on device; the pack needs"),
    ("pwrite", 20, errno.EIO, r"writing experts-0000\d\.bin failed: Input/output error"),
    ("ftruncate", 0, errno.EFBIG, "making .*-00000.bin of .*File too large"),
    ("fsync", 0, errno.EIO, r"syncing .*-00000\.bin failed: Input/output error"),
    ("mkdir", 0, errno.EROFS, r"making a\.partial failed: Read-only file system"),
    ("rename", 0, errno.EIO, r"writing manifest\.json failed: Input/output error"),
    ("rename", -1, errno.EIO, r"drives\.json: cannot be written: Input/output error"),
    ("unlink", 0, errno.EIO, r"renaming \w.*\.partial to .* failed: Input/output error"),
    ("rename", -2, errno.EIO, r"renaming \w.*\.partial to .* failed: Input/output error"),
]


def n_calls(monkeypatch, function, action, pack):
    """How often ``action`` on a copy of ``pack`` calls ``os.function``."""
    calls = []
    real = getattr(os, function)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, lambda *a, **k: (calls.append(a), real(*a, **k))[1])
        action(pack)
    return len(calls)


@pytest.mark.parametrize("action", [split_over_three, split_and_remove, mirror_to_a])
@pytest.mark.parametrize(("function", "at", "code", "message"), FAULTS)
def test_a_write_that_fails_is_explained_and_leaves_nothing(
    place, tmp_path, monkeypatch, action, function, at, code, message
):
    pack, model = place
    if at < 0:
        (tmp_path / "rehearsal").mkdir()
        at += n_calls(monkeypatch, function, action, make_pack(tmp_path / "rehearsal")[0])
    before = tree(tmp_path)
    hook(monkeypatch, function, failing(code), at=at)
    with pytest.raises(PackError, match=message.replace("/a:", r"/(a|b|drive-00001):")):
        action(pack)
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert_opens_plainly(pack, model)


@pytest.mark.parametrize("action", [split_over_three, mirror_to_a])
def test_a_directory_that_somebody_else_made_meanwhile_stays_as_he_made_it(
    place, tmp_path, monkeypatch, action
):
    pack, model = place
    his = dict.fromkeys(("manifest.json", "experts-00000.bin", "dense-00000.bin"), b"his")

    def appear():
        (tmp_path / "a").mkdir()
        for name, content in his.items():
            (tmp_path / "a" / name).write_bytes(content)

    hook(monkeypatch, "pwrite", appear, at=5)
    with pytest.raises(PackError, match=r"renaming a\.partial to a failed: Directory not empty"):
        action(pack)
    assert tree(tmp_path / "a") == his
    assert_opens_plainly(pack, model)


@pytest.mark.parametrize("action", [split_over_three, mirror_to_a])
def test_a_damaged_pack_is_neither_split_nor_mirrored(place, action):
    pack, _ = place
    flip(pack / "experts-00001.bin", 5)
    before = tree(pack.parent)
    with pytest.raises(PackError, match=r"experts-00001.bin: is damaged: layer 1, expert 0, gate"):
        action(pack)
    assert tree(pack.parent) == before


def test_damaged_dense_bytes_are_not_mirrored(place):
    pack, _ = place
    opened = open_pack(pack)
    index, offset, _ = opened.locate_tensor("output.weight")
    flip(opened.tensor_files[index], offset)
    before = tree(pack.parent)
    with pytest.raises(PackError, match=r"dense-0000\d.bin: is damaged: tensor output.weight"):
        mirror_to_a(pack)
    assert tree(pack.parent) == before


def test_a_pack_that_cannot_be_read_is_named(place, monkeypatch):
    pack, _ = place
    before = tree(pack.parent)
    real = os.preadv
    n = iter(range(10_000))

    def preadv(*arguments):
        if next(n) == 40:
            raise OSError(errno.EIO, "injected")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(PackError, match=r"experts-0000\d.bin: cannot be read at byte .*Input/outp"):
        split_over_three(pack)
    assert tree(pack.parent) == before


def test_the_original_stays_if_a_drive_did_not_keep_what_was_written(place, monkeypatch):
    pack, _ = place
    before = tree(pack.parent)
    real = os.pwrite

    def forgetful(fd, data, offset):
        wrong = bytearray(data)
        wrong[0] ^= offset == 4096 and len(data) > 100
        return real(fd, wrong, offset)

    monkeypatch.setattr(os, "pwrite", forgetful)
    with pytest.raises(PackError) as caught:
        split_and_remove(pack)
    assert "was not split, a drive did not keep what was written" in str(caught.value)
    assert "does not match its digest" in str(caught.value)
    assert tree(pack.parent) == before


def test_an_original_that_cannot_be_removed_is_said_and_the_split_stands(place, monkeypatch):
    pack, model = place
    real = Path.unlink

    def unlink(path, **options):
        if path.name == "experts-00001.bin":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(PackError, match=r"experts-00001.bin: cannot be removed now that .*by hand"):
        split_and_remove(pack)
    assert_reads_all(open_drives(pack), model)


@pytest.mark.parametrize("n_cancels", [1, 3])
@pytest.mark.parametrize(("function", "at"), [("pwrite", 0), ("pwrite", 17), ("fsync", 0)])
@pytest.mark.parametrize("what", ["split", "mirror"])
def test_cancelling_leaves_nothing_and_returns_after_the_clean_up(
    place, tmp_path, monkeypatch, what, function, at, n_cancels
):
    pack, model = place
    heard = threading.Event()
    real_stop = progress_module.Reporter.stop

    def stop(reporter):
        real_stop(reporter)
        heard.set()

    monkeypatch.setattr(progress_module.Reporter, "stop", stop)
    monkeypatch.setattr(record_copy_module, "PIECE_NBYTES", 1024)
    before = tree(tmp_path)

    async def scenario():
        loop = asyncio.get_running_loop()
        a, b = tmp_path / "a", tmp_path / "b"
        work = split_pack(pack, [a, pack, b]) if what == "split" else mirror_pack(pack, a)
        task = asyncio.create_task(work)

        def cancel():
            for _ in range(n_cancels):
                loop.call_soon_threadsafe(task.cancel)
            assert heard.wait(10)

        hook(monkeypatch, function, cancel, at=at)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard.is_set(), "the work was told to stop; it was not just waited for"
        assert tree(tmp_path) == before

    asyncio.run(scenario())
    assert not (tmp_path / "a.partial").exists()
    assert_opens_plainly(pack, model)


KILLED_AT_EVERY_STEP = """
import asyncio, json, os, shutil, signal, sys
from pathlib import Path
from tieredmoe.pack.split import split_pack
from tieredmoe.pack.mirror import mirror_pack

source, place, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
STEPS = ("mkdir", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir")

def work(here, die_at):
    real = {name: getattr(os, name) for name in STEPS}
    n = n_writes = 0
    def step(name):
        def stepped(*args, **kwargs):
            nonlocal n, n_writes
            if n == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            n_writes += name == "pwrite"
            n += name != "pwrite" or n_writes % 3 == 1  # what follows a write is mostly another
            # A kill is no power loss: syncing would only make this slow.
            return None if name == "fsync" else real[name](*args, **kwargs)
        return stepped
    for name in STEPS:
        setattr(os, name, step(name))
    if what == "split":
        drives = [here / "pack", here / "b"]
        asyncio.run(split_pack(here / "pack", drives, remove_original=True))
    else:
        asyncio.run(mirror_pack(here / "pack", here / "b"))

outcomes = []
while True:
    here = place / str(len(outcomes))
    shutil.copytree(source, here / "pack")
    child = os.fork()
    if child == 0:
        work(here, len(outcomes))
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    outcomes.append(killed)
    if not killed:
        break
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("what", ["split", "mirror"])
def test_a_kill_at_any_step_loses_nothing_and_can_be_gone_on_from(tmp_path, monkeypatch, what):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    pack, model = make_pack(tmp_path, types=(UNIFORM,), n_experts=2)
    place = tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, pack, place, what],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(split_module.__file__).parents[2])},
    )
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 15
    assert outcomes == [True] * (len(outcomes) - 1) + [False]
    has = []
    for i in range(len(outcomes)):
        killed = place / str(i) / "pack"
        has.append(has_drives(killed))
        if not has[-1]:
            open_pack(killed)
            go_on(killed, what)
        assert_reads_all(open_drives(killed), model)
    assert has == sorted(has), "once split or mirrored, it stays so"
    assert 0 < sum(has) < len(has)


def go_on(pack, what):
    """Do it again, or take up what was finished but for the index."""
    finished = [path for path in (pack / "drive-00000", pack.parent / "b") if path.exists()]
    if len(finished) == (2 if what == "split" else 1):
        attach(pack, *finished)
        return
    for path in finished:
        with pytest.raises(PackError, match="already exists"):
            split(pack, path)
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    if what == "split":
        split(pack, pack, pack.parent / "b")
    else:
        mirror(pack, pack.parent / "b")
