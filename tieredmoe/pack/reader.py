"""Opens a pack: what it says of itself is checked, and then every expert is one addition away.

A ``Pack`` is data and holds no open file: the read backend opens the expert files by itself, and
dense tensors are read once. Everything here blocks for as long as reading the manifest and the
headers takes; full digests are ``verify_pack``'s business.
"""

from __future__ import annotations

import itertools
import stat
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.errors import GGUFError, MetadataError, PackError
from tieredmoe.gguf import GGUFHeader, Metadata, MetadataReader, merge_headers, parse_header
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.document import parse_manifest
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.manifest import DIGEST_NBYTES, MANIFEST_NAME, Manifest, digest_of
from tieredmoe.pack.records import Extents, whole_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tieredmoe.gguf import GGUFInventory, TensorInfo
    from tieredmoe.pack.layout import PackLayout
    from tieredmoe.spec import ExpertKey, MoESpec

MANIFEST_NBYTES_MAX = 256 << 20
"""A longer manifest is refused unread; that of a model of a terabyte has 9 MB."""


@attrs.frozen(eq=False)
class Pack:
    """An opened expert pack; a ``TensorSource`` for everything in it, experts included.

    See ``pack.records.Checkpoint`` for what all opened models have.
    """

    path: Path
    manifest: Manifest
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    @property
    def spec(self) -> MoESpec:
        """The routed part of the model."""
        return self.manifest.layout.spec

    @cached_property
    def data_files(self) -> tuple[Path, ...]:
        """The expert files, in the order that ``Extent.file_index`` counts in."""
        return tuple(self.path / file.name for file in self.manifest.layout.expert_files)

    def locate(self, key: ExpertKey) -> Extent:
        """Where the record of ``key`` lies; its length is the stride of its layer.

        Constant time, no name is looked up. Raises ``KeyError`` for a key the model does not have.
        """
        return self.manifest.layout.record(key)

    def extents(self, key: ExpertKey) -> Extents:
        """What to read for ``key``: its record, which lies as it is to lie in a slot."""
        return whole_record(self.locate(key), self.spec.layouts[key.layer])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that holds any record."""
        return self.spec.slot_nbytes

    @property
    def has_digests(self) -> bool:
        """A pack always has them."""
        return True

    def digests(self, key: ExpertKey) -> tuple[bytes, ...]:
        """The xxh3-128 digests of one expert's gate, up and down, 16 bytes each."""
        return self.manifest.role_digests(key)

    def digest_of(self, data: memoryview) -> bytes:
        """The xxh3-128 digest of ``data``."""
        return digest_of(data)

    @cached_property
    def tensor_files(self) -> tuple[Path, ...]:
        """Every data file, in the order that ``locate_tensor`` counts in."""
        return tuple(self.path / file.name for file in self.manifest.layout.files)

    def locate_tensor(self, name: str) -> Extent:
        """Where the bytes of a dense tensor lie; ``KeyError`` for experts, which are gathered."""
        layout = self.manifest.layout
        stored = layout.tensors[name]
        if stored.slabs is not None:
            raise KeyError(name)
        file_index = len(layout.expert_files) + stored.shard_index
        return Extent(file_index, stored.dense_offset, stored.nbytes)

    def tensor_digest(self, name: str) -> bytes:
        """The xxh3-128 digest of a dense tensor's bytes."""
        return self.manifest.tensor_digests[name]

    def check_unchanged(self) -> None:
        """Raise ``PackError`` if a data file has another size than the manifest says."""
        _check_sizes(self.path, self.manifest.layout)

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, a fresh writable 1-D array; experts are gathered.

        Always compared with their digests: it costs little beside the reading, and a wrong dense
        weight spoils every token. Raises ``KeyError`` for an unknown name and ``PackError`` when a
        file cannot be read or holds other bytes.
        """
        data = np.empty(self.tensors[name].nbytes, dtype=np.uint8)
        if not data.nbytes:
            return data
        layout = self.manifest.layout
        extents = list(layout.tensor_extents(name))
        # The pieces of one tensor are in one file.
        path = self.path / layout.files[extents[0].file_index].name
        digests = self.manifest.tensor_digests[name]
        done = 0
        with as_pack_errors(), opened(path) as (fd, _):
            for i, extent in enumerate(extents):
                target = data.data[done : done + extent.nbytes]
                read_exactly(fd, target, offset=extent.offset, path=path)
                if digest_of(target) != digests[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES]:
                    raise PackError(
                        path,
                        f"is damaged: tensor {name!r} does not match its digest; "
                        "`tieredmoe pack verify` lists all damage",
                    )
                done += extent.nbytes
        return data

    def check_source(self, inventory: GGUFInventory) -> None:
        """Raise ``PackError`` unless this is a pack of ``inventory``: sizes, headers, samples.

        Names may differ. Compared are the headers, every small tensor (norms differ in any two
        fine-tunes of a model) and a few large pieces, so that a model of any size takes no longer
        than a second or two.
        """
        layout = self.manifest.layout
        same = [shard.nbytes for shard in layout.shards] == [
            shard.file_nbytes for shard in inventory.shards
        ]
        if not same or not all(
            _matches(layout, i, shard.path, digests)
            for i, (shard, digests) in enumerate(
                zip(inventory.shards, self.manifest.digests, strict=True)
            )
        ):
            raise PackError(
                self.path,
                f"is a pack of another model than {inventory.shards[0].path}; name another pack",
            )


def open_pack(path: Path | str) -> Pack:
    """The pack in directory ``path``, its manifest, file sizes and headers checked; blocks.

    Raises ``PackError``: not a pack, or damaged, or of a newer format.
    """
    path = Path(path).absolute()
    manifest_path = path / MANIFEST_NAME
    manifest = parse_manifest(read_manifest(manifest_path), manifest_path)
    _check_sizes(path, manifest.layout)
    with as_pack_errors():
        headers = list(read_headers(path, manifest))
        metadata, tensors = merge_headers(headers)
        if problems := list(header_problems(manifest.layout, headers, metadata, tensors)):
            raise PackError(manifest_path, f"does not fit its headers: {'; '.join(problems)}")
    return Pack(path, manifest, metadata, tensors)


@contextmanager
def as_pack_errors() -> Iterator[None]:
    """Whatever is wrong with a file in here is wrong with a pack."""
    try:
        yield
    except GGUFError as error:
        raise PackError(error.path, error.fact) from error


def read_manifest(path: Path) -> bytes:
    """The manifest file at ``path``. Raises ``PackError`` for what is no pack."""
    try:
        is_directory = stat.S_ISDIR(path.parent.stat().st_mode)
        is_regular = is_directory and stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError as error:
        fact = f"is not a pack, or not a whole one: no {MANIFEST_NAME} in it"
        raise PackError(path.parent, fact if path.parent.is_dir() else "does not exist") from error
    except OSError as error:
        raise PackError(path.parent, f"cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise PackError(path.parent, f"cannot be opened: {error}") from error
    if not is_directory:
        raise PackError(
            path.parent, "is a file, not a pack; make one of it with `tieredmoe pack create`"
        )
    if not is_regular:
        raise PackError(path, "is not a regular file")
    with as_pack_errors(), opened(path) as (fd, status):
        if status.st_size > MANIFEST_NBYTES_MAX:
            raise PackError(path, f"has {status.st_size:,} bytes, too many for a manifest")
        data = bytearray(status.st_size)
        read_exactly(fd, memoryview(data), offset=0, path=path)
        return bytes(data)


SMALL_NBYTES = 64 << 10
"""Tensors up to this size are all compared with a source: norms, biases, tables of scales."""

N_SAMPLES = 8
"""So many larger pieces of each shard are compared with a source."""


def _matches(layout: PackLayout, shard_index: int, path: Path, digests: tuple[bytes, ...]) -> bool:
    """Whether the file ``path`` has the header, small tensors and samples of this shard."""
    shard = layout.shards[shard_index]
    starts = itertools.accumulate((segment.nbytes for segment in shard.segments), initial=0)
    pieces = [  # the first of each segment; the header is that of segment 0
        (start, segment.nbytes // layout.n_pieces(segment), of_segment[:DIGEST_NBYTES])
        for start, segment, of_segment in zip(starts, shard.segments, digests, strict=False)
    ]
    large = [piece for piece in pieces[1:] if piece[1] > SMALL_NBYTES]
    chosen = pieces[:1] + [piece for piece in pieces[1:] if piece[1] <= SMALL_NBYTES]
    chosen += large[:: max(1, len(large) // N_SAMPLES)]
    with opened(path) as (fd, _):
        for start, nbytes, digest in chosen:
            data = bytearray(nbytes)
            read_exactly(fd, memoryview(data), offset=start, path=path)
            if digest_of(data) != digest:
                return False
    return True


def _check_sizes(path: Path, layout: PackLayout) -> None:
    problems = []
    for file in layout.files:
        try:
            nbytes = (path / file.name).stat().st_size
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror}")
            continue
        if nbytes != file.nbytes:
            problems.append(f"{file.name} has {nbytes:,} bytes instead of {file.nbytes:,}")
    if problems:
        raise PackError(path, f"is damaged: {'; '.join(problems)}")


def read_headers(path: Path, manifest: Manifest) -> Iterator[GGUFHeader]:
    """The headers of all shards, from the beginnings of the dense files."""
    for shard, digests in zip(manifest.layout.shards, manifest.digests, strict=True):
        dense_path = path / shard.dense_file.name
        data = bytearray(shard.segments[0].nbytes)
        with opened(dense_path) as (fd, _):
            read_exactly(fd, memoryview(data), offset=0, path=dense_path)
        if digest_of(data) != digests[0]:
            raise PackError(dense_path, "is damaged: its header does not match its digest")
        yield parse_header(data, path=dense_path, file_nbytes=shard.nbytes)


def header_problems(
    layout: PackLayout,
    headers: list[GGUFHeader],
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
) -> Iterator[str]:
    """Where the manifest contradicts the headers, which are known to be the source's own."""
    try:
        reader = MetadataReader(metadata, metadata.architecture)
        top_k = reader.integer("expert_used_count")
        reader.finish()
    except MetadataError as error:
        yield str(error)
        return
    model = (layout.spec.architecture, layout.spec.top_k)
    if model != (metadata.architecture, top_k):
        yield f"architecture and top_k are {model}, not {(metadata.architecture, top_k)}"
    for shard, header in zip(layout.shards, headers, strict=True):
        if shard.segments[0].nbytes != min(header.data_offset, header.file_nbytes):
            yield f"the header of {shard.name} has {header.data_offset} bytes"
    stored = {name for name, info in tensors.items() if info.nbytes}
    for name in sorted(stored ^ layout.tensors.keys()):
        yield f"tensor {name!r} is in only one of them"
    for name in stored & layout.tensors.keys():
        where, info = layout.tensors[name], tensors[name]
        expected = (info.shard_index, info.offset, info.nbytes)
        if expected != (where.shard_index, where.source_offset, where.nbytes):
            yield f"tensor {name!r} is elsewhere or of another size"
        if where.slabs is not None:
            roles = [layout.spec.layouts[where.slabs.layer].by_name[r] for r in where.slabs.roles]
            n_rows, n_columns = sum(role.shape[0] for role in roles), roles[0].shape[1]
            found = {(info.ggml_type, info.shape)}
            shape = (layout.spec.n_experts, n_rows, n_columns)
            if found != {(role.ggml_type, shape) for role in roles}:
                yield f"tensor {name!r} has another type or shape"
