"""Brings an expert from the source of a foreign pack when the pack's own bytes are damaged.

The pack on the disk is left as it is, for the reasons that ``pack.repair`` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.foreign.opening import open_foreign_pack

if TYPE_CHECKING:
    from pathlib import Path

    from tieredmoe.pack.foreign.pack import ForeignPack
    from tieredmoe.spec import ExpertKey


class SourceRepair:
    """A ``Repair`` for the experts of ``pack``, which must carry digests, from its own source."""

    def __init__(self, pack: ForeignPack) -> None:
        self._pack = pack

    def fill(self, key: ExpertKey, record: memoryview) -> None:
        """Put the roles of ``key`` at their uniform places in ``record``; padding is left alone.

        Blocks. Nothing is written that does not match its digest. Raises ``GGUFError`` if the
        source cannot be read, was changed after it was opened, or has other bytes.
        """
        source = self._pack.source
        source.check_unchanged()
        roles = self._pack.spec.layouts[key.layer].roles
        for role, digest in zip(roles, self._pack.digests(key), strict=True):
            where = source.experts.slab(key.layer, role.name, key.expert)
            path = source.tensor_files[where.shard_index]
            slab = bytearray(where.nbytes)
            with opened(path) as (fd, _):
                read_exactly(fd, memoryview(slab), offset=where.offset, path=path)
            if self._pack.digest_of(memoryview(slab)) != digest:
                raise GGUFError(
                    path,
                    f"is damaged too, or is of another model: the {role.name} matrix of layer "
                    f"{key.layer}, expert {key.expert} has another digest than in the pack",
                )
            record[role.offset : role.offset + role.nbytes] = slab


def open_foreign_repair(pack: ForeignPack, path: Path) -> SourceRepair:
    """The GGUF at ``path`` as the source of repairs for ``pack``, which must carry digests.

    Raises what ``open_foreign_pack`` raises for a file that is not its source; blocks.
    """
    return SourceRepair(open_foreign_pack(pack.path, source=path))
