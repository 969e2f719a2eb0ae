"""Where experts lie in a foreign pack: per layer, records a constant stride apart."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import PackError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tieredmoe.spec import MoESpec


@attrs.frozen
class RecordPlaces:
    """One layer: the record of expert ``e`` is ``nbytes`` bytes from ``start + e * stride`` on.

    In it, each role lies at its ``role_offsets``, in the order of this mapping. ``nbytes`` ends
    with the last role; what follows up to the next record is padding.
    """

    start: int
    stride: int
    role_offsets: Mapping[str, int]
    nbytes: int


def place_layers(
    spec: MoESpec,
    *,
    data_start: int,
    role_order: Sequence[str],
    role_alignment: int,
    record_alignment: int,
) -> dict[int, RecordPlaces]:
    """Every layer's records end to end from ``data_start`` on, which is aligned like a record."""
    places = {}
    start = data_start
    for layer, layout in spec.layouts.items():
        offsets: dict[str, int] = {}
        end = 0
        for name in role_order:
            offsets[name] = rounded_up(end, role_alignment)
            end = offsets[name] + layout.by_name[name].nbytes
        stride = rounded_up(end, record_alignment)
        places[layer] = RecordPlaces(start, stride, MappingProxyType(offsets), end)
        start += stride * spec.n_experts
    return places


def require_file_end(path: Path, *, nbytes: int, end: int) -> None:
    """Raise ``PackError`` unless a file of ``nbytes`` ends where its records end."""
    if nbytes != end:
        what = "is cut short" if nbytes < end else "has bytes that belong to no expert"
        raise PackError(path, f"{what}: it has {nbytes:,} bytes, and its records end at {end:,}")


def rounded_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not less than ``nbytes``."""
    return -(-nbytes // alignment) * alignment
