"""What the tier above evicts goes back into the slots of the one below, which becomes its cache.

Two tiers that read through each other hold the same experts twice: whatever is above came from
below. So a tier that *keeps* is exclusive in effect. What it has copied up turns coldest and is
overwritten first; what the tier above evicts is warm here again if it is still there, and otherwise
is copied back before its slot above is written again. Copies back run on a stream of their own, the
other way over the link, and the next writer of a slot waits on the device for the copy out of it.

Keeping never makes anybody wait for a slot: it takes only those that the reads at hand do not need,
and what finds none is not kept.

Rejected: reading into both tiers and keeping all (on three traces 9 to 10 % of lookups fewer were
served without the disk), and turning cold alone, with no copies back (3 to 9 % fewer); copying back
when a slot is about to be written (with its record from the disk in hand, somebody waits for it).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.errors import DeviceError
from tieredmoe.memory.protocol import Part
from tieredmoe.trace import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tieredmoe.entry import Entry
    from tieredmoe.memory.protocol import Slot
    from tieredmoe.residency import Residency
    from tieredmoe.spec import ExpertKey
    from tieredmoe.tier import Tier


class Keeper:
    """Keeps in ``tier`` what the tier above it evicts. All methods run in the loop's thread."""

    __slots__ = ("_tier", "copied_back", "copied_back_nbytes")

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.copied_back = 0
        self.copied_back_nbytes = 0

    def take_back(self, entries: Sequence[Entry], slots: Sequence[Slot]) -> None:
        """Keep what had to go for ``entries``, which are to be filled from ``tier`` next.

        ``slots`` are those of the tier above.
        """
        if not self._tier.closed:
            keep_evicted(self._tier.residency, entries, partial(self._copy_back, slots))

    def gone_above(self, keys: Iterable[ExpertKey]) -> None:
        """The tier above has lost ``keys`` with their slots: those still here are warm again."""
        for key in keys:
            self._tier.residency.warm(key)

    def _copy_back(self, slots: Sequence[Slot], key: ExpertKey, successor: Entry) -> None:
        tier = self._tier
        source = slots[successor.slot_index]
        if not source.arena.copies_out:
            return
        entry = tier.residency.take_in(key)
        target = tier.slots[entry.slot_index]
        if entry.evicted is not None:
            if tier.trace is not None:
                tier.trace.note(EventKind.EVICTED, tier.name, entry.evicted)
            if tier.below is not None:
                tier.below.take_back([entry], tier.slots)
        # As a read would have left it: a copy up finds every role where it looks for it.
        parts = [
            Part(part.target_offset, part.source_offset, part.nbytes)
            for part in tier.source.parts(key)
        ]
        try:
            fence = source.arena.copy_out(source, target, parts)
        except DeviceError:  # the device is broken, which the copy that follows reports
            tier.residency.unpin(entry)
            tier.residency.abort(entry)
            return
        if tier.trace is not None:
            tier.trace.note(EventKind.RETURNING, tier.name, key)
        # READY before the bytes are there, as above: who reads the slot waits for its fence.
        tier.residency.commit(entry)
        self.copied_back += 1
        self.copied_back_nbytes += sum(part.nbytes for part in parts)
        tier.transfers.begin()
        fence.on_passed(partial(self._returned, entry))

    def _returned(self, entry: Entry) -> None:
        """The bytes of ``entry`` are there: its slot may be rewritten."""
        tier = self._tier
        if tier.trace is not None:
            tier.trace.note(EventKind.RETURNED, tier.name, entry.key)
        tier.transfers.end()
        tier.unpin([entry])

    def __repr__(self) -> str:
        return f"<Keeper {self.copied_back} copied back>"


def keep_evicted(
    residency: Residency,
    entries: Sequence[Entry],
    copy_back: Callable[[ExpertKey, Entry], None],
) -> None:
    """What of the experts evicted above for ``entries`` becomes warm in ``residency``, and how.

    Those still there do; for others ``copy_back(key, successor)`` is called, to ``take_in`` the
    key, as long as slots are left that the reads of ``entries`` will not need. What is there of
    ``entries`` keeps its slot; successors of that kind come first, since they are all that a copy
    upwards has to wait for. Sans-IO, so that replays decide as tiers do.
    """
    going = [entry for entry in entries if entry.evicted is not None and not entry.evicted_spare]
    if not going:
        return
    wanted = residency.pin_ready([entry.key for entry in entries])
    here = {entry.key for entry in wanted}
    n_reads = len(entries) - len(wanted)
    for entry in sorted(going, key=lambda entry: entry.key not in here):
        assert entry.evicted is not None
        if not residency.warm(entry.evicted) and residency.n_available > n_reads:
            copy_back(entry.evicted, entry)
    for entry in wanted:
        residency.unpin(entry)
