"""A foreign pack that was damaged, cut, edited or forged is refused by name, or means the same."""

import shutil
import struct
import tracemalloc

import pytest
from foreign_making import (
    GGML_ENTRY,
    GGML_HEADER,
    STRUCTS,
    V1_ENTRY,
    entry,
    header,
    make,
    set_entry,
    set_header,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from small_moe import UNIFORM

from tieredmoe.errors import PackError
from tieredmoe.pack.foreign import open_foreign_pack

FORMS = ["v1", "ggml"]
TYPES = (UNIFORM,) * 3


@pytest.fixture(scope="module", params=FORMS)
def whole(request, tmp_path_factory):
    """Form, a pack that nobody may change, and a copy of it that every example writes anew."""
    directory = tmp_path_factory.mktemp(request.param)
    made = make(directory, request.param, types=TYPES)
    made.manifest.unlink()
    shutil.copytree(directory, directory / "scratch")
    return request.param, made, directory / "scratch" / made.path.name


def opens_as(path, made):
    """Whether ``path`` opens; then it must say of every expert what the whole pack says."""
    try:
        pack = open_foreign_pack(path, source=made.model.paths[0])
    except PackError:
        return False
    right = open_foreign_pack(made.path, source=made.model.paths[0])
    for key in right.spec.keys():
        assert pack.extents(key) == right.extents(key)
    return True


def index_nbytes(form):
    of_header, of_entry = STRUCTS[form]
    n_entries = 3 * len(TYPES) * 4
    return of_header.size + n_entries * of_entry.size


@given(data=st.data())
def test_any_changed_byte_of_header_and_index_is_noticed_or_moves_nothing(whole, data):
    form, made, scratch = whole
    damaged = bytearray(made.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, index_nbytes(form) - 1))
        damaged[offset] ^= data.draw(st.integers(1, 255))
    scratch.write_bytes(damaged)
    opens_as(scratch, made)


# What nothing rests on: in the header the digests of a source whose metadata may have been edited
# since, and an alignment, as long as records lie where it puts them; in an entry the digest of the
# whole tensor and the generation.
FREE = {"v1": ({7, 12, 13, 14}, {13, 23}), "ggml": (set(), set())}
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 5, 31, 32, 4095, 4096, 8192, 2**31 - 1, 2**32 - 1]) | (
    st.integers(0, 2**64 - 1)
)


@given(data=st.data())
def test_no_field_can_be_given_another_value(whole, data):
    form, made, scratch = whole
    number = data.draw(st.none() | st.integers(0, 3 * len(TYPES) * 4 - 1))
    values = header(made.path, form) if number is None else entry(made.path, form, number)
    free = FREE[form][number is not None]
    field = data.draw(st.sampled_from([i for i in range(len(values)) if i not in free]))
    old = values[field]
    new = data.draw(st.binary(max_size=len(old)) if isinstance(old, bytes) else NUMBERS)
    if isinstance(old, bytes):
        new = new.ljust(len(old), b"\0")
    assume(new != old)
    shutil.copy(made.path, scratch)
    try:
        if number is None:
            set_header(scratch, form, field, new)
        else:
            set_entry(scratch, form, number, field, new)
    except struct.error:
        assume(False)  # the number is too large for the field
    assert not opens_as(scratch, made)


@given(data=st.data())
def test_a_pack_cut_short_anywhere_is_noticed(whole, data):
    _, made, scratch = whole
    content = made.path.read_bytes()
    scratch.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert not opens_as(scratch, made)


def test_a_pack_with_more_bytes_than_experts_is_noticed(whole):
    _, made, scratch = whole
    scratch.write_bytes(made.path.read_bytes() + bytes(4096))
    with pytest.raises(PackError, match="has bytes that belong to no expert: it has"):
        open_foreign_pack(scratch, source=made.model.paths[0])


def test_two_entries_that_changed_places_are_noticed(whole):
    form, made, scratch = whole
    of_header, of_entry = STRUCTS[form]
    content = bytearray(made.path.read_bytes())
    at, n = of_header.size, of_entry.size
    content[at : at + 2 * n] = content[at + n : at + 2 * n] + content[at : at + n]
    scratch.write_bytes(content)
    # In the ggml format the first three entries say in which order roles lie: the rest differs.
    with pytest.raises(PackError, match=r"index entry [03] does not fit the source: "):
        open_foreign_pack(scratch, source=made.model.paths[0])


def test_huge_counts_allocate_nothing(whole):
    form, made, scratch = whole
    shutil.copy(made.path, scratch)
    count = 5 if form == "v1" else 3
    set_header(scratch, form, count, 2**63)
    tracemalloc.start()
    try:
        with pytest.raises(PackError, match="n_entries is 9223372036854775808, not 36"):
            open_foreign_pack(scratch, source=made.model.paths[0])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


HEADERS = [
    ("v1", 1, 2, "is SGLANG-EXPERTPACK-v1 of version 2, and this tieredmoe reads version 1"),
    ("v1", 2, 180, "header_nbytes is 180, not 176"),
    ("v1", 3, 320, "entry_nbytes is 320, not 328"),
    ("v1", 4, 0b111, "has flags 0x7, and only 0x3 is understood"),
    ("v1", 4, 0b01, "has flags 0x1, and only 0x3 is understood"),
    ("v1", 5, 35, "n_entries is 35, not 36"),
    ("v1", 6, 4096, "data_start 4096, which is in its index"),
    (
        "v1",
        6,
        12289,
        "data_start 12289, which is in its index, past its end or not a multiple of 4096",
    ),
    ("v1", 6, 16384, "index entry 0 does not fit the source: offset is 12288, not 16384"),
    ("v1", 6, 2**64 - 4096, "data_start 18446744073709547520, which is in its index, past its end"),
    ("ggml", 4, 2**64 - 4096, "data_start 18446744073709547520, which is in its index, past"),
    ("v1", 7, 0, "alignment 0, which is no power of two"),
    ("v1", 7, 3000, "alignment 3000, which is no power of two"),
    ("v1", 7, 2**62, "alignment [0-9]+, which is no power of two up to 1 GiB"),
    ("v1", 8, 4, "n_layers is 4, not 3"),
    ("v1", 9, 5, "n_experts is 5, not 4"),
    ("v1", 10, 3, "top_k is 3, not 2"),
    ("v1", 11, 2, "n_roles is 2, not 3"),
    ("ggml", 1, 2, "is GGMLMOEPACKv1 of version 2, and this tieredmoe reads version 1"),
    ("ggml", 2, 48, "header_nbytes is 48, not 40"),
    ("ggml", 3, 39, "n_entries is 39, not 36"),
    ("ggml", 4, 4096, "data_start 4096, which is in its index, past its end or not"),
    ("ggml", 4, 12288, "index entry 0 does not fit the source: offset is 8192, not 12288"),
]
ENTRIES = [
    ("v1", 0, 7, "layer is 7, not 0"),
    ("v1", 1, 3, "expert is 3, not 1"),
    ("v1", 2, 2, "role is 2, not 1"),
    ("v1", 3, 3, "rank is 3, not 2"),
    ("v1", 4, 2, "ggml_type is 2, not 39"),
    ("v1", 5, b"Q4_0", "type_name is 'Q4_0', not 'MXFP4'"),
    ("v1", 6, b"blk.0.ffn_out_exps.weight", "tensor is 'blk.0.ffn_out_exps.weight', not 'blk.0"),
    ("v1", 6, b"blk.0.ffn_up_exps.weight\0x", r"tensor is 'blk.0.ffn_up_exps.weight\\x00x', not"),
    ("v1", 8, 1, "tensor_nbytes is 1, not 4352"),
    ("v1", 9, 1, "source_offset is 1, not"),
    ("v1", 10, 1, "source_nbytes is 1, not 1088"),
    ("v1", 11, 4096, "offset is 4096, not 17472"),
    ("v1", 12, 2**63, "nbytes is 9223372036854775808, not 1088"),
    ("v1", 14, bytes(32), r"source_sha256 is \[0, "),
    ("v1", 16, 32, r"dims is \[32, 32, 0, 0\], not \[64, 32, 0, 0\]"),
    ("v1", 20, b"Q4_0", "quant_scheme is 'Q4_0', not 'MXFP4'"),
    ("v1", 21, b"rot-v1", "transform is 'rot-v1', not 'identity-v1'"),
    ("v1", 22, 256, "block_size is 256, not 32"),
    ("ggml", 0, b"blk.9.ffn_gate_exps.weight", "tensor is 'blk.9.ffn_gate_exps.weight', not"),
    ("ggml", 1, -1, "expert is -1, not 1"),
    ("ggml", 2, 1, "reserved is 1, not 0"),
    ("ggml", 3, 4096, "offset is 4096, not 24576"),
    ("ggml", 4, 1087, "nbytes is 1087, not 1088"),
]


@pytest.mark.parametrize(("form", "field", "value", "message"), HEADERS)
def test_a_wrong_header_field_is_named(tmp_path, form, field, value, message):
    made = make(tmp_path, form, types=TYPES)
    set_header(made.path, form, field, value)
    with pytest.raises(PackError, match=message):
        open_foreign_pack(made.path)


@pytest.mark.parametrize(("form", "field", "value", "message"), ENTRIES)
def test_a_wrong_index_field_is_named_with_its_entry(tmp_path, form, field, value, message):
    made = make(tmp_path, form, types=TYPES)
    set_entry(made.path, form, 4, field, value)
    with pytest.raises(PackError, match=f"index entry 4 does not fit the source: {message}"):
        open_foreign_pack(made.path)


def test_the_structures_have_their_published_sizes():
    sizes = [s.size for s in (*STRUCTS["v1"], GGML_HEADER, GGML_ENTRY)]
    assert sizes == [176, 328, 40, 152]
    assert V1_ENTRY.size == 328


@pytest.mark.parametrize(
    ("form", "message"),
    [("v1", "its index was never written"), ("ggml", "begins with the tensors '', '', '', and")],
)
def test_an_index_that_was_never_written_is_refused(tmp_path, form, message):
    """SGLang writes the index of its own format last: a build that was stopped leaves zeros."""
    made = make(tmp_path, form, types=TYPES)
    content = bytearray(made.path.read_bytes())
    begin, end = STRUCTS[form][0].size, index_nbytes(form)
    content[begin:end] = bytes(end - begin)
    made.path.write_bytes(content)
    with pytest.raises(PackError, match=message):
        open_foreign_pack(made.path)
