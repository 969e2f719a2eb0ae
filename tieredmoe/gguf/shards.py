"""Which files make up one model: llama.cpp's names for split files, seen from any one of them.

A set is ``PREFIX-00001-of-00038.gguf`` to ``PREFIX-00038-of-00038.gguf``. The numbers in names
count from 1, ``split.no`` inside the files from 0. Names decide which files are looked for, the
headers then have to agree. Symbolic links are not resolved: download caches keep these names on
links only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.errors import GGUFError

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class ShardName(NamedTuple):
    """The parts of a shard's file name; ``number`` counts from 1."""

    prefix: str
    number: int
    n_shards: int


def parse_shard_name(name: str) -> ShardName | None:
    """The parts of ``name`` if it is a shard's, else None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return ShardName(match["prefix"], int(match["number"]), int(match["count"]))


def shard_paths(path: Path) -> tuple[Path, ...]:
    """Every file of the model that ``path`` (a file, any shard, a directory) belongs to, in order.

    Of a set, all names are given whether they exist or not. Raises ``GGUFError`` for a path that is
    not there and for a directory that does not hold exactly one model.
    """
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise GGUFError(path, f"cannot be opened: {error.strerror}") from error
    if is_directory:
        return _directory_paths(path)
    name = parse_shard_name(path.name)
    if name is None:
        return (path,)
    if not 1 <= name.number <= name.n_shards:
        raise GGUFError(path, f"is named shard {name.number} of {name.n_shards}")
    return _set_paths(path.parent, name.prefix, name.n_shards)


def _set_paths(directory: Path, prefix: str, n_shards: int) -> tuple[Path, ...]:
    return tuple(
        directory / f"{prefix}-{i:05d}-of-{n_shards:05d}.gguf" for i in range(1, n_shards + 1)
    )


def _directory_paths(directory: Path) -> tuple[Path, ...]:
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.suffix == ".gguf")
    except OSError as error:
        raise GGUFError(directory, f"cannot be listed: {error.strerror}") from error
    models: dict[tuple[str, int], list[str]] = {}
    for name in names:
        shard = parse_shard_name(name)
        model = (name, 0) if shard is None else (shard.prefix, shard.n_shards)
        models.setdefault(model, []).append(name)
    if not models:
        raise GGUFError(directory, "is a directory without any .gguf file")
    if len(models) > 1:
        shown = ", ".join(
            f"{files[0]} ({len(files)} of {n_shards} shards)" if n_shards else files[0]
            for (_, n_shards), files in models.items()
        )
        raise GGUFError(directory, f"holds {len(models)} models, name one of them: {shown}")
    return shard_paths(directory / names[0])
