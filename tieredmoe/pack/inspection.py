"""What a model on disk is, in numbers and names: for people, for scripts, and for plans.

Reads headers and indexes only. Rejected: a text made here, which scripts would have to parse.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from gguf import GGMLQuantizationType

from tieredmoe.gguf import find_experts, predicting_layers
from tieredmoe.pack.drives import DrivesPack
from tieredmoe.pack.foreign import ForeignPack
from tieredmoe.pack.opening import open_checkpoint
from tieredmoe.pack.reader import Pack
from tieredmoe.pack.virtual import VirtualPack
from tieredmoe.spec import ROLES, ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tieredmoe.gguf import ExpertTensors
    from tieredmoe.pack.records import Checkpoint
    from tieredmoe.spec import ExpertLayout

_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_USUAL_ALIGNMENT = 32
_N_NAMED = 8


@attrs.frozen(kw_only=True)
class InspectedRole:
    """One matrix of each expert: ``rows`` by ``columns`` weights in ``nbytes``."""

    name: str
    type: str
    rows: int
    columns: int
    nbytes: int


@attrs.frozen(kw_only=True)
class InspectedLayers:
    """Neighbouring routed layers whose experts are alike.

    A record has ``payload_nbytes`` of weights and is ``stride_nbytes`` of slot and of a pack.
    """

    layers: tuple[int, ...]
    roles: tuple[InspectedRole, ...]
    payload_nbytes: int
    stride_nbytes: int


@attrs.frozen(kw_only=True)
class InspectedFile:
    """One file that the model consists of; ``alignment`` is that of a GGUF's tensors."""

    path: Path
    nbytes: int
    alignment: int | None = None


@attrs.frozen(kw_only=True)
class Inspection:
    """A model on disk. Sizes are bytes; every field is stable, new ones may come."""

    path: Path
    form: str
    """``gguf``, ``pack``, ``split pack``, ``mirrored pack``, or the name of a foreign format"""
    architecture: str
    name: str | None
    n_layers: int
    n_experts: int
    top_k: int
    routed_layers: tuple[int, ...]
    layers: tuple[InspectedLayers, ...]
    files: tuple[InspectedFile, ...]
    drives: tuple[Path, ...]
    """directories with experts, of a pack on several drives"""
    experts_nbytes: int
    """of all routed experts, as they are computed with"""
    dense_nbytes: int
    """of all other tensors"""
    types_nbytes: Mapping[str, Mapping[str, int]]
    """``experts`` and ``dense``: bytes by type"""
    token_nbytes: int
    """of the experts that one token uses"""
    token_experts: int
    """the token cycle W: routed layers × top-k"""
    slot_nbytes: int
    slots_per_gib: float
    read_nbytes: int
    """room that the reads of any expert take"""
    padding_share: float
    """of what is read (a pack: and stored) for experts, the part that is no weights"""
    digests: str | None
    source_digest: str | None
    config_digest: str | None
    unusual: tuple[str, ...]
    """what is not as in most files, and what it means here"""
    left_out: tuple[str, ...]
    """copies of a mirror that cannot be read, and why"""


def inspect_model(model: Checkpoint | Path | str) -> Inspection:
    """What the model at a path, in any form, is and holds; blocks, reads headers only.

    Raises what ``open_checkpoint`` and ``find_experts`` raise.
    """
    if isinstance(model, Path | str):
        model = open_checkpoint(model)
    spec, experts = model.spec, find_experts(model)
    experts_nbytes = spec.n_experts * sum(each.payload_nbytes for each in spec.layouts.values())
    reads_nbytes = sum(model.extents(ExpertKey(layer, 0)).nbytes for layer in spec.layers)
    pack = model.pack if isinstance(model, DrivesPack) else model
    digests = pack.manifest if isinstance(pack, Pack) else None
    name = model.metadata.get("general.name")
    return Inspection(
        path=model.path,
        form=_form(model),
        architecture=spec.architecture,
        name=name if isinstance(name, str) else None,
        n_layers=_n_layers(model),
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        routed_layers=spec.layers,
        layers=tuple(_layers(spec.layouts)),
        files=tuple(_files(model)),
        drives=model.drives if isinstance(model, DrivesPack) else (),
        experts_nbytes=experts_nbytes,
        dense_nbytes=sum(info.nbytes for info in model.tensors.values()) - experts_nbytes,
        types_nbytes=_types(model, experts),
        token_nbytes=spec.top_k * sum(each.payload_nbytes for each in spec.layouts.values()),
        token_experts=len(spec.layers) * spec.top_k,
        slot_nbytes=spec.slot_nbytes,
        slots_per_gib=(1 << 30) / spec.slot_nbytes,
        read_nbytes=model.slot_nbytes,
        padding_share=1 - experts_nbytes / (spec.n_experts * reads_nbytes),
        digests=_digests(model),
        source_digest=None if digests is None else digests.source_digest.hex(),
        config_digest=None if digests is None else digests.config_digest.hex(),
        unusual=tuple(_unusual(model, experts)),
        left_out=model.left_out if isinstance(model, DrivesPack) else (),
    )


def layer_ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as people write them: ``0-3, 5``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def type_name(ggml_type: int) -> str:
    """The name of a ggml type."""
    return GGMLQuantizationType(ggml_type).name


def _form(model: Checkpoint) -> str:
    if isinstance(model, DrivesPack):
        return "mirrored pack" if model.placement is None else "split pack"
    if isinstance(model, Pack):
        return "pack"
    return model.format if isinstance(model, ForeignPack) else "gguf"


def _digests(model: Checkpoint) -> str | None:
    if isinstance(model, Pack | DrivesPack):
        return "xxh3-128"
    return "SHA-256" if isinstance(model, ForeignPack) and model.has_digests else None


def _n_layers(model: Checkpoint) -> int:
    """Layers of the model itself, those of multi-token prediction not among them."""
    named = {int(match[1]) for name in model.tensors if (match := _LAYER.match(name))}
    return len(named - set(predicting_layers(model)))


def _layers(layouts: Mapping[int, ExpertLayout]) -> Iterator[InspectedLayers]:
    for layout, group in groupby(layouts.items(), key=lambda item: item[1]):
        yield InspectedLayers(
            layers=tuple(layer for layer, _ in group),
            roles=tuple(
                InspectedRole(
                    name=role.name,
                    type=type_name(role.ggml_type),
                    rows=role.shape[0],
                    columns=role.shape[1],
                    nbytes=role.nbytes,
                )
                for role in layout.roles
            ),
            payload_nbytes=layout.payload_nbytes,
            stride_nbytes=layout.stride,
        )


def _files(model: Checkpoint) -> Iterator[InspectedFile]:
    if isinstance(model, VirtualPack):
        for shard in model.inventory.shards:
            yield InspectedFile(
                path=shard.path, nbytes=shard.file_nbytes, alignment=shard.alignment
            )
        return
    for path in dict.fromkeys([*model.data_files, *model.tensor_files]):
        yield InspectedFile(path=path, nbytes=path.stat().st_size)


def _types(model: Checkpoint, experts: ExpertTensors) -> Mapping[str, Mapping[str, int]]:
    routed, dense = Counter[str](), Counter[str]()
    names = {info.name for info in experts.tensors.values()}
    for name, info in model.tensors.items():
        (routed if name in names else dense)[type_name(info.ggml_type)] += info.nbytes
    return {"experts": dict(routed.most_common()), "dense": dict(dense.most_common())}


def _unusual(model: Checkpoint, experts: ExpertTensors) -> Iterator[str]:
    """What people who made the file did otherwise than most, and what it means here."""
    if experts.fused_layers:
        layers = layer_ranges(sorted(experts.fused_layers))
        yield f"layers {layers}: gate and up are one tensor (ffn_gate_up_exps); served as two roles"
    if predicting := predicting_layers(model):
        nbytes = sum(
            info.nbytes
            for name, info in model.tensors.items()
            if any(name.startswith(f"blk.{layer}.") for layer in predicting)
        )
        yield (
            f"layers {layer_ranges(predicting)}: multi-token prediction, {nbytes:,} bytes; kept, "
            "and not run"
        )
    yield from _unusual_shards(model, experts)
    layouts = experts.spec.layouts.values()
    if len({tuple(role.ggml_type for role in layout.roles) for layout in layouts}) > 1:
        yield "experts of different types in different layers: slots are as large as the largest"
    others = sorted(
        name
        for name in model.tensors
        if "_exps." in name and not name.endswith(".weight") and name.startswith("blk.")
    )
    if others:
        named = ", ".join(others[:_N_NAMED]) + (", …" if len(others) > _N_NAMED else "")
        yield f"experts have more than three matrices; {len(others)} are kept as dense: {named}"


def _unusual_shards(model: Checkpoint, experts: ExpertTensors) -> Iterator[str]:
    apart = [
        layer
        for layer in experts.spec.layers
        if len({experts.tensors[layer, role].shard_index for role in ROLES}) > 1
    ]
    if apart:
        yield f"layers {layer_ranges(apart)}: experts are in more than one source file"
    if isinstance(model, VirtualPack):
        alignments = {shard.alignment for shard in model.inventory.shards} - {_USUAL_ALIGNMENT}
        for alignment in sorted(alignments):
            yield f"general.alignment is {alignment}, not {_USUAL_ALIGNMENT}"
    claims = model.metadata.get("split.tensors.count")
    if isinstance(claims, int) and claims != len(model.tensors):
        yield (
            f"split.tensors.count is {claims}, but there are {len(model.tensors)} tensors: written "
            "before some were fused, or the files are incomplete"
        )
