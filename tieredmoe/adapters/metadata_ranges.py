"""Numbers that no model has: nothing is built or computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

SIZE_MAX = 2**31 - 1
"""A larger integer is no size of a model."""

FLOAT_MIN, FLOAT_MAX = 1e-30, 1e30
"""Constants beyond these become zero or infinite in float32 arithmetic."""


def number_problems(
    parts: Iterable[Any],
    keys: Mapping[str, str],
    fault: Callable[[str, float], str | None],
    *,
    architecture: str,
) -> Iterator[str]:
    """A line for each number of a configuration's ``parts`` (attrs objects) that has a fault.

    ``keys`` maps the names of the fields that count to their metadata keys; ``fault`` takes a
    field's name and value and says what it should be and is not.
    """
    for part in parts:
        for field in attrs.fields(type(part)):
            value = getattr(part, field.name)
            if field.name in keys and isinstance(value, int | float):
                fact = fault(field.name, value)
                if fact is not None:
                    yield f"{architecture}.{keys[field.name]} is {value}, not {fact}"


def size_fault(value: int, *, least: int = 1, most: int = SIZE_MAX) -> str | None:
    """What a size should be and is not, None for nothing."""
    if least <= value <= most:
        return None
    return f"{least} to {most}" if least != 1 else f"positive and at most {most}"


def constant_fault(value: float) -> str | None:
    """What a positive constant should be and is not, None for nothing."""
    return None if FLOAT_MIN <= value <= FLOAT_MAX else f"{FLOAT_MIN} to {FLOAT_MAX}"
