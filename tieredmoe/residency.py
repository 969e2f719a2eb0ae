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

* I1 a slot is free or belongs to exactly one entry.
* I2 there is at most one entry per key.
* I3 only READY entries reach a caller (held by ``Lease``; here: an entry's state never skips
  FILLING).
* I4 READY and no pins ⇔ the policy may propose the key.
* I5 a slot being written has exactly one writer (an entry is FILLING from admit to commit or
  abort).
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.policies.protocol import EvictionPolicy
    from tieredmoe.spec import ExpertKey


class EntryState(enum.Enum):
    """Where an entry is in its life; ABSENT ones live on only in their last users' hands."""

    FILLING = "filling"
    READY = "ready"
    ABSENT = "absent"


FILLING, READY, ABSENT = EntryState.FILLING, EntryState.READY, EntryState.ABSENT


class Entry:
    """One expert in one slot. ``pins`` counts every reason for it to stay: leases and copies.

    While FILLING it is also the record of the transfer in flight: whoever wants the expert pins the
    entry and adds to ``waiters``, which are called once, when it lands or fails. ``evicted`` is the
    expert that had to go for it, None if the slot was free.
    """

    __slots__ = ("evicted", "fill", "key", "pins", "slot_index", "state", "waiters")

    def __init__(self, key: ExpertKey, slot_index: int, evicted: ExpertKey | None) -> None:
        self.key = key
        self.slot_index = slot_index
        self.evicted = evicted
        self.state = FILLING
        self.pins = 1
        self.fill: object | None = None
        self.waiters: list[Callable[[Entry, BaseException | None], None]] = []

    def __repr__(self) -> str:
        return (
            f"<Entry L{self.key.layer}.E{self.key.expert} {self.state.value} "
            f"slot={self.slot_index} pins={self.pins}>"
        )


class Admission(NamedTuple):
    """A granted working set: one pinned entry per key, in key order, and those to fill."""

    entries: list[Entry]
    to_fill: list[Entry]


class Residency:
    """Which expert is where, in ``n_slots`` slots. Methods are atomic and none fails half-way.

    Counters follow the library's counting rule: at the admission, per distinct key: READY is a hit,
    FILLING a join (also counted as a miss), absent a miss.
    """

    __slots__ = (
        "_evictable",
        "_free",
        "_mutex",
        "entries",
        "evictions",
        "hits",
        "joins",
        "misses",
        "n_slots",
        "policy",
    )

    def __init__(self, n_slots: int, policy: EvictionPolicy) -> None:
        assert n_slots > 0
        self.n_slots = n_slots
        self.policy = policy
        self.entries: dict[ExpertKey, Entry] = {}
        self._free = list(range(n_slots - 1, -1, -1))
        self._evictable = 0
        self._mutex = threading.Lock()
        self.hits = 0
        self.misses = 0
        self.joins = 0
        self.evictions = 0

    @property
    def n_available(self) -> int:
        """Slots that an admission could take now: free ones and those of evictable experts."""
        with self._mutex:
            return len(self._free) + self._evictable

    def n_fitting(self, keys: Sequence[ExpertKey]) -> int:
        """The length of the longest prefix of ``keys`` that ``admit`` would grant now.

        A key costs one available slot if it is absent (it takes one) or READY and unpinned (pinning
        it takes one away from the evictable); pinned and FILLING keys cost nothing.
        """
        with self._mutex:
            return self._n_fitting(keys)

    def admit(self, keys: Sequence[ExpertKey]) -> Admission | None:
        """Pin every key of ``keys`` (distinct, of one layer), or change nothing and return None.

        Absent keys take a free slot or a victim's and come back in ``to_fill``, FILLING: the caller
        must fill each and ``commit`` or ``abort`` it.
        """
        with self._mutex:
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
                    entry = entries[i] = self.entries[key] = Entry(key, *self._take_slot())
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
            if not entry.pins:
                self._evictable += 1
                self.policy.release(entry.key, cold=True)

    def abort(self, entry: Entry) -> None:
        """The fill of ``entry`` failed or was dropped: nothing of it stays, its slot is free.

        Pins that remain on it are its holders' to drop; they no longer keep a slot.
        """
        with self._mutex:
            assert entry.state is FILLING, entry
            entry.state = ABSENT
            entry.fill = None
            del self.entries[entry.key]
            self.policy.forget(entry.key)
            self._free.append(entry.slot_index)

    def unpin(self, entry: Entry) -> bool:
        """Drop one pin; True if it was the last of an entry still FILLING (nobody wants it)."""
        with self._mutex:
            return bool(self._unpin((entry,)))

    def try_unpin(self, entries: Sequence[Entry]) -> list[Entry] | None:
        """``unpin`` each and return those of which it says True, or None: the mutex is taken.

        It never waits, because garbage collection may run it in a thread that is inside the mutex:
        a lease in an abandoned coroutine is released wherever the collector happens to start. (And
        after a fork, the mutex may be in the hands of a thread that was not inherited.)
        """
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            return self._unpin(entries)
        finally:
            self._mutex.release()

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
        room = len(self._free) + self._evictable
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
            if not entry.pins:
                self._evictable -= 1
                self.policy.hold(key)
        else:
            self.joins += 1
            self.misses += 1
        entry.pins += 1
        return entry

    def _take_slot(self) -> tuple[int, ExpertKey | None]:
        """A slot to write, and the expert that was evicted from it, if one had to go."""
        if self._free:
            return self._free.pop(), None
        key = self.policy.victim()
        assert key is not None, "n_fitting() promised a slot"
        victim = self.entries.pop(key)
        assert victim.state is READY, victim
        assert not victim.pins, victim
        victim.state = ABSENT
        self.policy.forget(key)
        self._evictable -= 1
        self.evictions += 1
        return victim.slot_index, key

    def check(self) -> None:
        """Assert the invariants; O(n), for tests."""
        with self._mutex:
            self._check()

    def _check(self) -> None:
        owned = [entry.slot_index for entry in self.entries.values()]
        assert sorted(owned + self._free) == list(range(self.n_slots)), "I1: slots lost or shared"
        evictable = 0
        for key, entry in self.entries.items():
            assert entry.key == key, "I2: an entry under another's key"
            assert entry.state is not ABSENT, f"I3: {entry} is in the table"
            assert entry.pins >= 0, entry
            assert entry.state is FILLING or not entry.waiters, f"I3: {entry} landed, waiters left"
            evictable += entry.state is READY and not entry.pins
        assert evictable == self._evictable, f"I4: {evictable} evictable, counted {self._evictable}"
        victim = self.policy.victim()
        assert (victim is not None) == (evictable > 0), "I4: the policy and the pins disagree"
        if victim is not None:
            entry = self.entries[victim]
            assert entry.state is READY, f"I4: {entry} proposed"
            assert not entry.pins, f"I4: {entry} proposed"

    def __repr__(self) -> str:
        filling = sum(entry.state is FILLING for entry in self.entries.values())
        return (
            f"<Residency {len(self.entries)}/{self.n_slots} slots, {filling} filling, "
            f"{self._evictable} evictable, hits={self.hits} misses={self.misses}>"
        )
