"""Finds the routed experts of any llama.cpp MoE file, and checks that they are whole.

llama.cpp keeps the experts of one layer and role in one tensor, ``blk.N.ffn_gate_exps.weight`` of
shape (experts, rows, columns), experts slowest: expert e is one contiguous slab. Nothing here knows
an architecture: types and shapes are the tensors' own, and may differ between layers and roles.
Gate and up may be fused in one tensor, ``blk.N.ffn_gate_up_exps.weight``: then expert e's gate rows
come first and its up rows follow (llama.cpp views the halves so), and both are contiguous too.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import attrs

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.metadata import MetadataReader
from tieredmoe.spec import ROLES, ExpertLayout, MoESpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieredmoe.gguf.tensors import TensorInfo, TensorSource

N_EXPERTS_MAX = 1 << 16
"""More experts than a layer of any model has: digests are kept of each."""

_LAYER_TENSOR = re.compile(r"blk\.(\d{1,9})\.")
_EXPERT_TENSOR = re.compile(r"blk\.(\d{1,9})\.ffn_(gate_up|gate|up|down)_exps\.weight")
_MTP_TENSOR = re.compile(r"blk\.(\d{1,9})\.nextn\.")
_FUSED = ("gate", "up")
_N_AXES = 3


class Slab(NamedTuple):
    """Where one role of one expert lies: bytes ``offset`` to ``offset + nbytes`` of a shard."""

    shard_index: int
    offset: int
    nbytes: int


@attrs.frozen(eq=False)
class ExpertTensors:
    """A model's routed experts: their layout, and the tensors that hold them by (layer, role).

    In ``fused_layers`` gate and up are halves of one tensor: both then have its name, and the shape
    and the bytes of the half.
    """

    spec: MoESpec
    tensors: Mapping[tuple[int, str], TensorInfo]
    fused_layers: frozenset[int] = frozenset()

    def step(self, layer: int, role: str) -> int:
        """Bytes from one expert's slab to the next one's."""
        nbytes = self.tensors[layer, role].nbytes // self.spec.n_experts
        return 2 * nbytes if layer in self.fused_layers and role in _FUSED else nbytes

    def slab(self, layer: int, role: str, expert: int) -> Slab:
        """The bytes of one role of one expert; ``IndexError`` beyond the layer's experts."""
        if not 0 <= expert < self.spec.n_experts:
            raise IndexError(f"expert {expert} of {self.spec.n_experts}")
        info = self.tensors[layer, role]
        nbytes = info.nbytes // self.spec.n_experts
        return Slab(info.shard_index, info.offset + expert * self.step(layer, role), nbytes)


def find_experts(source: TensorSource) -> ExpertTensors:
    """The routed experts of ``source``, every role of every routed layer checked.

    Layers from ``block_count`` on, and layers with ``nextn`` tensors, belong to multi-token
    prediction and are not routed here. Raises ``MetadataError`` for missing keys and an impossible
    ``block_count``, and ``GGUFError`` with every fault of the expert tensors.
    """
    metadata = source.metadata
    path = metadata.path or "the model"
    n_named = sum(_EXPERT_TENSOR.fullmatch(name) is not None for name in source.tensors)
    reader = MetadataReader(metadata, metadata.architecture)
    if n_named:
        n_layers = reader.layer_count(n_tensors=len(source.tensors))
        top_k = reader.integer("expert_used_count")
        n_experts = reader.integer("expert_count", default=None)
        reader.finish()
        found = _expert_tensors(source.tensors, n_layers)
    if not n_named or not found:
        raise GGUFError(
            path,
            f"has no routed experts: architecture {metadata.architecture!r}, but no tensor "
            "blk.N.ffn_{gate,up,down}_exps.weight in its layers",
        )
    if n_experts is None:
        n_experts = next((info.shape[0] for info in found.values() if info.shape), 0)

    problems, fused_layers = _split_fused(found)
    if not metadata.architecture:
        problems.append("general.architecture is empty")
    if n_experts > N_EXPERTS_MAX:
        problems.append(f"there are {n_experts} experts in a layer; at most {N_EXPERTS_MAX} can be")
    if not 1 <= top_k <= n_experts:
        problems.append(f"{reader.key('expert_used_count')} is {top_k}, of {n_experts} experts")
    for layer in sorted({layer for layer, _ in found}):
        roles = {role: found[layer, role] for role in ROLES if (layer, role) in found}
        problems += _layer_problems(layer, roles, n_experts)
    if problems:
        problems[0] = f"expert tensors are unusable: {problems[0]}"
        raise GGUFError(path, *problems)
    layouts = _layouts(found, n_experts)
    return ExpertTensors(
        MoESpec(metadata.architecture, n_experts, top_k, layouts),
        MappingProxyType(found),
        fused_layers,
    )


def predicting_layers(source: TensorSource) -> tuple[int, ...]:
    """The layers of multi-token prediction, whose tensors no layer of the model itself uses.

    Raises ``MetadataError`` for an impossible ``block_count``.
    """
    reader = MetadataReader(source.metadata, source.metadata.architecture)
    n_layers = reader.layer_count(n_tensors=len(source.tensors))
    reader.finish()
    return tuple(sorted(_predicting(source.tensors, n_layers)))


def _expert_tensors(
    tensors: Mapping[str, TensorInfo], n_layers: int
) -> dict[tuple[int, str], TensorInfo]:
    """Expert tensors of routed layers by (layer, role), in the order of layers and roles."""
    predicting = _predicting(tensors, n_layers)
    found = {
        (int(match[1]), match[2]): info
        for name, info in tensors.items()
        if (match := _EXPERT_TENSOR.fullmatch(name))
    }
    return {
        key: found[key]
        for key in sorted(found, key=lambda key: (key[0], (*ROLES, "gate_up").index(key[1])))
        if key[0] not in predicting
    }


def _predicting(tensors: Iterable[str], n_layers: int) -> set[int]:
    named = {int(match[1]) for name in tensors if (match := _MTP_TENSOR.match(name))}
    layers = {int(match[1]) for name in tensors if (match := _LAYER_TENSOR.match(name))}
    return named | {layer for layer in layers if layer >= n_layers}


def _split_fused(found: dict[tuple[int, str], TensorInfo]) -> tuple[list[str], frozenset[int]]:
    """Put the halves of fused tensors in their place; returns what is wrong, and the layers."""
    problems, layers = [], set()
    for layer, fused in [
        (layer, info) for (layer, role), info in found.items() if role == "gate_up"
    ]:
        del found[layer, "gate_up"]
        if any((layer, role) in found for role in _FUSED):
            problems.append(f"layer {layer} has {fused.name} and a tensor of its own for a half")
            continue
        if len(fused.shape) != _N_AXES or 0 in fused.shape or fused.shape[1] % 2:
            problems.append(f"{fused.name} has shape {fused.shape}, not (experts, 2 rows, columns)")
            continue
        n_experts, n_rows, n_columns = fused.shape
        shape, nbytes = (n_experts, n_rows // 2, n_columns), fused.nbytes // 2
        offsets = (fused.offset, fused.offset + nbytes // n_experts)
        for role, offset in zip(_FUSED, offsets, strict=True):
            found[layer, role] = attrs.evolve(fused, shape=shape, nbytes=nbytes, offset=offset)
        layers.add(layer)
    return problems, frozenset(layers)


def _layer_problems(
    layer: int,
    roles: Mapping[str, TensorInfo],
    n_experts: int,
) -> list[str]:
    problems = []
    missing = [role for role in ROLES if role not in roles]
    if missing:
        problems.append(f"layer {layer} lacks the {' and '.join(missing)} experts")
    sound = {}
    for role, info in roles.items():
        if len(info.shape) != _N_AXES or 0 in info.shape:
            problems.append(f"{info.name} has shape {info.shape}, not (experts, rows, columns)")
        elif info.shape[0] != n_experts:
            problems.append(f"{info.name} holds {info.shape[0]} experts, not {n_experts}")
        else:
            sound[role] = info.shape[1:]
    if "gate" in sound and "up" in sound and sound["gate"] != sound["up"]:
        problems.append(f"layer {layer}: gate is {sound['gate']}, but up is {sound['up']}")
    if "gate" in sound and "down" in sound and sound["gate"] != sound["down"][::-1]:
        problems.append(
            f"layer {layer}: down is {sound['down']}, not the transpose of gate {sound['gate']}"
        )
    return problems


def _layouts(
    found: Mapping[tuple[int, str], TensorInfo], n_experts: int
) -> dict[int, ExpertLayout]:
    """One layout per layer; every layer is known to have all three roles."""
    layouts = {}
    for layer in {layer for layer, _ in found}:
        roles = {}
        for role in ROLES:
            info = found[layer, role]
            _, n_rows, n_columns = info.shape
            roles[role] = (info.ggml_type, (n_rows, n_columns), info.nbytes // n_experts)
        layouts[layer] = ExpertLayout.build(roles)
    return layouts
