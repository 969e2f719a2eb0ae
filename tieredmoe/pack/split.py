"""Divides the experts of a pack among drives, each of which then serves its share of every layer.

One pass: records are read in file order and written to their drives, compared with the manifest's
digests on the way. The pack's own directory gets nothing but the index, so until that is there the
pack is what it was; its own expert data goes only if asked, and only after every drive has been
read again and found right.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

from tieredmoe.errors import PackError, raise_config_problems
from tieredmoe.pack.drive_files import (
    drive_problems,
    exclusive,
    sync_directory,
    taken_back_on_failure,
    write_index,
)
from tieredmoe.pack.drive_index import (
    DRIVE_FILE_NAME,
    INDEX_NAME,
    DriveIndex,
    DrivePart,
    dump_index,
    dump_part,
    split_parts,
    written_path,
)
from tieredmoe.pack.drive_speed import measure_drive
from tieredmoe.pack.drives import pack_digest_of
from tieredmoe.pack.layout import DataFile
from tieredmoe.pack.partial import PartialPack
from tieredmoe.pack.placement import N_DRIVES_MAX, integer_weights, place_experts
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import Pack, open_pack
from tieredmoe.pack.record_copy import copy_runs, find_damage, record_runs, sync_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.pack.placement import SplitPlacement

N_DAMAGE_NAMED = 3


@attrs.frozen
class SplitReport:
    """What a split did; ``n_experts`` and ``weights`` go with ``drives``."""

    path: Path
    drives: tuple[Path, ...]
    weights: tuple[int, ...]
    n_experts: tuple[int, ...]
    written_nbytes: int
    removed_nbytes: int


async def split_pack(
    pack: Path | str,
    drives: Sequence[Path | str],
    *,
    weights: Sequence[float] | Literal["measured"] | None = None,
    remove_original: bool = False,
    progress: Callable[[PackProgress], None] | None = None,
) -> SplitReport:
    """Put the experts of ``pack`` in the new directories ``drives``: all of it is done, or nothing.

    A directory holds a share by its weight, of every layer alike: equal ones by default, bandwidth
    with ``"measured"``. The pack's own directory may be among ``drives``: its share goes to a
    directory inside. With ``remove_original`` the pack's own expert data is removed at the end,
    after all drives were synced, read again and found right.

    Raises ``ConfigError`` for arguments and ``PackError`` for directories that will not do, with
    every problem found before the first byte is written; ``PackError`` for a pack that is damaged
    and a disk that is full. Cancelling removes what was written and returns when that is done.
    """
    path, directories = _settled(pack, drives)
    raise_config_problems("cannot split a pack so", _problems(directories, weights))
    if weights == "measured":
        weights = [await measure_drive(directory.parent) / 1e6 for directory in directories]
    chosen = integer_weights(weights or [1] * len(directories))
    work = partial(_split, path, directories, chosen, remove_original=remove_original)
    return await run_in_thread(work, progress)


def _settled(pack: Path | str, drives: Sequence[Path | str]) -> tuple[Path, list[Path]]:
    """Paths as they are now: the work goes on elsewhere while the working directory may change."""
    path = Path(pack).absolute()
    directories = [Path(drive).absolute() for drive in drives]
    return path, [
        path / f"drive-{i:05d}" if directory == path else directory
        for i, directory in enumerate(directories)
    ]


def _problems(
    directories: Sequence[Path], weights: Sequence[float] | Literal["measured"] | None
) -> list[str]:
    problems = []
    if not 0 < len(directories) <= N_DRIVES_MAX:
        problems.append(f"{len(directories)} drives; from 1 to {N_DRIVES_MAX} are possible")
    if len({directory.resolve() for directory in directories}) != len(directories):
        problems.append("a directory is named twice")
    if weights is None or weights == "measured":
        return problems
    if isinstance(weights, str):  # type: ignore[unreachable]  # not every caller is type-checked
        return [*problems, f"weights={weights!r}: it is numbers, 'measured' or nothing"]  # type: ignore[unreachable]  # likewise
    if len(weights) != len(directories):
        problems.append(f"{len(weights)} weights for {len(directories)} drives")
    if wrong := [each for each in weights if not (math.isfinite(each) and each > 0)]:
        problems.append(f"a weight of {wrong[0]}; it must be more than nothing, and finite")
    return problems


@attrs.frozen
class _Plan:
    """A split that nothing is known to forbid; ``parts`` go with ``directories``."""

    pack: Pack
    directories: Sequence[Path]
    index: DriveIndex
    placement: SplitPlacement
    parts: Sequence[DrivePart]


def _split(
    path: Path,
    directories: Sequence[Path],
    weights: tuple[int, ...],
    reporter: Reporter,
    *,
    remove_original: bool,
) -> SplitReport:
    with exclusive(path):
        plan = _planned(path, directories, weights)
        with taken_back_on_failure() as made:
            written_nbytes = _write(plan, made, reporter, check=remove_original)
            write_index(path, dump_index(plan.index, plan.pack.spec))
        sync_directory(path)
        removed_nbytes = _remove_original(plan.pack) if remove_original else 0
    drives = plan.placement.drives.values()
    counts = sum(np.bincount(of_layer, minlength=len(weights)) for of_layer in drives)
    n_experts = tuple(np.asarray(counts).tolist())
    return SplitReport(path, tuple(directories), weights, n_experts, written_nbytes, removed_nbytes)


def _planned(path: Path, directories: Sequence[Path], weights: tuple[int, ...]) -> _Plan:
    """Everything decided and looked at; ``PackError`` with all that forbids the split."""
    if (path / INDEX_NAME).exists():
        raise PackError(path, f"is on several drives already, by the {INDEX_NAME} in it")
    pack = open_pack(path)
    placement = place_experts(pack.spec, weights)
    sizes = dict(zip(directories, placement.file_nbytes, strict=True))
    problems = drive_problems(path, sizes)
    problems += [
        f"{directory} would get no expert by its weight; leave it out"
        for directory, nbytes in sizes.items()
        if not nbytes
    ]
    if problems:
        raise PackError(path, f"cannot be split: {'; '.join(problems)}")
    digest = pack_digest_of(path)
    written = tuple(written_path(directory, path) for directory in directories)
    index = DriveIndex(digest, written, weights)
    return _Plan(pack, directories, index, placement, split_parts(digest, pack.spec, weights))


class _Drives:
    """The data files of all drives, as one target of a copy."""

    def __init__(self, partials: Sequence[PartialPack]) -> None:
        self._partials = partials

    def write(self, file_index: int, data: memoryview, offset: int) -> None:
        """Write to the data file of one drive."""
        self._partials[file_index].write(0, data, offset)

    def sync(self, file_index: int) -> None:
        """Sync the data file of one drive."""
        self._partials[file_index].sync(0)


def _write(plan: _Plan, made: list[PartialPack], reporter: Reporter, *, check: bool) -> int:
    """Make all drives, whole and durable, and give them their names; returns the bytes written.

    They are put in ``made`` before that.
    """
    pack, placement = plan.pack, plan.placement
    total = sum(
        layout.payload_nbytes * pack.spec.n_experts for layout in pack.spec.layouts.values()
    )
    with ExitStack() as stack:
        partials = [
            stack.enter_context(PartialPack(directory, part.nbytes))
            for directory, part in zip(plan.directories, plan.parts, strict=True)
        ]
        for drive, part in zip(partials, plan.parts, strict=True):
            drive.create([DataFile(DRIVE_FILE_NAME, part.nbytes)])
        keys = sorted(pack.spec.keys(), key=pack.locate)
        runs = record_runs(pack.manifest, pack.locate, placement.locate, keys)
        target = _Drives(partials)
        copy_runs(runs, pack.data_files, target, reporter, total_nbytes=total)
        sync_all(target, placement.file_nbytes, reporter)
        if check:
            _check(plan, [drive.path / DRIVE_FILE_NAME for drive in partials], reporter, total)
        for drive, part in zip(partials, plan.parts, strict=True):
            drive.write_manifest(dump_part(part))
        made += partials
        for drive in partials:
            drive.publish()
        return sum(drive.written_nbytes for drive in partials)


def _check(plan: _Plan, files: Sequence[Path], reporter: Reporter, total_nbytes: int) -> None:
    """Raise ``PackError`` unless every record can be read back and is right."""
    locate = plan.placement.locate
    keys = sorted(plan.pack.spec.keys(), key=locate)
    runs = record_runs(plan.pack.manifest, locate, locate, keys)
    damage = find_damage(runs, files, reporter, total_nbytes=total_nbytes)
    if named := [str(each) for each in islice(damage, N_DAMAGE_NAMED)]:
        raise PackError(
            plan.pack.path,
            f"was not split, a drive did not keep what was written: {'; '.join(named)}",
        )


def _remove_original(pack: Pack) -> int:
    """Remove the expert files of a pack that needs them no more; returns their bytes."""
    nbytes = 0
    for path, file in zip(pack.data_files, pack.manifest.layout.expert_files, strict=True):
        try:
            path.unlink()
        except OSError as error:
            raise PackError(
                path,
                "cannot be removed now that its experts are on the drives, and can be by hand: "
                f"{error.strerror}",
            ) from error
        nbytes += file.nbytes
    sync_directory(pack.path)
    return nbytes
