"""Which drive holds which expert of a split pack: decided by the drives' weights alone.

A layer asks for a few of its experts at once, and is served when the slowest drive is done. So each
layer is divided by itself, to one expert in proportion to the weights, and neighbours in number go
to different drives. The arithmetic is exact and stated in ``FORMAT.md``; the index records weights,
not places, and whoever reads it computes the same places.

Rejected: a hash of the key (a layer's share then varies by its square root: two drives of a layer
of 256 would differ by 16 experts or more), whole layers in turn (one layer then has one drive), and
striping records over all drives (every read would wait for the slowest drive, and a record of 12 MB
already is as large as a drive wants its reads).
"""

from __future__ import annotations

from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.pack.layout import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tieredmoe.spec import ExpertKey, MoESpec

N_DRIVES_MAX = 64
WEIGHT_MAX = 1_000_000


@attrs.frozen(eq=False)
class SplitPlacement:
    """The place of every record; a drive's records lie end to end by layer, then by expert.

    ``drives`` and ``offsets`` hold, per layer, the drive of each expert and its offset there;
    ``file_nbytes`` the size of each drive's data.
    """

    drives: Mapping[int, NDArray[np.int64]]
    offsets: Mapping[int, NDArray[np.int64]]
    strides: Mapping[int, int]
    file_nbytes: tuple[int, ...]

    def locate(self, key: ExpertKey) -> Extent:
        """Drive, offset and length of the record of ``key``, in constant time; ``KeyError``."""
        layer, expert = key
        offsets = self.offsets[layer]
        if not 0 <= expert < len(offsets):
            raise KeyError(key)
        drive = self.drives[layer].item(expert)
        return Extent(drive, offsets.item(expert), self.strides[layer])


def place_experts(spec: MoESpec, weights: Sequence[int]) -> SplitPlacement:
    """Divide the experts of every layer among drives of these weights."""
    assert weights
    assert all(weight > 0 for weight in weights)
    drives, offsets, strides = {}, {}, {}
    dealt: dict[tuple[int, ...], NDArray[np.int64]] = {}
    ends = np.zeros(len(weights), np.int64)
    for layer, counts in zip(spec.layers, _layer_counts(spec, weights), strict=True):
        stride = spec.layouts[layer].stride
        if counts not in dealt:
            dealt[counts] = _dealt(counts)
        drive_of = dealt[counts]
        rank = np.zeros(spec.n_experts, np.int64)
        for drive in range(len(weights)):
            mine = drive_of == drive
            rank[mine] = np.arange(mine.sum())
        drives[layer] = drive_of
        offsets[layer] = ends[drive_of] + rank * stride
        strides[layer] = stride
        ends += np.array(counts, np.int64) * stride
    return SplitPlacement(
        MappingProxyType(drives),
        MappingProxyType(offsets),
        MappingProxyType(strides),
        tuple(ends.tolist()),
    )


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Positive numbers as integers that an index can hold: as they are, or the largest as 1000."""
    if all(isinstance(weight, int) and weight <= WEIGHT_MAX for weight in weights):
        return tuple(int(weight) for weight in weights)
    largest = max(weights)
    return tuple(max(1, round(1000 * weight / largest)) for weight in weights)


def _layer_counts(spec: MoESpec, weights: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Per layer, how many experts each drive gets.

    A drive gets its share of the layer rounded down; the experts that are left go one each to the
    drives that, over all layers so far, are the furthest behind their share.
    """
    total = sum(weights)
    given = [0] * len(weights)
    for n_layers in range(1, len(spec.layers) + 1):
        counts = [spec.n_experts * weight // total for weight in weights]
        behind = [
            n_layers * spec.n_experts * weight - total * (has + count)
            for weight, has, count in zip(weights, given, counts, strict=True)
        ]
        neediest = sorted(range(len(weights)), key=lambda drive: (-behind[drive], drive))
        for drive in neediest[: spec.n_experts - sum(counts)]:
            counts[drive] += 1
        given = [has + count for has, count in zip(given, counts, strict=True)]
        yield tuple(counts)


def _dealt(counts: tuple[int, ...]) -> NDArray[np.int64]:
    """The drive of each expert of a layer in which drive ``d`` has ``counts[d]`` of them.

    The ``j``-th expert of a drive with ``n`` of them wants to be at (j + 1/2) / n of the layer;
    sorted by that (a lower drive first), they are dealt to experts 0, 1, ….
    """
    wanted = sorted(
        (Fraction(2 * j + 1, 2 * count), drive)
        for drive, count in enumerate(counts)
        for j in range(count)
    )
    return np.array([drive for _, drive in wanted], np.int64)
