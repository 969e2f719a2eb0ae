"""Copies a pack to another drive, so that reads are shared between the two and either may die.

A copy is a whole pack, dense files and manifest included: it opens by itself on the day on which
the first one is gone. Rejected: copying the experts alone, which saves a few per cent of the space
and makes the copy useless without the drive that it is to replace.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import PackError
from tieredmoe.pack.drive_files import (
    drive_problems,
    exclusive,
    sync_directory,
    taken_back_on_failure,
    write_index,
)
from tieredmoe.pack.drive_index import (
    INDEX_NAME,
    DriveIndex,
    dump_index,
    parse_index,
    read_document,
    written_path,
)
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.partial import PartialPack
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import Pack, open_pack, read_manifest
from tieredmoe.pack.record_copy import copy_runs, dense_runs, record_runs, sync_all
from tieredmoe.pack.sealed import stated_digest

if TYPE_CHECKING:
    from collections.abc import Callable

ITSELF = "."
"""How the index of a mirrored pack names the pack's own directory, a copy like the others."""


@attrs.frozen
class MirrorReport:
    """What making a copy did; ``copies`` are all directories of the mirror."""

    path: Path
    copies: tuple[Path, ...]
    written_nbytes: int


async def mirror_pack(
    pack: Path | str,
    directory: Path | str,
    *,
    progress: Callable[[PackProgress], None] | None = None,
) -> MirrorReport:
    """Make the new ``directory`` a copy of ``pack``, and read from both: all of it, or nothing.

    A pack may have several copies, made one by one. Every byte is compared with its digest on the
    way. Raises ``PackError``: a directory that will not do, with every problem found before the
    first byte is written; a pack that is damaged or split; a disk that is full. Cancelling removes
    what was written and returns when that is done.
    """
    work = partial(_mirror, *_settled(pack, directory))
    return await run_in_thread(work, progress)


def _settled(pack: Path | str, directory: Path | str) -> tuple[Path, Path]:
    return Path(pack).absolute(), Path(directory).absolute()


def _mirror(path: Path, directory: Path, reporter: Reporter) -> MirrorReport:
    with exclusive(path):
        pack = open_pack(path)
        manifest_data = read_manifest(path / MANIFEST_NAME)
        index = _with_copy(pack, manifest_data, directory)
        nbytes = pack.manifest.layout.data_nbytes + len(manifest_data)
        if problems := drive_problems(path, {directory: nbytes}):
            raise PackError(path, f"cannot be mirrored: {'; '.join(problems)}")
        with taken_back_on_failure() as made:
            files = pack.manifest.layout.files
            with PartialPack(directory, nbytes) as copy:
                copy.create(files)
                _copy(pack, copy, reporter)
                copy.write_manifest(manifest_data)
                open_pack(copy.path)  # the last check before others can see it
                made.append(copy)
                copy.publish()
            write_index(path, dump_index(index, pack.spec))
        sync_directory(path)
    return MirrorReport(path, tuple(index.paths(path)), copy.written_nbytes)


def _with_copy(pack: Pack, manifest_data: bytes, directory: Path) -> DriveIndex:
    """The index that ``pack`` will have; ``PackError`` if it is split, or its index damaged."""
    digest = stated_digest(manifest_data)
    assert digest is not None, "a manifest that was parsed begins with its digest"
    path = pack.path / INDEX_NAME
    copies: tuple[str, ...] = (ITSELF,)
    if path.exists():
        index = parse_index(read_document(path), path, pack_digest=digest, spec=pack.spec)
        if index.weights is not None:
            raise PackError(pack.path, "is split over drives, so it cannot be mirrored as well")
        copies = index.directories
    return DriveIndex(digest, (*copies, written_path(directory, pack.path)), None)


def _copy(pack: Pack, copy: PartialPack, reporter: Reporter) -> None:
    manifest = pack.manifest
    n_expert_files = len(manifest.layout.expert_files)
    keys = sorted(pack.spec.keys(), key=pack.locate)
    total = manifest.layout.source_nbytes
    copy_runs(
        (
            *dense_runs(manifest, n_expert_files),
            *record_runs(manifest, pack.locate, pack.locate, keys),
        ),
        pack.tensor_files,
        copy,
        reporter,
        total_nbytes=total,
    )
    sync_all(copy, [file.nbytes for file in manifest.layout.files], reporter)
