"""Arenas, slots and fences: memory as the tiers see it.

An arena is one allocation made at open and cut into equal slots. A slot carries two fences:
``ready`` (readers wait for it) and ``idle`` (the next writer waits for it). On host memory both
have always passed; on a device they are events, and the same code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.spec import ExpertKey


class Part(NamedTuple):
    """A run of bytes to copy from one slot to another: both offsets count from the slot's start."""

    source_offset: int
    target_offset: int
    nbytes: int


class Fence(Protocol):
    """A point in the order of work on a device."""

    def passed(self) -> bool:
        """Whether all work before the fence has ended. Never blocks."""

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the owner's loop once the fence has passed; at once if it has."""

    def wait_on(self, stream: object) -> None:
        """Order all later work of ``stream`` after this fence. Never blocks the host."""

    def covers(self, other: Fence) -> bool:
        """Whether it is certain that ``other`` has passed once this one has."""


class Slot(Protocol):
    """One record-sized place in an arena."""

    slot_index: int
    nbytes: int
    ready: Fence
    idle: Fence

    @property
    def arena(self) -> Arena:
        """The arena this slot is a part of; it alone can copy into the slot."""


class HostSlot(Slot, Protocol):
    """A slot that the host can address: what disk reads are aimed at."""

    view: memoryview
    address: int


class Arena(Protocol):
    """Fixed slots in one kind of memory."""

    @property
    def n_slots(self) -> int:
        """How many slots there are, those without memory included."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of each slot, a multiple of 4096."""

    def slot(self, slot_index: int) -> Slot:
        """The slot of that number; always the same object."""

    def copy_from(self, key: ExpertKey, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Enqueue a copy of ``parts`` of ``source`` (a host slot) into ``target`` (ours).

        They are the bytes of ``key``, which nobody uses in another slot of ours. The copy is
        ordered after ``source.ready`` and after ``target.idle`` as it is now, of which nothing is
        left; ``target.ready`` is set to the returned fence. ``source`` must not be rewritten before
        that fence has passed.
        """

    @property
    def copies_out(self) -> bool:
        """Whether ``copy_out`` can be had without the host waiting for it."""

    def copy_out(self, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Enqueue a copy of ``parts`` of our ``source`` into ``target``, a host slot of another.

        The copy is ordered after ``source.ready``, and ``source.idle`` waits for it; ``target``,
        which nobody else uses, must not be rewritten before the returned fence, which is also
        ``target.ready``, has passed. Copies out run beside copies in.
        """

    def fence(self, stream: object) -> Fence:
        """A fence after all that has been enqueued on a device's ``stream``; in any thread.

        Never raises: what would run after a broken device has passed.
        """

    def resize(self, n_slots: int) -> None:
        """Keep memory for the first ``n_slots`` slots (at least 1), and give back the others'.

        Nobody uses those others, and nothing on a device reads them; growing back, they have
        undefined bytes. Raises ``BudgetError``, with nothing changed, if memory for more is short;
        giving back does not fail.
        """

    def close(self) -> None:
        """Release the memory. The caller has drained all I/O and copies before."""
