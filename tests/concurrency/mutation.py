"""Putting a bug into running code: a small edit to the text of one or two functions.

An edit replaces a piece of a function's source, which must be there exactly once: when the code
moves on, its mutant says so instead of quietly testing nothing.
"""

import __future__

import inspect
import textwrap

import attrs


@attrs.frozen
class Edit:
    """In ``function``, ``old`` becomes ``new``."""

    function: object
    old: str
    new: str


@attrs.frozen
class Mutant:
    """A bug, in words, and how to make it."""

    bug: str
    edits: tuple[Edit, ...]

    def __str__(self):
        return self.bug

    def infect(self, monkeypatch):
        """Put the bug in; ``monkeypatch`` takes it out again."""
        for function in dict.fromkeys(edit.function for edit in self.edits):
            edits = [edit for edit in self.edits if edit.function is function]
            monkeypatch.setattr(function, "__code__", _mutated(function, edits))


def _mutated(function, edits):
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        found = source.count(edit.old)
        assert found == 1, (
            f"{function.__qualname__} has {edit.old!r} {found} times; mend the mutant"
        )
        source = source.replace(edit.old, edit.new)
    made = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(source, "<mutant>", "exec", flags=flags), function.__globals__, made)
    remade = made[function.__name__]
    return (remade.fget if isinstance(remade, property) else remade).__code__


def mutant(bug, function, old, new="pass", *more):
    """A mutant of one edit, or of several: ``more`` goes on with function, old, new."""
    rest = [Edit(*more[i : i + 3]) for i in range(0, len(more), 3)]
    return Mutant(bug, (Edit(function, old, new), *rest))
