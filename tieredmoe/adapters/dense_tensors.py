"""The dense tensors of a model: found under the names that files use, checked, then read.

Everything that can be wrong with a file's tensors is found before the first byte is read and told
in one error. Files of one architecture differ harmlessly: some drop the ``.weight`` suffix, any
matrix may be of any type, leading axes may be merged or not, and tensors may be there that nobody
needs.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType

from tieredmoe.errors import MetadataError, UnsupportedModelError
from tieredmoe.moe.dequant import check_type, dequantise
from tieredmoe.moe.linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.adapters.protocol import Progress
    from tieredmoe.gguf.tensors import TensorInfo, TensorSource

_SUFFIXES = (".weight", ".bias")

_INTEGERS = MappingProxyType(
    {
        GGMLQuantizationType.I8.value: torch.int8,
        GGMLQuantizationType.I16.value: torch.int16,
        GGMLQuantizationType.I32.value: torch.int32,
        GGMLQuantizationType.I64.value: torch.int64,
    }
)


class DenseTensors:
    """Tensors of ``source`` by their canonical names, each read onto ``device`` when asked for.

    ``floats`` and ``integers`` map the names that will be read to shapes in numpy order, ``others``
    those that must be there but are read elsewhere. Raises one ``MetadataError`` listing every
    missing tensor and every wrong shape, else one ``UnsupportedModelError`` listing every tensor
    of an unusable type.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        floats: Mapping[str, tuple[int, ...]],
        integers: Mapping[str, tuple[int, ...]],
        others: Mapping[str, tuple[int, ...]],
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._progress = progress
        self._shapes = {**floats, **integers}
        self._found = _find(source, {**self._shapes, **others})
        _check_types(source, [self._found[name] for name in floats], integral=False)
        _check_types(source, [self._found[name] for name in integers], integral=True)
        self._n_total = sum(self._found[name].nbytes for name in self._shapes)
        self._n_done = 0

    def matrix(self, name: str) -> PackedLinear:
        """A matrix in its quantised bytes."""
        n_rows, n_columns = self._shapes[name]
        return PackedLinear(self._read(name), self._found[name].ggml_type, (n_rows, n_columns))

    def values(self, name: str) -> torch.Tensor:
        """A small tensor as float32."""
        return dequantise(self._read(name), self._found[name].ggml_type, self._shapes[name])

    def table(self, name: str) -> torch.Tensor:
        """Integers of any width as int64."""
        raw = self._read(name).view(_INTEGERS[self._found[name].ggml_type])
        return raw.long().view(*self._shapes[name])

    def _read(self, name: str) -> torch.Tensor:
        info = self._found[name]
        raw = torch.from_numpy(self._source.read(info.name)).to(self._device)
        self._n_done += info.nbytes
        if self._progress is not None:
            self._progress(self._n_done, self._n_total)
        return raw


def _where(source: TensorSource) -> str:
    return "" if source.metadata.path is None else f"{source.metadata.path}: "


def _find(source: TensorSource, expected: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Every expected tensor by its canonical name, or one error with all that is wrong."""
    found: dict[str, TensorInfo] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    for name, shape in expected.items():
        stem = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
        info = source.tensors.get(name) or source.tensors.get(stem)
        if info is None:
            missing.append(name)
        elif not _fits(info.shape, shape):
            misshapen.append(f"{info.name} has shape {info.shape}, the metadata imply {shape}")
        else:
            found[name] = info
    problems = [f"missing tensors: {', '.join(missing)}"] if missing else []
    problems += misshapen
    if problems:
        raise MetadataError(_where(source) + "; ".join(problems))
    return found


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether the same bytes make the expected shape: equal rows, equally many of them."""
    if math.prod(found) != math.prod(expected):
        return False
    return len(expected) == 1 or found[-1:] == expected[-1:]


def _check_types(source: TensorSource, infos: list[TensorInfo], *, integral: bool) -> None:
    problems = []
    for ggml_type in sorted({info.ggml_type for info in infos}):
        fact = None
        if not integral:
            try:
                check_type(ggml_type)
            except UnsupportedModelError as error:
                fact = str(error)
        elif ggml_type not in _INTEGERS:
            kind = GGMLQuantizationType(ggml_type).name
            fact = f"a table of integers cannot be of type {kind}"
        if fact is not None:
            names = ", ".join(info.name for info in infos if info.ggml_type == ggml_type)
            problems.append(f"{fact} (tensors: {names})")
    if problems:
        raise UnsupportedModelError(_where(source) + "; ".join(problems))
