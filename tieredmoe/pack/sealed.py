"""A JSON document whose first line is the digest of all that follows, as ``manifest.json`` is.

A document that is read is the one that was written, whatever happened to the file since; what is
left to check field by field is what somebody wrote on purpose.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tieredmoe.errors import PackError
from tieredmoe.pack.fields import Field
from tieredmoe.pack.manifest import digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FIRST_LINE = re.compile(rb'\{"digest": "([0-9a-f]{32})",\n')


def seal(document: Mapping[str, Any]) -> bytes:
    """The file of a document; the same document always gives the same bytes."""
    body = json.dumps(document, indent=1).removeprefix("{\n").encode("ascii") + b"\n"
    return b'{"digest": "' + digest_of(body).hex().encode("ascii") + b'",\n' + body


def stated_digest(data: bytes) -> bytes | None:
    """The digest in the first line of ``data``, which names the document; None if it has none."""
    first_line = _FIRST_LINE.match(data)
    return bytes.fromhex(first_line[1].decode("ascii")) if first_line else None


def unseal(data: bytes, path: Path, *, name: str, version: int) -> Field:
    """The document of format ``name`` in ``data``, undamaged and of a version that is known.

    Raises ``PackError``, which calls the file ``path``.
    """
    stated = stated_digest(data)
    if stated is None:
        raise PackError(path, f"is no {name} document, or its first line is damaged")
    if digest_of(memoryview(data)[data.index(b"\n") + 1 :]) != stated:
        raise PackError(
            path, "is damaged or was edited: it does not match the digest in its first line"
        )
    try:
        top = Field(path, "", json.loads(data))
    except (ValueError, RecursionError) as error:
        raise PackError(path, f"is not JSON: {error}") from error
    document = top.value
    if not isinstance(document, dict) or document.get("format") != name:
        top.fail(f'must be an object with "format": "{name}"')
    found = Field(path, "version", document.get("version")).integer(minimum=1)
    if found != version:
        raise PackError(
            path,
            f"is a {name} document of format version {found}, and this tieredmoe reads version "
            f"{version}; install a newer tieredmoe",
        )
    return top
