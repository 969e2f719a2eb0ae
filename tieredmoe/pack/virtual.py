"""A GGUF model as it is, run without converting it: a virtual pack.

llama.cpp keeps one role of a layer's experts in one tensor, experts slowest, so an expert is three
runs of bytes, anywhere in any shard and aligned to what the file says (32 as a rule). Each is read
as the whole pages around it, at most 8 KiB more than the role, and all three go to the disk in one
submission with those of the other experts of the working set. The copy out of the slot they land in
brings the roles to their uniform places, so what is above sees the records of a pack.

Rejected: buffered reads of the exact bytes (half the bandwidth for ten times the CPU time), and one
read from the first role to the last (they are a tensor apart: gigabytes).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import find_experts, open_inventory
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.records import Extents, in_envelopes
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.gguf import ExpertTensors, GGUFInventory, Metadata, Slab, TensorInfo
    from tieredmoe.spec import ExpertKey, MoESpec


@attrs.frozen(eq=False)
class VirtualPack:
    """An opened GGUF model whose experts are read where they are; a ``TensorSource``.

    See ``pack.records.Checkpoint`` for what all opened models have. It carries no digests. Experts
    are looked for when they are first asked for, so that an adapter, which knows all that its
    architecture needs, can complain of the metadata before that.
    """

    inventory: GGUFInventory

    @cached_property
    def experts(self) -> ExpertTensors:
        """The routed experts; raises what ``find_experts`` raises."""
        return find_experts(self.inventory)

    @property
    def path(self) -> Path:
        """The model's first file."""
        return self.inventory.shards[0].path

    @property
    def spec(self) -> MoESpec:
        """The routed part of the model; raises what ``find_experts`` raises."""
        return self.experts.spec

    @cached_property
    def data_files(self) -> tuple[Path, ...]:
        """All shards, in their order."""
        return tuple(shard.path for shard in self.inventory.shards)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that has room for the reads of any expert, wherever its slabs begin."""
        return max(
            sum(-(-role.nbytes // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES for role in layout.roles)
            for layout in self.spec.layouts.values()
        )

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``: each role in the whole pages around it.

        Constant time, no name is looked up. Raises ``KeyError`` for a key the model does not have.
        """
        slabs = self._first_slabs[key.layer]
        if not 0 <= key.expert < self.spec.n_experts:
            raise KeyError(key)
        return in_envelopes(
            (
                Extent(file_index, offset + key.expert * step, nbytes)
                for (file_index, offset, nbytes), step in slabs
            ),
            self.spec.layouts[key.layer],
        )

    @cached_property
    def _first_slabs(self) -> Mapping[int, tuple[tuple[Slab, int], ...]]:
        """Per layer, the slabs of its expert 0, and how far apart those of the others are."""
        experts = self.experts
        return MappingProxyType(
            {
                layer: tuple(
                    (experts.slab(layer, role.name, 0), experts.step(layer, role.name))
                    for role in layout.roles
                )
                for layer, layout in self.spec.layouts.items()
            }
        )

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""
        return self.inventory.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, experts included."""
        return self.inventory.tensors

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor; see ``GGUFInventory.read``."""
        return self.inventory.read(name)

    @property
    def tensor_files(self) -> tuple[Path, ...]:
        """All shards, in their order."""
        return self.data_files

    def locate_tensor(self, name: str) -> Extent:
        """Where the bytes of a tensor lie; ``KeyError`` if it is none or has none."""
        info = self.tensors[name]
        if not info.nbytes:
            raise KeyError(name)
        return Extent(info.shard_index, info.offset, info.nbytes)

    def tensor_digest(self, name: str) -> None:
        """None: a GGUF carries no digests."""

    def check_unchanged(self) -> None:
        """Raise ``GGUFError`` if a shard is not what it was when its header was read.

        Names, sizes and times are compared. What lies where was learnt then, so a shard that was
        replaced since would be read in the wrong places.
        """
        for shard in self.inventory.shards:
            try:
                status = shard.path.stat()
            except OSError as error:
                raise GGUFError(shard.path, f"cannot be read any more: {error.strerror}") from error
            if (status.st_size, status.st_mtime_ns) != (shard.file_nbytes, shard.mtime_ns):
                raise GGUFError(
                    shard.path,
                    f"changed since it was opened (it had {shard.file_nbytes} bytes, now "
                    f"{status.st_size}); open the model again when nothing writes to it",
                )


def open_virtual_pack(path: Path | str) -> VirtualPack:
    """The GGUF model that ``path`` belongs to (a file, any shard, their directory), run in place.

    Reads headers only; blocks. Raises one ``GGUFError`` with every problem of the files.
    """
    return VirtualPack(open_inventory(Path(path).absolute()))
