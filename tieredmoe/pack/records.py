"""What opening a model gives: where its experts and tensors lie, whatever the files look like.

A leaf source needs to know which bytes to read for an expert and where its roles are among them
afterwards; everything above sees records in their uniform layout. A pack is the simple case (one
read, nothing to move), a virtual pack over GGUF shards the general one. Rejected: a source per
format, since reading, counting, dropping and failing are the same for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import attrs

from tieredmoe.memory.protocol import Part
from tieredmoe.spec import PAGE_NBYTES, ExpertKey, ExpertLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.gguf import Metadata, TensorInfo
    from tieredmoe.pack.layout import Extent
    from tieredmoe.spec import MoESpec


class Envelope(NamedTuple):
    """One read of whole pages of a data file, of which the first ``needed_nbytes`` must be there.

    What lies beyond belongs to nobody here, and the file may end in it.
    """

    file_index: int
    offset: int
    nbytes: int
    needed_nbytes: int


class Extents(NamedTuple):
    """The bytes of one expert: ``envelopes`` are read into a slot, end to end in this order.

    ``parts`` say where in the slot the roles then lie, and where in the uniform record they belong.
    """

    envelopes: tuple[Envelope, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all reads, which is how much of a slot they take."""
        return sum(envelope.nbytes for envelope in self.envelopes)

    def place(self, offset: int) -> tuple[int, int]:
        """The file index and file offset of byte ``offset`` of the uniform record."""
        part = next(p for p in self.parts if 0 <= offset - p.target_offset < p.nbytes)
        at = part.source_offset + offset - part.target_offset
        for envelope in self.envelopes:
            if at < envelope.nbytes:
                return envelope.file_index, envelope.offset + at
            at -= envelope.nbytes
        raise AssertionError("a part lies outside what is read")


def whole_record(extent: Extent, layout: ExpertLayout) -> Extents:
    """The extents of an expert that lies in its file as it is to lie in its slot."""
    return Extents(
        (Envelope(*extent, needed_nbytes=extent.nbytes),), (Part(0, 0, layout.payload_nbytes),)
    )


def in_envelopes(slabs: Iterable[Extent], layout: ExpertLayout) -> Extents:
    """The extents of an expert whose roles lie anywhere: each in the whole pages around it.

    ``slabs`` are in the order of ``layout.roles``.
    """
    envelopes, parts, end = [], [], 0
    for slab, role in zip(slabs, layout.roles, strict=True):
        skew = slab.offset % PAGE_NBYTES
        needed_nbytes = skew + slab.nbytes
        nbytes = -(-needed_nbytes // PAGE_NBYTES) * PAGE_NBYTES
        envelopes.append(Envelope(slab.file_index, slab.offset - skew, nbytes, needed_nbytes))
        parts.append(Part(end + skew, role.offset, role.nbytes))
        end += nbytes
    return Extents(tuple(envelopes), tuple(parts))


def spec_as_read(records: Records) -> MoESpec | None:
    """The model as its reads leave it in a slot; None unless all experts of a layer lie alike.

    So a record can be used where it was read to, though its roles have gaps between them: slabs of
    whole pages keep one skew. Looks at every expert.
    """
    layouts = {}
    for layer, layout in records.spec.layouts.items():
        extents = records.extents(ExpertKey(layer, 0))
        others = (records.extents(ExpertKey(layer, e)) for e in range(1, records.spec.n_experts))
        if any(other.parts != extents.parts for other in others):
            return None
        layouts[layer] = _layout_as_read(layout, extents)
    return attrs.evolve(records.spec, layouts=layouts)


def _layout_as_read(layout: ExpertLayout, extents: Extents) -> ExpertLayout:
    roles = []
    for role in layout.roles:
        part = next(p for p in extents.parts if 0 <= role.offset - p.target_offset < p.nbytes)
        moved = part.source_offset - part.target_offset
        roles.append(attrs.evolve(role, offset=role.offset + moved))
    end = max(role.offset + role.nbytes for role in roles)
    return ExpertLayout(tuple(roles), payload_nbytes=end, stride=extents.nbytes)


class Records(Protocol):
    """What a leaf source reads: experts, by where they lie."""

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``; ``KeyError`` for a key the model does not have."""


class TensorFiles(Protocol):
    """Where the dense tensors of a model lie, each in one run of bytes."""

    @property
    def tensor_files(self) -> Sequence[Path]:
        """The files, in the order that ``locate_tensor`` counts in."""

    def locate_tensor(self, name: str) -> Extent:
        """Where the bytes of a dense tensor lie; ``KeyError`` if it is none or has none."""

    def tensor_digest(self, name: str) -> bytes | None:
        """The xxh3-128 digest of a dense tensor's bytes, if one is known."""

    def check_unchanged(self) -> None:
        """Raise ``GGUFError`` or ``PackError`` if a file is not the one that was opened."""


class Checkpoint(Records, TensorFiles, Protocol):
    """An opened model: a pack, a virtual pack or another form of one; also a ``TensorSource``."""

    @property
    def path(self) -> Path:
        """What errors call it."""

    @property
    def data_files(self) -> Sequence[Path]:
        """The files with the experts, in the order that ``Envelope.file_index`` counts in."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that has room for the reads of any expert, a multiple of 4096."""

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor; see ``TensorSource.read``."""


@runtime_checkable
class Digested(Protocol):
    """Records that can be checked: a ``Pack``, or anything else that carries digests."""

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""

    @property
    def data_files(self) -> Sequence[Path]:
        """The files, in the order that ``Envelope.file_index`` counts in; errors name them."""

    @property
    def has_digests(self) -> bool:
        """Whether they are there: in some forms they are an option."""

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``."""

    def digests(self, key: ExpertKey) -> Sequence[bytes]:
        """The digests of the record's roles, in the order of its layout."""

    def digest_of(self, data: memoryview) -> bytes:
        """The digest of ``data``, by the function that ``digests`` are of; in any thread."""
