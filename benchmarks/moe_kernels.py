"""How close the kernels on packed weights come to the memory's bandwidth, at real dimensions.

    python benchmarks/moe_kernels.py [--replays 15] [--prefill]

Every number is a CUDA graph over many layers whose experts all lie in different slots, so that no
weights are in a cache (a graph touches several times the L2); the percentage is of a large
device-to-device copy measured in the same run, reads and writes counted. A layer is all of it:
activations to fixed point, gate and up, down, the sum over k. ``unpack`` is the same experts
through float32 matrices and torch. With --prefill also chunks of 2 to 512 tokens.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
from gguf import GGMLQuantizationType as T
from kernel_timing import copy_bandwidth, measured, random_weights, row
from machine import describe_machine

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels import (
    DeviceLinear,
    DeviceRoutedBatch,
    FixedRows,
    LinearWorkspace,
    SiTU,
    SwiGLU,
    Workspace,
    execute_resident,
    expert_plan,
)
from tieredmoe.moe.kernels.launches import Launches, _Units
from tieredmoe.moe.kernels.unpacked import UnpackedExperts
from tieredmoe.spec import ExpertLayout

if TYPE_CHECKING:
    from tieredmoe.moe.kernels import FusedActivation


class Model(NamedTuple):
    name: str
    types: tuple[int, int, int]
    hidden: int
    width: int
    top_k: int
    n_layers: int
    activation: FusedActivation

    @property
    def layout(self) -> ExpertLayout:
        shapes = ((self.width, self.hidden),) * 2 + ((self.hidden, self.width),)
        named = zip(("gate", "up", "down"), self.types, shapes, strict=True)
        return ExpertLayout.build(
            {name: (kind, s, s[0] * row_nbytes(kind, s[1])) for name, kind, s in named}
        )


MODELS = (
    Model("DeepSeek-V4-Flash MXFP4", (T.MXFP4,) * 3, 4096, 2048, 6, 43, SwiGLU(10.0)),
    Model("Kimi-K3 Q2_K/Q3_K", (T.Q2_K, T.Q2_K, T.Q3_K), 3584, 3072, 16, 20, SiTU()),
)

MATRICES = (
    ("DeepSeek attn_q_a Q8_0", T.Q8_0, 1024, 4096),
    ("DeepSeek attn_q_b Q8_0", T.Q8_0, 32768, 1024),
    ("DeepSeek attn_output_b Q8_0", T.Q8_0, 4096, 8192),
    ("DeepSeek shared gate Q8_0", T.Q8_0, 2048, 4096),
    ("DeepSeek shared down Q8_0", T.Q8_0, 4096, 2048),
    ("DeepSeek compressor BF16", T.BF16, 1024, 4096),
    ("DeepSeek head (part) BF16", T.BF16, 32768, 4096),
    ("Kimi attn_q Q2_K", T.Q2_K, 12288, 7168),
    ("Kimi attn_q and attn_k as one Q2_K", T.Q2_K, 24576, 7168),
    ("Kimi latent down Q2_K", T.Q2_K, 3584, 7168),
    ("Kimi latent up Q2_K", T.Q2_K, 7168, 3584),
    ("Kimi attn_v Q3_K", T.Q3_K, 12288, 7168),
    ("Kimi attn_output Q3_K", T.Q3_K, 7168, 12288),
    ("Kimi shared down Q3_K", T.Q3_K, 7168, 6144),
    ("Kimi head (part) Q6_K", T.Q6_K, 20480, 7168),
)


class Layers:
    """A model's layers: distinct slots for every expert of every layer, one token's routing."""

    def __init__(self, model: Model, *, n_slots: int, n_tokens: int) -> None:
        device = torch.device("cuda")
        generator = np.random.default_rng(0)
        self.model = model
        self.layout = model.layout
        self.arena = torch.empty((n_slots, self.layout.stride), dtype=torch.uint8, device=device)
        records = []
        for _ in range(3):
            parts = [
                random_weights(role.ggml_type, role.shape[0] * role.shape[1], generator)
                for role in self.layout.roles
            ]
            records.append(torch.cat(parts).to(device))
        for i in range(n_slots):
            self.arena[i, : self.layout.payload_nbytes] = records[i % 3]
        self.slots = torch.randperm(n_slots, generator=torch.Generator().manual_seed(0))
        self.weights = torch.rand(n_tokens * model.top_k, device=device)
        self.workspace = Workspace(
            [self.layout], n_tokens=n_tokens, top_k=model.top_k, device=device
        )

    def batch(
        self, x: torch.Tensor, ids: torch.Tensor, host_ids: list[list[int]], slot_of: torch.Tensor
    ) -> DeviceRoutedBatch:
        return DeviceRoutedBatch(
            x,
            ids,
            self.weights[: ids.numel()].view(ids.shape),
            self.model.activation,
            host_ids=host_ids,
            layout=self.layout,
            arena=self.arena,
            slot_of=slot_of,
            workspace=self.workspace,
        )


def executed(
    layers: Layers,
    x: torch.Tensor,
    ids: torch.Tensor,
    host_ids: list[list[int]],
    slot_of: torch.Tensor,
) -> None:
    """A layer whose experts are all resident."""
    batch = layers.batch(x, ids, host_ids, slot_of)
    batch.add(batch.experts)
    batch.finish()


def unpacked_experts(layers: Layers, x: torch.Tensor, n: int, slot_of: torch.Tensor) -> None:
    """``n`` experts through float32 matrices, each on the rows of ``x``."""
    experts = UnpackedExperts(
        expert_plan(layers.layout),
        layers.model.activation,
        layers.arena,
        slot_of,
        layers.workspace,
    )
    for expert in range(n):
        experts.execute(expert, x)


def decode(model: Model, copy: float, replays: int) -> None:
    k = model.top_k
    layers = Layers(model, n_slots=model.n_layers * k, n_tokens=1)
    ids = torch.arange(k, device="cuda").view(1, -1)
    host_ids = ids.tolist()
    tables = [part.int().cuda() for part in layers.slots.split(k)]
    x = torch.randn(1, model.hidden, device="cuda")
    launches = [
        Launches(
            expert_plan(layers.layout),
            model.activation,
            ids=ids,
            arena=layers.arena,
            slot_of=table,
            workspace=layers.workspace,
            is_sorted=False,
        )
        for table in tables
    ]
    formats = launches[0]._plan.formats  # noqa: SLF001 (single kernels have no public face)
    assert formats is not None
    units = _Units.of(list(range(k)), 1)
    down, work = formats[2], layers.workspace

    def whole(i: int) -> None:
        execute_resident(
            x,
            ids,
            layers.weights.view(1, -1),
            model.activation,
            layout=layers.layout,
            arena=layers.arena,
            slot_of=tables[i],
            workspace=layers.workspace,
        )

    def as_a_batch(i: int) -> None:
        executed(layers, x, ids, host_ids, tables[i])

    def one_by_one(i: int) -> None:
        batch = layers.batch(x, ids, host_ids, tables[i])
        for expert in batch.experts:
            batch.add([expert])
        batch.finish()

    def unpacked(i: int) -> None:
        unpacked_experts(layers, x, k, tables[i])

    gate_nbytes, _, down_nbytes = (role.nbytes * k for role in layers.layout.roles)
    total = 2 * gate_nbytes + down_nbytes
    n = model.n_layers
    gates = measured(lambda i: launches[i]._gate_up(formats[0], down, units), n, replays)  # noqa: SLF001
    row(f"{model.name}: gate and up", gates, 2 * gate_nbytes, copy)
    role = layers.layout.roles[2]
    downs = measured(
        lambda i: launches[i]._rows(role, down, work.h, work.y, units, is_last=True),  # noqa: SLF001
        n,
        replays,
    )
    row(f"{model.name}: down", downs, down_nbytes, copy)
    row(f"{model.name}: layer, 1 token", measured(whole, n, replays), total, copy)
    row(f"{model.name}: layer, one expert at a time", measured(one_by_one, n, replays), total, copy)
    row(f"{model.name}: layer, unpack and matmul", measured(unpacked, 4, replays), total, copy)
    start = time.perf_counter()
    for i in range(10 * n):
        as_a_batch(i % n)
    us = (time.perf_counter() - start) / (10 * n) * 1e6
    torch.cuda.synchronize()
    print(f"{model.name}: {us:.0f} µs of host time per layer without a graph")


def prefill(model: Model, n_experts: int, copy: float, replays: int) -> None:
    layers = Layers(model, n_slots=n_experts, n_tokens=512)
    table = layers.slots.int().cuda()
    for n_tokens in (2, 8, 32, 128, 512):
        generator = torch.Generator().manual_seed(n_tokens)
        chosen = [torch.randperm(n_experts, generator=generator) for _ in range(n_tokens)]
        ids = torch.stack([one[: model.top_k] for one in chosen]).cuda()
        host_ids = ids.tolist()
        x = torch.randn(n_tokens, model.hidden, device="cuda")
        n_distinct = len(set(ids.flatten().tolist()))

        whole = functools.partial(executed, layers, x, ids, host_ids, table)
        rows = x[: max(1, n_tokens * model.top_k // n_distinct)]
        unpacked = functools.partial(unpacked_experts, layers, rows, n_distinct, table)
        nbytes = n_distinct * layers.layout.payload_nbytes
        what = f"{model.name}: layer, {n_tokens} tokens, {n_distinct} experts"
        row(what, measured(lambda _, work=whole: work(), 2, replays), nbytes, copy)
        times = measured(lambda _, work=unpacked: work(), 1, 3)
        row(f"{what}, unpack and matmul", times, nbytes, copy)


def product(matrices: list[DeviceLinear], x: torch.Tensor, out: torch.Tensor, i: int) -> None:
    matrices[i](x, out=out)


def shared(matrices: list[DeviceLinear], rows: FixedRows, out: torch.Tensor, i: int) -> None:
    matrices[i].multiply(rows, out=out)


def dense(copy: float, replays: int) -> None:
    generator = np.random.default_rng(0)
    for name, kind, n_rows, n_columns in MATRICES:
        nbytes = n_rows * row_nbytes(kind, n_columns)
        n = min(64, max(2, 2**28 // nbytes))
        workspace = LinearWorkspace(n_columns, device=torch.device("cuda"))
        raw = random_weights(kind, n_rows * n_columns, generator).cuda()
        matrices = [
            DeviceLinear(raw.clone(), kind, (n_rows, n_columns), workspace=workspace)
            for _ in range(n)
        ]
        for n_x in (1, 8, 128):
            x = torch.randn(n_x, n_columns, device="cuda")
            out = torch.empty(n_x, n_rows, device="cuda")
            what = f"{name} {n_rows}x{n_columns}, T={n_x}"
            if n_x == 1:
                rows = workspace.rows.fill(x, matrices[0].kind.order)
                times = measured(functools.partial(shared, matrices, rows, out), n, replays)
                row(f"{what}, rows made before", times, nbytes, copy)
            times = measured(functools.partial(product, matrices, x, out), n, replays)
            row(what, times, nbytes, copy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--prefill", action="store_true")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}; {describe_machine()}")
    copy = copy_bandwidth(arguments.replays)
    print(f"{'µs':<58}{'n':>4}{'min':>9}{'median':>9}{'max':>9}{'GB/s':>8}{'of copy':>8}")
    for model in MODELS:
        decode(model, copy, arguments.replays)
        torch.cuda.empty_cache()
    dense(copy, arguments.replays)
    if arguments.prefill:
        prefill(MODELS[0], 256, copy, arguments.replays)
        torch.cuda.empty_cache()
        prefill(MODELS[1], 896, copy, arguments.replays)
    print(f"copy again: {copy_bandwidth(arguments.replays):.0f} GB/s")


if __name__ == "__main__":
    main()
