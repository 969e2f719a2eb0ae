"""What a pack says about itself: its geometry and the digests of every piece.

Digests form a tree (pieces, shards, source), so one pass over the source in file order computes all
of it, a conversion can stop and go on between any two pieces, and the inner nodes are checked at
every opening without reading data. Rejected: one running hash per file, which allows neither.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import xxhash

from tieredmoe.pack.layout import PackLayout, SlabRole
from tieredmoe.spec import ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.spec import ExpertKey

MANIFEST_NAME = "manifest.json"
DIGEST_NBYTES = 16


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The xxh3-128 digest of ``data``, in the canonical (big-endian) byte order."""
    return xxhash.xxh3_128_digest(data)


@attrs.frozen
class Manifest:
    """The geometry of a pack and the digests of its contents.

    ``digests[i][j]`` holds the digests of segment ``j`` of shard ``i``: ``DIGEST_NBYTES`` bytes for
    each of its pieces, end to end.
    """

    layout: PackLayout
    digests: tuple[tuple[bytes, ...], ...]

    @cached_property
    def shard_digests(self) -> tuple[bytes, ...]:
        """Per shard, the digest of its pieces' digests in file order."""
        return tuple(digest_of(b"".join(shard)) for shard in self.digests)

    @cached_property
    def source_digest(self) -> bytes:
        """The digest of the shards' digests: names the source to the last byte."""
        return digest_of(b"".join(self.shard_digests))

    @cached_property
    def config_digest(self) -> bytes:
        """The digest of the shards' header digests: metadata, tokenizer, names and shapes."""
        return digest_of(b"".join(shard[0] for shard in self.digests))

    @cached_property
    def slab_digests(self) -> Mapping[SlabRole, bytes]:
        """Per (layer, role), the digests of its slabs: ``DIGEST_NBYTES`` per expert, end to end."""
        return MappingProxyType(
            {
                SlabRole(segment.slabs.layer, role): _every(digests, len(segment.slabs.roles), i)
                for shard, of_shard in zip(self.layout.shards, self.digests, strict=True)
                for segment, digests in zip(shard.segments, of_shard, strict=True)
                if segment.slabs is not None
                for i, role in enumerate(segment.slabs.roles)
            }
        )

    @cached_property
    def tensor_digests(self) -> Mapping[str, bytes]:
        """Per tensor, the digests of its pieces (one, or one per slab), end to end."""
        return MappingProxyType(
            {
                segment.tensor: digests
                for shard, of_shard in zip(self.layout.shards, self.digests, strict=True)
                for segment, digests in zip(shard.segments, of_shard, strict=True)
                if segment.tensor is not None
            }
        )

    def role_digests(self, key: ExpertKey) -> tuple[bytes, ...]:
        """The digests of one expert's slabs, in the order of ``ROLES``; ``KeyError`` if unknown."""
        if not 0 <= key.expert < self.layout.spec.n_experts:
            raise KeyError(key)
        begin, end = key.expert * DIGEST_NBYTES, (key.expert + 1) * DIGEST_NBYTES
        return tuple(self.slab_digests[SlabRole(key.layer, role)][begin:end] for role in ROLES)

    def expert_digest(self, key: ExpertKey) -> bytes:
        """The digest of one expert: that of its role digests, end to end."""
        return digest_of(b"".join(self.role_digests(key)))


def _every(digests: bytes, n: int, i: int) -> bytes:
    """Digests ``i``, ``i + n``, ``i + 2 n``, … of those that lie end to end in ``digests``."""
    if n == 1:
        return digests
    step = n * DIGEST_NBYTES
    starts = range(i * DIGEST_NBYTES, len(digests), step)
    return b"".join(digests[start : start + DIGEST_NBYTES] for start in starts)
