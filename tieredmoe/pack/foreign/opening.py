"""Opens a pack that another system wrote, where it lies and as it is.

Such a pack holds experts and nothing else, so it is opened together with the GGUF it was made from:
dense weights, metadata, types and shapes come from there. That the two belong together is settled
by bytes: in every layer a page of each role is compared. Rejected: asking for equal digests of
the whole source, which takes an hour to compute, and refuses a source whose metadata was edited.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError
from tieredmoe.gguf.files import opened
from tieredmoe.pack.foreign import ggmlmoe, sglang_v1
from tieredmoe.pack.foreign.index import PackFile
from tieredmoe.pack.foreign.pack import ForeignPack
from tieredmoe.pack.foreign.sidecar import check_sidecar, read_sidecar, source_path
from tieredmoe.pack.reader import as_pack_errors
from tieredmoe.pack.virtual import VirtualPack, open_virtual_pack
from tieredmoe.spec import PAGE_NBYTES, ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.pack.fields import Field
    from tieredmoe.pack.foreign.index import ForeignFormat
    from tieredmoe.pack.foreign.places import RecordPlaces

FORMATS = (sglang_v1.FORMAT, ggmlmoe.FORMAT)
MAGIC_NBYTES = max(len(known.magic) for known in FORMATS)


def foreign_format(beginning: bytes) -> ForeignFormat | None:
    """The format of a file by its first bytes, 24 of them at least; None if it is none of these."""
    return next((known for known in FORMATS if beginning.startswith(known.magic)), None)


def is_foreign_pack(path: Path, beginning: bytes) -> bool:  # noqa: ARG001 (a Form's recogniser)
    """Whether a file of these first bytes is a pack that ``open_foreign_pack`` opens."""
    return foreign_format(beginning) is not None


def open_foreign_pack(
    path: Path | str, *, source: Path | str | None = None, manifest: Path | str | None = None
) -> ForeignPack:
    """The pack at ``path``, its header and index checked against the GGUF it was made from; blocks.

    ``source`` is that GGUF (a file, any shard, a directory); by default the one that the manifest
    names, else the one model in the pack's directory. ``manifest`` is by default
    ``<path>.manifest.json`` and may be absent. Neither file is read further than their headers, the
    index and a few pages.

    Raises ``PackError`` for a pack that cannot be read or is of another model, ``GGUFError`` and
    ``MetadataError`` for a source that is none.
    """
    path = Path(path).absolute()
    with as_pack_errors(), opened(path) as (fd, status):
        nbytes = min(status.st_size, MAGIC_NBYTES)
        form = foreign_format(PackFile(path, fd, nbytes).read(0, nbytes))
    if form is None:
        known = " or ".join(known.name for known in FORMATS)
        raise PackError(path, f"does not begin like a pack of the format {known}")
    sidecar = _sidecar(path, manifest)
    origin = open_virtual_pack(_source(path, source, sidecar, form))
    with as_pack_errors(), opened(path) as (fd, status):
        file = PackFile(path, fd, status.st_size)
        index = form.read_index(file, origin.experts)
        if sidecar is not None:
            check_sidecar(sidecar, index.manifest)
        _require_same_bytes(file, index.places, origin)
    return ForeignPack(path, form.name, origin, index.places, index.sha256, status)


def _sidecar(path: Path, manifest: Path | str | None) -> Field | None:
    if manifest is not None:
        return read_sidecar(Path(manifest))
    beside = path.with_name(f"{path.name}.manifest.json")
    return read_sidecar(beside) if _exists(beside) else None


def _source(
    path: Path, source: Path | str | None, sidecar: Field | None, form: ForeignFormat
) -> Path:
    """Where the source is: as said by the caller, by the manifest, or by lying beside the pack."""
    if source is not None:
        return Path(source)
    recorded = "and there is no manifest that names it"
    if sidecar is not None:
        named = source_path(sidecar, form.source_field)
        if _exists(named):
            return named
        recorded = f"{named} by its manifest, which does not exist"
    if any(path.parent.glob("*.gguf")):
        return path.parent
    raise PackError(
        path,
        f"holds experts only; everything else is in the GGUF it was made from ({recorded}): "
        "name that file, open_foreign_pack(…, source=…), or link it into the pack's directory",
    )


def _exists(path: Path) -> bool:
    # Path.exists raises for names that no file can have; this says no.
    return os.path.exists(path)  # noqa: PTH110 (see above)


def _require_same_bytes(
    file: PackFile, places: Mapping[int, RecordPlaces], source: VirtualPack
) -> None:
    """A page of each role of each layer, of another expert each time, is the same in both."""
    with ExitStack() as stack:
        shards = [
            PackFile(shard.path, stack.enter_context(opened(shard.path))[0], shard.file_nbytes)
            for shard in source.inventory.shards
        ]
        samples = itertools.product(places, ROLES)
        for (layer, role), expert in zip(samples, itertools.cycle(range(source.spec.n_experts))):
            place, slab = places[layer], source.experts.slab(layer, role, expert)
            nbytes = min(slab.nbytes, PAGE_NBYTES)
            offset = place.start + expert * place.stride + place.role_offsets[role]
            shard = shards[slab.shard_index]
            if file.read(offset, nbytes) != shard.read(slab.offset, nbytes):
                raise PackError(
                    file.path,
                    f"does not hold the bytes of {shard.path}: the {role} matrix of layer "
                    f"{layer}, expert {expert} differs. It is of another model, or damaged; "
                    "name its own source, or run that GGUF as it is",
                )
