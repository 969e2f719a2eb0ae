"""Where every byte of a pack lies, as pure arithmetic: no files, no digests.

The source's shards are tiled by *segments* in file order (header, dense tensors, expert tensors,
the padding between them), so every source byte has exactly one place in the pack:

* byte ``b`` of expert ``e``'s slab of a role goes to its record, at
  ``start + e * stride + role.offset + b`` of the layer's expert file;
* every other byte goes to its shard's dense file, in file order, end to end.

Only lengths are stored; offsets are running sums. A gap or an overlap therefore cannot be written
down, and conversion, verification and restoring walk the same pieces. Rejected: an index entry per
(layer, expert, role) as in the published format: 247,296 of them, parsed at every start, for Kimi.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import attrs

from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tieredmoe.gguf.tensors import TensorInfo
    from tieredmoe.spec import ExpertLayout, MoESpec, RoleSpec


class Extent(NamedTuple):
    """A range of bytes of one of the pack's data files; expert files come first in their list."""

    file_index: int
    offset: int
    nbytes: int


FUSED_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType({"gate_up": ("gate", "up")})
"""Tensors that hold two roles of each expert, one after the other, as a record does."""


class SlabRole(NamedTuple):
    """Says that a segment holds all experts' slabs of a role of one layer, or of fused roles."""

    layer: int
    role: str

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose slabs alternate in the segment: one, as a rule."""
        return FUSED_ROLES.get(self.role, (self.role,))


class SlabRun(NamedTuple):
    """Expert ``e``'s slab of ``role`` begins at ``offset + e * step`` of its segment."""

    role: RoleSpec
    offset: int
    step: int


def slab_runs(experts: ExpertLayout, slabs: SlabRole) -> tuple[SlabRun, ...]:
    """Where the slabs of a segment lie in it, role by role."""
    roles = [experts.by_name[name] for name in slabs.roles]
    step = sum(role.nbytes for role in roles)
    first = roles[0].offset
    return tuple(SlabRun(role, role.offset - first, step) for role in roles)


class StoredTensor(NamedTuple):
    """Where a tensor was in its shard; ``dense_offset`` counts in the shard's dense file.

    A tensor with ``slabs`` is in the records of its layer instead.
    """

    shard_index: int
    source_offset: int
    nbytes: int
    dense_offset: int
    slabs: SlabRole | None


@attrs.frozen
class DataFile:
    """A file of the pack: a plain name inside its directory, and its exact size."""

    name: str
    nbytes: int


@attrs.frozen
class Placement:
    """Where a layer's records lie: expert ``e`` at ``start + e * stride`` of an expert file."""

    file_index: int
    start: int


@attrs.frozen
class Segment:
    """A run of a shard's bytes. Without ``tensor`` it is padding (or, if first, the header).

    ``slabs`` is set when the tensor holds routed experts: then it is one slab per expert, or one of
    each fused role, end to end, and each slab is a piece by itself; any other segment is one piece.
    """

    nbytes: int
    tensor: str | None = None
    slabs: SlabRole | None = None


@attrs.frozen
class ShardLayout:
    """One source file: its name and size, its segments, and the pack file with its dense bytes."""

    name: str
    nbytes: int
    dense_file: DataFile
    segments: tuple[Segment, ...]


@attrs.frozen
class PackLayout:
    """The geometry of a whole pack; see the module docstring."""

    spec: MoESpec
    expert_files: tuple[DataFile, ...]
    placements: Mapping[int, Placement]
    shards: tuple[ShardLayout, ...]

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """Every data file: expert files first (a ``Unit``'s file index counts in here)."""
        return self.expert_files + tuple(shard.dense_file for shard in self.shards)

    @cached_property
    def source_nbytes(self) -> int:
        """Bytes of all source shards."""
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes of all data files: the source's and the padding of the records."""
        return sum(file.nbytes for file in self.files)

    def n_pieces(self, segment: Segment) -> int:
        """How many pieces, and so digests, a segment has."""
        return 1 if segment.slabs is None else self.spec.n_experts * len(segment.slabs.roles)

    @cached_property
    def addresses(self) -> Mapping[int, Extent]:
        """Per layer, the record of its expert 0; the others follow it without gaps."""
        return {
            layer: Extent(placement.file_index, placement.start, self.spec.layouts[layer].stride)
            for layer, placement in self.placements.items()
        }

    def record(self, key: ExpertKey) -> Extent:
        """The record of ``key``: all its roles and its padding. Raises ``KeyError`` if unknown."""
        file_index, start, stride = self.addresses[key.layer]
        if not 0 <= key.expert < self.spec.n_experts:
            raise KeyError(key)
        return Extent(file_index, start + key.expert * stride, stride)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor that has bytes, by name."""
        stored = {}
        for shard_index, shard in enumerate(self.shards):
            source_offset = dense_offset = 0
            for segment in shard.segments:
                if segment.tensor is not None:
                    stored[segment.tensor] = StoredTensor(
                        shard_index, source_offset, segment.nbytes, dense_offset, segment.slabs
                    )
                source_offset += segment.nbytes
                dense_offset += segment.nbytes if segment.slabs is None else 0
        return MappingProxyType(stored)

    def tensor_extents(self, name: str) -> Iterator[Extent]:
        """Where the bytes of one tensor lie, in their order: one extent, or one per slab."""
        stored = self.tensors[name]
        if stored.slabs is None:
            file_index = len(self.expert_files) + stored.shard_index
            yield Extent(file_index, stored.dense_offset, stored.nbytes)
            return
        layer = stored.slabs.layer
        runs = slab_runs(self.spec.layouts[layer], stored.slabs)
        for expert in range(self.spec.n_experts):
            record = self.record(ExpertKey(layer, expert))
            for run in runs:
                yield Extent(record.file_index, record.offset + run.role.offset, run.role.nbytes)


class SourceShard(NamedTuple):
    """What planning needs to know of one source file."""

    name: str
    nbytes: int
    header_nbytes: int


def plan_pack(
    spec: MoESpec,
    shards: Sequence[SourceShard],
    tensors: Mapping[str, TensorInfo],
    slabs: Mapping[str, SlabRole],
    *,
    file_nbytes_max: int | None = None,
) -> PackLayout:
    """Lay out a pack of the given source: layers ascending, end to end, in as few files as allowed.

    ``slabs`` names the tensors that hold routed experts. ``file_nbytes_max`` starts a new expert
    file where the next layer would pass it (a layer is never divided); by default there is one.
    """
    expert_files, placements = _place_layers(spec, file_nbytes_max)
    by_shard: list[list[TensorInfo]] = [[] for _ in shards]
    for tensor in tensors.values():
        by_shard[tensor.shard_index].append(tensor)
    shard_layouts = []
    for index, (shard, inside) in enumerate(zip(shards, by_shard, strict=True)):
        segments = _tile(shard, inside, slabs)
        dense_nbytes = sum(segment.nbytes for segment in segments if segment.slabs is None)
        dense_file = DataFile(f"dense-{index:05d}.bin", dense_nbytes)
        shard_layouts.append(ShardLayout(shard.name, shard.nbytes, dense_file, segments))
    return PackLayout(spec, expert_files, placements, tuple(shard_layouts))


def layer_nbytes(spec: MoESpec, layer: int) -> int:
    """Bytes that one layer's records take, padding included."""
    return spec.layouts[layer].stride * spec.n_experts


def _place_layers(
    spec: MoESpec, file_nbytes_max: int | None
) -> tuple[tuple[DataFile, ...], dict[int, Placement]]:
    sizes: list[int] = []
    placements: dict[int, Placement] = {}
    for layer in spec.layouts:
        nbytes = layer_nbytes(spec, layer)
        if not sizes or (file_nbytes_max is not None and sizes[-1] + nbytes > file_nbytes_max):
            sizes.append(0)
        placements[layer] = Placement(len(sizes) - 1, sizes[-1])
        sizes[-1] += nbytes
    files = tuple(DataFile(f"experts-{i:05d}.bin", nbytes) for i, nbytes in enumerate(sizes))
    return files, placements


def _tile(
    shard: SourceShard, tensors: list[TensorInfo], slabs: Mapping[str, SlabRole]
) -> tuple[Segment, ...]:
    """Cover a shard from its first byte to its last with segments."""
    # A shard without tensors may end inside the padding that follows its header.
    end = min(shard.header_nbytes, shard.nbytes)
    segments = [Segment(end)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.nbytes == 0:
            continue
        assert tensor.offset >= end, "a header with overlapping tensors does not parse"
        if tensor.offset > end:
            segments.append(Segment(tensor.offset - end))
        segments.append(Segment(tensor.nbytes, tensor.name, slabs.get(tensor.name)))
        end = tensor.offset + tensor.nbytes
    assert end <= shard.nbytes, "a header with tensors past the end of its file does not parse"
    if end < shard.nbytes:
        segments.append(Segment(shard.nbytes - end))
    return tuple(segments)
