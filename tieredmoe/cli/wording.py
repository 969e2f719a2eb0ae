"""Numbers in sentences."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """``n`` of a thing whose plural is regular: ``1 file``, ``1,472 experts``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
