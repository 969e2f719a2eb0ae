"""The dense tensors of a model: found under the names that files use, checked, then read.

Everything that can be wrong with a file's tensors is found before the first byte is read and told
in one error. Files of one architecture differ harmlessly: some drop the ``.weight`` suffix, any
matrix may be of any type, leading axes may be merged or not, and tensors may be there that nobody
needs.

A ``TensorLoader`` brings all of them in one pass over the files when the first is asked for, each
byte into the place where it stays. Other sources are asked for one tensor at a time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType

from tieredmoe.budget import format_size
from tieredmoe.errors import BudgetError, MetadataError, UnsupportedModelError
from tieredmoe.moe.dequant import ALIGNMENT_NBYTES, check_type, dequantise
from tieredmoe.moe.linear import PackedLinear
from tieredmoe.pack.tensors import TensorLoader

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
    """Tensors of ``source`` by their canonical names, on ``device``; read when asked for.

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
        self._loaded: dict[str, torch.Tensor] | None = None

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
        if isinstance(self._source, TensorLoader):
            if self._loaded is None:
                self._loaded = self._load(self._source)
            return self._loaded[info.name]
        raw = torch.from_numpy(self._source.read(info.name)).to(self._device)
        self._report(info.nbytes)
        return raw

    def _load(self, loader: TensorLoader) -> dict[str, torch.Tensor]:
        infos = {info.name: info for info in (self._found[name] for name in self._shapes)}
        tensors = _memory_for(list(infos.values()), self._device)

        def deliver(name: str, start: int, data: memoryview) -> None:
            piece = torch.frombuffer(data, dtype=torch.uint8)
            tensors[name][start : start + data.nbytes].copy_(piece)
            self._report(data.nbytes)

        loader.load(list(infos), deliver)
        return tensors

    def _report(self, nbytes: int) -> None:
        self._n_done += nbytes
        if self._progress is not None:
            self._progress(self._n_done, self._n_total)


def _memory_for(infos: list[TensorInfo], device: torch.device) -> dict[str, torch.Tensor]:
    """uint8 tensors of the sizes of ``infos``, their contents undefined.

    On the host they share one mapping of huge pages, each aligned for any type. Raises
    ``BudgetError`` if the kernel refuses it.
    """
    if device.type != "cpu":
        return {
            info.name: torch.empty(info.nbytes, dtype=torch.uint8, device=device) for info in infos
        }
    starts, end = [], 0
    for info in infos:
        starts.append(end)
        end += -(-info.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    memory = _host_memory(max(end, 1))
    return {
        info.name: memory[start : start + info.nbytes]
        for info, start in zip(infos, starts, strict=True)
    }


def _host_memory(nbytes: int) -> torch.Tensor:
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise BudgetError(
            f"the kernel refused {format_size(nbytes)} of host memory for the dense weights "
            f"({error}); free some, or raise the limit (ulimit -v, overcommit, container)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still right
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive. Pages are touched first by what is copied into them.
    return torch.frombuffer(mapping, dtype=torch.uint8)


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
