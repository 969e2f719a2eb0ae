"""A document of a newer format is refused by name, with the way forward, by whoever meets it."""

import asyncio
import json
import struct

import pytest
from drive_stage import attach, make_pack, mirror, split
from typer.testing import CliRunner

from tieredmoe.cli.app import app
from tieredmoe.errors import GGUFError, PackError
from tieredmoe.pack import (
    inspect_model,
    open_checkpoint,
    open_drives,
    open_pack,
    restore_pack,
    verify_drives,
    verify_pack,
)
from tieredmoe.pack.sealed import seal

NEWER = "is a {} document of format version 2, and this tieredmoe reads version 1; install a newer"


def change_version(path, version):
    """What another tieredmoe would have written: another version, and a digest that is right."""
    document = json.loads(path.read_bytes())
    del document["digest"]
    document["version"] = version
    path.write_bytes(seal(document))


def verify(path):
    return asyncio.run(verify_pack(path))


def restore(path):
    return asyncio.run(restore_pack(path, path.parent / "restored"))


@pytest.mark.parametrize("use", [open_pack, open_checkpoint, inspect_model, verify, restore])
def test_a_newer_manifest_is_refused_by_name_whatever_is_done(pack, use):
    change_version(pack / "manifest.json", 2)
    with pytest.raises(PackError, match=rf"manifest\.json: {NEWER.format('tieredmoe-pack')}"):
        use(pack)
    assert not (pack.parent / "restored").exists()


def test_a_newer_index_of_drives_is_refused_by_name(tmp_path):
    pack, _ = make_pack(tmp_path)
    split(pack, tmp_path / "a", tmp_path / "b")
    change_version(pack / "drives.json", 2)
    for use in (open_checkpoint, open_drives, lambda path: asyncio.run(verify_drives(path))):
        with pytest.raises(PackError, match=rf"drives\.json: {NEWER.format('tieredmoe-drives')}"):
            use(pack)


def test_a_newer_part_of_a_split_is_refused_by_name(tmp_path):
    pack, _ = make_pack(tmp_path)
    split(pack, tmp_path / "a", tmp_path / "b")
    change_version(tmp_path / "a" / "manifest.json", 2)
    for use in (open_checkpoint, lambda path: attach(path, tmp_path / "a")):
        with pytest.raises(PackError, match=NEWER.format("tieredmoe-drive")):
            use(pack)


def test_a_newer_copy_of_a_mirror_is_left_out_and_named(tmp_path, caplog):
    pack, _ = make_pack(tmp_path)
    mirror(pack, tmp_path / "copy")
    change_version(tmp_path / "copy" / "manifest.json", 2)
    with pytest.raises(PackError, match="copy holds another pack"):
        open_drives(pack)


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.0, True, 2**70])
def test_a_version_that_none_ever_was_is_refused(pack, version):
    change_version(pack / "manifest.json", version)
    with pytest.raises(PackError, match="manifest field version must be"):
        open_pack(pack)


def test_a_manifest_of_this_version_opens(pack):
    change_version(pack / "manifest.json", 1)
    assert not verify(pack).damage


@pytest.mark.parametrize("version", [4, 5, 99])
def test_a_newer_gguf_is_refused_by_name(small_pack, tmp_path, version):
    data = small_pack[1].paths[0].read_bytes()
    path = tmp_path / "newer.gguf"
    path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    with pytest.raises(GGUFError, match=f"has GGUF version {version}; versions 2 and 3 are"):
        inspect_model(path)


def test_the_command_says_so_in_one_line(pack):
    change_version(pack / "manifest.json", 2)
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, ["pack", command, str(pack)])
        assert isinstance(result.exception, PackError)
        assert "install a newer tieredmoe" in str(result.exception)
