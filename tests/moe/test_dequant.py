import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.errors import UnsupportedModelError
from tieredmoe.moe.dequant import ALIGNMENT_NBYTES, check_type, dequantise


def readable(ggml_type):
    _, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    try:
        gguf.quants.dequantize(np.zeros((1, n_bytes), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


READABLE = [kind for kind in T if readable(kind)]
IN_TORCH = [
    *(T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q5_0),
    *(T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.MXFP4),
]


def expected(raw, ggml_type):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, ggml_type).astype(np.float32, copy=False)


def assert_same_bits(got, want):
    """Equal bit patterns, so that -0 differs from +0; any NaN equals any other."""
    got = got.numpy()
    assert got.dtype == np.float32
    assert got.shape == want.shape
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {same.size} weights differ"


@pytest.mark.parametrize("ggml_type", READABLE, ids=lambda kind: kind.name)
def test_any_bytes_become_the_bits_that_the_gguf_package_gives(ggml_type):
    _, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    n_rows = 256 if ggml_type in IN_TORCH else 16
    raw = np.random.default_rng(ggml_type).integers(0, 256, (n_rows, 8 * n_bytes), dtype=np.uint8)
    want = expected(raw, ggml_type)
    if ggml_type in IN_TORCH and ggml_type != T.MXFP4:  # whose scales cannot be NaN
        assert np.isnan(want).any(), "random scales should include NaN"
    assert_same_bits(dequantise(torch.from_numpy(raw), ggml_type, want.shape), want)


@pytest.mark.parametrize("ggml_type", READABLE, ids=lambda kind: kind.name)
def test_a_single_block_at_an_odd_address_is_read_like_any_other(ggml_type):
    _, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(1).integers(0, 256, (1, n_bytes), dtype=np.uint8)
    want = expected(raw, ggml_type)
    buffer = torch.zeros(n_bytes + 1, dtype=torch.uint8)
    buffer[1:] = torch.from_numpy(raw[0])
    assert_same_bits(dequantise(buffer[1:], ggml_type, want.shape), want)


def test_every_mxfp4_scale_times_every_code_has_the_right_bits():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)  # each byte holds two codes
    raw = np.empty((256, 16, 17), np.uint8)
    raw[:, :, 0] = np.arange(256, dtype=np.uint8)[:, None]
    raw[:, :, 1:] = codes
    raw = raw.reshape(256, -1)
    want = expected(raw, T.MXFP4)
    assert_same_bits(dequantise(torch.from_numpy(raw), T.MXFP4, want.shape), want)


@pytest.mark.parametrize("ggml_type", [T.F16, T.BF16])
def test_every_16_bit_float_has_the_right_bits(ggml_type):
    raw = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(1, -1)
    want = expected(raw, ggml_type)
    assert_same_bits(dequantise(torch.from_numpy(raw), ggml_type, want.shape), want)


@pytest.mark.parametrize("ggml_type", IN_TORCH, ids=lambda kind: kind.name)
def test_the_common_types_need_no_trip_through_numpy(ggml_type, monkeypatch):
    monkeypatch.setattr("gguf.quants.dequantize", lambda *_: pytest.fail("went through gguf"))
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = torch.zeros(3 * 2 * n_bytes, dtype=torch.uint8)
    assert dequantise(raw, ggml_type, (3, 1, 2 * n_weights)).shape == (3, 1, 2 * n_weights)


def test_aligned_f32_bytes_are_used_in_place():
    raw = torch.zeros(4096, dtype=torch.uint8)
    values = dequantise(raw, T.F32, (8, 128))
    raw.view(torch.float32)[130] = 7.0
    assert values[1, 2] == 7.0


@pytest.mark.parametrize("offset", [1, 4, 32])
def test_misaligned_f32_bytes_are_copied_to_aligned_memory(offset):
    buffer = torch.randint(0, 256, (4096 + offset,), dtype=torch.uint8)
    values = dequantise(buffer[offset:], T.F32, (8, 128))
    assert values.data_ptr() % ALIGNMENT_NBYTES == 0
    assert_same_bits(values, buffer[offset:].numpy().copy().view(np.float32).reshape(8, 128))


@pytest.mark.parametrize("ggml_type", [T.I32, T.Q8_1, T.F64])
def test_a_type_that_nobody_can_read_is_refused_by_its_name(ggml_type):
    with pytest.raises(UnsupportedModelError, match=ggml_type.name):
        check_type(ggml_type)


def test_a_type_number_that_does_not_exist_is_refused_by_its_number():
    with pytest.raises(UnsupportedModelError, match="tensor type 777 is unknown"):
        dequantise(torch.zeros(8, dtype=torch.uint8), 777, (2,))


def test_bytes_that_do_not_fit_the_shape_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"Q8_0 weights of shape \(2, 32\) are 68 bytes, not 34"):
        dequantise(torch.zeros(34, dtype=torch.uint8), T.Q8_0, (2, 32))


def test_a_row_of_broken_blocks_is_refused():
    with pytest.raises(ValueError, match="row of 33 weights is no whole number of Q8_0 blocks"):
        dequantise(torch.zeros(34, dtype=torch.uint8), T.Q8_0, (1, 33))
