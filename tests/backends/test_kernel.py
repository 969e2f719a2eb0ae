import os
from pathlib import Path

import pytest

from tieredmoe.backends import kernel as kernel_module
from tieredmoe.backends.kernel import (
    cached_nbytes,
    direct_alignment,
    drop_cached,
    lives_in_memory,
)

NBYTES = 64 << 10


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * NBYTES)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    yield fd
    os.close(fd)


def test_a_stated_alignment_is_one_that_a_direct_read_accepts(fd):
    alignment = direct_alignment(fd)
    if not alignment:
        pytest.skip("this file system states no alignment")
    assert alignment & (alignment - 1) == 0


def test_an_unknown_machine_states_nothing(fd, monkeypatch):
    monkeypatch.setattr(kernel_module.platform, "machine", lambda: "pdp11")
    assert direct_alignment(fd) is None


def test_a_pipe_states_no_alignment():
    ends = os.pipe()
    assert not direct_alignment(ends[0])
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("measure", ["cachestat", "mincore"])
def test_the_page_cache_is_seen_filling_and_emptying(fd, measure, monkeypatch):
    if measure == "mincore":
        monkeypatch.setattr(kernel_module, "_cachestat", lambda *_: None)
    os.pread(fd, NBYTES, 0)
    full = cached_nbytes(fd, 0, NBYTES)
    if full is None or lives_in_memory(fd):
        pytest.skip("this system does not tell, or the file has no disk")
    drop_cached(fd, 0, NBYTES)
    assert (full, cached_nbytes(fd, 0, NBYTES)) == (NBYTES, 0)


def test_the_pages_of_a_file_on_an_overlay_are_found_where_they_are(fd, monkeypatch):
    if lives_in_memory(fd):
        pytest.skip("the file has no disk")
    # What cachestat says of any file on an overlay, whose pages belong to the file below.
    monkeypatch.setattr(kernel_module, "_cachestat", lambda *_: 0)
    monkeypatch.setattr(kernel_module, "_file_system", lambda _: 0x794C7630)
    os.pread(fd, NBYTES, 0)
    full = cached_nbytes(fd, 0, NBYTES)
    drop_cached(fd, 0, NBYTES)
    assert (full, cached_nbytes(fd, 0, NBYTES)) == (NBYTES, 0)


def test_a_cache_that_cannot_be_measured_is_unknown(monkeypatch):
    monkeypatch.setattr(kernel_module, "_cachestat", lambda *_: None)
    ends = os.pipe()
    assert cached_nbytes(ends[0], 0, 4096) is None
    for end in ends:
        os.close(end)


def test_tmpfs_is_told_from_a_disk():
    mounts = [
        line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    ]
    kinds = {mount: kind for _, mount, kind, *_ in mounts}
    for mount, expected in (("/dev/shm", kinds.get("/dev/shm") == "tmpfs"), ("/proc", False)):
        if Path(mount).is_dir():
            fd = os.open(mount, os.O_RDONLY)
            assert lives_in_memory(fd) is expected
            os.close(fd)
