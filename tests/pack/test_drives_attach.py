"""Directories of drives can be named anew, and what does not belong is refused by name."""

import logging
import os
import shutil

import pytest
from drive_stage import (
    assert_reads_all,
    attach,
    make_pack,
    mirror,
    split,
    tree,
)

from tieredmoe.errors import ConfigError, PackError
from tieredmoe.pack.drives import open_drives


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


def test_a_moved_drive_is_attached_and_the_others_are_remembered(place):
    pack, model = place
    drives = [pack.parent / name for name in "abc"]
    split(pack, *drives, weights=[1, 2, 3], remove_original=True)
    moved = drives[1].rename(pack.parent / "moved")
    opened = attach(pack, moved)
    assert opened.drives == (drives[0], moved, drives[2])
    assert_reads_all(open_drives(pack), model)


def test_a_split_without_an_index_is_taken_up_in_any_order(place):
    pack, model = place
    drives = [pack.parent / name for name in "abc"]
    split(pack, *drives, remove_original=True)
    index = (pack / "drives.json").read_bytes()
    for damage in (b"", b"nonsense", None):
        (pack / "drives.json").unlink()
        if damage is not None:
            (pack / "drives.json").write_bytes(damage)
        attach(pack, drives[2], drives[0], drives[1])
        assert (pack / "drives.json").read_bytes() == index
    assert_reads_all(open_drives(pack), model)


def test_a_copy_made_by_other_means_is_a_copy(place):
    pack, model = place
    copy = shutil.copytree(pack, pack.parent / "rsynced")
    assert attach(pack, copy).drives == (pack, copy)
    assert len(assert_reads_all(open_drives(pack), model)) == 2


def test_attaching_copies_anew_forgets_those_not_named(mirrored, caplog):
    pack, _, copy = mirrored
    shutil.rmtree(copy)
    third = shutil.copytree(pack, pack.parent / "third")
    assert attach(pack, third).drives == (pack, third)
    assert warnings(caplog) == []


BAD_ATTACHMENTS = [
    (["a"], r"drive 1 is missing; name its directory as well; drive 2 is missing"),
    (["a", "b", "c", "copy"], "some are copies of the pack, and some are parts of a split"),
    (["a", "b", "b2", "c"], "/b2 and .*/b are the same drive 1"),
    (["a", "b", "c", "nothing"], "/nothing: does not exist"),
    (["a", "b", "c", "empty"], "/empty: is not a pack, or not a whole one"),
    (["a", "b", "other"], "/other/manifest.json: manifest field at the top must be an object with"),
    (["a", "b", "foreign"], r"/foreign is drive 2 of a split by 1:1:1 of pack \w+, not of this"),
    (["a", "b", "short"], "drive 2: .*/short: experts-00000.bin has 0 bytes instead of"),
    (["a", "b2", "weighed"], "they are parts of different splits"),
]


@pytest.mark.parametrize(("named", "message"), BAD_ATTACHMENTS)
def test_what_cannot_be_attached_is_named_and_nothing_changes(place, tmp_path, named, message):
    pack, _ = place
    other, _ = make_pack(tmp_path, seed=1)
    weighed = shutil.copytree(pack, tmp_path / "weighed-pack")
    shutil.copytree(pack, tmp_path / "copy")
    split(pack, *(tmp_path / name for name in "abc"))
    (pack / "drives.json").unlink()
    split(other, *(tmp_path / f"other-{name}" for name in "abc"))
    split(weighed, tmp_path / "w0", tmp_path / "w1", tmp_path / "weighed", weights=[2, 1, 1])
    shutil.copytree(tmp_path / "b", tmp_path / "b2")
    shutil.copytree(tmp_path / "c", tmp_path / "short")
    (tmp_path / "short" / "experts-00000.bin").write_bytes(b"")
    shutil.copytree(tmp_path / "other-c", tmp_path / "foreign")
    shutil.copytree(other, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    with pytest.raises(PackError, match=message):
        attach(pack, *(tmp_path / name for name in named))
    assert tree(tmp_path) == before


def test_attaching_nothing_is_refused(place):
    with pytest.raises(ConfigError, match="no directory is named"):
        attach(place[0])
