"""Reads the fields of a GGUF header one after another, and refuses what a sound file cannot hold.

Every length and count of the file is checked against the bytes that are left *before* anything is
allocated or looped over, so a damaged header costs no more than its own size. Bytes come in on
demand, in growing pieces that are appended and never read twice: the walk is linear, and the tensor
data behind the header is not touched.

The package's own reader keeps an array view per string (9 s and 560 MB for a vocabulary of 163,840
tokens), hence this one.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np
from gguf.constants import GGUFValueType

from tieredmoe.errors import GGUFError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HEADER_NBYTES_MAX = 128 << 20
"""A longer header is refused as damaged; the largest real vocabularies need about 20 MB."""

ARRAY_DEPTH_MAX = 4
"""Arrays of arrays deeper than this are refused; llama.cpp itself writes none."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_DTYPES: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {
        int(value_type): np.dtype(code)
        for value_type, code in {
            GGUFValueType.UINT8: "<u1",
            GGUFValueType.INT8: "<i1",
            GGUFValueType.UINT16: "<u2",
            GGUFValueType.INT16: "<i2",
            GGUFValueType.UINT32: "<u4",
            GGUFValueType.INT32: "<i4",
            GGUFValueType.FLOAT32: "<f4",
            GGUFValueType.BOOL: "<u1",
            GGUFValueType.UINT64: "<u8",
            GGUFValueType.INT64: "<i8",
            GGUFValueType.FLOAT64: "<f8",
        }.items()
    }
)

# The fewest bytes an element of an array can take: a string's length, an array's type and length.
_ELEMENT_NBYTES_MIN: Mapping[int, int] = MappingProxyType(
    {
        **{value_type: dtype.itemsize for value_type, dtype in _DTYPES.items()},
        int(GGUFValueType.STRING): 8,
        int(GGUFValueType.ARRAY): 12,
    }
)


class Cursor:
    """A position in the first bytes of a GGUF file; each method reads one field and moves past it.

    ``buffer`` holds the head of the file. ``extend(n)`` grows it to at least ``n`` bytes; without
    it, ``buffer`` is all there is. Raises only ``GGUFError``.
    """

    __slots__ = ("_buffer", "_extend", "file_nbytes", "path", "position")

    def __init__(
        self,
        path: Path,
        buffer: bytes | bytearray | memoryview,
        *,
        file_nbytes: int,
        extend: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.file_nbytes = file_nbytes
        self.position = 0
        self._buffer = buffer
        self._extend = extend

    def take(self, nbytes: int, what: str) -> bytes | bytearray | memoryview:
        """The next ``nbytes`` bytes."""
        end = self._need(nbytes, what)
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        end = self._need(4, what)
        value = _U32.unpack_from(self._buffer, self.position)[0]
        self.position = end
        return cast("int", value)

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        end = self._need(8, what)
        value = _U64.unpack_from(self._buffer, self.position)[0]
        self.position = end
        return cast("int", value)

    def count(self, what: str, *, item_nbytes_min: int) -> int:
        """A 64-bit count of items that follow, each of at least ``item_nbytes_min`` bytes."""
        n_items = self.u64(what)
        left = self.file_nbytes - self.position
        if n_items * item_nbytes_min > left:
            raise GGUFError(
                self.path,
                f"{what} is {n_items}, but only {left} bytes follow: truncated or damaged",
            )
        self._check_limit(self.position + n_items * item_nbytes_min, what)
        return n_items

    def string(self, what: str) -> str:
        """A string; one that is not UTF-8 is refused."""
        start = self._need(8, what)
        nbytes = _U64.unpack_from(self._buffer, self.position)[0]
        self.position = start
        end = self._need(nbytes, what)
        self.position = end
        try:
            return str(self._buffer[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(self.path, f"{what} at byte {start} is not UTF-8") from error

    def value(self, what: str) -> object:
        """A type number and a value of that type, as plain Python."""
        return self._typed_value(self.u32(f"type of {what}"), what, depth=0)

    def _typed_value(self, value_type: int, what: str, *, depth: int) -> object:
        if value_type == GGUFValueType.STRING:
            return self.string(what)
        if value_type == GGUFValueType.ARRAY:
            return self._array(what, depth=depth + 1)
        if value_type not in _DTYPES:
            raise GGUFError(self.path, f"{what} has the unknown value type {value_type}")
        return self._numbers(value_type, 1, what)[0]

    def _array(self, what: str, *, depth: int) -> list[object]:
        if depth > ARRAY_DEPTH_MAX:
            raise GGUFError(self.path, f"{what} nests arrays deeper than {ARRAY_DEPTH_MAX}")
        value_type = self.u32(f"element type of {what}")
        if value_type not in _ELEMENT_NBYTES_MIN:
            raise GGUFError(self.path, f"{what} has the unknown element type {value_type}")
        n_items = self.count(f"length of {what}", item_nbytes_min=_ELEMENT_NBYTES_MIN[value_type])
        if value_type in _DTYPES:
            return self._numbers(value_type, n_items, what)
        if value_type == GGUFValueType.STRING:
            return [self.string(what) for _ in range(n_items)]
        return [self._array(what, depth=depth + 1) for _ in range(n_items)]

    def _numbers(self, value_type: int, n_items: int, what: str) -> list[object]:
        dtype = _DTYPES[value_type]
        taken = self.take(n_items * dtype.itemsize, what)
        numbers = np.frombuffer(taken, dtype=dtype)
        if value_type == GGUFValueType.BOOL:
            numbers = numbers != 0
        return cast("list[object]", numbers.tolist())

    def _need(self, nbytes: int, what: str) -> int:
        """The position after ``nbytes`` more, with the buffer filled up to there."""
        end = self.position + nbytes
        if end > len(self._buffer):
            self._grow(end, what)
        return end

    def _grow(self, end: int, what: str) -> None:
        if end > self.file_nbytes:
            raise GGUFError(
                self.path,
                f"truncated header: {what} at byte {self.position} needs "
                f"{end - self.position} bytes, but the file ends at byte {self.file_nbytes}",
            )
        self._check_limit(end, what)
        if self._extend is None:
            raise GGUFError(
                self.path,
                f"truncated header: {what} at byte {self.position} needs "
                f"{end - self.position} bytes, but only {len(self._buffer)} bytes were given",
            )
        self._extend(end)

    def _check_limit(self, end: int, what: str) -> None:
        if end > HEADER_NBYTES_MAX:
            raise GGUFError(
                self.path,
                f"{what} would make a header of more than {HEADER_NBYTES_MAX >> 20} MiB: damaged",
            )
