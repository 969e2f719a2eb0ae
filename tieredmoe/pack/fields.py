"""Typed access to parsed JSON: every wrong field ends in one ``PackError`` that names it.

A manifest may be damaged, hand-edited or hostile, so each value is taken through a method that
states its type and bounds. Rejected: a schema or structuring library (a dependency for forty lines,
and its errors would not name the file).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import attrs

from tieredmoe.errors import PackError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INT_MAX = 2**63 - 1
"""File offsets are signed 64-bit; nothing in a manifest may be larger."""


@attrs.frozen
class Field:
    """One JSON value with its place in the document, for messages."""

    path: Path
    name: str
    value: object

    def fail(self, fact: str) -> NoReturn:
        """Raise the ``PackError`` of this field."""
        raise PackError(self.path, f"manifest field {self.name or 'at the top'} {fact}")

    def members(self, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Field]:
        """The members of an object that has all of ``required`` and nothing unknown."""
        value = self.value
        if not isinstance(value, dict):
            self.fail("must be an object")
        if missing := [name for name in required if name not in value]:
            self.fail(f"lacks {', '.join(missing)}")
        if unknown := sorted(value.keys() - {*required, *optional}):
            self.fail(f"has unknown members: {', '.join(map(repr, unknown))}")
        prefix = f"{self.name}." if self.name else ""
        return {name: Field(self.path, prefix + name, member) for name, member in value.items()}

    def items(self) -> Iterator[Field]:
        """The items of a non-empty array."""
        if not isinstance(self.value, list) or not self.value:
            self.fail("must be a non-empty array")
        return (Field(self.path, f"{self.name}[{i}]", item) for i, item in enumerate(self.value))

    def integer(self, *, minimum: int = 0, maximum: int = INT_MAX) -> int:
        """An integer within bounds, both included."""
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail("must be an integer")
        if not minimum <= value <= maximum:
            self.fail(f"must be from {minimum} to {maximum}, not {value}")
        return value

    def text(self) -> str:
        """A non-empty string."""
        if not isinstance(self.value, str) or not self.value:
            self.fail("must be a non-empty string")
        return self.value

    def file_name(self) -> str:
        """A plain file name: it cannot lead out of its directory."""
        name = self.text()
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            self.fail(f"must be a file name that this system can write, not {name!r}")
        if name in {".", ".."} or "/" in name or "\0" in name:
            self.fail(f"must be a plain file name, not {name!r}")
        return name

    def hex_bytes(self, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes, written as lower-case hexadecimal digits."""
        text = self.text()
        if len(text) != 2 * nbytes or set(text) - set("0123456789abcdef"):
            self.fail(f"must be {2 * nbytes} lower-case hexadecimal digits")
        return bytes.fromhex(text)
