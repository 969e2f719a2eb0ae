"""Model metadata: the raw values, and a tolerant typed view that reports every problem at once.

Files of one architecture differ in how they spell the same fact: other integer widths, a scalar as
an array of one or of one per layer, a per-layer array as a scalar, a flag as a number, an older
name of a key. The view accepts all of those when they mean one thing, and guesses nothing.

Raising at the first missing key was rejected: who converts a file wants the whole list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import attrs

from tieredmoe.errors import MetadataError

if TYPE_CHECKING:
    from pathlib import Path

_LITERAL_NAMESPACES = ("general.", "tokenizer.", "split.")
"""Keys of these namespaces are the same for every architecture, so readers never prefix them."""

LAYER_MAX = 1024
"""More layers than any model has: readers build lists of this length from one number of a file."""

T = TypeVar("T")
V = TypeVar("V")


class _Default(Enum):
    REQUIRED = "no default: the key must be there"


@attrs.frozen
class _Kind(Generic[T]):
    """A type of value: its name for one and for many, the tolerant conversion, a harmless value."""

    one: str
    many: str
    convert: Callable[[object], T | None]
    harmless: T


class Metadata(Mapping[str, object]):
    """A model's raw key-value metadata, read-only; arrays are lists.

    ``path`` names the file in error messages, where there is one.
    """

    __slots__ = ("_values", "path")

    def __init__(self, values: Mapping[str, object], *, path: Path | str | None = None) -> None:
        self._values = dict(values)
        self.path = path

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys of {self.path or 'no file'})"

    @property
    def architecture(self) -> str:
        """``general.architecture``; ``MetadataError`` if it is missing or not a string."""
        reader = MetadataReader(self, "general")
        architecture = reader.text("general.architecture")
        reader.finish()
        return architecture


class MetadataReader:
    """Typed access to metadata; call ``finish()`` after the last read to hear of every problem.

    A name such as ``"block_count"`` or ``"attention.head_count"`` means the key under ``prefix``
    (usually the architecture); one in the namespaces ``general.``, ``tokenizer.`` and ``split.`` is
    a whole key. Each method takes a name and its aliases; the first one present counts.

    An absent key gives ``default``. Without one, or when the value is of another type, the problem
    is recorded and a harmless value (1, "", false) returned, so that the caller can read on.
    """

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._missing: list[str] = []
        self._ill_typed: list[str] = []

    def key(self, name: str) -> str:
        """The whole key that ``name`` stands for."""
        return name if name.startswith(_LITERAL_NAMESPACES) else f"{self._prefix}.{name}"

    def finish(self) -> None:
        """Raise one ``MetadataError`` that lists all missing and all ill-typed keys met so far."""
        problems = []
        if self._missing:
            problems.append("missing metadata keys: " + ", ".join(self._missing))
        if self._ill_typed:
            problems.append("metadata of another type: " + ", ".join(self._ill_typed))
        if problems:
            where = "" if self._metadata.path is None else f"{self._metadata.path}: "
            raise MetadataError(where + "; ".join(problems))

    @overload
    def integer(self, *names: str) -> int: ...
    @overload
    def integer(self, *names: str, default: V) -> int | V: ...
    def integer(self, *names: str, default: object = _Default.REQUIRED) -> object:
        """An integer of any width, signed or not."""
        return self._read(names, default, _INTEGER)

    def layer_count(self, *, n_tensors: int) -> int:
        """``block_count``, safe to build lists of: at most ``LAYER_MAX`` and ``n_tensors``.

        Every layer has a tensor, so a file that claims more layers than tensors is wrong.
        """
        most = min(LAYER_MAX, n_tensors)

        def convert(value: object) -> int | None:
            count = integral(value)
            return count if count is not None and 1 <= count <= most else None

        wanted = f"a count of 1 to {most} layers"
        count = self._read(("block_count",), _Default.REQUIRED, _Kind(wanted, wanted, convert, 1))
        assert isinstance(count, int), "converted, or harmless"
        return count

    @overload
    def number(self, *names: str) -> float: ...
    @overload
    def number(self, *names: str, default: V) -> float | V: ...
    def number(self, *names: str, default: object = _Default.REQUIRED) -> object:
        """A finite float; integers count, NaN and the infinities do not."""
        return self._read(names, default, _NUMBER)

    @overload
    def flag(self, *names: str) -> bool: ...
    @overload
    def flag(self, *names: str, default: V) -> bool | V: ...
    def flag(self, *names: str, default: object = _Default.REQUIRED) -> object:
        """A bool; the numbers 0 and 1 count."""
        return self._read(names, default, _FLAG)

    @overload
    def text(self, *names: str) -> str: ...
    @overload
    def text(self, *names: str, default: V) -> str | V: ...
    def text(self, *names: str, default: object = _Default.REQUIRED) -> object:
        """A string."""
        return self._read(names, default, _TEXT)

    @overload
    def integers(self, *names: str, length: int | None = None) -> tuple[int, ...]: ...
    @overload
    def integers(
        self, *names: str, length: int | None = None, default: V
    ) -> tuple[int, ...] | V: ...
    def integers(
        self, *names: str, length: int | None = None, default: object = _Default.REQUIRED
    ) -> object:
        """Integers. ``length`` is how many the caller needs.

        A scalar then stands for that many, a longer array is cut (files carry entries for MTP
        layers behind those of the model's own), a shorter one is a problem.
        """
        return self._read_all(names, default, _INTEGER, length)

    @overload
    def numbers(self, *names: str, length: int | None = None) -> tuple[float, ...]: ...
    @overload
    def numbers(
        self, *names: str, length: int | None = None, default: V
    ) -> tuple[float, ...] | V: ...
    def numbers(
        self, *names: str, length: int | None = None, default: object = _Default.REQUIRED
    ) -> object:
        """Finite floats; ``length`` as for ``integers``."""
        return self._read_all(names, default, _NUMBER, length)

    @overload
    def strings(self, *names: str, length: int | None = None) -> tuple[str, ...]: ...
    @overload
    def strings(
        self, *names: str, length: int | None = None, default: V
    ) -> tuple[str, ...] | V: ...
    def strings(
        self, *names: str, length: int | None = None, default: object = _Default.REQUIRED
    ) -> object:
        """Strings; ``length`` as for ``integers``."""
        return self._read_all(names, default, _TEXT, length)

    def _read(self, names: tuple[str, ...], default: object, kind: _Kind[T]) -> object:
        keys = [self.key(name) for name in names]
        for key in keys:
            if key in self._metadata:
                value = kind.convert(self._metadata[key])
                if value is not None:
                    return value
                found = _described(self._metadata[key])
                self._ill_typed.append(f"{key} is {found}, not {kind.one}")
                return kind.harmless
        if default is _Default.REQUIRED:
            self._missing.append(" or ".join(keys))
            return kind.harmless
        return default

    def _read_all(
        self, names: tuple[str, ...], default: object, kind: _Kind[T], length: int | None
    ) -> object:
        def convert(value: object) -> tuple[T, ...] | None:
            items = value if isinstance(value, list) else [value] * (length or 1)
            converted = [kind.convert(item) for item in items if not isinstance(item, list)]
            kept = tuple(item for item in converted if item is not None)
            if len(kept) < len(items) or (length is not None and len(items) < length):
                return None
            return kept[:length]

        wanted = kind.many if length is None else f"{length} {kind.many}"
        harmless = (kind.harmless,) * (length or 0)
        return self._read(names, default, _Kind(wanted, wanted, convert, harmless))


def integral(value: object) -> int | None:
    """The one integer that ``value`` means (int, bool, integral float, or equal ones), or None."""
    item = _only(value)
    if isinstance(item, int):
        return int(item)
    if isinstance(item, float) and item.is_integer():
        return int(item)
    return None


def _real(value: object) -> float | None:
    item = _only(value)
    if not isinstance(item, int | float):
        return None
    try:
        number = float(item)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _boolean(value: object) -> bool | None:
    number = integral(value)
    return bool(number) if number in (0, 1) else None


def _string(value: object) -> str | None:
    item = _only(value)
    return item if isinstance(item, str) else None


def _only(value: object) -> object:
    """A scalar as it is; the element of an array whose elements are all equal; else the array."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


_INTEGER = _Kind("an integer", "integers", integral, 1)
_NUMBER = _Kind("a finite number", "finite numbers", _real, 1.0)
_FLAG = _Kind("a flag", "flags", _boolean, False)
_TEXT = _Kind("a string", "strings", _string, "")


def _described(value: object) -> str:
    """A value in a few words: an array of 163,840 strings does not belong in a message."""
    if isinstance(value, list):
        kinds = sorted({type(item).__name__ for item in value})
        return f"an array of {len(value)} ({', '.join(kinds)})" if value else "an empty array"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}… ({len(shown)} characters)"
