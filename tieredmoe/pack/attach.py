"""Says anew in which directories the experts of a pack are: after a drive was moved or replaced.

What a directory is, it says itself: a part of a split by its number, or a copy of the pack. So they
can be named in any order, and one that belongs elsewhere is refused by name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import PackError, raise_config_problems
from tieredmoe.pack.document import parse_manifest
from tieredmoe.pack.drive_files import exclusive, sync_directory, write_index
from tieredmoe.pack.drive_index import (
    INDEX_NAME,
    DriveIndex,
    DrivePart,
    dump_index,
    parse_index,
    read_document,
    read_part,
    split_parts,
    written_path,
)
from tieredmoe.pack.drives import (
    DrivesPack,
    is_copy,
    open_drives,
    pack_digest_of,
    part_problems,
    size_problems,
)
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.mirror import ITSELF
from tieredmoe.pack.progress import Reporter, run_in_thread
from tieredmoe.pack.reader import read_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.pack.manifest import Manifest


async def attach_drives(pack: Path | str, directories: Sequence[Path | str]) -> DrivesPack:
    """Read the experts of ``pack`` from ``directories`` from now on; returns it opened so.

    Of a split pack, these are its parts, or those that were moved: the index says of the others.
    Of a mirrored one, or of one that is to be, they are all copies beside the pack itself. A split
    or a copy without an index, left by a kill or made by other means, is taken up in the same way.

    Raises ``PackError`` with all that is wrong, and then nothing was changed.
    """
    settled = _settled(pack, directories)
    no_directory = [] if directories else ["no directory is named"]
    raise_config_problems("cannot attach drives", no_directory)
    return await run_in_thread(partial(_attach, *settled), None)


def _settled(pack: Path | str, directories: Sequence[Path | str]) -> tuple[Path, list[Path]]:
    return Path(pack).absolute(), [Path(each).absolute() for each in directories]


@attrs.define
class _Found:
    """What the directories say that they are."""

    copies: list[Path] = attrs.field(factory=list)
    parts: dict[int, Path] = attrs.field(factory=dict)
    weights: set[tuple[int, ...]] = attrs.field(factory=set)
    problems: list[str] = attrs.field(factory=list)


def _attach(path: Path, directories: Sequence[Path], reporter: Reporter) -> DrivesPack:
    del reporter  # this takes no time
    with exclusive(path):
        data = read_manifest(path / MANIFEST_NAME)
        manifest = parse_manifest(data, path / MANIFEST_NAME)
        found = _look(data, pack_digest_of(path), directories)
        if found.copies and found.parts:
            found.problems.append("some are copies of the pack, and some are parts of a split")
        elif len(found.weights) > 1:
            found.problems.append("they are parts of different splits")
        if not found.problems:
            index = _index(path, manifest, found)
        if found.problems:
            raise PackError(path, f"cannot be read from there: {'; '.join(found.problems)}")
        write_index(path, dump_index(index, manifest.layout.spec))
        sync_directory(path)
    return open_drives(path)


def _look(manifest_data: bytes, pack_digest: bytes, directories: Sequence[Path]) -> _Found:
    found = _Found()
    for directory in directories:
        try:
            if is_copy(directory, manifest_data):
                found.copies.append(directory)
                continue
            part = read_part(directory)
        except PackError as error:
            found.problems.append(str(error))
            continue
        if part.pack_digest != pack_digest:
            found.problems.append(f"{directory} is {part}, not of this pack")
        elif part.drive in found.parts:
            other = found.parts[part.drive]
            found.problems.append(f"{directory} and {other} are the same drive {part.drive}")
        found.parts[part.drive] = directory
        found.weights.add(part.weights)
    return found


def _index(path: Path, manifest: Manifest, found: _Found) -> DriveIndex:
    """The new index; adds to ``found.problems`` what is wrong with the directories in it."""
    digest = pack_digest_of(path)
    expert_files = manifest.layout.expert_files
    if found.copies:
        others = [copy for copy in found.copies if copy != path]
        for copy in others:
            found.problems += [f"{copy}: {fact}" for fact in size_problems(copy, expert_files)]
        own = () if size_problems(path, expert_files) else (ITSELF,)
        return DriveIndex(digest, (*own, *(written_path(copy, path) for copy in others)), None)
    (weights,) = found.weights
    parts = split_parts(digest, manifest.layout.spec, weights)
    known = _known_parts(path, manifest, parts)
    places = [found.parts.get(i) or known.get(i) for i in range(len(parts))]
    for part, place in zip(parts, places, strict=True):
        if place is None:
            found.problems.append(f"drive {part.drive} is missing; name its directory as well")
        else:
            found.problems += part_problems(place, part)
    written = tuple(written_path(place, path) for place in places if place is not None)
    return DriveIndex(digest, written, weights)


def _known_parts(path: Path, manifest: Manifest, parts: Sequence[DrivePart]) -> dict[int, Path]:
    """Where the present index has the parts of this split; nowhere if it is damaged or of another.

    It is about to be replaced, so what is wrong with it is of no matter.
    """
    try:
        index = parse_index(
            read_document(path / INDEX_NAME),
            path / INDEX_NAME,
            pack_digest=parts[0].pack_digest,
            spec=manifest.layout.spec,
        )
    except PackError:
        return {}
    if index.weights != parts[0].weights:
        return {}
    return dict(enumerate(index.paths(path)))
