"""The two documents of a pack on several drives; ``FORMAT.md`` beside this module defines them.

``drives.json`` beside a pack's manifest says in which directories its experts are; the manifest of
a drive's directory says whose part of which split it is, so a directory that was exchanged, or is
of another pack or another split of the same pack, is known by itself. The name of a pack is the
digest in the first line of its manifest.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.layout import DataFile
from tieredmoe.pack.manifest import DIGEST_NBYTES, MANIFEST_NAME
from tieredmoe.pack.placement import N_DRIVES_MAX, WEIGHT_MAX, place_experts
from tieredmoe.pack.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.pack.fields import Field
    from tieredmoe.spec import MoESpec

INDEX_NAME = "drives.json"
INDEX_FORMAT = "tieredmoe-drives"
DRIVE_FORMAT = "tieredmoe-drive"
VERSION = 1
DRIVE_FILE_NAME = "experts-00000.bin"

_DOCUMENT_NBYTES_MAX = 1 << 20


@attrs.frozen
class DriveIndex:
    """``drives.json``: where a pack's experts are. ``directories`` are as they are written.

    With ``weights`` the pack is split, one part in each directory; without, each directory is a
    copy of the pack, "." among them.
    """

    pack_digest: bytes
    directories: tuple[str, ...]
    weights: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        """``split`` or ``mirror``."""
        return "mirror" if self.weights is None else "split"

    def paths(self, pack: Path) -> list[Path]:
        """The directories, of the pack that is now at ``pack``."""
        return [pack / directory for directory in self.directories]


@attrs.frozen
class DrivePart:
    """The manifest of a drive's directory: part ``drive`` of the split by ``weights``."""

    pack_digest: bytes
    drive: int
    weights: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        shares = ":".join(map(str, self.weights))
        return f"drive {self.drive} of a split by {shares} of pack {self.pack_digest.hex()}"


def split_parts(pack_digest: bytes, spec: MoESpec, weights: tuple[int, ...]) -> list[DrivePart]:
    """The parts that a split by ``weights`` has."""
    sizes = place_experts(spec, weights).file_nbytes
    return [DrivePart(pack_digest, i, weights, nbytes) for i, nbytes in enumerate(sizes)]


def dump_index(index: DriveIndex, spec: MoESpec) -> bytes:
    """``drives.json`` as a file."""
    drives: list[dict[str, Any]] = [{"directory": each} for each in index.directories]
    if index.weights is not None:
        parts = split_parts(index.pack_digest, spec, index.weights)
        for drive, part in zip(drives, parts, strict=True):
            drive["weight"] = part.weights[part.drive]
            drive["file"] = attrs.asdict(DataFile(DRIVE_FILE_NAME, part.nbytes))
    document = {
        "format": INDEX_FORMAT,
        "version": VERSION,
        "kind": index.kind,
        "pack": index.pack_digest.hex(),
        "drives": drives,
    }
    return seal(document)


def parse_index(data: bytes, path: Path, *, pack_digest: bytes, spec: MoESpec) -> DriveIndex:
    """The index in ``data`` of the pack of that digest; ``PackError`` naming the first wrong field.

    ``path`` names the file in messages.
    """
    top = unseal(data, path, name=INDEX_FORMAT, version=VERSION)
    fields = top.members("digest", "format", "version", "kind", "pack", "drives")
    _check_pack(fields["pack"], pack_digest)
    kind = fields["kind"].text()
    if kind not in {"split", "mirror"}:
        fields["kind"].fail(f"must be split or mirror, not {kind!r}")
    drives = list(fields["drives"].items())
    if len(drives) > N_DRIVES_MAX:
        fields["drives"].fail(f"must be at most {N_DRIVES_MAX}, not {len(drives)}")
    if kind == "mirror":
        mirrors = [drive.members("directory")["directory"] for drive in drives]
        return DriveIndex(pack_digest, _directories(fields["drives"], mirrors), None)
    items = [drive.members("directory", "weight", "file") for drive in drives]
    weights = tuple(item["weight"].integer(minimum=1, maximum=WEIGHT_MAX) for item in items)
    parts = split_parts(pack_digest, spec, weights)
    for item, part in zip(items, parts, strict=True):
        _check_file(item["file"], part.nbytes)
    directories = _directories(fields["drives"], [item["directory"] for item in items])
    return DriveIndex(pack_digest, directories, weights)


def dump_part(part: DrivePart) -> bytes:
    """The manifest of a drive's directory as a file."""
    document = {
        "format": DRIVE_FORMAT,
        "version": VERSION,
        "pack": part.pack_digest.hex(),
        "drive": part.drive,
        "weights": list(part.weights),
        "file": attrs.asdict(DataFile(DRIVE_FILE_NAME, part.nbytes)),
    }
    return seal(document)


def read_part(directory: Path) -> DrivePart:
    """What the drive's directory says of itself; ``PackError`` if it is none."""
    path = directory / MANIFEST_NAME
    top = unseal(read_document(path), path, name=DRIVE_FORMAT, version=VERSION)
    fields = top.members("digest", "format", "version", "pack", "drive", "weights", "file")
    weights = [item.integer(minimum=1, maximum=WEIGHT_MAX) for item in fields["weights"].items()]
    if len(weights) > N_DRIVES_MAX:
        fields["weights"].fail(f"must be at most {N_DRIVES_MAX}")
    file = fields["file"].members("name", "nbytes")
    nbytes = file["nbytes"].integer(minimum=1)
    _check_file(fields["file"], nbytes)
    return DrivePart(
        fields["pack"].hex_bytes(DIGEST_NBYTES),
        fields["drive"].integer(maximum=len(weights) - 1),
        tuple(weights),
        nbytes,
    )


def read_document(path: Path) -> bytes:
    """The bytes of a small document; ``PackError`` if there is none or it is no small one."""
    try:
        with opened(path) as (fd, status):
            if status.st_size > _DOCUMENT_NBYTES_MAX:
                raise PackError(path, f"has {status.st_size:,} bytes, too many for what it is")
            data = bytearray(status.st_size)
            read_exactly(fd, memoryview(data), offset=0, path=path)
    except GGUFError as error:
        raise PackError(error.path, error.fact) from error
    return bytes(data)


def written_path(directory: Path, pack: Path) -> str:
    """How the index of ``pack`` names a directory: relative if inside of it, else absolute.

    What is inside moves with the pack; a drive of its own stays where it is mounted.
    """
    if directory.is_relative_to(pack):
        return os.fspath(directory.relative_to(pack))
    return os.fspath(directory)


def _directories(drives: Field, fields: Sequence[Field]) -> tuple[str, ...]:
    directories = tuple(field.text() for field in fields)
    for field, directory in zip(fields, directories, strict=True):
        try:
            writable = "\0" not in directory and bool(os.fsencode(directory))
        except UnicodeEncodeError:
            writable = False
        if not writable:
            field.fail(f"must be a path that this system can write, not {directory!r}")
    if len(set(directories)) != len(directories):
        drives.fail("must not name a directory twice")
    return directories


def _check_pack(field: Field, pack_digest: bytes) -> None:
    found = field.hex_bytes(DIGEST_NBYTES)
    if found != pack_digest:
        field.fail(
            f"must be {pack_digest.hex()}, the digest of the manifest beside it, not "
            f"{found.hex()}: it is the index of another pack"
        )


def _check_file(field: Field, nbytes: int) -> None:
    members = field.members("name", "nbytes")
    if members["name"].file_name() != DRIVE_FILE_NAME:
        members["name"].fail(f"must be {DRIVE_FILE_NAME}")
    if members["nbytes"].integer() != nbytes:
        members["nbytes"].fail(f"must be {nbytes}, by the weights of all drives")
