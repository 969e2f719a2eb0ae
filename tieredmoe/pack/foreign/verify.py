"""Checks every expert of a foreign pack against the digests that the format carries."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError
from tieredmoe.pack.progress import run_in_thread
from tieredmoe.pack.spans import Span, SpanPart
from tieredmoe.pack.verify import NOT_ZERO, VerifyReport, check_sample, verify_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieredmoe.pack.foreign.pack import ForeignPack
    from tieredmoe.pack.progress import PackProgress, Reporter
    from tieredmoe.spec import ExpertKey


async def verify_foreign_pack(
    pack: ForeignPack,
    *,
    sample: int | None = None,
    seed: int | None = None,
    progress: Callable[[PackProgress], None] | None = None,
) -> VerifyReport:
    """Every expert of ``pack`` compared with its digests, and padding with zero; all damage named.

    The header and the index were checked when it was opened. ``sample``, ``seed`` and memory are as
    for ``verify_pack``. Raises ``PackError`` for a format without digests. Cancelling stops within
    a few records.
    """
    check_sample(sample)
    if not pack.has_digests:
        raise PackError(
            pack.path,
            f"is {pack.format}, which carries no digests to verify; a pack made of its source by "
            "`tieredmoe pack create` does",
        )
    return await run_in_thread(partial(_verify, pack, sample, seed), progress)


def _verify(
    pack: ForeignPack, sample: int | None, seed: int | None, reporter: Reporter
) -> VerifyReport:
    return verify_spans(
        [pack.path],
        partial(_spans, pack),
        reporter,
        sample=sample,
        seed=seed,
        hasher=hashlib.sha256,
    )


def _spans(pack: ForeignPack) -> Iterator[Span]:
    zeros = {
        layer: hashlib.sha256(bytes(places.stride - places.nbytes)).digest()
        for layer, places in pack.places.items()
    }
    for key in pack.spec.keys():
        places = pack.places[key.layer]
        parts = list(_role_parts(pack, key))
        if places.stride > places.nbytes:
            padding = SpanPart(places.stride - places.nbytes, zeros[key.layer], "padding", NOT_ZERO)
            parts.append(padding)
        start = places.start + key.expert * places.stride
        yield Span(0, start, f"layer {key.layer}, expert {key.expert}", tuple(parts), key)


def _role_parts(pack: ForeignPack, key: ExpertKey) -> Iterator[SpanPart]:
    """The roles in the order in which they lie, and what is between them."""
    places, layout = pack.places[key.layer], pack.spec.layouts[key.layer]
    digests = dict(zip((role.name for role in layout.roles), pack.digests(key), strict=True))
    end = 0
    for name, offset in sorted(places.role_offsets.items(), key=lambda item: item[1]):
        if offset > end:
            yield SpanPart(offset - end, None)
        nbytes = layout.by_name[name].nbytes
        yield SpanPart(nbytes, digests[name], name)
        end = offset + nbytes
