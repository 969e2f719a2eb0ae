"""Reading numbers that callers pass: exact, of any library, and never a bare ``TypeError``.

A type check by ``isinstance(value, int)`` was rejected: it refuses the integers of numpy and torch,
and takes ``True`` for 1.
"""

from __future__ import annotations

import math
import operator
import reprlib
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def integer_from(value: object) -> int | None:
    """``value`` as an int if it is an integer of any library; None for a bool and all else."""
    plain: Any = plain_from(value)
    if isinstance(plain, bool):
        return None
    try:
        return operator.index(plain)
    except TypeError:
        return None


def number_from(value: object) -> float | None:
    """``value`` as a float if it is a finite real number; None for a bool and all else."""
    plain = plain_from(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        return None
    try:
        number = float(plain)
    except OverflowError:  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def plain_from(value: object) -> object:
    """Scalars and arrays of numpy, torch and their like as Python's own; all else as it is."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def setting_problems(settings: Iterable[tuple[str, object, str, bool]]) -> list[str]:
    """One line for each (name, value, rule, whether it holds) whose rule does not hold."""
    return [
        f"{name} is {brief(value)}, it must be {rule}"
        for name, value, rule, ok in settings
        if not ok
    ]


def brief(value: object) -> str:
    """``value`` for a message: one line, shortened."""
    return " ".join(reprlib.repr(plain_from(value)).split())
