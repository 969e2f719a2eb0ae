"""A device's memory on virtual time: copies end later, and until then the bytes are wrong.

On host memory a copy is done when ``copy_from`` returns, so a tier that trusts a slot before its
``ready`` fence, or lets go of a source too soon, passes every test there. ``LateArena`` is the
opposite: a copy writes garbage when it starts, reads its source only at its very end, and writes
the right bytes as its fence passes. Copies run one after the other, as on a device's copy stream,
each after the ``idle`` fence of its target.

It records a violation (and raises) when a source is rewritten under a copy, when somebody else
writes into a target, and when the arena is closed while copies run. Copies back into host slots are
just as late, on a stream of their own.

Rejected: a random order of copies (one stream promises order, and an evicted slot relies on it).
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NoReturn, cast

import attrs

from tieredmoe.memory.fences import PASSED, joined
from tieredmoe.testing.stream import LateFence, SimStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.memory.protocol import Fence, HostSlot, Part, Slot
    from tieredmoe.spec import ExpertKey

_INVERTED = bytes(255 - i for i in range(256))


@attrs.define(eq=False)
class LateSlot:
    """One slot of a ``LateArena``. ``view`` is what a kernel would see, at any time."""

    arena: LateArena
    slot_index: int
    nbytes: int
    view: memoryview
    ready: Fence = PASSED
    idle: Fence = PASSED


@attrs.define(eq=False)
class LateCopy:
    """A copy from the moment it is enqueued until its fence passes."""

    source: LateSlot | HostSlot
    target: LateSlot | HostSlot
    parts: tuple[Part, ...]
    idle: Fence
    """What must have passed before the target is written."""
    fence: LateFence
    promised: list[bytes] | None
    """The bytes to copy; None until they are there, if another copy still brings them."""


class LateArena:
    """``n_slots`` slots whose copies take ``latency_s`` and then ``nbytes_per_s``, one by one.

    ``copies`` holds those into slots not ended, the one that runs first; ``copies_back`` those out
    of slots, which run beside them. Slots start out filled with ``poison``. Bound to the loop of
    its first copy.
    """

    copies_out = True

    def __init__(
        self,
        n_slots: int,
        slot_nbytes: int,
        *,
        latency_s: float = 50e-6,
        nbytes_per_s: float = 20e9,
        poison: int = 0xA5,
    ) -> None:
        assert n_slots > 0
        assert latency_s >= 0
        assert nbytes_per_s > 0
        self.slot_nbytes = slot_nbytes
        self.copies: deque[LateCopy] = deque()
        self.copies_back: deque[LateCopy] = deque()
        self.violations: list[str] = []
        self.closed = False
        self._latency_s = latency_s
        self._poison = poison
        self._nbytes_per_s = nbytes_per_s
        self._slots = tuple(
            LateSlot(self, i, slot_nbytes, memoryview(bytearray([poison]) * slot_nbytes))
            for i in range(n_slots)
        )

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def slot(self, slot_index: int) -> LateSlot:
        """The slot of that number; always the same object."""
        assert not self.closed, "slot of a closed arena"
        return self._slots[slot_index]

    def copy_from(
        self, key: ExpertKey, source: Slot, target: Slot, parts: Sequence[Part]
    ) -> LateFence:
        """Enqueue a copy of ``parts`` of the host slot ``source`` into our ``target``.

        Until the returned fence, which is also ``target.ready``, has passed, the target holds
        garbage and ``source`` must keep its bytes.
        """
        del key
        ours = self._slots[target.slot_index]
        assert ours is target, "copy into another arena's slot"
        # Host slots are what the protocol asks of every source.
        fence = self._enqueue(self.copies, cast("HostSlot", source), ours, parts)
        ours.idle = PASSED  # whoever reads what this copy brings waits for its own fence
        return fence

    def copy_out(self, source: Slot, target: Slot, parts: Sequence[Part]) -> LateFence:
        """Enqueue a copy of ``parts`` of our ``source`` into the host slot ``target``.

        Until the returned fence, which is also ``target.ready``, has passed, the target holds
        garbage, and ``source``, whose ``idle`` waits for it, must keep its bytes.
        """
        ours = self._slots[source.slot_index]
        assert ours is source, "copy out of another arena's slot"
        fence = self._enqueue(self.copies_back, ours, cast("HostSlot", target), parts)
        ours.idle = joined(ours.idle, fence)
        return fence

    def fence(self, stream: object) -> Fence:
        """A fence after all that a ``SimStream`` has been given; nothing else is ever behind."""
        return stream.fence() if isinstance(stream, SimStream) else PASSED

    def resize(self, n_slots: int) -> None:
        """Poison all slots from ``n_slots`` on; it is a violation if a copy or kernel uses one."""
        assert not self.closed, "resizing a closed arena"
        assert 0 < n_slots <= len(self._slots)
        for slot in self._slots[n_slots:]:
            if not (slot.ready.passed() and slot.idle.passed()):
                self._violated(f"slot {slot.slot_index} was given back while it was used")
            slot.view[:] = bytes([self._poison]) * slot.nbytes

    def close(self) -> None:
        """Release the memory; idempotent. It is a violation while copies run."""
        self.closed = True
        if n_running := len(self.copies) + len(self.copies_back):
            self._violated(f"closed with {n_running} copies running")
        for slot in self._slots:
            if not slot.idle.passed():
                self._violated(f"closed while slot {slot.slot_index} is read")

    def check(self) -> None:
        """Assert that nothing was violated so far."""
        assert not self.violations, "; ".join(self.violations)

    # ---- a copy's life

    def _enqueue(
        self,
        stream: deque[LateCopy],
        source: LateSlot | HostSlot,
        target: LateSlot | HostSlot,
        parts: Sequence[Part],
    ) -> LateFence:
        assert not self.closed, "copy of a closed arena"
        for part in parts:
            assert part.nbytes >= 0
            assert 0 <= part.source_offset <= source.nbytes - part.nbytes
            assert 0 <= part.target_offset <= target.nbytes - part.nbytes
        promised = _bytes_of(source, parts) if source.ready.passed() else None
        idle = joined(target.idle, source.ready)
        fence = target.ready = LateFence()
        stream.append(LateCopy(source, target, tuple(parts), idle, fence, promised))
        if len(stream) == 1:
            self._begin(stream)
        return fence

    def _begin(self, stream: deque[LateCopy]) -> None:
        stream[0].idle.on_passed(partial(self._run, stream))

    def _run(self, stream: deque[LateCopy]) -> None:
        copy = stream[0]
        if copy.promised is None:
            copy.promised = _bytes_of(copy.source, copy.parts)
        for part, promised in zip(copy.parts, copy.promised, strict=True):
            _target_of(copy, part)[:] = promised.translate(_INVERTED)
        nbytes = sum(part.nbytes for part in copy.parts)
        asyncio.get_running_loop().call_later(
            self._latency_s + nbytes / self._nbytes_per_s, self._end, stream
        )

    def _end(self, stream: deque[LateCopy]) -> None:
        copy = stream[0]
        assert copy.promised is not None
        arrived = _bytes_of(copy.source, copy.parts)
        intruded = False
        for part, promised, right in zip(copy.parts, copy.promised, arrived, strict=True):
            target = _target_of(copy, part)
            intruded = intruded or bytes(target) != promised.translate(_INVERTED)
            target[:] = right
        stream.popleft()
        copy.fence.pass_now()
        if stream:
            self._begin(stream)
        where = f"slot {copy.source.slot_index} to slot {copy.target.slot_index}"
        if arrived != copy.promised:
            self._violated(f"the source was rewritten under the copy of {where}")
        if intruded:
            self._violated(f"somebody wrote into the target under the copy of {where}")

    def _violated(self, fact: str) -> NoReturn:
        self.violations.append(fact)
        raise AssertionError(fact)

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        n_running = len(self.copies) + len(self.copies_back)
        return f"<LateArena{state} {self.n_slots} slots, {n_running} copies running>"


def _bytes_of(source: LateSlot | HostSlot, parts: Sequence[Part]) -> list[bytes]:
    return [bytes(source.view[p.source_offset : p.source_offset + p.nbytes]) for p in parts]


def _target_of(copy: LateCopy, part: Part) -> memoryview:
    return copy.target.view[part.target_offset : part.target_offset + part.nbytes]
