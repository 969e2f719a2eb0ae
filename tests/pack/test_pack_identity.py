"""A pack holds every byte of its source, in one place, found as FORMAT.md says."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_moe import MIXED, SHAPES, UNIFORM, make_small_moe, pack_files, rebuild_source

from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack, open_pack, verify_pack
from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.spec import PAGE_NBYTES

LAYOUTS = {
    "one file": {},
    "alignment 64": {"alignment": 64},
    "alignment 4096": {"alignment": 4096},
    "types differ between layers and roles": {"types": MIXED},
    "roles in different shards": {"n_shards": 3},
    "bytes after the last tensor": {"trailing": b"\x01tail"},
    "one expert": {"n_experts": 1, "types": (UNIFORM,)},
    "everything": {"types": MIXED, "n_shards": 4, "alignment": 128, "trailing": b"\x00" * 99},
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def packed(request, tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", **{"n_experts": 2} | request.param)
    asyncio.run(create_pack(model.paths[-1], tmp_path / "pack"))
    return model, tmp_path / "pack"


def test_source_files_are_rebuilt_from_the_pack_alone(packed):
    model, pack = packed
    assert rebuild_source(pack) == model.files


def test_every_record_holds_the_slabs_of_its_expert_and_zeros(packed):
    model, path = packed
    pack = open_pack(path)
    files = [file.read_bytes() for file in pack.data_files]
    for key in list(pack.spec.keys()):
        where = pack.locate(key)
        record = files[where.file_index][where.offset : where.offset + where.nbytes]
        slabs = b"".join(model.slabs[key.layer, role, key.expert] for role in SHAPES)
        assert record == slabs.ljust(where.nbytes, b"\0")


def test_records_start_and_end_on_pages(packed):
    pack = open_pack(packed[1])
    for key in list(pack.spec.keys()):
        where = pack.locate(key)
        assert where.offset % 4096 == 0
        assert where.nbytes % 4096 == 0


def test_every_tensor_reads_as_from_the_source(packed):
    model, path = packed
    pack, source = open_pack(path), open_inventory(model.paths[0])
    assert dict(pack.metadata) == dict(source.metadata)
    assert dict(pack.tensors) == dict(source.tensors)
    for name in source.tensors:
        np.testing.assert_array_equal(pack.read(name), source.read(name))


def test_digests_are_those_the_format_defines(packed):
    model, path = packed
    h = xxhash.xxh3_128_digest
    manifest = json.loads((path / "manifest.json").read_bytes())
    of_shards, of_headers = b"", b""
    for shard, data in zip(manifest["shards"], model.files.values(), strict=True):
        pieces, at = [], 0
        for segment in shard["segments"]:
            n_pieces = manifest["model"]["n_experts"] if "layer" in segment else 1
            nbytes = segment["nbytes"] // n_pieces
            own = [h(data[at + i * nbytes : at + (i + 1) * nbytes]) for i in range(n_pieces)]
            assert segment["digests"] == b"".join(own).hex()
            pieces += own
            at += segment["nbytes"]
        assert at == len(data)
        assert shard["digest"] == h(b"".join(pieces)).hex()
        of_shards += h(b"".join(pieces))
        of_headers += pieces[0]
    assert manifest["source_digest"] == h(of_shards).hex()
    assert manifest["model"]["config_digest"] == h(of_headers).hex()
    first_line, body = (path / "manifest.json").read_bytes().split(b"\n", 1)
    assert first_line == b'{"digest": "' + h(body).hex().encode() + b'",'


def test_an_experts_digests_are_those_of_its_slabs(packed):
    model, path = packed
    pack = open_pack(path)
    for key in list(pack.spec.keys()):
        own = [xxhash.xxh3_128_digest(model.slabs[key.layer, r, key.expert]) for r in SHAPES]
        assert pack.digests(key) == tuple(own)
        assert pack.manifest.expert_digest(key) == xxhash.xxh3_128_digest(b"".join(own))


def test_a_sound_pack_verifies_and_every_data_byte_is_read(packed):
    report = asyncio.run(verify_pack(packed[1]))
    n_data = sum(len(data) for name, data in pack_files(packed[1]).items() if ".bin" in name)
    assert (report.damage, report.read_nbytes) == ((), n_data)


def test_a_whole_deepseek_v4_file_is_rebuilt_and_read(tmp_path):
    source = Path(__file__).parents[1] / "data" / "deepseek_v4" / "tiny_mx.gguf"
    asyncio.run(create_pack(source, tmp_path / "pack"))
    assert rebuild_source(tmp_path / "pack") == {source.name: source.read_bytes()}
    pack, inventory = open_pack(tmp_path / "pack"), open_inventory(source)
    for name in inventory.tensors:
        np.testing.assert_array_equal(pack.read(name), inventory.read(name))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=10)
@given(
    n_layers=st.integers(1, 3),
    n_experts=st.integers(2, 5),
    n_shards=st.integers(1, 3),
    alignment=st.sampled_from([32, 64, 256]),
    trailing=st.binary(max_size=5),
    n_pages=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_any_model_survives_any_window(tmp_path_factory, n_pages, n_layers, **shape):
    directory = tmp_path_factory.mktemp("any")
    model = make_small_moe(directory / "model.gguf", types=MIXED[:n_layers], **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_copy_module, "WINDOW_NBYTES", n_pages * PAGE_NBYTES)
        asyncio.run(create_pack(model.paths[0], directory / "pack"))
    assert rebuild_source(directory / "pack") == model.files
    assert not asyncio.run(verify_pack(directory / "pack")).damage


def test_a_shard_without_tensors_that_ends_with_its_header_is_kept(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", n_shards=12, alignment=4096)
    empty = model.paths[-1]
    header_nbytes = len(empty.read_bytes().rstrip(b"\0")) + 8
    assert open_inventory(empty).shards[-1].data_offset > header_nbytes
    os.truncate(empty, header_nbytes)
    asyncio.run(create_pack(empty, tmp_path / "pack"))
    assert rebuild_source(tmp_path / "pack") == model.files


def test_a_second_conversion_gives_the_same_bytes(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", types=MIXED, n_shards=2)
    for name in ("first", "second"):
        asyncio.run(create_pack(model.paths[0], tmp_path / name))
    assert pack_files(tmp_path / "first") == pack_files(tmp_path / "second")


def test_the_same_model_elsewhere_gives_the_same_bytes(tmp_path):
    packs = []
    for place in ("here", "there/deeper"):
        (tmp_path / place).mkdir(parents=True)
        model = make_small_moe(tmp_path / place / "model.gguf")
        asyncio.run(create_pack(model.paths[0], tmp_path / place / "pack"))
        packs.append(pack_files(tmp_path / place / "pack"))
    assert packs[0] == packs[1]


def test_a_moved_pack_opens(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf")
    asyncio.run(create_pack(model.paths[0], tmp_path / "pack"))
    model.paths[0].unlink()
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "pack").rename(tmp_path / "elsewhere" / "renamed")
    assert open_pack(moved).read("output.weight").nbytes


def test_layers_go_to_further_files_when_a_file_would_grow_too_large(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", types=[*MIXED, UNIFORM], n_experts=2)
    asyncio.run(create_pack(model.paths[0], tmp_path / "pack", file_nbytes_max=2 * 12288))
    pack = open_pack(tmp_path / "pack")
    sizes = [path.stat().st_size for path in pack.data_files]
    assert len(sizes) > 1
    assert max(sizes) == max(layout.stride * 2 for layout in pack.spec.layouts.values())
    assert rebuild_source(tmp_path / "pack") == model.files
    assert not asyncio.run(verify_pack(tmp_path / "pack")).damage
