"""Header and index of a foreign pack as arrays, compared with what they must be.

Both formats are regular: from the source's types and shapes follows where every slab lies. So an
index is not interpreted but compared, field by field, with the one its format prescribes for this
source; an entry that is missing, doubled, moved, overlapping or of another tensor differs from it.
What is kept afterwards is a few numbers per layer. Rejected: a table of entries, which takes a
second and 100 MB as Python objects for the 247,296 of Kimi, and must be searched for overlaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from tieredmoe.errors import PackError
from tieredmoe.gguf.files import read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tieredmoe.gguf import ExpertTensors
    from tieredmoe.pack.foreign.places import RecordPlaces

ROLES_PER_EXPERT = 3


@attrs.frozen
class PackFile:
    """An open file and its size."""

    path: Path
    fd: int
    nbytes: int

    def structs(self, dtype: np.dtype[np.void], *, offset: int, count: int) -> NDArray[np.void]:
        """``count`` structures from ``offset`` on; ``PackError`` if the file ends before."""
        nbytes = dtype.itemsize * count
        if offset + nbytes > self.nbytes:
            raise PackError(
                self.path,
                f"is cut short: its index goes to byte {offset + nbytes:,} of {self.nbytes:,}",
            )
        data = np.empty(nbytes, np.uint8)
        read_exactly(self.fd, data.data, offset=offset, path=self.path)
        return data.view(dtype)

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset`` on; ``GGUFError`` if they cannot be read."""
        data = bytearray(nbytes)
        read_exactly(self.fd, memoryview(data), offset=offset, path=self.path)
        return bytes(data)


@attrs.frozen(eq=False)
class ForeignIndex:
    """What a pack's header and index say, checked against its source.

    ``sha256`` has, per layer, the digest of each expert's gate, up and down: (experts, 3, 32)
    bytes; None if the format has none. ``manifest`` is what a manifest of the pack must say, by the
    paths of its fields.
    """

    places: Mapping[int, RecordPlaces]
    sha256: Mapping[int, NDArray[np.uint8]] | None
    manifest: Mapping[str, object]


@attrs.frozen
class ForeignFormat:
    """A format: its files begin with ``magic``; ``read_index`` raises ``PackError``.

    ``source_field`` is where a manifest names the source.
    """

    name: str
    magic: bytes
    source_field: str
    read_index: Callable[[PackFile, ExpertTensors], ForeignIndex]


def require_header(path: Path, header: np.void, expected: Mapping[str, int | bytes]) -> None:
    """Raise one ``PackError`` naming every field of ``header`` that is not as ``expected``."""
    wrong = [
        f"{name} is {shown(header[name])}, not {shown(value)}"
        for name, value in expected.items()
        if header[name] != value
    ]
    if wrong:
        raise PackError(path, f"cannot be read as this model's pack: {', '.join(wrong)}")


def require_data_start(file: PackFile, data_start: int, *, index_end: int, alignment: int) -> None:
    """Raise ``PackError`` unless records can start there, behind the index and in the file."""
    if not index_end <= data_start <= file.nbytes or data_start % alignment:
        raise PackError(
            file.path,
            f"has data_start {data_start}, which is in its index, past its end or not a multiple "
            f"of {alignment}",
        )


def require_entries(
    path: Path,
    entries: NDArray[np.void],
    expected: Mapping[str, NDArray[Any] | bytes | int],
    *,
    first: int,
) -> None:
    """Raise ``PackError`` naming the first entry with a field that is not as ``expected``.

    ``expected`` has one value per entry, or one for all. ``first`` is the number of entry 0.
    """
    for name, values in expected.items():
        found = entries[name]
        differ = found != values
        wrong = np.flatnonzero(differ.any(axis=1) if differ.ndim > 1 else differ)
        if len(wrong):
            at = int(wrong[0])
            right = np.broadcast_to(np.asarray(values), found.shape)[at]
            raise PackError(
                path,
                f"index entry {first + at} does not fit the source: {name} is "
                f"{shown(found[at])}, not {shown(right)}",
            )


def shown(value: Any) -> str:
    """A field's value for a message: text as text, numbers as numbers."""
    plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    return repr(plain.decode("ascii", "backslashreplace") if isinstance(plain, bytes) else plain)
