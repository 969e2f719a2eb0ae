import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.errors import UnsupportedModelError
from tieredmoe.moe import PackedLinear, dequantise, linear

TYPES = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_K, T.MXFP4]


def quantised(n_rows, n_columns, ggml_type, seed=0):
    """Random matrix as (bytes, exact float32 values); scales are kept sensible."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    if ggml_type == T.Q4_K:  # which the package cannot quantise to
        n_weights, n_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        raw = rng.integers(0, 256, (n_rows, n_columns // n_weights, n_bytes), dtype=np.uint8)
        raw[..., :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
        raw = raw.reshape(n_rows, -1)
    else:
        raw = gguf.quants.quantize(values, ggml_type).view(np.uint8)
    raw = torch.from_numpy(np.ascontiguousarray(raw))
    return raw, dequantise(raw, ggml_type, (n_rows, n_columns))


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
def test_a_product_is_that_of_the_dequantised_matrix(ggml_type, n_tokens):
    raw, weights = quantised(40, 512, ggml_type)
    x = torch.randn(n_tokens, 512)
    got = PackedLinear(raw, ggml_type, (40, 512))(x)
    torch.testing.assert_close(got, x @ weights.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ggml_type", [T.Q8_0, T.MXFP4])
def test_a_large_matrix_is_dequantised_in_bounded_blocks(ggml_type, monkeypatch):
    monkeypatch.setattr(linear, "_HOST_BLOCK_NBYTES", 2**16)
    raw, weights = quantised(769, 256, ggml_type)
    sizes = []

    def watched(rows, kind, shape):
        values = dequantise(rows, kind, shape)
        sizes.append(4 * values.numel())
        return values

    matrix = PackedLinear(raw, ggml_type, (769, 256))
    monkeypatch.setattr(linear, "dequantise", watched)
    x = torch.randn(3, 256)
    torch.testing.assert_close(matrix(x), x @ weights.T)
    assert max(sizes) <= 2**16
    assert sum(sizes) == 4 * weights.numel()


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
def test_where_the_bytes_lie_does_not_change_a_bit(ggml_type):
    raw, _ = quantised(96, 512, ggml_type)
    x = torch.randn(7, 512)
    here = PackedLinear(raw.clone(), ggml_type, (96, 512))(x)
    for offset in (1, 4, 16, 32):
        buffer = torch.zeros(raw.numel() + offset, dtype=torch.uint8)
        buffer[offset:] = raw.flatten()
        there = PackedLinear(buffer[offset:], ggml_type, (96, 512))
        assert torch.equal(there(x), here)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
def test_an_embedding_lookup_dequantises_only_the_rows_asked_for(ggml_type, monkeypatch):
    raw, weights = quantised(50, 256, ggml_type)
    table = PackedLinear(raw, ggml_type, (50, 256))
    ids = torch.tensor([[49, 0, 7], [7, 3, 3]])
    n_dequantised = []

    def watched(rows, kind, shape):
        n_dequantised.append(shape[0])
        return dequantise(rows, kind, shape)

    monkeypatch.setattr(linear, "dequantise", watched)
    assert torch.equal(table.rows(ids), weights[ids])
    assert n_dequantised == [6]


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
def test_the_parts_of_a_split_matrix_are_its_rows(ggml_type):
    raw, weights = quantised(12, 256, ggml_type)
    x = torch.randn(4, 256)
    parts = PackedLinear(raw, ggml_type, (12, 256)).split(3)
    assert [part.shape for part in parts] == [(4, 256)] * 3
    got = torch.cat([part(x) for part in parts], dim=1)
    torch.testing.assert_close(got, x @ weights.T, atol=1e-4, rtol=1e-5)


def test_a_matrix_takes_no_memory_beyond_its_bytes():
    raw, _ = quantised(32, 256, T.Q8_0)
    matrix = PackedLinear(raw, T.Q8_0, (32, 256))
    x = torch.ones(1, 256)
    before = matrix(x)
    raw.view(32, -1, 34)[:, :, 2:] = 0  # all weights 0, in the bytes it was made of
    assert before.abs().sum() > 0
    assert torch.equal(matrix(x), torch.zeros(1, 32))


def test_bytes_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match=r"Q8_0 matrix of shape \(2, 32\) is 68 bytes, not 70"):
        PackedLinear(torch.zeros(70, dtype=torch.uint8), T.Q8_0, (2, 32))


def test_an_unknown_type_is_refused_when_the_matrix_is_made():
    with pytest.raises(UnsupportedModelError, match="777"):
        PackedLinear(torch.zeros(70, dtype=torch.uint8), 777, (2, 32))
