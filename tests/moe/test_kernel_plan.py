"""Which kernels serve what, decided without a device."""

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.reference import clamped_swiglu
from tieredmoe.spec import ExpertLayout

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.moe.kernels import SiTU, SwiGLU, Workspace, expert_plan, readable
from tieredmoe.moe.kernels.launches import N_UNITS, _Units

DEEPSEEK = (T.MXFP4, T.MXFP4, T.MXFP4)
KIMI = (T.Q2_K, T.Q2_K, T.Q3_K)


def layout(types, hidden, width):
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertLayout.build(
        {
            name: (kind, shape, shape[0] * row_nbytes(kind, shape[1]))
            for name, kind, shape in zip(("gate", "up", "down"), types, shapes, strict=True)
        }
    )


@pytest.mark.parametrize(
    "built", [layout(DEEPSEEK, 4096, 2048), layout(KIMI, 3584, 3072)], ids=["deepseek", "kimi"]
)
def test_experts_of_the_target_models_have_fused_kernels(built):
    plan = expert_plan(built)
    assert plan.has_kernels
    assert plan.fused


def test_roles_of_two_types_have_kernels_that_are_not_fused():
    plan = expert_plan(layout((T.Q8_0, T.MXFP4, T.Q8_0), 96, 64))
    assert plan.has_kernels
    assert not plan.fused
    assert plan.two_orders


@pytest.mark.parametrize("types", [(T.IQ4_NL, T.MXFP4, T.MXFP4), (T.F32, T.F32, T.F32)], ids=str)
def test_one_role_without_a_kernel_unpacks_the_expert(types):
    assert not expert_plan(layout(types, 96, 64)).has_kernels


@pytest.mark.parametrize(
    ("kind", "shape", "offset"),
    [
        (T.Q2_K, (4, 256), 2),  # its blocks are read in aligned words
        (T.BF16, (4, 64), 8),  # 16 bytes in one load
        (T.BF16, (4, 12), 0),  # rows start at multiples of 24
        (T.Q8_0, (2**20, 4096), 0),  # 4.5 GB: past 32-bit offsets
        (T.IQ2_S, (4, 256), 0),
    ],
)
def test_what_the_loads_cannot_reach_is_not_readable(kind, shape, offset):
    assert readable(kind, shape, offset) is None


def test_blocks_of_odd_size_are_readable_anywhere():
    assert readable(T.MXFP4, (3, 32), 17) is not None
    assert readable(T.Q6_K, (3, 256), 2) is not None


def test_positions_survive_packing_into_launch_arguments():
    positions = [0, 65535, 32768, 7, 40000]
    units = _Units.of(positions, 4)
    assert units.n == 5
    unpacked = np.array(units.selected, np.int64).view(np.uint16)
    assert unpacked[:5].tolist() == positions
    assert len(unpacked) == N_UNITS


def test_situ_is_the_formula_of_its_model():
    gate, up = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigmoid = [1 / (1 + math.exp(-g)) for g in gate]
    wanted = [
        4 * math.tanh(g / 4) * s * 25 * math.tanh(u / 25)
        for g, s, u in zip(gate, sigmoid, up, strict=True)
    ]
    torch.testing.assert_close(SiTU()(gate, up), torch.tensor(wanted, dtype=torch.float64))


def test_swiglu_is_the_references():
    gate, up = torch.randn(2, 50) * 20
    assert torch.equal(SwiGLU(3.0)(gate, up), clamped_swiglu(3.0)(gate, up))


def test_a_workspace_says_what_it_takes():
    workspace = Workspace(
        [layout(DEEPSEEK, 256, 128)], n_tokens=4, top_k=2, device=torch.device("cpu")
    )
    floats = 4 * 256 + 9 * 128 + 9 * 256 + 4 * 256 + 8 + 256 * 128
    assert workspace.nbytes == 4 * floats
