"""The sans-IO core: which expert is in which slot, and who needs it to stay.

One synchronous object owns slots, pins and states. It has no await, no I/O, no clock and no device,
so a transition is atomic by construction and the simulator runs the very object that production
runs. Rejected: locks and dicts spread over coroutines, where every ``await`` is a place to lose a
pin.

One mutex, taken once by each method, makes them atomic between threads too: with a hierarchy on a
thread of its own, callers pin and unpin resident experts from theirs. It is always there (taking it
costs 0.2 to 0.35 µs), for a core with and a core without it would be two cores. Entries come and go
in the owner's thread alone, so that thread reads ``entries`` and states without it.

States of a key::

    absent ──admit──▶ FILLING ──commit──▶ READY ──(victim)──▶ absent
                         └──abort──▶ absent

Invariants, asserted by ``check``:

* I1 a slot is free or belongs to exactly one entry, or has been given up (``resize``) and to none.
* I2 there is at most one entry per key.
* I3 only READY entries reach a caller (held by ``Lease``; here: an entry's state never skips
  FILLING).
* I4 READY and no pins ⇔ demand may have the slot: the policy may propose the key, or the ring has
  it (prefetched and never asked for: the policy does not know it, and only then takes its turn).
* I5 a slot being written has exactly one writer (an entry is FILLING from admit to commit or
  abort).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.entry import ABSENT, FILLING, READY, Admission, Entry
from tieredmoe.invariants import check_residency
from tieredmoe.slot_table import SlotTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tieredmoe.spec import ExpertKey


class Residency(SlotTable):
    """Which expert is where, in ``n_slots`` slots. Methods are atomic and none fails half-way.

    Counters follow the library's counting rule: at the admission, per distinct key: READY is a hit,
    FILLING a join (also counted as a miss), absent a miss.
    """

    __slots__ = ()

    @property
    def n_available(self) -> int:
        """Slots that an admission could take now: free ones and those of evictable experts."""
        with self._mutex:
            self._sweep()
            return len(self._free) + self._evictable + self.ring.n_ready

    def n_fitting(self, keys: Sequence[ExpertKey]) -> int:
        """The length of the longest prefix of ``keys`` that ``admit`` would grant now.

        A key costs one available slot if it is absent (it takes one) or READY and unpinned (pinning
        it takes one away from the evictable); pinned and FILLING keys cost nothing.
        """
        with self._mutex:
            self._sweep()
            return self._n_fitting(keys)

    def admit(self, keys: Sequence[ExpertKey]) -> Admission | None:
        """Pin every key of ``keys`` (distinct, of one layer), or change nothing and return None.

        Absent keys take a free slot or a victim's and come back in ``to_fill``, FILLING: the caller
        must fill each and ``commit`` or ``abort`` it.
        """
        with self._mutex:
            if self._stranded:
                self._sweep()
            hits = self._pinned_hits(keys)
            if hits is not None:
                return Admission(hits, [])
            if self._n_fitting(keys) < len(keys):
                return None
            policy = self.policy
            policy.step(keys[0].layer, keys)
            entries = [self._pin_resident(key) for key in keys]
            to_fill: list[Entry] = []
            for i, key in enumerate(keys):
                if entries[i] is None:
                    entry = entries[i] = self.entries[key] = Entry(key, self._take_slot())
                    policy.admit(key)
                    to_fill.append(entry)
            self.misses += len(to_fill)
            return Admission(entries, to_fill)  # type: ignore[arg-type]  # every None was replaced

    def pinned_hits(self, keys: Sequence[ExpertKey]) -> list[Entry] | None:
        """Pin every key if all are READY, or change nothing and return None."""
        with self._mutex:
            return self._pinned_hits(keys)

    def commit(self, entry: Entry) -> None:
        """The bytes of ``entry`` are in its slot: FILLING becomes READY; unwanted, it is cold."""
        with self._mutex:
            assert entry.state is FILLING, entry
            entry.state = READY
            entry.fill = None
            if entry.in_ring:
                self.ring.landed()
            elif not entry.pins:
                self._evictable += 1
                self.policy.release(entry.key, cold=True)

    def abort(self, entry: Entry, *, dropped: bool = False) -> None:
        """The fill of ``entry`` failed or was ``dropped``: nothing of it stays, its slot is free.

        Pins that remain on it are its holders' to drop; they no longer keep a slot.
        """
        with self._mutex:
            assert entry.state is FILLING, entry
            entry.state = ABSENT
            entry.fill = None
            del self.entries[entry.key]
            if entry.in_ring:
                self.ring.end(entry, dropped=dropped)
            else:
                self.policy.forget(entry.key)
            if entry.slot_index < self.n_slots:
                self._free.append(entry.slot_index)

    def prefetch(self, keys: Sequence[ExpertKey]) -> list[Entry]:
        """Give the ring's slots to those of ``keys`` that are absent, as far as they go.

        They come back FILLING and unpinned. A slot is a free one, that of a guess known to be
        wrong, while the ring has less than its share a victim's, else that of the oldest guess that
        has landed. What is in use, and what is guessed again, is never touched.
        """
        with self._mutex:
            self._sweep()
            for key in keys:
                self.ring.refresh(key)
            entries: list[Entry] = []
            for key in keys:
                if key in self.entries:
                    continue
                place = self._take_ring_slot(keys)
                if place is None:
                    break
                entry = self.entries[key] = Entry(key, place, pins=0)
                self.ring.put(entry)
                entries.append(entry)
            return entries

    def mark_wrong(self, layer: int, chosen: Collection[int]) -> list[Entry]:
        """Guesses for ``layer`` not ``chosen`` lose their slots first; those still FILLING."""
        with self._mutex:
            return self.ring.stale(layer, chosen)

    def limit_ring(self, n_max: int) -> list[ExpertKey]:
        """Let the ring have ``n_max`` slots; the experts evicted for that.

        What is on its way stays, as if demand had asked for it and thought better of it.
        """
        with self._mutex:
            self._sweep()
            self.ring.n_max = n_max
            return self._shrink_ring()

    def unpin(self, entry: Entry) -> bool:
        """Drop one pin; True if it was the last of an entry still FILLING (nobody wants it)."""
        with self._mutex:
            return bool(self._unpin((entry,)))

    def try_unpin(
        self, entries: Sequence[Entry], *, first: Callable[[], None] | None = None
    ) -> list[Entry] | None:
        """``unpin`` each and return those of which it says True, or None: the mutex is taken.

        ``first`` is called inside the mutex, before a pin is dropped; it must not fail.

        It never waits, because garbage collection may run it in a thread that is inside the mutex:
        a lease in an abandoned coroutine is released wherever the collector happens to start. (And
        after a fork, the mutex may be in the hands of a thread that was not inherited.)
        """
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            if first is not None:
                first()
            return self._unpin(entries)
        finally:
            self._mutex.release()

    def pin_ready(self, keys: Sequence[ExpertKey]) -> list[Entry]:
        """Pin those of ``keys`` that are READY, which counts as no use of them; their entries."""
        with self._mutex:
            entries = [e for key in keys if (e := self.entries.get(key)) and e.state is READY]
            for entry in entries:
                assert not entry.in_ring, entry
                if not entry.pins:
                    self._evictable -= 1
                    self.policy.hold(entry.key)
                entry.pins += 1
            return entries

    def warm(self, key: ExpertKey) -> bool:
        """Whether ``key`` is here; then it is as if used just now, however cold it was."""
        with self._mutex:
            entry = self.entries.get(key)
            if entry is not None:
                entry.copied_up = False
                self.policy.step(key.layer, (key,))
            return entry is not None

    def take_in(self, key: ExpertKey) -> Entry:
        """A slot for the absent ``key``, which nobody has asked for: FILLING, pinned, not counted.

        There must be an available one.
        """
        with self._mutex:
            assert key not in self.entries
            self.policy.step(key.layer, (key,))
            entry = self.entries[key] = Entry(key, self._take_slot())
            self.policy.admit(key)
            return entry

    def demote(self, entry: Entry) -> None:
        """Drop one pin of the READY ``entry``; as the last, it leaves it cold if it was copied up.

        What the tier above has evicted meanwhile is not (``warm``).
        """
        with self._mutex:
            assert entry.state is READY, entry
            assert entry.pins, entry
            entry.pins -= 1
            if not entry.pins:
                self._evictable += 1
                self.policy.release(entry.key, cold=entry.copied_up)

    def resize(self, n_slots: int) -> None:
        """Use slots 0 to ``n_slots`` - 1 from now on; what is pinned or FILLING stays.

        Experts in higher slots are evicted: at once those that nobody needs, the others when they
        are unpinned. Growing again, slots come back empty, save those of experts still there.
        """
        assert n_slots > 0
        with self._mutex:
            self.n_slots = n_slots
            by_slot = {entry.slot_index: entry for entry in self.entries.values()}
            self._free = [i for i in range(n_slots - 1, -1, -1) if i not in by_slot]
            self._stranded = [entry for i, entry in by_slot.items() if i >= n_slots]
            self.policy.resize(n_slots)
            self._sweep()

    def sweep(self) -> list[ExpertKey]:
        """Evict what nobody needs any more in slots given up; all so evicted since the last call.

        Admissions do it too: an expert in such a slot is never a victim, its slot never reused.
        """
        with self._mutex:
            self._sweep()
            swept, self._swept = self._swept, []
            return swept

    def _unpin(self, entries: Sequence[Entry]) -> list[Entry]:
        release = self.policy.release
        unwanted: list[Entry] = []
        n_released = 0
        for entry in entries:
            pins = entry.pins = entry.pins - 1
            assert pins >= 0, entry
            if pins:
                continue
            if entry.state is READY:
                n_released += 1
                release(entry.key)
            elif entry.state is FILLING:
                unwanted.append(entry)
        self._evictable += n_released
        return unwanted

    def _n_fitting(self, keys: Sequence[ExpertKey]) -> int:
        room = len(self._free) + self._evictable + self.ring.n_ready
        for i, key in enumerate(keys):
            entry = self.entries.get(key)
            if entry is None or (entry.state is READY and not entry.pins):
                if not room:
                    return i
                room -= 1
        return len(keys)

    def _pinned_hits(self, keys: Sequence[ExpertKey]) -> list[Entry] | None:
        get = self.entries.get
        entries: list[Entry] = []
        for key in keys:
            entry = get(key)
            if entry is None or entry.state is not READY:
                return None
            entries.append(entry)
        if entries:
            self.policy.step(keys[0].layer, keys)
        hold = self.policy.hold
        n_held = 0
        for entry in entries:
            pins = entry.pins
            if not pins:
                if entry.in_ring:
                    self._change_sides(entry)
                else:
                    n_held += 1
                    hold(entry.key)
            entry.pins = pins + 1
        self._evictable -= n_held
        self.hits += len(entries)
        return entries

    def _pin_resident(self, key: ExpertKey) -> Entry | None:
        """Pin ``key`` if it has an entry, counting a hit or a join."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.state is READY:
            self.hits += 1
            if not entry.pins and not entry.in_ring:
                self._evictable -= 1
                self.policy.hold(key)
        else:
            self.joins += 1
            self.misses += 1
        if entry.in_ring:
            self._change_sides(entry)
        entry.pins += 1
        return entry

    def check(self) -> None:
        """Assert the invariants; O(n), for tests."""
        with self._mutex:
            check_residency(self)

    def __repr__(self) -> str:
        filling = sum(entry.state is FILLING for entry in self.entries.values())
        return (
            f"<Residency {len(self.entries)}/{self.n_slots} slots, {filling} filling, "
            f"{self._evictable} evictable, hits={self.hits} misses={self.misses}>"
        )
