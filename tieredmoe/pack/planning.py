"""What a conversion would write, and everything that forbids it, before a byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import find_experts
from tieredmoe.pack.document import dump_manifest
from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.layout import FUSED_ROLES, PackLayout, SlabRole, SourceShard, plan_pack
from tieredmoe.pack.manifest import DIGEST_NBYTES, Manifest, digest_of
from tieredmoe.pack.partial import LOCK_NAME

if TYPE_CHECKING:
    from tieredmoe.gguf import GGUFInventory

RESERVED_NAMES = frozenset({JOURNAL_NAME, LOCK_NAME})
"""What is in a directory that is being written beside the data: no source's file can be, too."""


def plan_inventory(inventory: GGUFInventory, *, file_nbytes_max: int | None = None) -> PackLayout:
    """The geometry of the pack that ``inventory`` would become."""
    for shard in inventory.shards:
        if shard.path.name in RESERVED_NAMES:
            fact = "has a name that unfinished work has a file of its own by; give it another"
            raise GGUFError(shard.path, fact)
    experts = find_experts(inventory)
    slabs = {}
    for (layer, role), info in experts.tensors.items():
        fused = [name for name, roles in FUSED_ROLES.items() if role in roles]
        is_fused = layer in experts.fused_layers and fused
        slabs[info.name] = SlabRole(layer, fused[0] if is_fused else role)
    return plan_pack(
        experts.spec,
        [
            SourceShard(shard.path.name, shard.file_nbytes, shard.data_offset)
            for shard in inventory.shards
        ],
        inventory.tensors,
        slabs,
        file_nbytes_max=file_nbytes_max,
    )


def pack_nbytes(layout: PackLayout) -> int:
    """The exact size of a pack of this layout, manifest included."""
    return layout.data_nbytes + len(_blank_manifest(layout))


def plan_digest(layout: PackLayout) -> bytes:
    """Names a layout: two that differ anywhere have different ones."""
    return digest_of(_blank_manifest(layout))


def _blank_manifest(layout: PackLayout) -> bytes:
    blank = tuple(
        tuple(bytes(DIGEST_NBYTES * layout.n_pieces(segment)) for segment in shard.segments)
        for shard in layout.shards
    )
    return dump_manifest(Manifest(layout, blank))
