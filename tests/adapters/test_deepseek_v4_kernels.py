"""The decode step's kernels compile without a device, for the published sizes, without spilling."""

import re
import subprocess

import pytest

pytest.importorskip("triton", reason="kernels are written in Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tieredmoe.adapters.deepseek_v4 import attention_kernels, choice_kernels, stream_kernels

FLOATS = {"rms_eps", "hc_eps", "sign", "scale"}
INTEGERS = {"position", "token", "ids", "picks", "table"}

HEADS = {"D": 512, "PAIRS": 256, "N_TURNING": 32}
WINDOW = {"OVERLAPS": True, "RATIO": 4, "S": 4}
KERNELS = {
    "join": (
        stream_kernels.join_streams,
        {"H": 4096, "N": 4, "N_OUTPUTS": 2, "N_LOGITS": 24, "WIDTH": 32, "C": 32},
        4,
    ),
    "split": (
        stream_kernels.split_streams,
        {
            "H": 4096,
            "N": 4,
            "N_LOGITS": 24,
            "WIDTH": 32,
            "N_PARTS": 128,
            "PARTS": 128,
            "CHANNELS": 4096,
            "N_SINKHORN": 20,
        },
        8,
    ),
    "turn": (attention_kernels.turn_heads, {**HEADS, "NORMED": True}, 4),
    "turn back": (attention_kernels.turn_heads, {**HEADS, "NORMED": False}, 4),
    "key": (attention_kernels.keep_key, {**HEADS, "N_WINDOW": 128}, 4),
    "CSA window": (attention_kernels.compress, {**HEADS, **WINDOW}, 8),
    "index window": (
        attention_kernels.compress,
        {**HEADS, **WINDOW, "D": 128, "PAIRS": 64},
        4,
    ),
    "HCA window": (
        attention_kernels.compress,
        {**HEADS, "OVERLAPS": False, "RATIO": 128, "S": 16},
        8,
    ),
    "shares": (
        attention_kernels.share_out,
        {"N": 640, "N_WINDOW": 128, "RATIO": 4, "PICKED": True, "B": 1024},
        4,
    ),
    "scores": (
        choice_kernels.score_rows,
        {"N_ROWS": 1024, "N_HEADS": 64, "HEADS": 64, "RATIO": 4, "B": 64},
        4,
    ),
    "ranks": (
        choice_kernels.rank_rows,
        {"N_ROWS": 1024, "N_PICKS": 512, "B": 16, "OTHERS": 256},
        4,
    ),
    "route": (
        choice_kernels.route_by_score,
        {"N_EXPERTS": 256, "EXPERTS": 256, "TOP_K": 6, "K": 8},
        1,
    ),
    "hash route": (choice_kernels.route_by_token, {"TOP_K": 6, "K": 8}, 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_and_keeps_to_its_registers(name, tmp_path):
    kernel, constants, n_warps = KERNELS[name]
    constants = {**constants, "PDL": True}
    signature = {}
    for argument in kernel.arg_names:
        pointer = "*i64" if argument in INTEGERS else "*fp32"
        kind = "constexpr" if argument in constants else pointer
        # The same name means a tensor in one kernel and a factor in another.
        is_factor = argument in FLOATS and not (name == "split" and argument == "scale")
        signature[argument] = "fp32" if is_factor else kind
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": n_warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    done = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    )
    assert int(re.search(r"STACK:(\d+)", done.stdout)[1]) == 0, done.stdout
