"""A pack whose experts are on several drives, opened: split among them, or a copy on each.

Only the experts are elsewhere; manifest and dense files stay in the pack's own directory, and so
does the index that says where the rest is. Whatever is wrong with a split pack is found here and
listed at once. A mirror is there for the day on which a drive is not: a copy that is missing or
damaged is left out, at WARNING, and only a directory that holds *another* pack is an error, since
no failing disk makes one.
"""

from __future__ import annotations

import logging
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import attrs
import numpy as np

from tieredmoe.backends.drives import open_split
from tieredmoe.backends.mirror import open_mirror
from tieredmoe.errors import PackError
from tieredmoe.gguf import merge_headers
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.document import parse_manifest
from tieredmoe.pack.drive_index import (
    DRIVE_FILE_NAME,
    DRIVE_FORMAT,
    INDEX_NAME,
    DrivePart,
    parse_index,
    read_document,
    read_part,
    split_parts,
)
from tieredmoe.pack.layout import DataFile, Extent, slab_runs
from tieredmoe.pack.manifest import DIGEST_NBYTES, MANIFEST_NAME, digest_of
from tieredmoe.pack.placement import SplitPlacement, place_experts
from tieredmoe.pack.reader import Pack, as_pack_errors, header_problems, read_headers, read_manifest
from tieredmoe.pack.records import whole_record
from tieredmoe.pack.sealed import stated_digest
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tieredmoe.backends.drives import SplitBackend
    from tieredmoe.backends.mirror import MirrorBackend
    from tieredmoe.backends.protocol import ReadBackend
    from tieredmoe.gguf import Metadata, TensorInfo
    from tieredmoe.pack.manifest import Manifest
    from tieredmoe.pack.records import Extents
    from tieredmoe.spec import MoESpec

logger = logging.getLogger(__name__)

_WAY_OUT = "if a drive was moved, name its directory to `attach_drives`"


@attrs.frozen(eq=False)
class DrivesPack:
    """An opened pack on several drives; a ``Checkpoint`` like any other, digests included.

    ``drives`` are the directories that can be read, in the order of the index: of a split pack all,
    of a mirrored one the copies that are whole; ``left_out`` says why the others are not read.
    ``placement`` is that of a split pack.
    """

    pack: Pack
    drives: tuple[Path, ...]
    placement: SplitPlacement | None
    left_out: tuple[str, ...] = ()

    async def open_backend(
        self, open_files: Callable[[Sequence[Path]], ReadBackend]
    ) -> SplitBackend | MirrorBackend:
        """One backend over all drives; ``open_files`` opens those of one, e.g. by ``open_backend``.

        Its files are those that ``extents`` counts. If this raises, none stays open.
        """
        if self.placement is not None:
            return await open_split({d: [d / DRIVE_FILE_NAME] for d in self.drives}, open_files)
        names = [file.name for file in self.manifest.layout.expert_files]
        return await open_mirror({d: [d / name for name in names] for d in self.drives}, open_files)

    @property
    def path(self) -> Path:
        """The pack's own directory, with its manifest and dense files."""
        return self.pack.path

    @property
    def manifest(self) -> Manifest:
        """The manifest of the pack; where it places records is of no matter if it is split."""
        return self.pack.manifest

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""
        return self.pack.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self.pack.tensors

    @property
    def spec(self) -> MoESpec:
        """The routed part of the model."""
        return self.pack.spec

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that holds any record."""
        return self.pack.slot_nbytes

    @cached_property
    def data_files(self) -> tuple[Path, ...]:
        """The files that ``extents`` counts: one per drive if split, the first copy's if mirrored.

        Of a mirror, any copy may serve a read.
        """
        if self.placement is not None:
            return tuple(drive / DRIVE_FILE_NAME for drive in self.drives)
        return tuple(self.drives[0] / file.name for file in self.manifest.layout.expert_files)

    def locate(self, key: ExpertKey) -> Extent:
        """Where the record of ``key`` lies, in constant time; ``KeyError`` for an unknown one."""
        if self.placement is not None:
            return self.placement.locate(key)
        return self.pack.locate(key)

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``: its record, which lies as it is to lie in a slot."""
        return whole_record(self.locate(key), self.spec.layouts[key.layer])

    @property
    def has_digests(self) -> bool:
        """A pack always has them."""
        return True

    def digests(self, key: ExpertKey) -> tuple[bytes, ...]:
        """The xxh3-128 digests of one expert's gate, up and down, 16 bytes each."""
        return self.pack.digests(key)

    def digest_of(self, data: memoryview) -> bytes:
        """The xxh3-128 digest of ``data``."""
        return digest_of(data)

    @cached_property
    def tensor_files(self) -> tuple[Path, ...]:
        """The dense files, in the order that ``locate_tensor`` counts in."""
        return tuple(self.path / shard.dense_file.name for shard in self.manifest.layout.shards)

    def locate_tensor(self, name: str) -> Extent:
        """Where the bytes of a dense tensor lie; ``KeyError`` for experts, which are gathered."""
        stored = self.manifest.layout.tensors[name]
        if stored.slabs is not None:
            raise KeyError(name)
        return Extent(stored.shard_index, stored.dense_offset, stored.nbytes)

    def tensor_digest(self, name: str) -> bytes:
        """The xxh3-128 digest of a dense tensor's bytes."""
        return self.pack.tensor_digest(name)

    def check_unchanged(self) -> None:
        """Raise ``PackError`` if a dense file, or one of a split drive, has another size now.

        A copy of a mirror may change or go: its reads then fail, and others serve them.
        """
        problems = size_problems(self.path, _dense_files(self.manifest))
        if self.placement is not None:
            for drive, nbytes in zip(self.drives, self.placement.file_nbytes, strict=True):
                facts = size_problems(drive, [DataFile(DRIVE_FILE_NAME, nbytes)])
                problems += [f"{drive}: {fact}" for fact in facts]
        if problems:
            raise PackError(self.path, f"is damaged: {'; '.join(problems)}")

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, compared with their digests; see ``Pack.read``."""
        stored = self.manifest.layout.tensors.get(name)
        if stored is None or stored.slabs is None:
            return self.pack.read(name)
        data = np.empty(self.tensors[name].nbytes, dtype=np.uint8)
        digests = self.manifest.tensor_digests[name]
        layer = stored.slabs.layer
        runs = slab_runs(self.spec.layouts[layer], stored.slabs)
        for i, (expert, run) in enumerate(product(range(self.spec.n_experts), runs)):
            where = self.locate(ExpertKey(layer, expert))
            path = self.data_files[where.file_index]
            start = expert * run.step + run.offset
            target = data.data[start : start + run.role.nbytes]
            with as_pack_errors(), opened(path) as (fd, _):
                read_exactly(fd, target, offset=where.offset + run.role.offset, path=path)
            begin = i * DIGEST_NBYTES
            if digest_of(target) != digests[begin : begin + DIGEST_NBYTES]:
                raise PackError(
                    path, f"is damaged: tensor {name!r}, expert {expert}, is not what was packed"
                )
        return data


def has_drives(path: Path) -> bool:
    """Whether the directory ``path`` is a pack that was split or mirrored."""
    return (path / INDEX_NAME).exists()


def is_drive(path: Path) -> bool:
    """Whether the directory ``path`` is one drive's part of a split pack, not a pack."""
    try:
        with (path / MANIFEST_NAME).open("rb") as file:
            return f'"format": "{DRIVE_FORMAT}"'.encode("ascii") in file.read(256)
    except OSError:
        return False


def refuse_drive(path: Path) -> NoReturn:
    """Raise the ``PackError`` of who opens a drive's directory as if it were a pack."""
    raise PackError(path, f"is {read_part(path)}; name the pack itself, which names its drives")


def open_drives(path: Path | str) -> DrivesPack:
    """The split or mirrored pack in directory ``path``, checked as ``open_pack`` does; blocks.

    Raises ``PackError`` with all that is wrong: with its index, its dense files, and of a split
    pack with every drive. A mirrored pack opens with the copies that are whole, if there is one.
    """
    path = Path(path).absolute()
    manifest_path = path / MANIFEST_NAME
    data = read_manifest(manifest_path)
    manifest = parse_manifest(data, manifest_path)
    pack_digest = stated_digest(data)
    assert pack_digest is not None, "a manifest that was parsed begins with its digest"
    spec, index_path = manifest.layout.spec, path / INDEX_NAME
    document = read_document(index_path)
    index = parse_index(document, index_path, pack_digest=pack_digest, spec=spec)
    problems = size_problems(path, _dense_files(manifest))
    drives, left_out = index.paths(path), list[str]()
    if index.weights is not None:
        parts = split_parts(pack_digest, spec, index.weights)
        problems += [
            problem
            for drive, part in zip(drives, parts, strict=True)
            for problem in part_problems(drive, part)
        ]
    else:
        drives, foreign, left_out = _look_at_copies(drives, data, manifest)
        problems += foreign + ([] if drives else left_out)
    if problems:
        raise PackError(path, f"cannot be read from its drives: {'; '.join(problems)}")
    pack = open_dense(path, manifest)
    for fact in left_out:
        logger.warning("a copy of %s is left out: %s; %s", path, fact, _WAY_OUT)
    placement = None if index.weights is None else place_experts(spec, index.weights)
    return DrivesPack(pack, tuple(drives), placement, tuple(left_out))


def pack_digest_of(path: Path) -> bytes:
    """The digest that names the pack at ``path``; ``PackError`` if there is none."""
    digest = stated_digest(read_manifest(path / MANIFEST_NAME))
    if digest is None:
        raise PackError(path / MANIFEST_NAME, "is damaged in its first line")
    return digest


def open_dense(path: Path, manifest: Manifest) -> Pack:
    """A pack of which only what is not experts has been looked at; ``PackError`` as usual."""
    with as_pack_errors():
        headers = list(read_headers(path, manifest))
        metadata, tensors = merge_headers(headers)
        if problems := list(header_problems(manifest.layout, headers, metadata, tensors)):
            fact = f"does not fit its headers: {'; '.join(problems)}"
            raise PackError(path / MANIFEST_NAME, fact)
    return Pack(path, manifest, metadata, tensors)


def part_problems(directory: Path, expected: DrivePart) -> Iterator[str]:
    """Why ``directory`` is not this part of this split, nothing if it is; each names it."""
    if not directory.is_dir():
        yield f"drive {expected.drive} is not there: no directory {directory}; {_WAY_OUT}"
        return
    try:
        found = read_part(directory)
    except PackError as error:
        yield f"drive {expected.drive}: {error}"
        return
    if found != expected:
        yield f"{directory} is not {expected}: it is {found}; {_WAY_OUT}"
        return
    for problem in size_problems(directory, [DataFile(DRIVE_FILE_NAME, expected.nbytes)]):
        yield f"drive {expected.drive}: {directory}: {problem}"


def size_problems(directory: Path, files: Sequence[DataFile]) -> list[str]:
    """The files that are not there or have another size; empty if all is well."""
    problems = []
    for file in files:
        try:
            nbytes = (directory / file.name).stat().st_size
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror}")
            continue
        if nbytes != file.nbytes:
            problems.append(f"{file.name} has {nbytes:,} bytes instead of {file.nbytes:,}")
    return problems


def is_copy(directory: Path, manifest_data: bytes) -> bool:
    """Whether ``directory`` holds the pack of this manifest; ``PackError`` if that is not known."""
    data = read_manifest(directory / MANIFEST_NAME)
    if data == manifest_data:
        return True
    if stated_digest(data) in {None, stated_digest(manifest_data)}:
        raise PackError(directory / MANIFEST_NAME, "is damaged")
    return False


def _look_at_copies(
    directories: Sequence[Path], manifest_data: bytes, manifest: Manifest
) -> tuple[list[Path], list[str], list[str]]:
    """The copies that can be read, what says that one is another pack, and why others cannot."""
    whole, foreign, left_out = list[Path](), list[str](), list[str]()
    for directory in directories:
        try:
            if not is_copy(directory, manifest_data):
                foreign.append(f"{directory} holds another pack; name a copy of this one")
                continue
        except PackError as error:
            left_out.append(str(error))
            continue
        if facts := size_problems(directory, manifest.layout.expert_files):
            left_out.append(f"{directory}: {'; '.join(facts)}")
        else:
            whole.append(directory)
    return whole, foreign, left_out


def _dense_files(manifest: Manifest) -> list[DataFile]:
    return [shard.dense_file for shard in manifest.layout.shards]
