"""Brings an expert from the GGUF that a pack was made from, when the pack's own bytes are damaged.

The pack on the disk is left as it is: a library that reads must not write to a disk that has just
shown a fault. Buffered positioned reads, since slabs in a GGUF are unaligned and repairs rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.layout import slab_runs
from tieredmoe.pack.manifest import digest_of

if TYPE_CHECKING:
    from pathlib import Path

    from tieredmoe.gguf import GGUFInventory
    from tieredmoe.pack.reader import Pack
    from tieredmoe.spec import ExpertKey


class Repair(Protocol):
    """Another place to have experts from."""

    def fill(self, key: ExpertKey, record: memoryview) -> None:
        """Put the right bytes of ``key`` into ``record``, checked, or raise; blocks."""


class GGUFRepair:
    """The source GGUF of ``pack``, found by its headers and opened anew for each repair."""

    def __init__(self, pack: Pack, inventory: GGUFInventory) -> None:
        """Raises ``PackError`` if ``pack`` was made from another model."""
        pack.check_source(inventory)
        self._pack = pack
        self._shards = inventory.shards
        # Sizes and headers are the same, so every slab lies where the pack's manifest has it from.
        self._slabs = {
            (stored.slabs.layer, run.role.name): (stored, run)
            for stored in pack.manifest.layout.tensors.values()
            if stored.slabs is not None
            for run in slab_runs(pack.spec.layouts[stored.slabs.layer], stored.slabs)
        }

    def fill(self, key: ExpertKey, record: memoryview) -> None:
        """Put the roles of ``key`` where they lie in ``record``; its padding is left alone.

        Nothing is written that does not match its digest. Raises ``GGUFError`` if the file cannot
        be read, was changed after it was opened, or is damaged too.
        """
        roles = self._pack.spec.layouts[key.layer].roles
        for role, digest in zip(roles, self._pack.digests(key), strict=True):
            stored, run = self._slabs[key.layer, role.name]
            offset = stored.source_offset + run.offset + key.expert * run.step
            slab = self._read(stored.shard_index, offset, role.nbytes)
            if digest_of(slab) != digest:
                raise GGUFError(
                    self._shards[stored.shard_index].path,
                    f"is damaged: the {role.name} matrix of layer {key.layer}, expert "
                    f"{key.expert} has another digest than when the pack was made",
                )
            record[role.offset : role.offset + role.nbytes] = slab

    def _read(self, shard_index: int, offset: int, nbytes: int) -> bytearray:
        shard = self._shards[shard_index]
        slab = bytearray(nbytes)
        with opened(shard.path) as (fd, status):
            if (status.st_size, status.st_mtime_ns) != (shard.file_nbytes, shard.mtime_ns):
                raise GGUFError(shard.path, "changed since it was opened")
            read_exactly(fd, memoryview(slab), offset=offset, path=shard.path)
        return slab


def open_repair(pack: Pack, path: Path) -> GGUFRepair:
    """The GGUF at ``path`` as the source of repairs for ``pack``; reads headers, blocks.

    Raises ``GGUFError`` for a file that is no model and ``PackError`` for another model.
    """
    try:
        return GGUFRepair(pack, open_inventory(path))
    except PackError as error:
        raise PackError(
            error.path, f"{error.fact.split(';')[0]}; repair_from must name this pack's own source"
        ) from error
