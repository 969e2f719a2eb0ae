"""The manifest as a file: ``FORMAT.md`` beside this module defines the document.

The first line holds a digest of all other lines, so a manifest that parses is the one that was
written, whatever happened to the file since. Fields are checked one by one all the same: who
recomputes that digest after an edit gets a clear error too. Rejected: a digest over re-serialised
JSON, which would let changes of white space, order or number format through.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs

from tieredmoe.gguf.experts import N_EXPERTS_MAX
from tieredmoe.pack.layout import (
    FUSED_ROLES,
    DataFile,
    PackLayout,
    Placement,
    Segment,
    ShardLayout,
    SlabRole,
    layer_nbytes,
    slab_runs,
)
from tieredmoe.pack.manifest import DIGEST_NBYTES, MANIFEST_NAME, Manifest
from tieredmoe.pack.sealed import seal, unseal
from tieredmoe.spec import PAGE_NBYTES, ROLES, ExpertLayout, MoESpec, RoleSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tieredmoe.pack.fields import Field

FORMAT_NAME = "tieredmoe-pack"
FORMAT_VERSION = 1
LAYER_MAX = 1 << 16

_TOP = ("digest", "format", "version", "model", "source_digest", "expert_files", "layers", "shards")
_MODEL = ("architecture", "n_experts", "top_k", "config_digest")
_LAYER = ("layer", "file", "start", "stride", "roles")
_ROLE = ("name", "ggml_type", "shape", "offset", "nbytes")
_SHARD = ("name", "nbytes", "digest", "dense_file", "segments")


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file; the same source always gives the same bytes."""
    spec, layout = manifest.layout.spec, manifest.layout
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "model": {
            "architecture": spec.architecture,
            "n_experts": spec.n_experts,
            "top_k": spec.top_k,
            "config_digest": manifest.config_digest.hex(),
        },
        "source_digest": manifest.source_digest.hex(),
        "expert_files": [attrs.asdict(file) for file in layout.expert_files],
        "layers": [
            _dump_layer(layer, layout.placements[layer], experts)
            for layer, experts in spec.layouts.items()
        ],
        "shards": [
            _dump_shard(shard, digest, of_segments)
            for shard, digest, of_segments in zip(
                layout.shards, manifest.shard_digests, manifest.digests, strict=True
            )
        ],
    }
    return seal(document)


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``; ``path`` names it in messages.

    Every field is checked for type and bounds, the geometry for being one that a pack can have, and
    the inner nodes of the digest tree. Raises ``PackError``.
    """
    fields = unseal(data, path, name=FORMAT_NAME, version=FORMAT_VERSION).members(*_TOP)
    model = fields["model"].members(*_MODEL)
    n_experts = model["n_experts"].integer(minimum=1, maximum=N_EXPERTS_MAX)
    layers = [_load_layer(item) for item in fields["layers"].items()]
    placements = {layer: placement for layer, placement, _ in layers}
    if len(placements) != len(layers):
        fields["layers"].fail("must not name a layer twice")
    spec = MoESpec(
        model["architecture"].text(),
        n_experts,
        model["top_k"].integer(minimum=1, maximum=n_experts),
        {layer: layout for layer, _, layout in layers},
    )
    expert_files = tuple(_load_file(item) for item in fields["expert_files"].items())
    shards = [_load_shard(item, n_experts) for item in fields["shards"].items()]
    layout = PackLayout(spec, expert_files, placements, tuple(shard for shard, _, _ in shards))
    manifest = Manifest(layout, tuple(digests for _, digests, _ in shards))
    _check_names(fields, layout)
    _check_expert_files(fields, layout)
    _check_slabs(fields, layout)
    _check_digest(model["config_digest"], manifest.config_digest)
    _check_digest(fields["source_digest"], manifest.source_digest)
    for (_, _, stated), digest in zip(shards, manifest.shard_digests, strict=True):
        _check_digest(stated, digest)
    return manifest


def _dump_layer(layer: int, placement: Placement, layout: ExpertLayout) -> dict[str, Any]:
    return {
        "layer": layer,
        "file": placement.file_index,
        "start": placement.start,
        "stride": layout.stride,
        "roles": [attrs.asdict(role) for role in layout.roles],
    }


def _dump_shard(
    shard: ShardLayout, digest: bytes, of_segments: tuple[bytes, ...]
) -> dict[str, Any]:
    return {
        "name": shard.name,
        "nbytes": shard.nbytes,
        "digest": digest.hex(),
        "dense_file": attrs.asdict(shard.dense_file),
        "segments": [
            {
                "nbytes": segment.nbytes,
                **({} if segment.tensor is None else {"tensor": segment.tensor}),
                **({} if segment.slabs is None else segment.slabs._asdict()),
                "digests": digests.hex(),
            }
            for segment, digests in zip(shard.segments, of_segments, strict=True)
        ],
    }


def _load_file(field: Field) -> DataFile:
    members = field.members("name", "nbytes")
    return DataFile(members["name"].file_name(), members["nbytes"].integer())


def _load_layer(field: Field) -> tuple[int, Placement, ExpertLayout]:
    members = field.members(*_LAYER)
    roles = tuple(_load_role(item) for item in members["roles"].items())
    if tuple(role.name for role in roles) != ROLES:
        members["roles"].fail(f"must be the roles {', '.join(ROLES)}, in this order")
    layout = ExpertLayout.build(
        {role.name: (role.ggml_type, role.shape, role.nbytes) for role in roles}
    )
    if layout.roles != roles:
        members["roles"].fail("must lie end to end, the first at offset 0")
    if members["stride"].integer() != layout.stride:
        members["stride"].fail(f"must be {layout.stride}, the roles' bytes in whole pages")
    start = members["start"].integer()
    if start % PAGE_NBYTES:
        members["start"].fail(f"must be a multiple of {PAGE_NBYTES}")
    layer = members["layer"].integer(maximum=LAYER_MAX)
    return layer, Placement(members["file"].integer(), start), layout


def _load_role(field: Field) -> RoleSpec:
    members = field.members(*_ROLE)
    shape = tuple(item.integer(minimum=1) for item in members["shape"].items())
    if len(shape) != 2:
        members["shape"].fail("must be [rows, columns]")
    return RoleSpec(
        members["name"].text(),
        members["ggml_type"].integer(),
        (shape[0], shape[1]),
        members["offset"].integer(),
        members["nbytes"].integer(minimum=1),
    )


def _load_shard(field: Field, n_experts: int) -> tuple[ShardLayout, tuple[bytes, ...], Field]:
    """A shard's layout, the digests of its segments, and the field with its own digest."""
    members = field.members(*_SHARD)
    loaded = [_load_segment(item, n_experts) for item in members["segments"].items()]
    segments = tuple(segment for segment, _ in loaded)
    if segments[0].tensor is not None:
        members["segments"].fail("must begin with the shard's header")
    shard = ShardLayout(
        members["name"].file_name(),
        members["nbytes"].integer(),
        _load_file(members["dense_file"]),
        segments,
    )
    if shard.nbytes != (n_tiled := sum(segment.nbytes for segment in segments)):
        members["nbytes"].fail(f"must be {n_tiled}, the sum of its segments")
    n_dense = sum(segment.nbytes for segment in segments if segment.slabs is None)
    if shard.dense_file.nbytes != n_dense:
        members["dense_file"].fail(f"must have {n_dense} bytes, the sum of its segments")
    return shard, tuple(digests for _, digests in loaded), members["digest"]


def _load_segment(field: Field, n_experts: int) -> tuple[Segment, bytes]:
    members = field.members("nbytes", "digests", optional=("tensor", "layer", "role"))
    slabs = None
    if "layer" in members or "role" in members:
        members = field.members("nbytes", "digests", "tensor", "layer", "role")
        slabs = SlabRole(members["layer"].integer(), members["role"].text())
        if slabs.role not in {*ROLES, *FUSED_ROLES}:
            members["role"].fail(f"must be one of {', '.join([*ROLES, *FUSED_ROLES])}")
    tensor = members["tensor"].text() if "tensor" in members else None
    n_pieces = 1 if slabs is None else n_experts * len(slabs.roles)
    digests = members["digests"].hex_bytes(n_pieces * DIGEST_NBYTES)
    return Segment(members["nbytes"].integer(minimum=1), tensor, slabs), digests


def _check_names(fields: dict[str, Field], layout: PackLayout) -> None:
    """Neither the pack's files, nor the source's, nor its tensors share a name."""
    tensors = (segment.tensor for shard in layout.shards for segment in shard.segments)
    for names in (
        [MANIFEST_NAME, *(file.name for file in layout.files)],
        [shard.name for shard in layout.shards],
        [name for name in tensors if name is not None],
    ):
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            fields["shards"].fail(f"must not name {twice[0]!r} twice")


def _check_expert_files(fields: dict[str, Field], layout: PackLayout) -> None:
    """Layers lie end to end and fill their files."""
    ends = [0] * len(layout.expert_files)
    for layer, placement in sorted(layout.placements.items(), key=lambda item: item[1].start):
        if placement.file_index >= len(ends) or placement.start != ends[placement.file_index]:
            fields["layers"].fail(
                f"must lie end to end in the expert files; layer {layer} does not"
            )
        ends[placement.file_index] += layer_nbytes(layout.spec, layer)
    for index, (file, end) in enumerate(zip(layout.expert_files, ends, strict=True)):
        if file.nbytes != end:
            fields["expert_files"].fail(f"must give file {index} the {end} bytes of its layers")


def _check_slabs(fields: dict[str, Field], layout: PackLayout) -> None:
    """Each (layer, role) is in exactly one segment, of the size of its slabs."""
    segments = [segment for shard in layout.shards for segment in shard.segments]
    found = Counter(
        (segment.slabs.layer, role)
        for segment in segments
        if segment.slabs is not None
        for role in segment.slabs.roles
    )
    expected = {(layer, role): 1 for layer in layout.spec.layouts for role in ROLES}
    if found != expected or any(
        segment.nbytes != layout.spec.n_experts * slab_runs(experts, segment.slabs)[0].step
        for segment in segments
        if segment.slabs is not None
        for experts in [layout.spec.layouts[segment.slabs.layer]]
    ):
        fields["shards"].fail("must hold each layer's roles once, in segments of their size")


def _check_digest(field: Field, digest: bytes) -> None:
    if field.hex_bytes(DIGEST_NBYTES) != digest:
        field.fail(f"must be {digest.hex()}, by the digests below it")
