"""A model's files as one: the shards checked against each other, their tensors in one mapping.

Everything that can be known to be wrong with a set is found when it is opened, and reported in one
error: a conversion that discovers a missing shard after an hour has wasted the hour.

One number is not believed: files whose tensors were fused after the splitting go on claiming the
count from before (``split.tensors.count``). What the headers list is what there is; whether a model
can do with it is for its adapter to say, which names what is missing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.gguf.header import GGUFHeader, load_header
from tieredmoe.gguf.metadata import Metadata, integral
from tieredmoe.gguf.shards import shard_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tieredmoe.gguf.tensors import TensorInfo

logger = logging.getLogger(__name__)

N_DUPLICATES_NAMED = 5
"""An error names so many tensors that are there twice, and counts the rest."""

_IDENTITY_KEYS = (
    "general.architecture",
    "general.name",
    "general.basename",
    "general.finetune",
    "general.size_label",
)
"""Where two shards both have one of these, the values must agree; only the first needs any."""


@attrs.frozen
class ShardInfo:
    """One file of the model; ``data_offset`` is the length of its header with padding.

    ``mtime_ns`` and ``file_nbytes`` are those of the moment when the header was read.
    """

    path: Path
    file_nbytes: int
    data_offset: int
    alignment: int
    mtime_ns: int


@attrs.frozen(eq=False)
class GGUFInventory:
    """A whole model in GGUF files; a ``TensorSource``.

    ``tensors`` is in file order, shard by shard, as the headers list them.
    """

    shards: tuple[ShardInfo, ...]
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, a fresh writable 1-D array.

        Raises ``KeyError`` for an unknown name and ``GGUFError`` if the file cannot be read or is
        not the one that was opened: its size or time of change differ.
        """
        info = self.tensors[name]
        shard = self.shards[info.shard_index]
        data = np.empty(info.nbytes, dtype=np.uint8)
        with opened(shard.path) as (fd, status):
            if (status.st_size, status.st_mtime_ns) != (shard.file_nbytes, shard.mtime_ns):
                raise GGUFError(
                    shard.path,
                    f"changed since it was opened (it had {shard.file_nbytes} bytes, now "
                    f"{status.st_size}); open the model again",
                )
            read_exactly(fd, data.data, offset=info.offset, path=shard.path)
        return data


def open_inventory(path: Path | str, *, given_up: bool = False) -> GGUFInventory:
    """The model that ``path`` belongs to: a file, any one shard of a set, or a model's directory.

    Reads headers only. Raises one ``GGUFError`` with every problem of the set; a total of tensors
    that is not what the headers list is a warning. With ``given_up``, files whose tensors are being
    moved into a pack are opened too: their headers are whole, the rest of them need not be.
    """
    path = Path(path)
    paths = shard_paths(path)
    headers, shards, problems = _load(paths, given_up=given_up)
    problems += _set_problems(headers, len(paths))
    if problems:
        raise GGUFError(path, *problems)
    metadata, tensors = _merged(list(headers.values()))
    _warn_of_total(path, _claimed_totals(headers), len(tensors))
    return GGUFInventory(tuple(shards), metadata, MappingProxyType(tensors))


def merge_headers(headers: Sequence[GGUFHeader]) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Metadata and tensors of a model from the headers of all its files, in the set's order.

    The first header gives the metadata; tensors carry their header's index as ``shard_index``.
    Raises one ``GGUFError`` with everything in which the headers contradict each other.
    """
    problems = _set_problems(dict(enumerate(headers)), len(headers))
    if problems:
        raise GGUFError(headers[0].path, *problems)
    return _merged(headers)


def _load(
    paths: Sequence[Path], *, given_up: bool
) -> tuple[dict[int, GGUFHeader], list[ShardInfo], list[str]]:
    """Headers by position in the set, what to know of their files, and which could not be read."""
    headers: dict[int, GGUFHeader] = {}
    shards: list[ShardInfo] = []
    missing: list[str] = []
    problems: list[str] = []
    for index, path in enumerate(paths):
        try:
            header, status = load_header(path, given_up=given_up)
        except GGUFError as error:
            if len(paths) == 1:
                raise
            if isinstance(error.__cause__, FileNotFoundError):
                missing.append(path.name)
            else:
                problems.append(f"{path.name} {error.fact}")
            continue
        headers[index] = header
        shards.append(
            ShardInfo(
                path, header.file_nbytes, header.data_offset, header.alignment, status.st_mtime_ns
            )
        )
    if missing:
        problems.insert(0, f"{len(missing)} of {len(paths)} shards missing: {', '.join(missing)}")
    return headers, shards, problems


def _merged(headers: Sequence[GGUFHeader]) -> tuple[Metadata, dict[str, TensorInfo]]:
    tensors = {
        info.name: attrs.evolve(info, shard_index=index)
        for index, header in enumerate(headers)
        for info in header.tensors
    }
    return Metadata(headers[0].metadata, path=headers[0].path), tensors


def _set_problems(headers: Mapping[int, GGUFHeader], n_shards: int) -> list[str]:
    """What is wrong with a set of which ``headers``, by position, could be read."""
    problems = []
    for index, header in headers.items():
        problems += _split_problems(header, index=index, n_shards=n_shards)
    problems += _identity_problems(headers)
    problems += _duplicates(headers)
    problems += _total_problems(headers)
    return problems


def _split_problems(header: GGUFHeader, *, index: int, n_shards: int) -> list[str]:
    problems = []
    for key, expected in (("split.count", n_shards), ("split.no", index)):
        if n_shards == 1 and key not in header.metadata:
            continue
        found = integral(header.metadata.get(key))
        if found == expected:
            continue
        shown = "absent" if key not in header.metadata else repr(header.metadata[key])
        fact = f"{header.path.name}: {key} is {shown}, but this is shard {index} of {n_shards}"
        if n_shards == 1:
            fact += " by its name: shards must keep names like PREFIX-00001-of-00003.gguf"
        else:
            fact += ", counted from 0"
        problems.append(fact)
    return problems


def _identity_problems(headers: Mapping[int, GGUFHeader]) -> list[str]:
    problems = []
    for key in _IDENTITY_KEYS:
        having = [header for header in headers.values() if key in header.metadata]
        for header in having[1:]:
            found, first = header.metadata[key], having[0].metadata[key]
            if found != first:
                problems.append(
                    f"{header.path.name} is of another model: {key} is {found!r}, in "
                    f"{having[0].path.name} it is {first!r}"
                )
    return problems


def _duplicates(headers: Mapping[int, GGUFHeader]) -> list[str]:
    # A shard that is there twice has all its tensors twice: a few names tell as much as all.
    problems: list[str] = []
    n_more = 0
    owners: dict[str, str] = {}
    for header in headers.values():
        for info in header.tensors:
            owner = owners.setdefault(info.name, header.path.name)
            if owner == header.path.name:
                continue
            if len(problems) < N_DUPLICATES_NAMED:
                problems.append(f"tensor {info.name!r} is in {owner} and in {header.path.name}")
            else:
                n_more += 1
    if n_more:
        problems.append(f"{n_more} more tensors are there twice")
    return problems


def _total_problems(headers: Mapping[int, GGUFHeader]) -> list[str]:
    # Shards of one splitting agree, however old the number is.
    claims = _claimed_totals(headers)
    if len(claims) <= 1:
        return []
    shown = ", ".join(f"{claim} in {name}" for claim, name in claims.items())
    return [f"shards disagree on split.tensors.count: {shown}"]


def _warn_of_total(path: Path, claims: Mapping[int | None, str], n_found: int) -> None:
    for claim in claims:  # one, or none: the shards agree
        if claim != n_found:
            logger.warning(
                "%s: split.tensors.count is %s, but there are %d tensors; going on with those. "
                "Should the model lack any, its files are incomplete: get them again",
                path,
                claim,
                n_found,
            )


def _claimed_totals(headers: Mapping[int, GGUFHeader]) -> dict[int | None, str]:
    """Every number of tensors that is claimed for the set, and the first file to claim it."""
    claims: dict[int | None, str] = {}
    for header in headers.values():
        if "split.tensors.count" in header.metadata:
            claim = integral(header.metadata["split.tensors.count"])
            claims.setdefault(claim, header.path.name)
    return claims
