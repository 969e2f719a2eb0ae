"""A device's memory on virtual time: copies end later, and until then the bytes are wrong.

On host memory a copy is done when ``copy_from`` returns, so a tier that trusts a slot before its
``ready`` fence, or lets go of a source too soon, passes every test there. ``LateArena`` is the
opposite: a copy writes garbage when it starts, reads its source only at its very end, and writes
the right bytes as its fence passes. Copies run one after the other, as on a device's copy stream,
each after the ``idle`` fence of its target.

It records a violation (and raises) when a source is rewritten under a copy, when somebody else
writes into a target, and when the arena is closed while copies run.

Rejected: a random order of copies (one stream promises order, and an evicted slot relies on it).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import attrs

from tieredmoe.memory.host import PASSED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.protocol import Fence, HostSlot, Part, Slot

_INVERTED = bytes(255 - i for i in range(256))


class Waits(Protocol):
    """What ``LateFence.wait_on`` needs of a stream."""

    def wait_for(self, fence: Fence) -> None:
        """Order later work after ``fence``."""


class LateFence:
    """A fence that passes when its arena says so."""

    __slots__ = ("_callbacks", "_passed")

    def __init__(self) -> None:
        self._passed = False
        self._callbacks: list[Callable[[], None]] = []

    def passed(self) -> bool:
        """Whether all work before the fence has ended."""
        return self._passed

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the fence has passed; at once if it has."""
        if self._passed:
            callback()
        else:
            self._callbacks.append(callback)

    def wait_on(self, stream: object) -> None:
        """Order later work of ``stream``, a ``SimStream`` or its like, after this fence."""
        cast("Waits", stream).wait_for(self)

    def pass_now(self) -> None:
        """All work before the fence has ended: tell everyone, once."""
        assert not self._passed, "a fence passes once"
        self._passed = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class SimStream:
    """A device's queue of work as its host sees it: what it was told to wait for."""

    def __init__(self) -> None:
        self._fences: list[Fence] = []

    def wait_for(self, fence: Fence) -> None:
        """Order all later work after ``fence``."""
        self._fences.append(fence)

    async def synchronize(self) -> None:
        """Return when everything waited for has passed. Cancelling it changes nothing."""
        while self._fences:
            passed = asyncio.Event()
            self._fences[0].on_passed(passed.set)
            await passed.wait()
            del self._fences[0]


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
    """A copy from its ``copy_from`` until its fence passes."""

    source: HostSlot
    target: LateSlot
    parts: tuple[Part, ...]
    promised: list[bytes]
    fence: LateFence


class LateArena:
    """``n_slots`` slots whose copies take ``latency_s`` and then ``nbytes_per_s``, one by one.

    ``copies`` holds those not ended, the one that runs first. Slots start out filled with
    ``poison``. Bound to the loop of its first copy.
    """

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
        self.violations: list[str] = []
        self.closed = False
        self._latency_s = latency_s
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

    def copy_from(self, source: Slot, target: Slot, parts: Sequence[Part]) -> LateFence:
        """Enqueue a copy of ``parts`` of the host slot ``source`` into our ``target``.

        Until the returned fence, which is also ``target.ready``, has passed, the target holds
        garbage and ``source`` must keep its bytes.
        """
        assert not self.closed, "copy into a closed arena"
        ours = self._slots[target.slot_index]
        assert ours is target, "copy into another arena's slot"
        theirs = cast("HostSlot", source)  # what the protocol asks of every source
        for part in parts:
            assert part.nbytes >= 0
            assert 0 <= part.source_offset <= theirs.nbytes - part.nbytes
            assert 0 <= part.target_offset <= ours.nbytes - part.nbytes
        fence = ours.ready = LateFence()
        self.copies.append(
            LateCopy(theirs, ours, tuple(parts), _source_bytes(theirs, parts), fence)
        )
        if len(self.copies) == 1:
            self._begin()
        return fence

    def close(self) -> None:
        """Release the memory; idempotent. It is a violation while copies run."""
        self.closed = True
        if self.copies:
            self._violated(f"closed with {len(self.copies)} copies running")

    def check(self) -> None:
        """Assert that nothing was violated so far."""
        assert not self.violations, "; ".join(self.violations)

    # ---- a copy's life

    def _begin(self) -> None:
        self.copies[0].target.idle.on_passed(self._run)

    def _run(self) -> None:
        copy = self.copies[0]
        for part, promised in zip(copy.parts, copy.promised, strict=True):
            _target_of(copy, part)[:] = promised.translate(_INVERTED)
        nbytes = sum(part.nbytes for part in copy.parts)
        asyncio.get_running_loop().call_later(
            self._latency_s + nbytes / self._nbytes_per_s, self._end, copy
        )

    def _end(self, copy: LateCopy) -> None:
        arrived = _source_bytes(copy.source, copy.parts)
        intruded = False
        for part, promised, right in zip(copy.parts, copy.promised, arrived, strict=True):
            target = _target_of(copy, part)
            intruded = intruded or bytes(target) != promised.translate(_INVERTED)
            target[:] = right
        self.copies.popleft()
        copy.fence.pass_now()
        if self.copies:
            self._begin()
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
        return f"<LateArena{state} {self.n_slots} slots, {len(self.copies)} copies running>"


def _source_bytes(source: HostSlot, parts: Sequence[Part]) -> list[bytes]:
    return [bytes(source.view[p.source_offset : p.source_offset + p.nbytes]) for p in parts]


def _target_of(copy: LateCopy, part: Part) -> memoryview:
    return copy.target.view[part.target_offset : part.target_offset + part.nbytes]
