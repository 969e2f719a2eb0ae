"""A split pack opens with the drives that are its own, wherever they were moved."""

import logging
import os
import shutil

import pytest
from drive_stage import (
    assert_reads_all,
    make_pack,
    split,
)

from tieredmoe.errors import PackError
from tieredmoe.pack import Digested
from tieredmoe.pack.drives import has_drives, is_drive, open_drives, refuse_drive


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


def test_a_pack_and_the_drives_inside_it_move_together(made, tmp_path):
    pack, model, _, _ = made
    moved = shutil.copytree(pack, tmp_path / "elsewhere" / "renamed")
    opened = open_drives(moved)
    assert opened.drives[0] == moved / "drive-00000"
    assert_reads_all(opened, model)


def test_a_pack_reached_by_a_link_or_from_its_directory_is_the_same(made, tmp_path, monkeypatch):
    pack, model, _, _ = made
    (tmp_path / "link").symlink_to(pack)
    assert_reads_all(open_drives(tmp_path / "link"), model)
    monkeypatch.chdir(pack)
    opened = open_drives(".")
    monkeypatch.chdir(tmp_path)
    assert_reads_all(opened, model)


def test_all_that_is_wrong_with_the_drives_is_said_at_once(place):
    pack, _ = place
    drives = [pack.parent / name for name in "abcd"]
    split(pack, *drives, remove_original=True)
    shutil.rmtree(drives[0])
    (drives[1] / "manifest.json").unlink()
    with (drives[2] / "experts-00000.bin").open("ab") as file:
        file.write(b"!")
    (pack / "dense-00001.bin").unlink()
    with pytest.raises(PackError) as caught:
        open_drives(pack)
    message = str(caught.value)
    assert "dense-00001.bin: No such file" in message
    assert f"drive 0 is not there: no directory {drives[0]}" in message
    assert "name its directory to `attach_drives`" in message
    assert f"drive 1: {drives[1]}/manifest.json: cannot be opened: No such file" in message
    assert f"drive 2: {drives[2]}: experts-00000.bin has" in message
    assert "drive 3" not in message


def test_drives_that_were_exchanged_are_told_apart(place):
    pack, _ = place
    a, b = pack.parent / "a", pack.parent / "b"
    split(pack, a, b, remove_original=True)
    a.rename(pack.parent / "c")
    b.rename(a)
    (pack.parent / "c").rename(b)
    with pytest.raises(PackError) as caught:
        open_drives(pack)
    assert f"{a} is not drive 0 of a split by 1:1 of pack" in str(caught.value)
    assert "it is drive 1 of a split by 1:1" in str(caught.value)
    assert f"{b} is not drive 1" in str(caught.value)


def test_a_drive_of_another_pack_or_another_split_is_refused(place, tmp_path):
    pack, _ = place
    other, _ = make_pack(tmp_path, seed=1)
    again = shutil.copytree(pack, tmp_path / "again")
    for path, name, weights in ((pack, "p", [1, 1]), (other, "o", [1, 1]), (again, "g", [2, 2])):
        split(path, tmp_path / f"{name}0", tmp_path / f"{name}1", weights=weights)
    shutil.rmtree(tmp_path / "p0")
    shutil.rmtree(tmp_path / "p1")
    shutil.copytree(tmp_path / "o0", tmp_path / "p0")
    shutil.copytree(tmp_path / "g1", tmp_path / "p1")
    with pytest.raises(PackError) as caught:
        open_drives(pack)
    assert f"{tmp_path}/p0 is not drive 0 of a split by 1:1 of pack" in str(caught.value)
    assert f"{tmp_path}/p1 is not drive 1 of a split by 1:1" in str(caught.value)
    assert "it is drive 1 of a split by 2:2" in str(caught.value)


def test_only_a_pack_with_an_index_has_drives(place, caplog):
    pack, _ = place
    assert not has_drives(pack)
    split(pack, pack.parent / "a")
    assert has_drives(pack)
    (pack / "drives.json").unlink()
    with pytest.raises(PackError, match=r"drives\.json: cannot be opened: No such file"):
        open_drives(pack)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_drive_that_is_opened_as_a_pack_says_what_it_is(made, tmp_path):
    pack, _, report, whole = made
    assert [is_drive(path) for path in (*report.drives, pack, whole, tmp_path)] == [True] * 2 + [
        False
    ] * 3
    with pytest.raises(
        PackError, match=r"b: is drive 1 of a split by 1:3 of pack .*; name the pack"
    ):
        refuse_drive(report.drives[1])


def test_a_drive_that_changes_after_it_was_opened_is_noticed(place):
    pack, _ = place
    split(pack, pack, pack.parent / "b", remove_original=True)
    opened = open_drives(pack)
    opened.check_unchanged()
    for path in (pack / "dense-00001.bin", pack.parent / "b" / "experts-00000.bin"):
        path.write_bytes(b"")
    with pytest.raises(PackError) as caught:
        opened.check_unchanged()
    assert "dense-00001.bin has 0 bytes instead of" in str(caught.value)
    assert f"{pack.parent}/b: experts-00000.bin has 0 bytes instead of" in str(caught.value)


def test_a_pack_on_drives_can_be_checked_like_any_other(made):
    opened = open_drives(made[0])
    assert isinstance(opened, Digested)
    assert opened.has_digests
