"""Slots in a GPU's memory, filled by asynchronous copies and found by a table on the device.

Kernels take one base tensor, a table ``slot_of[layer, expert]`` and expert numbers that never leave
the device. An entry is written behind the bytes it speaks of and in front of the slot's ``ready``
fence; behind those bytes, too, goes the entry of the expert that they replace. So what a kernel
finds through the table is right if its stream has waited for a lease on the expert, and without
one it means nothing.

Nothing here waits for the device on the host. A copy is enqueued behind the ``idle`` fence of its
target, that is, behind the kernels of all who read what was there before; the host slot it reads
is free again when its ``ready`` fence has passed, which a thread watches (see ``cuda_events``).

Copies run back to back on one stream, and the table is written on another that follows it: a copy
of four bytes between two records costs the copy engine 10 µs, measured, which is 4 % of a record.
Copies out have a third, since the link carries both directions at once. Streams wait for each other
only for what was enqueued before, so they never wait in a circle.

Bound to one loop, save for ``fence``, which works in any thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import attrs
import torch

from tieredmoe.budget import format_size
from tieredmoe.errors import DeviceError
from tieredmoe.memory.cuda_driver import Driver
from tieredmoe.memory.cuda_events import EventFence, Watchers
from tieredmoe.memory.cuda_range import DeviceRange
from tieredmoe.memory.fences import PASSED, joined
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.memory.pinning import PinnedHost
    from tieredmoe.memory.protocol import Fence, HostSlot, Part, Slot
    from tieredmoe.spec import ExpertKey

_log = logging.getLogger(__name__)
_INT32_NBYTES = 4
# After a failure of the device its driver refuses all calls; the process's end frees the memory.
_NOT_FREED = "the GPU's memory could not be freed: %s"
ABSENT = -1
"""What the table says of an expert that is in no slot."""


@attrs.define(eq=False)
class CudaSlot:
    """One slot of a ``CudaArena``; ``address`` is the device's."""

    arena: CudaArena
    slot_index: int
    nbytes: int
    address: int
    ready: Fence = PASSED
    idle: Fence = PASSED


class CudaArena:
    """``n_slots`` equal slots, end to end at fixed addresses of one GPU.

    ``tensor`` is uint8 [n_slots, slot_nbytes], ``table`` int32 [len(layers), n_experts]: the slot
    of each expert of each layer, ``ABSENT`` where there is none. Both stay where they are until
    ``close``, also when the arena shrinks. ``copies_out`` is whether the host memory is registered.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        slot_nbytes: int,
        layers: Sequence[int],
        n_experts: int,
        device: torch.device | str,
        pinned: PinnedHost | None = None,
    ) -> None:
        """Allocate the slots, which start with undefined bytes, and an empty table.

        ``pinned`` is the registered memory that copies come from, if any: closing the arena
        unregisters it. Raises ``BudgetError`` if the device has not that much free memory.
        """
        assert n_slots > 0
        assert slot_nbytes > 0
        assert slot_nbytes % PAGE_NBYTES == 0
        self.slot_nbytes = slot_nbytes
        self._driver = Driver(torch.device(device))
        self.device = self._driver.device
        self.copies_out = pinned is not None and pinned.refused is None
        # With memory that is not registered, a call waits for its copy.
        self._call = self._driver.brief if self.copies_out else self._driver
        self._memory = DeviceRange(n_slots * slot_nbytes, device=self.device, driver=self._driver)
        self.tensor = self._memory.tensor(n_slots * slot_nbytes).view(n_slots, slot_nbytes)
        self.table = torch.full(
            (len(layers), n_experts), ABSENT, dtype=torch.int32, device=self.device
        )
        # Where table entries are copied from: the numbers of the slots, and ABSENT as the last.
        self._numbers = torch.arange(-1, n_slots, dtype=torch.int32).roll(-1).pin_memory()
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._key_of: list[ExpertKey | None] = [None] * n_slots
        self._slot_of: dict[ExpertKey, int] = {}
        self._copies = self._driver.new_stream()
        self._copies_out = self._driver.new_stream()
        self._entries = self._driver.new_stream()
        self._entries.wait_stream(torch.cuda.current_stream(self.device))  # the empty table
        self._copied = torch.cuda.Event()
        self._watchers = Watchers()
        self._pinned = pinned
        self._closed = False
        self._slots = tuple(
            CudaSlot(self, i, slot_nbytes, self._memory.address + i * slot_nbytes)
            for i in range(n_slots)
        )

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def slot(self, slot_index: int) -> CudaSlot:
        """The slot of that number; always the same object."""
        assert not self._closed, "slot of a closed arena"
        assert 0 <= slot_index < len(self._slots)
        return self._slots[slot_index]

    def slot_of(self, layer: int) -> torch.Tensor:
        """The table's row of ``layer``: int32 [n_experts] on the device, at a fixed address.

        A stream that has waited for a lease sees the slots of its experts.
        """
        return self.table[self._row_of[layer]]

    def copy_from(self, key: ExpertKey, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Enqueue a copy of ``parts`` of the host slot ``source`` into our ``target``.

        It waits on the device for ``source.ready`` and ``target.idle``. Behind it the table's entry
        of ``key`` is set, and that of the expert that was there before taken back. ``source`` may
        be rewritten once the returned fence, which is also ``target.ready``, has passed. Raises
        ``DeviceError``.
        """
        assert not self._closed, "copy into a closed arena"
        ours = self._slots[target.slot_index]
        assert ours is target, "copy into another arena's slot"
        theirs = cast("HostSlot", source)  # what the protocol asks of every source
        self._check_device()
        with self._driver.context():
            theirs.ready.wait_on(self._copies)
            ours.idle.wait_on(self._copies)
            for part in parts:
                assert part.nbytes >= 0
                assert 0 <= part.source_offset <= theirs.nbytes - part.nbytes
                assert 0 <= part.target_offset <= ours.nbytes - part.nbytes
                self._call(
                    "cuMemcpyHtoDAsync_v2",
                    ours.address + part.target_offset,
                    theirs.address + part.source_offset,
                    part.nbytes,
                    self._copies.cuda_stream,
                )
            self._copied.record(self._copies)
            self._entries.wait_event(self._copied)
            self._take_back(ours.slot_index)
            self._key_of[ours.slot_index] = key
            self._slot_of[key] = ours.slot_index
            self._set_entry(key, ours.slot_index)
            fence = EventFence(self._watchers, self._entries)
        ours.idle = PASSED  # the copy is behind it
        ours.ready = fence
        return fence

    def copy_out(self, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Enqueue a copy of ``parts`` of our ``source`` into the host slot ``target``.

        It waits on the device for ``source.ready``, and ``source.idle`` for it. ``target`` may be
        rewritten once the returned fence, which is also ``target.ready``, has passed. The table is
        as it was. Only if ``copies_out``: the host would wait. Raises ``DeviceError``.
        """
        assert not self._closed, "copy out of a closed arena"
        assert self.copies_out, "a copy out into memory that is not registered"
        ours = self._slots[source.slot_index]
        assert ours is source, "copy out of another arena's slot"
        theirs = cast("HostSlot", target)
        self._check_device()
        with self._driver.context():
            ours.ready.wait_on(self._copies_out)
            theirs.idle.wait_on(self._copies_out)
            for part in parts:
                assert part.nbytes >= 0
                assert 0 <= part.source_offset <= ours.nbytes - part.nbytes
                assert 0 <= part.target_offset <= theirs.nbytes - part.nbytes
                self._call(
                    "cuMemcpyDtoHAsync_v2",
                    theirs.address + part.target_offset,
                    ours.address + part.source_offset,
                    part.nbytes,
                    self._copies_out.cuda_stream,
                )
            fence = EventFence(self._watchers, self._copies_out)
        ours.idle = joined(ours.idle, fence)
        theirs.ready = fence
        return fence

    def fence(self, stream: object) -> Fence:
        """A fence after all that the ``torch.cuda.Stream`` has been given; in any thread."""
        try:
            return EventFence(self._watchers, cast("torch.cuda.Stream", stream))
        except RuntimeError as error:
            self._watchers.broke(error)
            return PASSED

    def resize(self, n_slots: int) -> None:
        """Keep memory for the first ``n_slots`` slots, and give back that of the others.

        Nobody may use those others; growing back, they start with undefined bytes. Raises
        ``BudgetError``, with nothing changed, if the device has not that much free memory, and
        ``DeviceError``; giving back does not fail.
        """
        assert not self._closed, "resizing a closed arena"
        assert 0 < n_slots <= len(self._slots)
        nbytes = n_slots * self.slot_nbytes
        if nbytes > self._memory.backed_nbytes:
            self._check_device()
            self._memory.resize(nbytes)
            return
        try:
            with self._driver.context():
                for slot_index in range(n_slots, len(self._slots)):
                    self._take_back(slot_index)
            self._memory.resize(nbytes)
        except DeviceError as error:
            _log.warning(_NOT_FREED, error)

    def close(self) -> None:
        """Give the memory back and unregister the host's; idempotent.

        The caller has drained all copies and waited for the ``idle`` fences: nothing on the device
        may read ``tensor`` or ``table`` any more.
        """
        if self._closed:
            return
        self._closed = True
        # Slots know the arena, so what it holds would stay until garbage is collected.
        nothing = torch.empty(0, dtype=torch.int32)
        self.table, self.tensor = nothing, nothing.view(torch.uint8)
        self._numbers = nothing
        self._watchers.close()
        try:
            self._driver.end_stream(self._copies)
            self._driver.end_stream(self._copies_out)
            self._driver.end_stream(self._entries)
            self._memory.close()
            if self._pinned is not None:
                self._pinned.close()
        except DeviceError as error:
            _log.warning(_NOT_FREED, error)

    def _take_back(self, slot_index: int) -> None:
        """Forget the expert of the slot; its entry goes, unless it says another slot by now."""
        key, self._key_of[slot_index] = self._key_of[slot_index], None
        if key is not None and self._slot_of.get(key) == slot_index:
            del self._slot_of[key]
            self._set_entry(key, ABSENT)

    def _set_entry(self, key: ExpertKey, number: int) -> None:
        row, n_experts = self._row_of[key.layer], self.table.shape[1]
        self._call(
            "cuMemcpyHtoDAsync_v2",
            self.table.data_ptr() + (row * n_experts + key.expert) * _INT32_NBYTES,
            self._numbers.data_ptr() + (number % self._numbers.numel()) * _INT32_NBYTES,
            _INT32_NBYTES,
            self._entries.cuda_stream,
        )

    def _check_device(self) -> None:
        failure = self._watchers.failure
        if failure is not None:
            raise DeviceError("everything after a failure", 0, str(failure)) from failure

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        slots = f"{len(self._slots)} slots of {format_size(self.slot_nbytes)}"
        return f"<CudaArena{state} {slots} on {self.device}>"
