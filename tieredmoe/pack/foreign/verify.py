"""Checks every expert of a foreign pack against the digests that the format carries."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.progress import run_in_thread
from tieredmoe.pack.reader import as_pack_errors
from tieredmoe.pack.verify import Damage, VerifyReport
from tieredmoe.spec import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.pack.foreign.pack import ForeignPack
    from tieredmoe.pack.progress import PackProgress, Reporter


async def verify_foreign_pack(
    pack: ForeignPack, *, progress: Callable[[PackProgress], None] | None = None
) -> VerifyReport:
    """Every expert of ``pack`` compared with its digests, and padding with zero; all damage named.

    The header and the index were checked when it was opened. Raises ``PackError`` for a format
    without digests. Cancelling stops within a record.
    """
    if not pack.has_digests:
        raise PackError(
            pack.path,
            f"is {pack.format}, which carries no digests to verify; a pack made of its source by "
            "`tieredmoe pack create` does",
        )
    return await run_in_thread(partial(_verify, pack), progress)


def _verify(pack: ForeignPack, reporter: Reporter) -> VerifyReport:
    damage: list[Damage] = []
    total = sum(places.stride * pack.spec.n_experts for places in pack.places.values())
    done = 0
    # SHA-256 is slower than a good disk, and the roles of an expert can be hashed side by side.
    with (
        as_pack_errors(),
        opened(pack.path) as (fd, _),
        ThreadPoolExecutor(len(ROLES), "tieredmoe-verify") as threads,
    ):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for key in pack.spec.keys():
            places = pack.places[key.layer]
            reporter.report("verify", done_nbytes=done, total_nbytes=total)
            place = Damage(
                pack.path,
                places.start + key.expert * places.stride,
                places.stride,
                f"layer {key.layer}, expert {key.expert}",
                "cannot be read",
                key,
            )
            damage += _record_damage(pack, fd, place, threads)
            done += places.stride
    reporter.report("verify", done_nbytes=done, total_nbytes=total)
    return VerifyReport(done, tuple(damage))


def _record_damage(
    pack: ForeignPack, fd: int, place: Damage, threads: ThreadPoolExecutor
) -> Iterator[Damage]:
    """What is wrong with the record at ``place``; bytes that cannot be read are damage too."""
    record = memoryview(bytearray(place.nbytes))
    try:
        read_exactly(fd, record, offset=place.offset, path=pack.path)
    except GGUFError as error:
        yield attrs.evolve(place, fact=f"cannot be read: {error.fact}")
        return
    assert place.key is not None
    places, layout = pack.places[place.key.layer], pack.spec.layouts[place.key.layer]
    offsets = [places.role_offsets[role.name] for role in layout.roles]
    slabs = [
        record[offset : offset + role.nbytes]
        for offset, role in zip(offsets, layout.roles, strict=True)
    ]
    found = threads.map(pack.digest_of, slabs)
    for role, offset, digest, right in zip(
        layout.roles, offsets, found, pack.digests(place.key), strict=True
    ):
        if digest != right:
            yield attrs.evolve(
                place,
                offset=place.offset + offset,
                nbytes=role.nbytes,
                what=f"{place.what}, {role.name}",
                fact="does not match its digest",
            )
    padding = record[places.nbytes :]
    if padding.tobytes().strip(b"\0"):
        yield attrs.evolve(
            place,
            offset=place.offset + places.nbytes,
            nbytes=len(padding),
            what=f"{place.what}, padding",
            fact="is not zero",
        )
