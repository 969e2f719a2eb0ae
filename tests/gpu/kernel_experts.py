"""Packed experts in scattered slots of one arena, and what the reference makes of them."""

from typing import NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.moe import RoutedBatch, expert_matrices
from tieredmoe.moe.dequant import block_size, row_nbytes
from tieredmoe.spec import ExpertLayout

HALVES = {
    T.Q4_0: {0: 3e-3},
    T.Q8_0: {0: 3e-3},
    T.IQ4_NL: {0: 3e-3},
    T.Q2_K: {80: 3e-3, 82: 3e-3},
    T.Q3_K: {108: 6e-4},
    T.Q4_K: {0: 3e-4, 2: 3e-4},
    T.Q5_K: {0: 3e-4, 2: 3e-4},
    T.Q6_K: {208: 3e-4},
}
"""Where a type's blocks have float16 scales, and how large those should be."""


def random_matrix(ggml_type, n_rows, n_columns, rng):
    """Random bytes with sensible scales: uint8."""
    n_weights, n_bytes = block_size(ggml_type)
    n = n_rows * n_columns // n_weights
    if ggml_type in (T.F16, T.BF16):
        values = torch.from_numpy(rng.standard_normal(n).astype(np.float32) / 20)
        dtype = torch.float16 if ggml_type == T.F16 else torch.bfloat16
        return values.to(dtype).view(torch.uint8)
    blocks = rng.integers(0, 256, (n, n_bytes), dtype=np.uint8)
    if ggml_type == T.MXFP4:
        blocks[:, 0] = rng.integers(117, 122, n)
    for at, most in HALVES.get(ggml_type, {}).items():
        scales = rng.uniform(most / 3, most, (n, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(-1))


def layout_of(types, hidden, width):
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertLayout.build(
        {
            name: (kind, shape, shape[0] * row_nbytes(kind, shape[1]))
            for name, kind, shape in zip(("gate", "up", "down"), types, shapes, strict=True)
        }
    )


class Experts(NamedTuple):
    """``arena`` has two slots more than there are experts; those, and what pads, hold 0xFF."""

    layout: ExpertLayout
    arena: torch.Tensor
    slot_of: torch.Tensor

    @classmethod
    def random(cls, types, hidden, width, n_experts, device, *, seed=0, placement=0):
        layout = layout_of(types, hidden, width)
        rng = np.random.default_rng(seed)
        slots = np.random.default_rng(placement).permutation(n_experts + 2)[:n_experts]
        arena = torch.full((n_experts + 2, layout.stride), 255, dtype=torch.uint8)
        for slot in slots.tolist():
            for role in layout.roles:
                packed = random_matrix(role.ggml_type, *role.shape, rng)
                arena[slot, role.offset : role.offset + role.nbytes] = packed
        slot_of = torch.tensor(slots, dtype=torch.int32)
        return cls(layout, arena.to(device), slot_of.to(device))

    def reference(self, x, ids, weights, activation):
        """What ``RoutedBatch`` computes on the CPU."""
        batch = RoutedBatch(x.cpu().float(), ids.cpu(), weights.cpu(), activation)
        for expert in batch.experts:
            record = self.arena[int(self.slot_of[expert])].cpu()
            batch.add(expert, *expert_matrices(record, self.layout))
        return batch.finish()


def routing(n_tokens, top_k, n_experts, hidden, device, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(n_experts, generator=generator)[:top_k] for _ in range(n_tokens)]
    )
    x = torch.randn(n_tokens, hidden, generator=generator)
    weights = torch.rand(n_tokens, top_k, generator=generator)
    return x.to(device), ids.to(device), weights.to(device)


def relative_error(value, wanted):
    wanted = wanted.double().cpu()
    return float((value.double().cpu() - wanted).norm() / wanted.norm())
