import os
import shutil

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType as V
from gguf_bytes import entry, header, padded, pair

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import files as gguf_files
from tieredmoe.gguf import find_experts, merge_headers, open_inventory, parse_header, read_header
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

N_SHARDS = 3


@pytest.fixture(scope="module")
def single(data_dir):
    return data_dir / "tiny_mx.gguf"


@pytest.fixture
def shards(single, tmp_path):
    """The tiny model in three shards, of which only the first says which model it is."""
    source = open_inventory(single)
    stored = [
        StoredTensor(
            info.name,
            source.read(info.name).reshape(*info.shape[:-1], -1),
            gguf.GGMLQuantizationType(info.ggml_type),
        )
        for info in source.tensors.values()
    ]
    cuts = [0, 50, 130, len(stored)]
    return write_shards(
        tmp_path / "tiny.gguf",
        architecture="deepseek4",
        metadata={"deepseek4.block_count": 6, "deepseek4.expert_used_count": 3},
        shards=[stored[cuts[i] : cuts[i + 1]] for i in range(N_SHARDS)],
    )


def split_shard(directory, number, n_shards, tensors=(), **changes):
    """A small shard file; ``changes`` replace (None: drop) its split keys or add others."""
    values = {
        "split.no": (V.UINT16, number - 1),
        "split.count": (V.UINT16, n_shards),
        "split.tensors.count": (V.INT32, n_shards),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    pairs = [pair(key, *value) for key, value in values.items() if value is not None]
    tensors = tensors or [f"t{number}"]
    entries = [entry(name, (8,), offset=32 * i) for i, name in enumerate(tensors)]
    path = directory / f"m-{number:05d}-of-{n_shards:05d}.gguf"
    path.write_bytes(padded(header(pairs, entries)) + bytes(32 * len(tensors)))
    return path


def refusal(path):
    with pytest.raises(GGUFError) as caught:
        open_inventory(path)
    assert caught.value.path == path
    return caught.value.fact


# ---------------------------------------------------------------- one file


def test_every_byte_read_is_the_byte_of_that_tensor(data_dir):
    path = data_dir / "tiny_mx.gguf"
    inventory, reader = open_inventory(path), gguf.GGUFReader(path)
    assert list(inventory.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert inventory.read(tensor.name).tobytes() == tensor.data.tobytes()


def test_a_read_gives_a_fresh_writable_array(single):
    inventory = open_inventory(single)
    first = inventory.read("output.weight")
    before = first.copy()
    first[:] = 0
    assert first.dtype == np.uint8
    assert first.ndim == 1
    assert np.array_equal(inventory.read("output.weight"), before)


def test_an_unknown_tensor_is_a_key_error(single):
    with pytest.raises(KeyError):
        open_inventory(single).read("no.such.tensor")


def test_metadata_names_its_file(single):
    assert open_inventory(single).metadata.path == single


# ---------------------------------------------------------------- sets of shards


def test_any_shard_and_the_directory_give_the_same_model(shards, single):
    whole = open_inventory(single)
    inventories = [open_inventory(path) for path in (*shards, shards[0].parent)]
    for inventory in inventories:
        assert inventory.shards == inventories[0].shards
        assert dict(inventory.tensors) == dict(inventories[0].tensors)
        assert inventory.metadata.architecture == "deepseek4"
    assert list(inventories[0].tensors) == list(whole.tensors)
    assert [shard.path for shard in inventories[0].shards] == list(shards)
    for name in whole.tensors:
        assert np.array_equal(inventories[1].read(name), whole.read(name))


def test_experts_are_found_across_shards(shards, single):
    split, whole = find_experts(open_inventory(shards[2])), find_experts(open_inventory(single))
    assert split.spec == whole.spec
    slab = split.slab(5, "down", 7)
    data = shards[slab.shard_index].read_bytes()[slab.offset : slab.offset + slab.nbytes]
    assert (
        data == open_inventory(single).read("blk.5.ffn_down_exps.weight")[-slab.nbytes :].tobytes()
    )


def test_links_with_the_right_names_are_enough(shards, tmp_path):
    cache, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    cache.mkdir()
    snapshot.mkdir()
    for i, path in enumerate(shards):
        shutil.move(path, cache / f"{i:x}0f")
        (snapshot / path.name).symlink_to(cache / f"{i:x}0f")
    assert len(open_inventory(snapshot).shards) == N_SHARDS


def test_headers_kept_elsewhere_merge_to_the_same_model(shards):
    inventory = open_inventory(shards[0])
    headers = [
        parse_header(
            shard.path.read_bytes()[: shard.data_offset],
            path=shard.path.name,
            file_nbytes=shard.file_nbytes,
        )
        for shard in inventory.shards
    ]
    metadata, tensors = merge_headers(headers)
    assert dict(metadata) == dict(inventory.metadata)
    assert list(tensors.items()) == list(inventory.tensors.items())


def test_headers_in_another_order_do_not_merge(shards):
    headers = [read_header(path) for path in shards]
    with pytest.raises(GGUFError, match=r"split\.no is 1, but this is shard 0 of 3"):
        merge_headers([headers[1], headers[0], headers[2]])


def test_shards_may_differ_in_alignment(tmp_path):
    split_shard(tmp_path, 1, 2)
    second = split_shard(tmp_path, 2, 2)
    keys = {"split.no": 1, "split.count": 2, "general.alignment": 64}
    pairs = [pair(key, V.UINT32, value) for key, value in keys.items()]
    second.write_bytes(padded(header(pairs, [entry("t2", (8,))]), 64) + bytes(range(32)))
    inventory = open_inventory(second)
    assert [shard.alignment for shard in inventory.shards] == [32, 64]
    assert inventory.read("t2").tobytes() == bytes(range(32))


def test_split_numbers_may_be_integers_of_any_width(tmp_path):
    split_shard(tmp_path, 1, 2, split__no=(V.INT64, 0), split__count=(V.UINT8, 2))
    path = split_shard(tmp_path, 2, 2, split__no=(V.UINT32, 1), split__tensors__count=(V.UINT64, 2))
    assert list(open_inventory(path).tensors) == ["t1", "t2"]


def test_a_set_of_one_needs_no_split_keys(tmp_path):
    path = split_shard(tmp_path, 1, 1, split__no=None, split__count=None)
    assert len(open_inventory(path).shards) == 1


def test_a_first_shard_may_hold_metadata_alone(tmp_path):
    first = split_shard(tmp_path, 1, 2)
    keys = {"split.no": 0, "split.count": 2, "split.tensors.count": 1}
    first.write_bytes(header([pair(key, V.UINT32, value) for key, value in keys.items()]))
    split_shard(tmp_path, 2, 2, split__tensors__count=(V.INT32, 1))
    assert list(open_inventory(first).tensors) == ["t2"]


# ---------------------------------------------------------------- everything wrong, in one error


def test_all_missing_shards_are_listed(shards):
    shards[0].unlink()
    shards[2].unlink()
    fact = refusal(shards[1])
    assert fact == f"2 of 3 shards missing: {shards[0].name}, {shards[2].name}"


def test_missing_and_damaged_shards_are_listed_together(shards):
    shards[0].unlink()
    os.truncate(shards[1], shards[1].stat().st_size - 8)
    shards[2].write_bytes(b"<html>404</html>")
    fact = refusal(shards[2])
    assert f"1 of 3 shards missing: {shards[0].name}" in fact
    assert f"{shards[1].name} truncated: 8 bytes are missing" in fact
    assert f"{shards[2].name} is not a GGUF file" in fact


def test_a_truncated_last_shard_is_found_when_opening(shards):
    os.truncate(shards[2], shards[2].stat().st_size - 1)
    assert "1 bytes are missing" in refusal(shards[0])


def test_swapped_shards_are_refused(shards):
    shards[1].rename(shards[1].with_suffix(".tmp"))
    shards[2].rename(shards[1])
    shards[1].with_suffix(".tmp").rename(shards[2])
    fact = refusal(shards[0])
    assert f"{shards[1].name}: split.no is 2, but this is shard 1 of 3" in fact
    assert f"{shards[2].name}: split.no is 1, but this is shard 2 of 3" in fact


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"split__count": (V.UINT16, 3)}, "split.count is 3, but this is shard 1 of 2"),
        ({"split__count": None}, "split.count is absent"),
        ({"split__no": (V.STRING, "1")}, "split.no is '1', but this is shard 1 of 2"),
        ({"split__tensors__count": (V.INT32, 9)}, "shards disagree on split.tensors.count"),
        ({"tensors": ["t1"]}, "tensor 't1' is in m-00001-of-00002.gguf and in m-00002-of-00002"),
        (
            {"general__architecture": (V.STRING, "kimi-k3")},
            "m-00002-of-00002.gguf is of another model: general.architecture is 'kimi-k3'",
        ),
        ({"general__name": (V.STRING, "B")}, "general.name is 'B', in m-00001-of-00002.gguf"),
    ],
)
def test_a_shard_that_does_not_belong_is_refused(tmp_path, changes, fact):
    own = {"general__architecture": (V.STRING, "deepseek4"), "general__name": (V.STRING, "A")}
    path = split_shard(tmp_path, 1, 2, **own)
    split_shard(tmp_path, 2, 2, **changes)
    assert fact in refusal(path)


def test_every_problem_of_a_set_is_in_one_error(tmp_path):
    path = split_shard(tmp_path, 1, 4, general__architecture=(V.STRING, "deepseek4"))
    split_shard(tmp_path, 2, 4, tensors=["t1"], split__no=(V.UINT16, 7))
    split_shard(tmp_path, 4, 4, general__architecture=(V.STRING, "llama"))
    fact = refusal(path)
    for part in ("m-00003-of-00004.gguf", "split.no is 7", "'t1'", "'llama'"):
        assert part in fact


def test_a_shard_that_lost_its_name_is_refused(shards):
    renamed = shards[1].rename(shards[1].with_name("model.gguf"))
    fact = refusal(renamed)
    assert "split.count is 3" in fact
    assert "PREFIX-00001-of-00003.gguf" in fact


def test_a_number_beyond_the_set_is_refused(tmp_path):
    path = split_shard(tmp_path, 4, 3)
    assert refusal(path) == "is named shard 4 of 3"


def test_a_number_of_more_than_five_digits_is_no_shard_number(tmp_path):
    path = split_shard(tmp_path, 1, 1, split__no=None, split__count=None)
    path = path.rename(tmp_path / "m-00001-of-99999999999.gguf")
    assert [shard.path for shard in open_inventory(path).shards] == [path]


def test_a_directory_without_a_model_is_refused(tmp_path):
    (tmp_path / "readme.txt").write_bytes(b"")
    assert refusal(tmp_path) == "is a directory without any .gguf file"


def test_a_directory_with_two_models_lists_them(shards, single):
    shutil.copy(single, shards[0].parent / "other.gguf")
    (shards[0].parent / "notes.txt").write_bytes(b"")
    assert refusal(shards[0].parent) == (
        "holds 2 models, name one of them: other.gguf, tiny-00001-of-00003.gguf (3 of 3 shards)"
    )


def test_a_missing_path_is_named(tmp_path):
    assert refusal(tmp_path / "m.gguf") == "cannot be opened: No such file or directory"


# ---------------------------------------------------------------- the file changes or fails later


def test_a_file_cut_after_opening_is_refused(shards):
    inventory = open_inventory(shards[0])
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    name = next(name for name, info in inventory.tensors.items() if info.shard_index == 1)
    with pytest.raises(GGUFError, match=r"00002-of-00003\.gguf: changed since it was opened"):
        inventory.read(name)


def test_a_file_cut_behind_the_back_of_its_time_is_refused(shards):
    inventory, status = open_inventory(shards[0]), shards[0].stat()
    os.truncate(shards[0], status.st_size - 1)
    os.utime(shards[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(GGUFError, match=f"it had {status.st_size} bytes, now {status.st_size - 1}"):
        inventory.read("token_embd.weight")


def test_a_file_rewritten_after_opening_is_refused(shards):
    inventory = open_inventory(shards[0])
    status = shards[0].stat()
    os.utime(shards[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(GGUFError, match="changed since it was opened"):
        inventory.read("output.weight")


def test_a_file_removed_after_opening_is_refused(shards):
    inventory = open_inventory(shards[0])
    shards[0].unlink()
    with pytest.raises(GGUFError, match="No such file"):
        inventory.read("output.weight")


def test_short_reads_are_continued(single, monkeypatch):
    inventory, preadv = open_inventory(single), os.preadv
    expected = inventory.read("output.weight")
    monkeypatch.setattr(
        gguf_files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:4097]], at)
    )
    assert np.array_equal(inventory.read("output.weight"), expected)


def test_a_file_that_shrinks_while_it_is_read_is_refused(single, monkeypatch):
    inventory, preadv = open_inventory(single), os.preadv
    monkeypatch.setattr(
        gguf_files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:0]], at)
    )
    with pytest.raises(GGUFError, match="bytes short of a read of"):
        inventory.read("output.weight")


def test_a_failing_disk_is_a_gguf_error_with_the_place(single, monkeypatch):
    inventory = open_inventory(single)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(gguf_files.os, "preadv", fail)
    offset = inventory.tensors["output.weight"].offset
    with pytest.raises(GGUFError, match=f"cannot be read at byte {offset}: Input/output error"):
        inventory.read("output.weight")
