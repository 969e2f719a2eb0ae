"""Checks every byte of a split or mirrored pack against its digests, drive by drive.

What ``verify_pack`` is to a pack in one directory; the padding of records is left out, since a
drive's is what the file system supplies and nothing reads it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.pack.drive_index import INDEX_NAME
from tieredmoe.pack.drives import DrivesPack, open_drives
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.record_copy import Run, dense_runs, find_damage, record_runs
from tieredmoe.pack.verify import Damage, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.pack.layout import Extent
    from tieredmoe.spec import ExpertKey


async def verify_drives(
    path: Path | str, *, progress: Callable[[PackProgress], None] | None = None
) -> VerifyReport:
    """Every byte on every drive compared with its digest, all damage named; of a mirror each copy.

    Raises ``PackError`` for a pack that does not even open. Cancelling stops within a run of bytes.
    """
    return await run_in_thread(partial(_verify, Path(path)), progress)


def _verify(path: Path, reporter: Reporter) -> VerifyReport:
    pack = open_drives(path)
    files, runs = _mirrored(pack) if pack.placement is None else _split(pack)
    total = sum(run.nbytes for run in runs)
    left_out = [
        Damage(pack.path / INDEX_NAME, 0, 0, "a copy", f"is left out: {fact}")
        for fact in pack.left_out
    ]
    damage = find_damage(runs, files, reporter, total_nbytes=total)
    return VerifyReport(total, (*left_out, *damage))


def _split(pack: DrivesPack) -> tuple[list[Path], list[Run]]:
    keys = sorted(pack.spec.keys(), key=pack.locate)
    runs = [
        *record_runs(pack.manifest, pack.locate, pack.locate, keys),
        *dense_runs(pack.manifest, len(pack.data_files)),
    ]
    return [*pack.data_files, *pack.tensor_files], runs


def _mirrored(pack: DrivesPack) -> tuple[list[Path], list[Run]]:
    """All files of all copies; the dense files of the pack's own directory come once."""
    layout = pack.manifest.layout
    keys = sorted(pack.spec.keys(), key=pack.locate)
    files: list[Path] = []
    runs: list[Run] = []
    for copy in pack.drives:
        first = len(files)

        def locate(key: ExpertKey, first: int = first) -> Extent:
            where = pack.locate(key)
            return where._replace(file_index=first + where.file_index)

        files += [copy / file.name for file in layout.files]
        runs += record_runs(pack.manifest, locate, locate, keys)
        runs += dense_runs(pack.manifest, first + len(layout.expert_files))
    return files, runs
