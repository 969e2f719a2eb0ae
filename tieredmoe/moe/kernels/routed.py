"""A routed batch on the device: packed experts in the slots of one arena, executed as they land.

The interface follows the reference ``RoutedBatch``: construct, ``add`` experts in any order and
company, ``finish``. Every (token, k) writes a row of its own and the rows are summed in routing
order, so results do not depend on the order of arrival, on which experts were added together, or on
the slots they lie in. How many tokens share a decoded weight is decided by the routing alone.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.moe.kernels.ffn import sort_pairs
from tieredmoe.moe.kernels.launches import Launches
from tieredmoe.moe.kernels.plan import expert_plan
from tieredmoe.moe.kernels.tiles import N_TOGETHER_MAX, together
from tieredmoe.moe.kernels.unpacked import UnpackedExperts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels.workspace import Workspace
    from tieredmoe.spec import ExpertLayout

N_PAIRS_MAX = 2**16
"""Launches name a pair in 16 bits."""

N_UNPACKED_MIN = 65
"""From so many tokens of one expert on, unpacking its weights once costs less than decoding them
for every few tokens."""


class DeviceRoutedBatch:
    """One layer's routed experts over one chunk, on the device.

    ``x`` is [T, H] of any float type, ``ids`` int64 [T, k] and ``weights`` float32 [T, k], all on
    the device and contiguous; ``host_ids`` are the same ids on the host, which the caller had to
    fetch to acquire the experts. ``arena`` is uint8 [slots, slot_nbytes], ``slot_of`` int32
    [experts], the slot of each expert of this layer, -1 where it is absent: an expert must be
    resident, in stream order, from ``add`` until its kernels have run. All tensors are used until
    ``finish``'s result has been computed.
    """

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: FusedActivation,
        *,
        host_ids: Sequence[Sequence[int]],
        layout: ExpertLayout,
        arena: torch.Tensor,
        slot_of: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        n_tokens, top_k = ids.shape
        assert n_tokens <= workspace.n_tokens, (n_tokens, workspace)
        assert top_k == workspace.top_k, (top_k, workspace)
        assert ids.numel() <= N_PAIRS_MAX, ids.shape
        self._x = x
        self._weights = weights
        self._plan = expert_plan(layout)
        self._work = workspace
        # A single token's experts are (almost always) distinct: its pairs need no sorting.
        self._sorted = n_tokens > 1 or not self._plan.has_kernels
        self._groups = _groups(host_ids, is_sorted=self._sorted)
        self._waiting = set(self._groups)
        self.n_executed = 0
        """(token, expert) pairs computed so far."""
        self._launches = Launches(
            self._plan,
            activation,
            ids=ids,
            arena=arena,
            slot_of=slot_of,
            workspace=workspace,
            is_sorted=self._sorted,
        )
        self._matrices = UnpackedExperts(self._plan, activation, arena, slot_of, workspace)
        if self._sorted:
            n_block, n_pairs = 64, ids.numel()
            n_most = max(n_block, 1 << (n_pairs - 1).bit_length())
            workspace.kernels.launch(
                sort_pairs,
                (-(-n_pairs // n_block), 1),
                (ids, workspace.order, n_pairs),
                (n_most, n_block),
                {"num_warps": 4},
            )
        if self._plan.has_kernels:
            self._launches.take(x)

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct experts chosen, ascending: the working set."""
        return tuple(self._groups)

    def add(self, experts: Iterable[int]) -> None:
        """Launch ``experts``, chosen and not added before, on all their tokens."""
        by_size: dict[int, list[int]] = {}
        for expert in experts:
            assert expert in self._waiting, f"expert {expert} was not chosen, or is here again"
            self._waiting.remove(expert)
            pairs = self._groups[expert]
            self.n_executed += len(pairs)
            if not self._sorted:
                by_size.setdefault(1, []).extend(pairs)
            elif self._plan.has_kernels and len(pairs) < N_UNPACKED_MIN:
                for at in range(0, len(pairs), N_TOGETHER_MAX):
                    n = min(len(pairs) - at, N_TOGETHER_MAX)
                    by_size.setdefault(together(n), []).append(pairs[at])
            else:
                self._unpacked(expert, pairs)
        for size, positions in sorted(by_size.items()):
            self._launches.run(positions, n_together=size)

    def finish(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weighted sum over k in routing order, float32 [T, H]; every expert has been added.

        In ``out``, contiguous, where given; else in the workspace, until the next batch.
        """
        assert not self._waiting, f"experts {sorted(self._waiting)} were chosen but not executed"
        return self._launches.combine(self._weights, self._x.shape[1], out)

    def _unpacked(self, expert: int, pairs: Sequence[int]) -> None:
        """Execute ``expert`` through float32 matrices in scratch memory."""
        work = self._work
        numbers = work.order[pairs[0] : pairs[-1] + 1]
        x = self._x[numbers // work.top_k].float()
        hidden = x.shape[1]
        y = work.y.view(-1)[: self._weights.numel() * hidden].view(-1, hidden)
        y[numbers] = self._matrices.execute(expert, x)

    def __repr__(self) -> str:
        n_tokens, top_k = self._weights.shape
        n_done = len(self._groups) - len(self._waiting)
        done = f"{n_done}/{len(self._groups)} experts done"
        return f"<DeviceRoutedBatch {n_tokens} tokens, top-{top_k}, {done}>"


def _groups(host_ids: Sequence[Sequence[int]], *, is_sorted: bool) -> dict[int, Sequence[int]]:
    """For each expert, ascending, its pairs: their numbers, or positions in the sorted order."""
    flat = [expert for ids in host_ids for expert in ids]
    if not is_sorted:
        groups: dict[int, list[int]] = {}
        for pair, expert in enumerate(flat):
            groups.setdefault(expert, []).append(pair)
        return dict(sorted(groups.items()))
    experts, counts = np.unique(np.array(flat, np.int64), return_counts=True)
    starts = (np.cumsum(counts) - counts).tolist()
    return {
        expert: range(start, start + n)
        for expert, start, n in zip(experts.tolist(), starts, counts.tolist(), strict=True)
    }
