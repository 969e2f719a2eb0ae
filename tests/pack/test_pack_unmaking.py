"""While a source is given up or given back, whatever is lost or in use, all bytes are somewhere."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from pack_faults import failing, hook
from pack_stops import NOTE, PUBLISH, TAKE, journal_of, last_line_spoilt, moe, stopped
from small_moe import (
    convert,
    names,
    rebuild_source,
)

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf.header import GIVEN_UP_MAGIC
from tieredmoe.pack import create_pack, rollback_pack
from tieredmoe.pack import rollback as rollback_module


@pytest.fixture
def model(tmp_path):
    """A model of two files whose tensors are many pages long."""
    return moe(tmp_path / "model")


# --- what is in the journal ---------------------------------------------------------------------


@pytest.mark.parametrize("then", ["create", "rollback"])
@pytest.mark.parametrize("n_taken", [0, 1, 3])
def test_a_journal_that_lost_its_last_word_costs_nothing_while_giving_up(
    model, tmp_path, monkeypatch, n_taken, then
):
    before = {path.name: path.read_bytes() for path in model.paths}
    stopped(model, tmp_path / "pack", monkeypatch, TAKE, n=n_taken, reclaim_source=True)
    assert model.paths[0].read_bytes()[:4] == GIVEN_UP_MAGIC
    last_line_spoilt(tmp_path / "pack")
    if then == "create":
        convert(model, tmp_path / "pack", reclaim_source=True)
        assert rebuild_source(tmp_path / "pack") == before
        assert names(tmp_path / "model") == []
    else:
        asyncio.run(rollback_pack(tmp_path / "pack"))
        assert model.files == before


@pytest.mark.parametrize("then", ["create", "rollback"])
@pytest.mark.parametrize("n_returned", [0, 2])
def test_a_journal_that_lost_its_last_word_costs_nothing_while_giving_back(
    model, tmp_path, monkeypatch, n_returned, then
):
    before = {path.name: path.read_bytes() for path in model.paths}
    stopped(model, tmp_path / "pack", monkeypatch, TAKE, n=3, reclaim_source=True)

    def work(_, dest):
        asyncio.run(rollback_pack(dest))

    # Before the next unit is given back, the pack's copy of this one is dropped.
    drop = (rollback_module._GivingBack, "_drop")
    stopped(model, tmp_path / "pack", monkeypatch, drop, n=n_returned, work=work)
    last_line_spoilt(tmp_path / "pack")
    if then == "create":
        convert(model, tmp_path / "pack", reclaim_source=True)
        assert rebuild_source(tmp_path / "pack") == before
    else:
        asyncio.run(rollback_pack(tmp_path / "pack"))
        assert model.files == before


def test_a_journal_that_is_gone_on_with_is_on_the_disk(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, NOTE, n=1)
    journal = journal_of(tmp_path / "pack")
    synced = []
    real = os.fdatasync

    def watching(fd):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        return real(fd)

    monkeypatch.setattr(os, "fdatasync", watching)
    convert(model, tmp_path / "pack")
    assert synced[0] == journal


# --- what is in the pack while it is taken apart --------------------------------------------------


def test_what_is_being_rolled_back_is_no_pack_to_anybody(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO), at=1)
        with pytest.raises(PackError):
            convert(model, tmp_path / "pack", reclaim_source=True)
    assert "manifest.json" in names(tmp_path / "pack.partial")
    with monkeypatch.context() as patch:
        hook(patch, "pwrite", failing(errno.EIO), at=3)
        with pytest.raises(GGUFError):
            asyncio.run(rollback_pack(tmp_path / "pack"))
    assert "manifest.json" not in names(tmp_path / "pack.partial")


def test_a_pack_that_is_read_is_not_taken_apart(model, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in model.paths}
    stopped(model, tmp_path / "pack", monkeypatch, TAKE, n=3, reclaim_source=True)
    with (
        (tmp_path / "pack.partial" / "experts-00000.bin").open("rb"),
        pytest.raises(PackError, match=r"experts-00000.bin: is in use"),
    ):
        asyncio.run(rollback_pack(tmp_path / "pack"))
    asyncio.run(rollback_pack(tmp_path / "pack"))
    assert model.files == before


def test_rolling_back_ends_at_all_of_it(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, TAKE, n=3, reclaim_source=True)
    seen = []
    asyncio.run(rollback_pack(tmp_path / "pack", progress=seen.append))
    for phase in ("copy", "verify"):
        done = [each.done_nbytes for each in seen if each.phase == phase]
        assert done == sorted(done)
        assert seen[-1].total_nbytes == done[-1]


def test_giving_up_ends_at_all_of_it(model, tmp_path):
    seen = []
    convert(model, tmp_path / "pack", reclaim_source=True, progress=seen.append)
    for phase in ("copy", "verify"):
        done = [each.done_nbytes for each in seen if each.phase == phase]
        assert done == sorted(done)
        assert seen[-1].total_nbytes == done[-1]


def test_a_pack_that_is_whole_is_not_rolled_back_and_told_what_to_do(model, tmp_path, monkeypatch):
    stopped(model, tmp_path / "pack", monkeypatch, PUBLISH, reclaim_source=True)
    with pytest.raises(PackError, match=r"is a whole pack.*pack restore"):
        asyncio.run(rollback_pack(tmp_path / "pack"))


def test_a_link_whose_file_went_before_a_crash_goes_too(model, tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    for path in model.paths:
        (links / path.name).symlink_to(path)
    with monkeypatch.context() as patch:
        hook(patch, "unlink", failing(errno.EIO), at=1)
        with pytest.raises(GGUFError):
            asyncio.run(create_pack(links, tmp_path / "pack", reclaim_source=True))
    asyncio.run(create_pack(links, tmp_path / "pack", reclaim_source=True))
    assert names(links) == []
