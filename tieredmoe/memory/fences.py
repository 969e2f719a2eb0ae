"""Fences that need no device: the one that has passed, and several that count as one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.memory.protocol import Fence


class PassedFence:
    """A fence with nothing before it: it has always passed."""

    __slots__ = ()

    def passed(self) -> bool:
        """Return True."""
        return True

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at once."""
        callback()

    def wait_on(self, stream: object) -> None:
        """Order nothing: there is no work to wait for."""

    def covers(self, other: Fence) -> bool:
        """Whether ``other`` has nothing before it either."""
        return other is self


PASSED = PassedFence()


class JoinedFence:
    """Passes when the last of ``parts`` has: several holders read one slot, each on its stream."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Fence, ...]) -> None:
        self.parts = parts

    def passed(self) -> bool:
        """Whether all work before every part has ended. Never blocks."""
        return all(part.passed() for part in self.parts)

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the owner's loop once all parts have passed; at once if they have.

        It waits for one part after the other.
        """
        for part in self.parts:
            if not part.passed():
                part.on_passed(partial(self.on_passed, callback))
                return
        callback()

    def wait_on(self, stream: object) -> None:
        """Order all later work of ``stream`` after every part."""
        for part in self.parts:
            part.wait_on(stream)

    def covers(self, other: Fence) -> bool:
        """Whether one of the parts covers ``other``."""
        return any(part.covers(other) for part in self.parts)


def joined(earlier: Fence, later: Fence) -> Fence:
    """A fence that passes when both have; of one stream's, only the last is kept.

    So however often a slot is read, its fence has as many parts as there are streams at most.
    """
    if later.covers(earlier):
        return later
    if earlier.covers(later):
        return earlier
    parts = earlier.parts if isinstance(earlier, JoinedFence) else (earlier,)
    left = tuple(part for part in parts if not part.passed() and not later.covers(part))
    return JoinedFence((*left, later)) if left else later
