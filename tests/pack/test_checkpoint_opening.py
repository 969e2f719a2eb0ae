"""One function opens a model in any form, and says of anything else what it is and what to do."""

import os
import tempfile
from pathlib import Path

import pytest
from small_moe import convert, make_small_moe

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import Pack, VirtualPack, open_checkpoint, open_pack, opening
from tieredmoe.pack.opening import FORMS, Form

NOBODY = 65534
"""The administrator may look into every directory; this user may not."""


@pytest.fixture
def place(tmp_path):
    """A model of two shards, its pack, and nothing else in either directory."""
    (tmp_path / "gguf").mkdir()
    model = make_small_moe(tmp_path / "gguf" / "m.gguf", n_shards=2)
    convert(model, tmp_path / "packed")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["gguf", "gguf/m-00001-of-00002.gguf", "gguf/m-00002-of-00002.gguf"]
)
def test_a_gguf_is_opened_by_any_of_its_shards_and_by_their_directory(place, name):
    model = open_checkpoint(place / name)
    assert isinstance(model, VirtualPack)
    assert [path.name for path in model.data_files] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]


def test_a_gguf_by_another_name_is_known_by_its_first_bytes(tmp_path):
    (path,) = make_small_moe(tmp_path / "m.gguf").paths
    assert isinstance(open_checkpoint(path.rename(tmp_path / "blob")), VirtualPack)


def test_an_inventory_needs_no_opening(place):
    inventory = open_inventory(place / "gguf")
    assert open_checkpoint(inventory).inventory is inventory


def test_a_pack_is_opened_by_its_directory(place):
    model = open_checkpoint(str(place / "packed"))
    assert isinstance(model, Pack)
    assert model.path == place / "packed"


def test_what_is_opened_stays_where_it_is_when_the_working_directory_changes(place, monkeypatch):
    monkeypatch.chdir(place)
    models = [open_checkpoint("gguf"), open_checkpoint("packed")]
    monkeypatch.chdir(place / "gguf")
    for model in models:
        assert all(path.is_file() for path in model.data_files)
        model.check_unchanged()


def test_a_directory_with_two_models_names_them(place):
    make_small_moe(place / "gguf" / "other.gguf")
    with pytest.raises(GGUFError, match=r"holds 2 models, name one.*m-00001.*other\.gguf"):
        open_checkpoint(place / "gguf")


def test_a_set_with_a_shard_missing_names_it(place):
    (place / "gguf" / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(GGUFError, match=r"1 of 2 shards missing: m-00002-of-00002\.gguf"):
        open_checkpoint(place / "gguf")


def test_a_damaged_pack_is_told_as_a_damaged_pack(place):
    (place / "packed" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(PackError, match="its first line is damaged"):
        open_checkpoint(place / "packed")


def leftover(directory):
    (directory / "conversion.lock").touch()
    (directory / "experts-00000.bin").touch()


def holding_packs(directory):
    for name in ("a", "b"):
        (directory / name).mkdir()
        (directory / name / "manifest.json").touch()
    (directory / "c").mkdir()


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda directory: None, "it is empty; a model is a pack's directory; a GGUF file"),
        (lambda directory: (directory / "x.txt").touch(), "a directory without one; a model is"),
        (leftover, "a conversion that did not end; go on with it by `tieredmoe pack create`"),
        (holding_packs, "it holds 2, name one of them: a, b$"),
    ],
)
def test_a_directory_that_is_no_model_says_what_it_is(tmp_path, make, fact):
    make(tmp_path)
    with pytest.raises(PackError, match=f"{tmp_path}: is not a pack, nor .*{fact}") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", "is not a pack, nor .*a model is"),
        ("empty", b"", "is not a pack, nor .*a model is"),
        ("manifest.json", b"{}", "it is a file of one; name its directory"),
        ("other.gguf", b"none", "a GGUF file: it starts with b'none'"),
    ],
)
def test_a_file_that_is_no_model_says_so(tmp_path, name, content, fact):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((PackError, GGUFError), match=f"{name}: .*{fact}"):
        open_checkpoint(tmp_path / name)


def test_what_is_not_there_or_no_file_says_so(tmp_path):
    with pytest.raises(PackError, match="gone: does not exist"):
        open_checkpoint(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackError, match="pipe: is neither a regular file nor a directory"):
        open_checkpoint(tmp_path / "pipe")
    with pytest.raises(PackError, match="cannot be opened"):
        open_checkpoint("a\0b")
    with pytest.raises(PackError, match="cannot be opened: File name too long"):
        open_checkpoint("x" * 5000)


@pytest.mark.parametrize("mode", [0o444, 0o311, 0o000])
def test_a_directory_that_may_not_be_looked_into_says_so(mode):
    directory = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        directory.chmod(mode)
        if user == 0:
            os.seteuid(NOBODY)
        with pytest.raises(PackError) as error:
            open_checkpoint(directory)
    finally:
        os.seteuid(user)
        directory.rmdir()
    assert str(error.value) == f"{directory}: cannot be opened: Permission denied"


def test_a_file_that_is_opened_as_a_pack_is_named_once(place):
    with pytest.raises(PackError) as error:
        open_pack(place / "gguf" / "m-00001-of-00002.gguf")
    assert str(error.value).count("m-00001") == 1
    assert "is a file, not a pack; make one of it" in str(error.value)


def test_a_new_form_is_one_row(tmp_path, monkeypatch):
    opened = object()
    row = Form("a toy", lambda path, beginning: beginning[:3] == b"TOY", lambda path: opened)
    monkeypatch.setattr(opening, "FORMS", (row, *FORMS))
    (tmp_path / "x").write_bytes(b"TOY!")
    assert open_checkpoint(tmp_path / "x") is opened
