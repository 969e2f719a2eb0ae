"""Dense packed matrices on the device: bounds on rounding, bits of unpacking, many rows."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from kernel_experts import random_matrix

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.moe import dequantise
from tieredmoe.moe.kernels import DeviceLinear, LinearWorkspace
from tieredmoe.moe.kernels.formats import FLOATS, FORMATS
from tieredmoe.moe.kernels.unpacked import unpack

pytestmark = pytest.mark.gpu

TYPES = [T.MXFP4, T.Q4_0, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.F16, T.BF16]
small = pytest.mark.parametrize(
    "kind", [T.MXFP4, T.Q8_0, T.F16], ids=lambda kind: f"small-{kind.name}"
)
N_ROWS, N_COLUMNS = 83, 1536
"""What most tests have in common: each size is compiled anew, for seconds."""

every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


def slow(*values):
    """Cases beyond those that show each type in each kind of launch."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def make(kind, n_rows, n_columns, device, *, seed=0):
    raw = random_matrix(kind, n_rows, n_columns, np.random.default_rng(seed)).to(device)
    weights = dequantise(raw.cpu(), kind, (n_rows, n_columns)).double()
    workspace = LinearWorkspace(n_columns, device=device)
    return DeviceLinear(raw, kind, (n_rows, n_columns), workspace=workspace), weights


def inputs(n, n_columns, device):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, n_columns, generator=generator)
    x[:, :: n_columns // 8] *= 40  # outliers, as real activations have
    return x.to(device)


def bound(x, weights, kind):
    """Each activation is off by half a step, 1/65278 of its group's largest; floats add a little.

    float64 [n, rows]: |error| may not exceed it anywhere.
    """
    x = x.cpu().double()
    slack = 4e-6 * (x.abs() @ weights.abs().T)
    if FORMATS[kind].order == FLOATS:
        return slack
    group = FORMATS[kind].group
    largest = x.abs().reshape(len(x), -1, group).amax(2).repeat_interleave(group, 1)
    return (largest / 65278) @ weights.abs().T + slack


def check(kind, n_rows, n_columns, n, device):
    matrix, weights = make(kind, n_rows, n_columns, device)
    x = inputs(n, n_columns, device)
    error = (matrix(x).cpu().double() - x.cpu().double() @ weights.T).abs()
    assert (error <= bound(x, weights, kind)).all()


@small
def test_every_output_is_within_the_rounding_bound(kind, device):
    check(kind, 7, 96, 3, device)


@pytest.mark.parametrize("kind", [T.Q8_0, T.F16], ids=lambda kind: f"tiny-{kind.name}")
def test_rows_that_fill_their_lanes_unevenly_are_within_the_rounding_bound(kind, device):
    """15 units of 32 weights go to 16 lanes, 60 of 8 to 64."""
    check(kind, 3, 480, 1, device)


@pytest.mark.parametrize("kind", [T.MXFP4, T.Q2_K, T.Q3_K], ids=lambda kind: f"tiny-{kind.name}")
def test_every_output_of_a_tiny_matrix_is_within_the_rounding_bound(kind, device):
    check(kind, 3, 256, 1, device)


@every_type
@pytest.mark.parametrize("n", [1, 3, 8, *slow(2, 4, 5, 6, 7)])
def test_every_output_of_few_rows_is_within_the_rounding_bound(kind, n, cuda):
    check(kind, N_ROWS, N_COLUMNS, n, cuda)


@every_type
@pytest.mark.parametrize("n", [9, 32, 33, 100])
def test_every_output_of_many_rows_is_within_the_rounding_bound(kind, n, cuda):
    check(kind, N_ROWS, N_COLUMNS, n, cuda)


@pytest.mark.parametrize("n", [1, *slow(3)])
@pytest.mark.parametrize("n_columns", [256, 3584, 7168, *slow(1024, 2048, 4096, 6144, 12288)])
@pytest.mark.parametrize("kind", [T.Q2_K, T.Q8_0, T.BF16], ids=lambda kind: kind.name)
def test_rows_of_any_length_are_within_the_rounding_bound(kind, n_columns, n, cuda):
    check(kind, 33, n_columns, n, cuda)


def check_unpacking(kind, n_rows, n_columns, device):
    matrix, weights = make(kind, n_rows, n_columns, device)
    out = torch.full((n_rows, n_columns), torch.nan, device=device)
    workspace = LinearWorkspace(n_columns, device=device)
    unpack(
        matrix.kind,
        out,
        arena=matrix.raw.view(1, -1),
        slot_of=workspace.slot_of,
        expert=0,
        offset=0,
        kernels=workspace.kernels,
    )
    assert torch.equal(out.cpu(), weights.float())


@small
def test_unpacked_weights_are_bit_equal(kind, device):
    check_unpacking(kind, 5, 96, device)


@every_type
def test_unpacked_weights_of_every_type_are_bit_equal(kind, cuda):
    check_unpacking(kind, N_ROWS, N_COLUMNS, cuda)


def test_every_scale_of_mxfp4_is_exact_down_to_the_subnormal_ones(cuda):
    """Up to 2^103, beyond which products with this x overflow in the reference too."""
    raw = random_matrix(T.MXFP4, 231, 32, np.random.default_rng(0)).view(231, 17)
    raw[:, 0] = torch.arange(231)
    packed = raw.reshape(-1)
    workspace = LinearWorkspace(32, device=cuda)
    matrix = DeviceLinear(packed.to(cuda), T.MXFP4, (231, 32), workspace=workspace)
    x = torch.zeros(1, 32, device=cuda)
    x[0, 5] = 2.0**20
    wanted = dequantise(packed, T.MXFP4, (231, 32)).double()[:, 5] * 2.0**20
    torch.testing.assert_close(matrix(x)[0].cpu().double(), wanted, rtol=1e-6, atol=0)


def test_types_without_a_kernel_are_served_all_the_same(cuda):
    matrix, weights = make(T.IQ4_NL, 40, 64, cuda)
    x = inputs(3, 64, cuda)
    assert matrix.kind is None
    torch.testing.assert_close(matrix(x).cpu(), (x.cpu().double() @ weights.T).float())


def test_bytes_written_in_place_later_are_what_counts(device):
    """Also where a matrix starts at no multiple of 16 and no kernel reads it."""
    memory = torch.zeros(17 + 8, dtype=torch.uint8, device=device)
    for start in (0, 8):
        raw = memory[start : start + 17]
        matrix = DeviceLinear(raw, T.MXFP4, (1, 32), workspace=LinearWorkspace(32, device=device))
        raw.copy_(torch.tensor([128, *[0x22] * 16], dtype=torch.uint8))
        product = matrix(torch.ones(1, 32, device=device))
        torch.testing.assert_close(product.cpu(), torch.full((1, 1), 64.0))
        raw.zero_()


def test_parts_of_a_matrix_give_the_bits_of_the_whole(cuda):
    matrix, _ = make(T.Q8_0, 64, 96, cuda)
    x = inputs(2, 96, cuda)
    parts = torch.cat([part(x) for part in matrix.split(4)], dim=1)
    assert torch.equal(parts, matrix(x))
