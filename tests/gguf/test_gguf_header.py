import os
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGUFValueType as V
from gguf_bytes import (
    MIB,
    entry,
    header,
    one_tensor,
    padded,
    pair,
    parse,
    refused,
    small_file,
    text,
    u32,
    u64,
)

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import files as gguf_files
from tieredmoe.gguf import read_header
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

# ---------------------------------------------------------------- what a sound header yields


def test_metadata_and_tensors_are_those_of_the_packages_reader(data_dir):
    path = data_dir / "tiny_mx.gguf"
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.data_offset == theirs.data_offset
    assert [(t.name, t.ggml_type, t.shape, t.nbytes, t.offset) for t in ours.tensors] == [
        (t.name, t.tensor_type, tuple(reversed(t.shape.tolist())), t.n_bytes, t.data_offset)
        for t in theirs.tensors
    ]


def test_every_value_type_becomes_a_plain_python_value():
    values = {
        V.UINT8: 255,
        V.INT8: -128,
        V.UINT16: 65535,
        V.INT16: -32768,
        V.UINT32: 2**32 - 1,
        V.INT32: -(2**31),
        V.FLOAT32: 0.5,
        V.BOOL: True,
        V.STRING: "▁straße",
        V.UINT64: 2**64 - 1,
        V.INT64: -(2**63),
        V.FLOAT64: 1e300,
    }
    pairs = [pair(f"s.{t}", t, v) for t, v in values.items()]
    pairs += [pair(f"a.{t}", V.ARRAY, (t, [v, v])) for t, v in values.items()]
    pairs += [pair("empty", V.ARRAY, (V.STRING, []))]
    pairs += [pair("nested", V.ARRAY, (V.ARRAY, [(V.INT8, [1, 2]), (V.STRING, ["x"])]))]
    found = parse(header(pairs)).metadata
    assert found == {
        **{f"s.{t}": v for t, v in values.items()},
        **{f"a.{t}": [v, v] for t, v in values.items()},
        "empty": [],
        "nested": [[1, 2], ["x"]],
    }
    scalars = [found[f"s.{t}"] for t in values] + [found[f"a.{t}"][0] for t in values]
    assert {type(value) for value in scalars} == {int, float, bool, str}


def test_version_2_reads_like_version_3():
    assert parse(header([pair("k", V.BOOL, 1)], version=2)).metadata == {"k": True}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_and_bytes_beyond_the_header_are_accepted(kind):
    data = small_file()
    assert parse(kind(data)) == parse(data[:512], file_nbytes=len(data))


@pytest.mark.parametrize("ggml_type", sorted(GGML_QUANT_SIZES), ids=lambda t: t.name)
def test_every_type_of_the_package_has_its_size(ggml_type):
    n_block, nbytes = GGML_QUANT_SIZES[ggml_type]
    data = one_tensor(ggml_type=ggml_type, ne=(3 * n_block, 2, 5), data_nbytes=30 * nbytes)
    info = parse(data).tensors[0]
    assert (info.nbytes, info.shape) == (30 * nbytes, (5, 2, 3 * n_block))
    assert "1 bytes are missing" in refused(data[:-1])


@pytest.mark.parametrize("alignment", [16, 32, 64, 4096])
def test_tensors_are_found_at_any_alignment(tmp_path, alignment):
    tensors = [
        StoredTensor(f"t{i}", np.full(12 + 4 * i, i, np.uint8), gguf.GGMLQuantizationType.F32)
        for i in range(5)
    ]
    (path,) = write_shards(
        tmp_path / "m.gguf", architecture="x", metadata={}, shards=[tensors], alignment=alignment
    )
    found, data = read_header(path), path.read_bytes()
    assert found.alignment == alignment
    assert found.data_offset % alignment == 0
    for tensor, info in zip(tensors, found.tensors, strict=True):
        assert data[info.offset : info.offset + info.nbytes] == tensor.data.tobytes()


@pytest.mark.parametrize(
    "value_type", [V.INT8, V.UINT16, V.INT16, V.UINT32, V.INT32, V.UINT64, V.INT64]
)
def test_the_alignment_may_be_an_integer_of_any_width(value_type):
    pairs = [pair("general.alignment", value_type, 64)]
    data = padded(header(pairs, [entry("a", (8,))]), 64) + bytes(32)
    assert parse(data).tensors[0].offset == len(data) - 32


def test_bytes_after_the_last_tensor_are_fine():
    assert parse(small_file() + bytes(1000)).tensors == parse(small_file()).tensors


def test_a_file_without_tensors_needs_no_padding():
    data = header([pair("k", V.UINT8, 1)])
    assert len(data) % 32
    assert parse(data).tensors == ()


def test_tensors_may_lie_in_another_order_than_the_header_lists():
    data = padded(header((), [entry("b", (8,), offset=32), entry("a", (8,))])) + bytes(64)
    assert [info.name for info in parse(data).tensors] == ["b", "a"]


# ---------------------------------------------------------------- large headers


def vocabulary_file(path, n_tokens):
    """A vocabulary with scores, types and merges, in front of 64 MiB of tensor data."""
    strings = np.empty(n_tokens, dtype=[("nbytes", "<u8"), ("text", "S12")])
    strings["nbytes"], strings["text"] = 12, [b"token%07d" % i for i in range(n_tokens)]
    many = u64(n_tokens)
    pairs = [
        text("tokenizer.ggml.tokens") + u32(V.ARRAY) + u32(V.STRING) + many + strings.tobytes(),
        text("tokenizer.ggml.scores") + u32(V.ARRAY) + u32(V.FLOAT32) + many + bytes(4 * n_tokens),
        text("tokenizer.ggml.token_type")
        + u32(V.ARRAY)
        + u32(V.INT32)
        + many
        + bytes(4 * n_tokens),
        text("tokenizer.ggml.merges") + u32(V.ARRAY) + u32(V.STRING) + many + strings.tobytes(),
    ]
    data = header(pairs)
    path.write_bytes(data)
    os.truncate(path, len(data) + 64 * MIB)
    return len(data)


def test_each_byte_of_a_large_header_is_read_once_and_in_large_pieces(tmp_path, monkeypatch):
    path, reads = tmp_path / "vocabulary.gguf", []
    n_header = vocabulary_file(path, 163_840)
    preadv = os.preadv

    def counting(*args):
        reads.append(preadv(*args))
        return reads[-1]

    monkeypatch.setattr(gguf_files.os, "preadv", counting)
    found = read_header(path)
    assert len(found.metadata["tokenizer.ggml.merges"]) == 163_840
    assert n_header <= sum(reads) <= n_header + MIB
    assert len(reads) <= n_header // MIB + 2


def test_a_header_takes_a_few_times_its_own_size_in_memory(tmp_path):
    n_header = vocabulary_file(tmp_path / "vocabulary.gguf", 20_000)
    tracemalloc.start()
    try:
        read_header(tmp_path / "vocabulary.gguf")
        assert tracemalloc.get_traced_memory()[1] < 8 * max(n_header, MIB)
    finally:
        tracemalloc.stop()


def test_the_work_grows_linearly_with_the_vocabulary(tmp_path):
    def n_calls(n_tokens):
        vocabulary_file(tmp_path / "v.gguf", n_tokens)
        n_events = 0

        def count(frame, event, arg):
            nonlocal n_events
            n_events += 1

        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            read_header(tmp_path / "v.gguf")
        finally:
            sys.setprofile(previous)
        return n_events

    n_calls(1)  # what is made once
    one, two, four = n_calls(1000), n_calls(2000), n_calls(4000)
    assert four - two == 2 * (two - one) > 0


# ---------------------------------------------------------------- the file system refuses


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(GGUFError, match=r"nowhere\.gguf: cannot be opened: No such file"):
        read_header(tmp_path / "nowhere.gguf")


def test_a_directory_is_named(tmp_path):
    with pytest.raises(GGUFError, match="is a directory"):
        read_header(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(gguf_files.os, "open", denied)
    with pytest.raises(GGUFError, match=r"m\.gguf: cannot be opened: Permission denied"):
        read_header(tmp_path / "m.gguf")


def test_a_fifo_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


def test_no_descriptor_stays_open_after_an_error(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(GGUFError):
        read_header(tmp_path / "m.gguf")
    assert sorted(Path("/proc/self/fd").iterdir()) == before
