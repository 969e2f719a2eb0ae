"""Checks every byte of a split or mirrored pack against its digests, drive by drive.

What ``verify_pack`` is to a pack in one directory; the padding of records is left out, since a
drive's is what the file system supplies and nothing reads it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs

from tieredmoe.pack.drive_index import INDEX_NAME
from tieredmoe.pack.drives import DrivesPack, open_drives
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.verify import (
    Damage,
    VerifyReport,
    check_sample,
    dense_spans,
    record_spans,
    settled,
    verify_spans,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tieredmoe.pack.layout import Extent
    from tieredmoe.pack.spans import Span
    from tieredmoe.spec import ExpertKey


async def verify_drives(
    path: Path | str,
    *,
    sample: int | None = None,
    seed: int | None = None,
    progress: Callable[[PackProgress], None] | None = None,
) -> VerifyReport:
    """Every byte on every drive compared with its digest, all damage named; of a mirror each copy.

    ``sample``, ``seed`` and memory are as for ``verify_pack``. Raises ``PackError`` for a pack that
    does not even open. Cancelling stops within a few records.
    """
    check_sample(sample)
    return await run_in_thread(partial(_verify, settled(path), sample, seed), progress)


def _verify(path: Path, sample: int | None, seed: int | None, reporter: Reporter) -> VerifyReport:
    pack = open_drives(path)
    is_mirror = pack.placement is None
    files = _copied_files(pack) if is_mirror else [*pack.data_files, *pack.tensor_files]
    spans = partial(_copied if is_mirror else _split, pack)
    report = verify_spans(files, spans, reporter, sample=sample, seed=seed)
    left_out = [
        Damage(pack.path / INDEX_NAME, 0, 0, "a copy", f"is left out: {fact}")
        for fact in pack.left_out
    ]
    return attrs.evolve(report, damage=(*left_out, *report.damage))


def _split(pack: DrivesPack) -> Iterator[Span]:
    yield from record_spans(pack.manifest, pack.locate, zero_padding=False)
    yield from dense_spans(pack.manifest, len(pack.data_files))


def _copied_files(pack: DrivesPack) -> list[Path]:
    """All files of all copies."""
    return [copy / file.name for copy in pack.drives for file in pack.manifest.layout.files]


def _copied(pack: DrivesPack) -> Iterator[Span]:
    layout = pack.manifest.layout
    for number in range(len(pack.drives)):
        first = number * len(layout.files)

        def locate(key: ExpertKey, first: int = first) -> Extent:
            where = pack.locate(key)
            return where._replace(file_index=first + where.file_index)

        yield from record_spans(pack.manifest, locate, zero_padding=False)
        yield from dense_spans(pack.manifest, first + len(layout.expert_files))
