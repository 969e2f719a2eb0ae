"""Every kernel compiles without a device, and its code keeps what measurements have taught.

What the tests read off the code: no layout conversion inside a loop (each is a trip through shared
memory), weights in whole words, activations in pairs of words, no registers spilled unawares.
"""

import re
import subprocess
from typing import NamedTuple

import pytest
from gguf import GGMLQuantizationType as T

pytest.importorskip("triton", reason="kernels are written in Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels import ffn, fixed_point, rows
from tieredmoe.moe.kernels.formats import FLOATS, FORMATS, QUARTERS
from tieredmoe.moe.kernels.tiles import (
    N_TOGETHER,
    gate_up_tile,
    matrix_tile,
    row_tile,
    unpack_tile,
)

POINTERS = {
    **dict.fromkeys(("arena", "matrix"), "*u8"),
    **dict.fromkeys(("slot_of", "order", "rows", "h"), "*i32"),
    **dict.fromkeys(("y", "gate", "up", "weights", "out"), "*fp32"),
    "ids": "*i64",
}
WIDE = {"slot_nbytes", *(f"sel{i}" for i in range(8))}
ALIGNED = {"arena", "matrix", "slot_nbytes", "x_stride", "h_stride", "row_stride", "h", "rows"}
SM_90, SM_120 = 90, 120


class Code(NamedTuple):
    ttgir: str
    ptx: str
    sass: str

    @property
    def loop(self):
        """The body of the loop over a row."""
        start = self.ttgir.index("scf.for")
        return self.ttgir[start : self.ttgir.index("scf.yield", start)]

    @property
    def stack_nbytes(self):
        return int(re.search(r"STACK:(\d+)", self.sass)[1])

    def loads(self):
        return set(re.findall(r"\bLDG\.[A-Z0-9.]+", self.sass))


def compiled(kernel, constants, options, *, capability=SM_90, x="*i32", wide=()):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "x":
            signature[name] = x
        else:
            default = "i64" if name in WIDE or name in wide else "i32"
            signature[name] = POINTERS.get(name, default)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in ALIGNED
    }
    source = ASTSource(kernel, signature, constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


def code_of(binary, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    done = subprocess.run(
        [tool, "-sass", "-res-usage", path], capture_output=True, text=True, check=True
    )
    return Code(binary.asm["ttgir"], binary.asm["ptx"], done.stdout)


def shape(kind):
    """Real dimensions of a type's users: columns of gate, rows of gate."""
    return (3584, 3072) if FORMATS[kind].order == QUARTERS else (4096, 2048)


def matrix_shape(kind):
    """Those of dense matrices: columns, rows. 112 units of a K-quant fill no whole turns."""
    return (7168, 12288) if FORMATS[kind].order == QUARTERS else (8192, 4096)


def is_capped(kind, m=1):
    order = FORMATS[kind].order
    return gate_up_tile(FORMATS[kind], shape(kind)[0], m, h_order=order).registers is not None


def gate_up(kind, m=1, **options):
    n_columns, n_rows = shape(kind)
    order = FORMATS[kind].order
    tile = gate_up_tile(FORMATS[kind], n_columns, m, h_order=order)
    constants = {
        "TOP_K": 6,
        "TYPE": int(kind),
        "K": n_columns,
        "N": n_rows,
        "ROW_NBYTES": row_nbytes(kind, n_columns),
        "H_ORDER": order,
        "ACTIVATION": 0,
        "A": 10.0,
        "B": 0.0,
        "M": m,
        "R": tile.R,
        "C": tile.C,
        "SORTED": m > 1,
        "PDL": True,
        "EMU": False,
    }
    return compiled(ffn.gate_up, constants, tile.options, **options)


def down(kind, m=1, **options):
    n_rows, n_columns = shape(kind)
    tile = row_tile(FORMATS[kind], n_columns, m)
    constants = {
        "X_PER_ROW": 1,
        "TYPE": int(kind),
        "K": n_columns,
        "N": n_rows,
        "ROW_NBYTES": row_nbytes(kind, n_columns),
        "M": m,
        "R": tile.R,
        "C": tile.C,
        "SORTED": m > 1,
        "PDL": True,
        "EMU": False,
    }
    return compiled(ffn.expert_rows, constants, tile.options, **options)


def matrix_rows(kind, m=1, **options):
    n_columns, n_rows = matrix_shape(kind)
    tile = matrix_tile(FORMATS[kind], n_columns, m)
    constants = {
        "TYPE": int(kind),
        "K": n_columns,
        "N": n_rows,
        "ROW_NBYTES": row_nbytes(kind, n_columns),
        "M": m,
        "R": tile.R,
        "C": tile.C,
        "PDL": True,
        "EMU": False,
    }
    return compiled(ffn.matrix_rows, constants, tile.options, **options)


def unpack(kind, **options):
    n_columns, _ = shape(kind)
    tile = unpack_tile(FORMATS[kind], n_columns)
    constants = {
        "TYPE": int(kind),
        "K": n_columns,
        "ROW_NBYTES": row_nbytes(kind, n_columns),
        "R": tile.R,
        "C": tile.C,
        "PDL": True,
        "EMU": False,
    }
    options = {"wide": ("offset",), **options}
    return compiled(rows.unpack_rows, constants, tile.options, **options)


SPILLED_NBYTES_MAX = 160
"""Where a tile caps the registers to get one more program onto each multiprocessor: measured to be
worth it, and how much is spilled differs between releases of the compiler."""


def check(code, kind, *, capped=False):
    assert "convert_layout" not in code.loop
    assert code.stack_nbytes <= (SPILLED_NBYTES_MAX if capped else 0)
    assert not [load for load in code.loads() if ".U8" in load or ".S8" in load or ".U16" in load]
    if FORMATS[kind].order == FLOATS:
        assert "LDG.E.128" in code.loads()
    else:
        assert "LDG.E.64" in code.loads()
    assert not re.search(r"\b(mul|fma|add)\S*\.ftz", code.ptx), "subnormal scales must survive"


def by_type(kinds):
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


@by_type([T.MXFP4, T.Q3_K, T.BF16])
def test_down_keeps_the_lessons(kind, tmp_path):
    check(code_of(down(kind), tmp_path), kind)


@by_type([T.MXFP4, T.Q2_K])
def test_gate_and_up_keep_the_lessons(kind, tmp_path):
    check(code_of(gate_up(kind), tmp_path), kind, capped=is_capped(kind))


@by_type([T(kind) for kind in FORMATS])
def test_a_matrix_of_every_type_keeps_the_lessons(kind, tmp_path):
    check(code_of(matrix_rows(kind), tmp_path), kind)


@by_type([T.MXFP4, T.Q2_K])
def test_experts_compile_for_consumer_cards(kind):
    assert gate_up(kind, capability=SM_120).asm["cubin"]
    assert down(kind, capability=SM_120).asm["cubin"]


@by_type([T.MXFP4, T.Q3_K])
def test_unpacking_compiles(kind):
    assert unpack(kind).asm["cubin"]


@pytest.mark.parametrize("capability", [SM_90, SM_120])
def test_the_kernels_without_weights_compile(capability):
    flags = {"PDL": True}
    one_warp = {"num_warps": 1}
    activated = {"N": 3072, "R": 256, "H_ORDER": QUARTERS, "ACTIVATION": 1, "A": 4.0, "B": 25.0}
    for kernel, constants in (
        (ffn.sort_pairs, {"N": 128, "B": 64}),
        (ffn.combine, {"N": 4096, "TOP_K": 6, "R": 64}),
        (ffn.activate, activated),
    ):
        binary = compiled(kernel, {**constants, **flags}, one_warp, capability=capability)
        assert binary.asm["cubin"]
    for order, x in ((0, "*fp32"), (2, "*bf16")):
        constants = {"K": 4096, "N": 64, "ORDER": order, **flags}
        options = {"capability": capability, "x": x, "wide": ("x_stride",)}
        assert compiled(fixed_point.fix_rows, constants, one_warp, **options).asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [SM_90, SM_120])
@pytest.mark.parametrize("m", N_TOGETHER)
@by_type([T(kind) for kind in FORMATS])
def test_every_kernel_of_every_type_keeps_the_lessons(kind, m, capability, tmp_path):
    fused = code_of(gate_up(kind, m, capability=capability), tmp_path)
    check(fused, kind, capped=is_capped(kind, m))
    check(code_of(down(kind, m, capability=capability), tmp_path), kind)
    check(code_of(matrix_rows(kind, m, capability=capability), tmp_path), kind)
    assert unpack(kind, capability=capability).asm["cubin"]
