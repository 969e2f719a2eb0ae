"""The JSON manifest that SGLang writes for a pack: optional, and believed where it agrees.

All that is needed stands in the pack and its source. A manifest adds the digest of the index and
the path of the source, so these and the fields that describe the pack's layout are compared, and
anything else in it is passed over: it records a build, and SGLang's tools add to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.errors import PackError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.fields import Field
from tieredmoe.pack.reader import as_pack_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

NBYTES_MAX = 64 << 20
"""A longer manifest is refused unread; SGLang's have one or two megabytes."""


def read_sidecar(path: Path) -> Field:
    """The manifest at ``path``, parsed and no more; ``PackError`` if it cannot be."""
    with as_pack_errors(), opened(path) as (fd, status):
        if status.st_size > NBYTES_MAX:
            raise PackError(path, f"has {status.st_size:,} bytes, too many for a manifest")
        data = bytearray(status.st_size)
        read_exactly(fd, memoryview(data), offset=0, path=path)
    try:
        return Field(path, "", json.loads(data))
    except (ValueError, RecursionError) as error:
        raise PackError(path, f"is not a manifest: {error}") from error


def check_sidecar(sidecar: Field, expected: Mapping[str, object]) -> None:
    """Raise ``PackError`` naming the first field that is missing or not as ``expected``."""
    for name, value in expected.items():
        field = _at(sidecar, name)
        if type(field.value) is not type(value) or field.value != value:
            field.fail(f"is {field.value!r:.100}, and the pack has {value!r}")


def source_path(sidecar: Field, name: str) -> Path:
    """The path in field ``name``; ``PackError`` if there is none."""
    return Path(_at(sidecar, name).text())


def _at(sidecar: Field, name: str) -> Field:
    """The field ``name``: members and, as numbers, items, separated by dots."""
    field = sidecar
    for step in name.split("."):
        value = field.value
        inner = f"{field.name}.{step}".removeprefix(".")
        if isinstance(value, dict) and step in value:
            field = Field(field.path, inner, value[step])
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            field = Field(field.path, inner, value[int(step)])
        else:
            Field(field.path, inner, None).fail("is missing")
    return field
