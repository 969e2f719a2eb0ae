"""A pack never hands out a tensor whose bytes are not its source's, and knows its source."""

import asyncio
import os
import stat

import pytest

from tieredmoe.errors import ConfigError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack, open_pack
from tieredmoe.testing import make_deepseek_v4


@pytest.fixture
def packed(tmp_path):
    """A pack of the model of seed 1, and its source."""
    make_deepseek_v4(tmp_path / "m.gguf", seed=1)
    asyncio.run(create_pack(tmp_path / "m.gguf", tmp_path / "m.pack"))
    return tmp_path / "m.pack", tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "name", ["output_norm.weight", "output.weight", "blk.2.ffn_up_exps.weight"]
)
def test_a_tensor_with_one_flipped_bit_is_refused_by_name(packed, name):
    pack = open_pack(packed[0])
    extent = list(pack.manifest.layout.tensor_extents(name))[-1]
    path = packed[0] / pack.manifest.layout.files[extent.file_index].name
    with path.open("r+b") as file:
        file.seek(extent.offset + extent.nbytes - 1)
        last = file.read(1)[0]
        file.seek(extent.offset + extent.nbytes - 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(PackError, match=f"{name}.*does not match its digest"):
        pack.read(name)


def test_a_pack_is_of_its_source_wherever_that_lies(packed, tmp_path):
    packed[1].rename(tmp_path / "elsewhere.gguf")
    open_pack(packed[0]).check_source(open_inventory(tmp_path / "elsewhere.gguf"))


@pytest.mark.parametrize("options", [{"seed": 2}, {"seed": 1, "n_shards": 2}])
def test_a_pack_of_other_weights_under_the_same_header_is_refused(packed, tmp_path, options):
    made = make_deepseek_v4(tmp_path / "other.gguf", **options)
    with pytest.raises(PackError, match="pack of another model than"):
        open_pack(packed[0]).check_source(open_inventory(made.paths[0]))


def test_an_open_pack_survives_a_change_of_the_working_directory(packed, monkeypatch, tmp_path):
    monkeypatch.chdir(packed[0].parent)
    pack = open_pack("m.pack")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert pack.read("output_norm.weight").nbytes


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_a_path_that_cannot_be_is_refused_like_any_other(path):
    with pytest.raises(PackError):
        open_pack(path)


def test_a_directory_that_may_not_be_entered_is_refused_by_name(packed, monkeypatch):
    real = os.stat

    def denied(path, *arguments, **options):
        if str(path).endswith("manifest.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(PackError, match="Permission denied"):
        open_pack(packed[0])
    assert stat.S_ISDIR(real(packed[0]).st_mode)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "x"])
def test_a_file_size_that_is_none_is_refused_before_anything_is_read(packed, tmp_path, nbytes):
    with pytest.raises(ConfigError, match="file_nbytes_max is"):
        asyncio.run(create_pack(packed[1], tmp_path / "n.pack", file_nbytes_max=nbytes))
    assert not (tmp_path / "n.pack").exists()
