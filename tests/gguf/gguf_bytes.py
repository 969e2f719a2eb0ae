"""Hand-packed GGUF files: whatever a header may say, right or wrong, byte by byte."""

import struct

import pytest
from gguf.constants import GGUFValueType as V

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import parse_header

MIB = 1 << 20

SCALARS = {
    V.UINT8: "<B",
    V.INT8: "<b",
    V.UINT16: "<H",
    V.INT16: "<h",
    V.UINT32: "<I",
    V.INT32: "<i",
    V.FLOAT32: "<f",
    V.BOOL: "<B",
    V.UINT64: "<Q",
    V.INT64: "<q",
    V.FLOAT64: "<d",
}
F32, Q8_0 = 0, 8


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return u64(len(data)) + data


def payload(value_type, value):
    if value_type == V.STRING:
        return text(value)
    if value_type == V.ARRAY:
        item_type, items = value
        return u32(item_type) + u64(len(items)) + b"".join(payload(item_type, i) for i in items)
    return struct.pack(SCALARS[value_type], value)


def pair(key, value_type, value):
    return text(key) + u32(value_type) + payload(value_type, value)


def entry(name, ne, *, ggml_type=F32, offset=0):
    """A tensor's line in the header; ``ne`` fastest axis first."""
    return text(name) + u32(len(ne)) + b"".join(map(u64, ne)) + u32(ggml_type) + u64(offset)


def header(pairs=(), entries=(), *, version=3, n_pairs=None, n_tensors=None):
    n_tensors = len(entries) if n_tensors is None else n_tensors
    n_pairs = len(pairs) if n_pairs is None else n_pairs
    return b"GGUF" + u32(version) + u64(n_tensors) + u64(n_pairs) + b"".join([*pairs, *entries])


def padded(data, alignment=32):
    return data + bytes(-len(data) % alignment)


def small_file():
    """Two tensors (F32 of 8 × 2, Q8_0 of 32 × 3), a string, a number, arrays of both."""
    pairs = [
        pair("general.architecture", V.STRING, "deepseek4"),
        pair("deepseek4.block_count", V.UINT32, 6),
        pair("tokenizer.ggml.tokens", V.ARRAY, (V.STRING, ["a", "bc", "▁d"])),
        pair("tokenizer.ggml.token_type", V.ARRAY, (V.INT32, [1, 3, -4])),
    ]
    entries = [
        entry("a.weight", [8, 2]),
        entry("b.weight", [32, 3], ggml_type=Q8_0, offset=64),
    ]
    return padded(header(pairs, entries)) + bytes(range(64)) + bytes(i % 251 for i in range(102))


def parse(data, *, file_nbytes=None):
    return parse_header(data, path="m.gguf", file_nbytes=file_nbytes or len(data))


def refused(data, *, file_nbytes=None):
    with pytest.raises(GGUFError) as caught:
        parse(data, file_nbytes=file_nbytes)
    assert str(caught.value).startswith("m.gguf: ")
    return caught.value.fact


def one_tensor(*, ggml_type=0, ne=(8, 2), offset=0, pairs=(), data_nbytes=64):
    return padded(header(pairs, [entry("a", ne, ggml_type=ggml_type, offset=offset)])) + bytes(
        data_nbytes
    )
