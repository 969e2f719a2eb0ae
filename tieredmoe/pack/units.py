"""The steps of a conversion: what is written, synced and noted in the journal as one.

A unit is a routed layer (all its records) or a shard's dense file; dense files come first. So a
conversion that goes on after a crash repeats one layer at most, and a source that is given up
meanwhile shrinks layer by layer, wherever its tensors lie. Rejected: the source's own file order,
in which a layer may be whole only at the very end.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.pack.layout import slab_runs
from tieredmoe.pack.manifest import DIGEST_NBYTES
from tieredmoe.pack.record_copy import Run
from tieredmoe.pack.stream_copy import Part, Stream
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tieredmoe.pack.layout import PackLayout, SlabRole


class SegmentKey(NamedTuple):
    """Names a segment: number of its shard, and its own in it."""

    shard_index: int
    segment_index: int


class SourceRange(NamedTuple):
    """Bytes ``[begin, end)`` of one shard."""

    shard_index: int
    begin: int
    end: int


class Unit(NamedTuple):
    """``nbytes`` of a data file from ``start`` on, and the segments that they are made of.

    ``layer`` is None for a dense file.
    """

    name: str
    layer: int | None
    file_index: int
    start: int
    nbytes: int
    segments: tuple[SegmentKey, ...]


def units_of(layout: PackLayout) -> tuple[Unit, ...]:
    """The units of a pack, dense files first; their order is part of the journal's format."""
    by_layer: dict[int, list[SegmentKey]] = {layer: [] for layer in layout.spec.layouts}
    units = []
    for shard_index, shard in enumerate(layout.shards):
        dense: list[SegmentKey] = []
        for segment_index, segment in enumerate(shard.segments):
            key = SegmentKey(shard_index, segment_index)
            (dense if segment.slabs is None else by_layer[segment.slabs.layer]).append(key)
        file_index = len(layout.expert_files) + shard_index
        file = shard.dense_file
        units.append(Unit(file.name, None, file_index, 0, file.nbytes, tuple(dense)))
    for layer, segments in by_layer.items():
        file_index, start = layout.placements[layer].file_index, layout.placements[layer].start
        nbytes = layout.spec.layouts[layer].stride * layout.spec.n_experts
        units.append(Unit(f"layer {layer}", layer, file_index, start, nbytes, tuple(segments)))
    return tuple(units)


def segment_starts(layout: PackLayout) -> Mapping[SegmentKey, int]:
    """Where each segment begins in its shard."""
    starts = {}
    for shard_index, shard in enumerate(layout.shards):
        offset = 0
        for segment_index, segment in enumerate(shard.segments):
            starts[SegmentKey(shard_index, segment_index)] = offset
            offset += segment.nbytes
    return starts


def ranges_of(
    layout: PackLayout, unit: Unit, starts: Mapping[SegmentKey, int]
) -> list[SourceRange]:
    """Where the bytes of ``unit`` lie in the source, headers left out."""
    ranges = []
    for key in unit.segments:
        if key.segment_index:
            nbytes = layout.shards[key.shard_index].segments[key.segment_index].nbytes
            ranges.append(SourceRange(key.shard_index, starts[key], starts[key] + nbytes))
    return ranges


def unit_streams(
    layout: PackLayout, unit: Unit, starts: Mapping[SegmentKey, int], *, stream_nbytes: int
) -> Iterator[Stream]:
    """``unit`` as copies from the source, of about ``stream_nbytes``; records are not divided."""
    if unit.layer is None:
        parts = [
            Part(key.shard_index, starts[key], _segment_nbytes(layout, key))
            for key in unit.segments
        ]
        yield Stream(unit.file_index, unit.start, parts)
        return
    experts = layout.spec.layouts[unit.layer]
    runs = {
        run.role.name: (key.shard_index, starts[key] + run.offset, run.step)
        for key in unit.segments
        for run in slab_runs(experts, _slabs(layout, key))
    }
    padding_nbytes = experts.stride - experts.payload_nbytes
    n_together = max(1, stream_nbytes // experts.stride)
    for first in range(0, layout.spec.n_experts, n_together):
        parts = []
        for expert in range(first, min(first + n_together, layout.spec.n_experts)):
            for role in experts.roles:
                shard_index, begin, step = runs[role.name]
                parts.append(Part(shard_index, begin + expert * step, role.nbytes))
            if padding_nbytes:
                parts.append(Part(None, 0, padding_nbytes))
        yield Stream(unit.file_index, unit.start + first * experts.stride, parts)


def unit_digests(
    layout: PackLayout, unit: Unit, digests: Sequence[bytes]
) -> dict[SegmentKey, bytes]:
    """Per segment its pieces' digests end to end, from those of all parts in ``unit``'s order."""
    if unit.layer is None:
        return dict(zip(unit.segments, digests, strict=True))
    roles = layout.spec.layouts[unit.layer].roles
    by_role = {role.name: digests[i :: len(roles)] for i, role in enumerate(roles)}
    return {
        key: b"".join(
            b"".join(of_expert)
            for of_expert in zip(
                *(by_role[role] for role in _slabs(layout, key).roles), strict=True
            )
        )
        for key in unit.segments
    }


def unit_runs(
    layout: PackLayout,
    unit: Unit,
    starts: Mapping[SegmentKey, int],
    digests: Sequence[bytes],
) -> Iterator[Run]:
    """Where ``unit`` lies in the pack's files (source) and in the shards (target), by pieces."""
    of_segments = dict(zip(unit.segments, digests, strict=True))
    at = unit.start
    for key, of_segment in of_segments.items():
        nbytes = _segment_nbytes(layout, key)
        if unit.layer is None:
            what = f"{unit.name}, {nbytes:,} bytes of shard {key.shard_index}"
            places = (unit.file_index, at, key.shard_index, starts[key], nbytes)
            yield Run(*places, of_segment, what)
            at += nbytes
            continue
        experts = layout.spec.layouts[unit.layer]
        slabs = slab_runs(experts, _slabs(layout, key))
        for i, (expert, run) in enumerate(product(range(layout.spec.n_experts), slabs)):
            yield Run(
                unit.file_index,
                unit.start + expert * experts.stride + run.role.offset,
                key.shard_index,
                starts[key] + expert * run.step + run.offset,
                run.role.nbytes,
                of_segment[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES],
                f"{unit.name}, expert {expert}, {run.role.name}",
                ExpertKey(unit.layer, expert),
            )


def runs_in_source(runs: Iterable[Run]) -> Iterator[Run]:
    """``runs`` of a unit as they lie in the source's files, but for headers, which never go."""
    for run in runs:
        if run.target_offset:
            yield run._replace(source_index=run.target_index, source_offset=run.target_offset)


def _slabs(layout: PackLayout, key: SegmentKey) -> SlabRole:
    slabs = layout.shards[key.shard_index].segments[key.segment_index].slabs
    assert slabs is not None, "a layer is made of slabs"
    return slabs


def _segment_nbytes(layout: PackLayout, key: SegmentKey) -> int:
    return layout.shards[key.shard_index].segments[key.segment_index].nbytes
