import contextlib
import os
import tracemalloc

import pytest
from gguf.constants import GGUFValueType as V
from gguf_bytes import (
    MIB,
    Q8_0,
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
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.errors import GGUFError, MetadataError
from tieredmoe.gguf import GGUFInventory, find_experts, merge_headers, read_header

# ---------------------------------------------------------------- damage anywhere


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    data, path = small_file(), tmp_path / "cut.gguf"
    path.write_bytes(data)
    read_header(path)
    for n_left in reversed(range(len(data))):
        os.truncate(path, n_left)
        with pytest.raises(GGUFError):
            read_header(path)


def test_a_buffer_that_ends_anywhere_in_the_header_is_refused():
    data = small_file()
    n_header = data.index(bytes(range(64))) - 31  # at most 31 bytes of padding
    for n_given in range(n_header):
        assert "truncated" in refused(data[:n_given], file_nbytes=len(data))


def test_any_byte_of_a_header_may_be_anything_without_another_exception():
    data = small_file()
    for at in range(data.index(bytes(range(64)))):
        for value in {0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1} - {data[at]}:
            damaged = bytearray(data)
            damaged[at] = value
            with contextlib.suppress(GGUFError):
                parse(damaged)


@given(
    flips=st.lists(st.tuples(st.integers(0, 13_000), st.integers(1, 255)), min_size=1, max_size=8)
)
def test_flipped_bytes_of_a_models_header_raise_nothing_but_our_errors(data_dir, flips):
    damaged = bytearray((data_dir / "tiny_mx.gguf").read_bytes())
    for at, mask in flips:
        damaged[at] ^= mask
    with contextlib.suppress(GGUFError, MetadataError):
        metadata, tensors = merge_headers([parse(damaged)])
        find_experts(GGUFInventory((), metadata, tensors))


# ---------------------------------------------------------------- counts and lengths


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (header(n_tensors=2**63), "number of tensors is 9223372036854775808"),
        (header(n_pairs=2**64 - 1), "number of metadata keys"),
        (header([u64(2**62) + b"key"]), "metadata key"),
        (header([text("k") + u32(V.STRING) + u64(2**40)]), "'k'"),
        (header([text("k") + u32(V.ARRAY) + u32(V.UINT8) + u64(2**50)]), "length of metadata"),
        (header([text("k") + u32(V.ARRAY) + u32(V.STRING) + u64(2**61)]), "length of metadata"),
        (header([text("k") + u32(V.ARRAY) + u32(V.ARRAY) + u64(2**61)]), "length of metadata"),
        (header((), [text("t") + u32(2**32 - 1) + bytes(64)]), "4294967295 dimensions"),
        (one_tensor(ne=(2**62, 2**62)), "bytes are missing"),
        (one_tensor(offset=2**64 - 32), "bytes are missing"),
    ],
)
def test_an_absurd_number_is_refused_without_allocating_for_it(data, named):
    data = data + bytes(max(0, 1000 - len(data)))
    tracemalloc.start()
    try:
        assert named in refused(data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "claim",
    [
        text("k") + u32(V.STRING) + u64(2**36),
        text("k") + u32(V.ARRAY) + u32(V.FLOAT64) + u64(2**32),
        text("k") + u32(V.ARRAY) + u32(V.STRING) + u64(2**32),
    ],
)
def test_a_huge_file_cannot_make_its_header_huge(tmp_path, claim):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header([claim]))
    os.truncate(path, 2**38)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match="128 MiB"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- refusals by name


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "is not a GGUF file: it has only 0 bytes"),
        (b"PK\x03\x04" + bytes(60), r"is not a GGUF file: it starts with b'PK\x03\x04'"),
        (b"1234567" + small_file(), "is not a GGUF file: it starts with b'1234'"),
        (header(version=1), "version 1"),
        (header(version=4), "version 4; versions 2 and 3 are supported"),
        (header(version=0), "version 0"),
        (header(version=3 << 24), "big-endian"),
    ],
)
def test_what_is_not_a_supported_gguf_is_named(data, fact):
    assert fact in refused(data)


@pytest.mark.parametrize("value", [0, 3, -32, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(value):
    data = one_tensor(pairs=[pair("general.alignment", V.INT32, value)])
    assert refused(data) == f"general.alignment is {value}, not a power of two"


@pytest.mark.parametrize(
    ("value_type", "value"), [(V.FLOAT32, 32.0), (V.STRING, "32"), (V.BOOL, 1)]
)
def test_an_alignment_that_is_no_integer_is_refused(value_type, value):
    data = one_tensor(pairs=[pair("general.alignment", value_type, value)])
    assert "not an integer" in refused(data)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (
            header([text("k") + u32(13) + bytes(8)]),
            "metadata key 'k' has the unknown value type 13",
        ),
        (
            header([text("k") + u32(V.ARRAY) + u32(77) + u64(0)]),
            "metadata key 'k' has the unknown element type 77",
        ),
        (one_tensor(ggml_type=4), "tensor 'a' has the unknown type 4"),
        (one_tensor(ggml_type=200), "tensor 'a' has the unknown type 200"),
        (
            one_tensor(ggml_type=Q8_0, ne=(48, 2)),
            "rows of tensor 'a' have 48 elements, not a multiple of the 32 in a block of its type",
        ),
        (
            one_tensor(offset=8),
            "tensor 'a' starts 8 bytes into the data, not on a multiple of the alignment 32",
        ),
        (
            padded(header((), [entry("a", (16,)), entry("b", (8,), offset=32)])) + bytes(64),
            "tensors 'a' and 'b' overlap",
        ),
        (
            padded(header((), [entry("a", (8,)), entry("a", (8,), offset=32)])) + bytes(64),
            "tensor 'a' appears twice",
        ),
        (padded(header((), [entry("", (8,))])) + bytes(32), "a tensor has no name"),
        (
            padded(header((), [entry(n, (8,), ggml_type=200) for n in "ab"])),
            "tensor 'a' has the unknown type 200, and 1 more have",
        ),
        (
            header([pair("k", V.UINT8, 1), pair("k", V.UINT8, 1)]),
            "metadata key 'k' appears twice",
        ),
        (
            header([text(b"\xff\xfe") + u32(V.UINT8) + b"1"]),
            "a metadata key at byte 32 is not UTF-8",
        ),
        (
            header((), [text(b"\xc3") + u32(1) + u64(8) + u32(0) + u64(0)]),
            "a tensor name at byte 32 is not UTF-8",
        ),
        (header([text("k") + u32(V.STRING) + text(b"\xff")]), "'k' at byte 45 is not UTF-8"),
        (one_tensor(ne=(2, 1, 1, 1, 1)), "tensor 'a' has 5 dimensions; at most 4 can be"),
    ],
)
def test_a_wrong_fact_is_named(data, fact):
    assert fact in refused(data)


def test_arrays_nested_without_end_are_refused():
    deep = b"".join(u32(V.ARRAY) + u64(1) for _ in range(5000))
    data = header([text("k") + u32(V.ARRAY) + deep])
    assert "nests arrays deeper" in refused(data)


def test_a_truncated_file_says_how_many_bytes_are_missing():
    data = small_file()
    assert refused(data[:-40]).startswith(
        f"truncated: 40 bytes are missing (the file has {len(data) - 40} bytes, its tensors end at "
        f"{len(data)}, 1 of 2 tensors are incomplete)"
    )
