"""What a check found: a fact, how bad it is, and what would change it."""

from __future__ import annotations

from enum import StrEnum

import attrs


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """It works, and could be better."""
    PROBLEM = "problem"
    """Something that was asked for will not work."""


@attrs.frozen
class Finding:
    """One line of a diagnosis. ``advice`` is what to do, if there is anything."""

    subject: str
    level: Level
    fact: str
    advice: str | None = None


def ok(subject: str, fact: str) -> Finding:
    """A finding that needs nothing done."""
    return Finding(subject, Level.OK, fact)


def note(subject: str, fact: str, advice: str | None = None) -> Finding:
    """A finding that costs speed or size, not function."""
    return Finding(subject, Level.NOTE, fact, advice)


def problem(subject: str, fact: str, advice: str | None = None) -> Finding:
    """A finding that keeps something from working."""
    return Finding(subject, Level.PROBLEM, fact, advice)
