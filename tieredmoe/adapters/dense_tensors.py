"""The dense tensors of a model: found under the names that files use, checked, then read.

Everything that can be wrong with a file's tensors is found before the first byte is read and told
in one error. Files of one architecture differ harmlessly: some drop the ``.weight`` suffix, any
matrix may be of any type, leading axes may be merged or not, and tensors may be there that nobody
needs.

All of them come in one pass over the files when the first is asked for, each byte into the place
where it stays: host memory, the device, or the host's end of the link that a layer streams through.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType

from tieredmoe.adapters.dense_memory import device_memory, host_memory
from tieredmoe.adapters.dense_sizes import EMBEDDING, DenseSizes
from tieredmoe.adapters.embedding import Embedding
from tieredmoe.adapters.streamed_layers import StreamedLayers
from tieredmoe.errors import MetadataError, UnsupportedModelError
from tieredmoe.moe.dequant import check_type, dequantise
from tieredmoe.moe.linear import PackedLinear
from tieredmoe.pack.tensors import TensorLoader

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tieredmoe.adapters.protocol import Progress
    from tieredmoe.gguf.tensors import TensorInfo, TensorSource
    from tieredmoe.moe.kernels import LinearWorkspace
    from tieredmoe.moe.linear import Linear

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
    """Tensors of ``source`` by their canonical names, for ``device``; all read at the first asked.

    ``floats`` and ``integers`` map the names that will be read to shapes in numpy order, ``others``
    those that must be there but are read elsewhere. The floats named in ``matrices`` are asked for
    as matrices, all others as values. Matrices of the layers in ``streamed`` are filled in there.
    Raises one ``MetadataError`` listing every missing tensor and every wrong shape, else one
    ``UnsupportedModelError`` listing every tensor of an unusable type.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        floats: Mapping[str, tuple[int, ...]],
        matrices: Collection[str],
        integers: Mapping[str, tuple[int, ...]],
        others: Mapping[str, tuple[int, ...]],
        device: torch.device,
        streamed: StreamedLayers | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._progress = progress
        self._shapes = {**floats, **integers}
        self._matrices = frozenset(matrices)
        self._found = _find(source, {**self._shapes, **others})
        _check_types(source, [self._found[name] for name in floats], integral=False)
        _check_types(source, [self._found[name] for name in integers], integral=True)
        self.streamed = streamed or StreamedLayers.none()
        self.sizes = DenseSizes.of(
            self._found, self._shapes, matrices=self._matrices, tables=integers
        )
        self._n_done = 0
        self._loaded: dict[str, torch.Tensor] | None = None
        self._workspace: LinearWorkspace | None = None

    def matrix(self, name: str) -> Linear:
        """A matrix in its quantised bytes, where the model computes."""
        n_rows, n_columns = self._shapes[name]
        assert name in self._matrices, f"{name} was not declared a matrix"
        raw = self.streamed.target(name) if name in self.streamed else self._read(name)
        ggml_type = self._found[name].ggml_type
        if self._device.type == "cpu":
            return PackedLinear(raw, ggml_type, (n_rows, n_columns))
        from tieredmoe.moe.kernels import (  # noqa: PLC0415 (Triton, which hosts may lack)
            DeviceLinear,
            LinearWorkspace,
        )

        if self._workspace is None:
            self._workspace = LinearWorkspace(self.sizes.n_columns, device=self._device)
        return DeviceLinear(raw, ggml_type, (n_rows, n_columns), workspace=self._workspace)

    def embedding(self) -> Embedding:
        """The token embedding, in host memory."""
        n_rows, n_columns = self._shapes[EMBEDDING]
        return Embedding(
            self._read(EMBEDDING),
            self._found[EMBEDDING].ggml_type,
            (n_rows, n_columns),
            device=self._device,
        )

    def values(self, name: str) -> torch.Tensor:
        """A small tensor as float32."""
        assert name not in self._matrices, f"{name} was declared a matrix"
        values = dequantise(self._read(name), self._found[name].ggml_type, self._shapes[name])
        return values.to(self._device)

    def table(self, name: str) -> torch.Tensor:
        """Integers of any width as int64."""
        raw = self._read(name).view(_INTEGERS[self._found[name].ggml_type])
        return raw.long().view(*self._shapes[name]).to(self._device)

    def _read(self, name: str) -> torch.Tensor:
        """The raw bytes: of a matrix where it stays, of all else on the host."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded[name]

    def _load(self) -> dict[str, torch.Tensor]:
        memory = self._memory()
        for name in self._shapes:
            if name in self.streamed:
                memory[name] = self.streamed.source(name)
        names = {self._found[name].name: name for name in self._shapes}

        def deliver(found: str, start: int, data: memoryview) -> None:
            piece = torch.frombuffer(data, dtype=torch.uint8)
            memory[names[found]][start : start + data.nbytes].copy_(piece)
            self._n_done += data.nbytes
            if self._progress is not None:
                self._progress(self._n_done, self.sizes.file_nbytes)

        if isinstance(self._source, TensorLoader):
            self._source.load(list(names), deliver)
        else:
            for found in names:
                deliver(found, 0, self._source.read(found).data)
        return memory

    def _memory(self) -> dict[str, torch.Tensor]:
        """Memory for all but the streamed tensors: one allocation for each kind that lives on."""
        kept = {
            name: self._found[name].nbytes for name in self._shapes if name not in self.streamed
        }
        if self._device.type == "cpu":
            return host_memory(kept)
        resident = self._matrices - {EMBEDDING}
        return {
            **device_memory({n: kept[n] for n in kept if n in resident}, device=self._device),
            **host_memory({EMBEDDING: kept[EMBEDDING]}),
            **host_memory({n: kept[n] for n in kept if n not in self._matrices}),
        }


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
