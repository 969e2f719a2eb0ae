"""Slots for the source contract, one for every expert: spoilt, filled and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.testing.tiny_pack import TinyPack, host_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.host import HostArenaSlot
    from tieredmoe.memory.protocol import Part
    from tieredmoe.spec import ExpertKey

SPOILT = 0x3C
"""What a slot is full of that nobody has written since it was spoilt."""
SKEW_NBYTES = 3 * 8192
"""Room beyond the largest record, for sources that read aligned envelopes of unaligned roles."""


class Slots:
    """Host memory for the experts of ``pack``; ``parts`` says where a source puts their bytes."""

    def __init__(self, pack: TinyPack, parts: Callable[[ExpertKey], Sequence[Part]]) -> None:
        self.keys = list(pack.spec.keys())
        self.n_slots = len(self.keys)
        self.slot_nbytes = pack.spec.slot_nbytes + SKEW_NBYTES
        self.payload = pack.payload
        self._parts = parts
        self._arena = host_arena(self.n_slots, self.slot_nbytes)
        self._spoilt = bytes([SPOILT]) * self.slot_nbytes

    def __getitem__(self, i: int) -> HostArenaSlot:
        return self._arena.slot(i)

    def right(self, key: ExpertKey, i: int) -> bool:
        """Whether slot ``i`` holds all bytes of ``key``, each where ``parts`` says."""
        view, payload = self[i].view, self.payload(key)
        return all(
            view[part.source_offset : part.source_offset + part.nbytes]
            == payload[part.target_offset : part.target_offset + part.nbytes]
            for part in self._parts(key)
        )

    def check(self, key: ExpertKey, i: int) -> None:
        """Assert that slot ``i`` holds ``key``."""
        assert self.right(key, i), f"slot {i} does not hold the bytes of {key}"

    def spoil(self, i: int | None = None) -> None:
        """Fill slot ``i``, or all of them, with what no expert has."""
        for each in range(self.n_slots) if i is None else (i,):
            self[each].view[:] = self._spoilt

    def spoiled(self, i: int) -> bool:
        """Whether nobody has written into slot ``i`` since it was spoilt."""
        return self[i].view == self._spoilt

    def all_spoiled(self) -> bool:
        """Whether nobody has written into any slot since."""
        return all(self.spoiled(i) for i in range(self.n_slots))
