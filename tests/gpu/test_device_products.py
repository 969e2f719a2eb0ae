"""Products that share launches: bit for bit those of one matrix after the other."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from kernel_experts import random_matrix, relative_error

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.adapters.device_products import DeviceProducts
from tieredmoe.adapters.gated_mlp import GatedMLP
from tieredmoe.adapters.products import PlainProducts
from tieredmoe.moe import SiTU, SwiGLU
from tieredmoe.moe.kernels import DeviceLinear, LinearWorkspace

pytestmark = pytest.mark.gpu


def bytes_of(kind, shape, seed):
    rng = np.random.default_rng(seed)
    if kind == T.F32:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).flatten().view(torch.uint8)
    return random_matrix(kind, *shape, rng)


def linears(kinds, shapes, device, *, gap=0):
    """Matrices of these types and shapes in one allocation, ``gap`` bytes between them."""
    raws = [
        bytes_of(kind, shape, seed)
        for seed, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]
    memory = torch.zeros(sum(raw.numel() + gap for raw in raws), dtype=torch.uint8, device=device)
    workspace = LinearWorkspace(max(max(shape) for shape in shapes), device=device)
    made, at = [], 0
    for kind, shape, raw in zip(kinds, shapes, raws, strict=True):
        place = memory[at : at + raw.numel()]
        place.copy_(raw)
        made.append(DeviceLinear(place, kind, shape, workspace=workspace))
        at += raw.numel() + gap
    return made, workspace


def draw(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)


def launches(products, x, matrices, monkeypatch):
    """How many products with packed matrices ``shared`` makes; it is right, to the bit."""
    want = [matrix(x) for matrix in matrices]
    n, multiply = [], DeviceLinear.multiply

    def counted(self, rows, *, out):
        n.append(self)
        return multiply(self, rows, out=out)

    monkeypatch.setattr(DeviceLinear, "multiply", counted)
    got = products.shared(x, matrices)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, products.shared(x, matrices), want))
    return len(n) / 2


def test_tiny_matrices_back_to_back_are_one_product(device, monkeypatch):
    matrices, workspace = linears([T.Q8_0] * 3, [(8, 32), (4, 32), (5, 32)], device)
    products = DeviceProducts(workspace)
    assert launches(products, draw(device, 1, 32), matrices, monkeypatch) == 1


@pytest.mark.parametrize(
    ("kinds", "outputs", "gap"),
    [
        pytest.param([T.Q8_0, T.MXFP4, T.IQ4_NL, T.Q4_0], (8, 4, 4, 4), 0, id="tiny-types"),
        pytest.param([T.Q8_0, T.Q8_0], (8, 8), 16, id="tiny-gap"),
        pytest.param([T.Q8_0, T.Q8_0], (6, 8), 0, id="tiny-unaligned"),
        pytest.param([T.Q8_0, T.F32, T.Q8_0], (8, 8, 8), 0, id="tiny-between"),
    ],
)
def test_all_other_matrices_are_products_of_their_own(device, monkeypatch, kinds, outputs, gap):
    matrices, workspace = linears(kinds, [(n, 32) for n in outputs], device, gap=gap)
    n_packed = sum(matrix.kind is not None for matrix in matrices)
    products = DeviceProducts(workspace)
    assert launches(products, draw(device, 1, 32), matrices, monkeypatch) == n_packed


def test_what_is_written_to_a_matrix_later_counts_in_joined_products(device):
    (a, b), workspace = linears([T.Q8_0] * 2, [(8, 32), (8, 32)], device)
    products, x = DeviceProducts(workspace), draw(device, 1, 32)
    products.shared(x, (a, b))
    b.raw.copy_(a.raw)
    first, second = products.shared(x, (a, b))
    assert torch.equal(first, second)


def test_several_tokens_share_too(device, monkeypatch):
    matrices, workspace = linears([T.Q8_0] * 2, [(8, 32), (4, 32)], device)
    assert launches(DeviceProducts(workspace), draw(device, 3, 32), matrices, monkeypatch) == 1


@pytest.mark.parametrize(
    ("kind", "n_parts", "shape"),
    [
        pytest.param(T.Q4_0, 3, (20, 64), id="tiny-Q4_0"),
        pytest.param(T.IQ4_NL, 4, (8, 64), id="tiny-no-kernel"),
        pytest.param(T.Q2_K, 2, (24, 256), id="Q2_K"),
        pytest.param(T.Q4_0, 96, (512, 128), id="keys"),
        pytest.param(T.Q2_K, 96, (128, 512), id="values"),
    ],
)
def test_each_part_meets_its_own_vector(device, request, kind, n_parts, shape):
    skip_large_in_the_interpreter(request, device)
    (matrix,), workspace = linears([kind], [(n_parts * shape[0], shape[1])], device)
    x = draw(device, n_parts, shape[1] + 16)[:, : shape[1]]  # a part of a row, as queries come
    want = PlainProducts().each(x, matrix).cpu()
    parts = matrix.split(n_parts)
    assert relative_error(want, torch.stack([p(v) for p, v in zip(parts, x, strict=True)])) < 5e-5
    for n_room in (n_parts, n_parts - 1):
        products = DeviceProducts(workspace, n_parts=n_room, n_part_inputs=shape[1])
        assert relative_error(products.each(x, matrix), want) < 5e-5


@pytest.mark.parametrize(
    ("kinds", "H", "width", "activation", "n"),
    [
        pytest.param((T.Q8_0, T.MXFP4, T.Q4_0), 32, 32, SiTU(), 1, id="tiny"),
        pytest.param((T.Q8_0, T.MXFP4, T.Q4_0), 32, 64, SwiGLU(2.0), 2, id="two-tokens"),
        pytest.param((T.Q8_0, T.F32, T.IQ4_NL), 32, 64, SiTU(), 1, id="no-kernel"),
        pytest.param((T.Q2_K, T.Q2_K, T.Q3_K), 256, 512, SwiGLU(2.0), 1, id="K"),
        pytest.param((T.Q2_K, T.Q2_K, T.Q3_K), 7168, 6144, SiTU(), 1, id="real"),
    ],
)
def test_a_gated_block_is_its_matrices_around_the_activation(
    device, request, kinds, H, width, activation, n
):
    skip_large_in_the_interpreter(request, device)
    matrices, workspace = linears(kinds, [(width, H), (width, H), (H, width)], device)
    mlp, x = GatedMLP(*matrices, activation), draw(device, n, H)
    got = DeviceProducts(workspace).gated(x, mlp)
    assert relative_error(got, mlp(x).cpu()) < 1e-4


def skip_large_in_the_interpreter(request, device):
    if device.type == "cpu" and "tiny" not in request.node.name:
        pytest.skip("too large for the interpreter")
