"""Rows of text in columns, the same on a terminal and in a pipe: nothing is folded or padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


def in_columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> Iterator[str]:
    """One line per row; columns numbered in ``left`` are aligned so, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            f"{cell:<{width}}" if index in left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
