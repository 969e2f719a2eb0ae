"""An opened foreign pack: experts from the pack's own file, all other tensors from its source."""

from __future__ import annotations

import hashlib
from functools import cached_property
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import PackError
from tieredmoe.memory.protocol import Part
from tieredmoe.pack.foreign.places import rounded_up
from tieredmoe.pack.records import Envelope, Extents
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.gguf import Metadata, TensorInfo
    from tieredmoe.pack.foreign.places import RecordPlaces
    from tieredmoe.pack.layout import Extent
    from tieredmoe.pack.virtual import VirtualPack
    from tieredmoe.spec import ExpertKey, MoESpec


@attrs.frozen(eq=False)
class ForeignPack:
    """A model with its experts in another system's pack and all else in the GGUF it was made from.

    See ``pack.records.Checkpoint`` for what all opened models have. Nothing is copied and no file
    is kept open. ``format`` is the format's name, ``source`` the GGUF; ``sha256`` has the digests
    of each layer's experts, shape (experts, 3, 32), or is None where the format carries none.
    ``status`` is that of the pack's file when its index was read.
    """

    path: Path
    format: str
    source: VirtualPack
    places: Mapping[int, RecordPlaces]
    sha256: Mapping[int, NDArray[np.uint8]] | None
    status: os.stat_result

    @property
    def spec(self) -> MoESpec:
        """The routed part of the model."""
        return self.source.spec

    @property
    def data_files(self) -> tuple[Path, ...]:
        """The pack's one file."""
        return (self.path,)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that has room for the read of any expert, a multiple of 4096."""
        envelopes = (
            # Records start at multiples of what start, stride and page have in common.
            rounded_up(
                PAGE_NBYTES - gcd(places.start, places.stride, PAGE_NBYTES) + places.nbytes,
                PAGE_NBYTES,
            )
            for places in self.places.values()
        )
        return max(self.spec.slot_nbytes, *envelopes)

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``: the pages around its record, at once. ``KeyError`` if unknown.

        Constant time, no name is looked up.
        """
        places = self.places[key.layer]
        if not 0 <= key.expert < self.spec.n_experts:
            raise KeyError(key)
        start = places.start + key.expert * places.stride
        skew = start % PAGE_NBYTES
        needed_nbytes = skew + places.nbytes
        nbytes = rounded_up(needed_nbytes, PAGE_NBYTES)
        parts = self._parts[key.layer]
        if skew:
            parts = tuple(part._replace(source_offset=skew + part.source_offset) for part in parts)
        return Extents((Envelope(0, start - skew, nbytes, needed_nbytes),), parts)

    @property
    def has_digests(self) -> bool:
        """Whether the format carries digests of experts."""
        return self.sha256 is not None

    def digests(self, key: ExpertKey) -> tuple[bytes, ...]:
        """The SHA-256 digests of one expert's gate, up and down; ``KeyError`` if there are none."""
        if self.sha256 is None or not 0 <= key.expert < self.spec.n_experts:
            raise KeyError(key)
        return tuple(digest.tobytes() for digest in self.sha256[key.layer][key.expert])

    def digest_of(self, data: memoryview) -> bytes:
        """The SHA-256 digest of ``data``."""
        return hashlib.sha256(data).digest()

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""
        return self.source.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the source by name, experts included."""
        return self.source.tensors

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, from the source; see ``GGUFInventory.read``."""
        return self.source.read(name)

    @property
    def tensor_files(self) -> tuple[Path, ...]:
        """The source's shards."""
        return self.source.tensor_files

    def locate_tensor(self, name: str) -> Extent:
        """Where in the source the bytes of a tensor lie; ``KeyError`` if it is none or has none."""
        return self.source.locate_tensor(name)

    def tensor_digest(self, name: str) -> None:
        """None: a GGUF carries no digests."""

    def check_unchanged(self) -> None:
        """Raise ``PackError`` or ``GGUFError`` if the pack or its source is not what was opened."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise PackError(self.path, f"cannot be read any more: {error.strerror}") from error
        opened_as = self.status
        if (status.st_size, status.st_mtime_ns) != (opened_as.st_size, opened_as.st_mtime_ns):
            raise PackError(
                self.path,
                f"changed since it was opened (it had {opened_as.st_size} bytes, now "
                f"{status.st_size}); open it again when nothing writes to it",
            )
        self.source.check_unchanged()

    @cached_property
    def _parts(self) -> Mapping[int, tuple[Part, ...]]:
        """Per layer, from where in its record each role goes to where in the uniform one."""
        parts = {}
        for layer, places in self.places.items():
            roles = self.spec.layouts[layer].by_name
            parts[layer] = _joined(
                Part(offset, roles[name].offset, roles[name].nbytes)
                for name, offset in places.role_offsets.items()
            )
        return MappingProxyType(parts)


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """``parts`` with neighbours that stay neighbours made one."""
    joined: list[Part] = []
    for part in parts:
        if joined:
            last = joined[-1]
            ends = (last.source_offset + last.nbytes, last.target_offset + last.nbytes)
            if ends == (part.source_offset, part.target_offset):
                joined[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
                continue
        joined.append(part)
    return tuple(joined)
