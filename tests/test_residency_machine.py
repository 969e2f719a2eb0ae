"""``Residency`` against a model too simple to be wrong: any order of calls, same answers."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tieredmoe.entry import ABSENT, FILLING, READY
from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.spec import ExpertKey

LAYERS = (1, 2)
N_EXPERTS = 5


class Model:
    """What ``Residency`` and its policy do, by dicts and lists, scanning everything every time."""

    def __init__(self, n_slots, policy):
        self.n_slots = n_slots
        self.policy = policy
        self.filling = {}  # key: pins
        self.ready = {}  # key: pins
        self.cold = []  # landed unwanted, the oldest first
        self.uses = Counter()
        self.last_use = {}
        self.clock = 0
        self.counts = Counter()
        self.slots = {}  # where a resident key is: which one it gets is not the model's to say
        self.swept = []
        self.n_ring = 0
        self.ring = {}  # key: whether it is known to be wrong; those first that go first

    def in_use(self, keys):
        """Those of ``keys`` that are in slots which have not been given up."""
        return [key for key in keys if self.slots[key] < self.n_slots]

    def resize(self, n_slots):
        self.n_slots = n_slots
        self.sweep()

    def sweep(self):
        idle = [key for key, pins in self.ready.items() if not pins]
        for key in set(idle) - set(self.in_use(idle)):
            self.evict(key)
            self.swept.append(key)

    def evict(self, key):
        del self.ready[key]
        self.forget(key)
        self.counts["evictions"] += 1
        if self.ring.pop(key, None) is not None:
            self.counts["wasted"] += 1

    def room(self):
        self.sweep()
        taken = [*self.filling, *(key for key, pins in self.ready.items() if pins)]
        return self.n_slots - len(self.in_use(taken))

    def n_fitting(self, keys):
        room = self.room()
        for i, key in enumerate(keys):
            room -= key not in self.filling and not self.ready.get(key)
            if room < 0:
                return i
        return len(keys)

    def use(self, keys):
        for key in keys:
            self.clock += 1
            self.uses[key] = min(255, self.uses[key] + 1)
            self.last_use[key] = self.clock

    def admit(self, keys):
        """The keys to fill, or None."""
        if self.n_fitting(keys) < len(keys):
            return None
        self.use(keys)
        absent = [key for key in keys if key not in self.filling and key not in self.ready]
        for key in keys:
            if key in self.ready:
                self.counts["hits"] += 1
                self.pin_ready(key)
            elif key in self.filling:
                self.counts["joins"] += 1
                self.counts["misses"] += 1
                self.take_out(key)
                self.filling[key] += 1
        for key in absent:
            self.counts["misses"] += 1
            if self.full():
                self.evict(self.victim() or self.guesses()[0])
            self.filling[key] = 1
            self.slots[key] = 0  # some slot in use, until the machine says which
        return absent

    def full(self):
        return len(self.in_use([*self.ready, *self.filling])) == self.n_slots

    def guesses(self, *, wrong=False):
        """Those in the ring that have landed, those first that go first."""
        return [k for k, is_wrong in self.ring.items() if k in self.ready and is_wrong >= wrong]

    def prefetch(self, keys):
        """The keys to fill."""
        self.sweep()
        for key in keys:
            if key in self.ring:
                del self.ring[key]
                self.ring[key] = False
        absent = []
        for key in keys:
            if key in self.filling or key in self.ready:
                continue
            below = len(self.ring) < self.n_ring
            if not below or self.full():
                victims = self.guesses(wrong=True)
                if below and self.victim():
                    victims.append(self.victim())
                victims += self.guesses()
                if not victims or victims[0] in keys:
                    break
                self.evict(victims[0])
            self.filling[key] = 0
            self.slots[key] = 0
            self.ring[key] = False
            self.counts["issued"] += 1
            absent.append(key)
        return absent

    def mark_wrong(self, layer, chosen):
        wrong = [k for k in self.ring if k.layer == layer and k.expert not in chosen]
        again = [k for k in wrong if not self.ring[k]]
        known = [k for k, is_wrong in self.ring.items() if is_wrong]
        right = [k for k in self.ring if k not in known + again]
        self.ring = dict.fromkeys(known + again, True) | dict.fromkeys(right, False)
        return [key for key in again if key in self.filling]

    def limit_ring(self, n_max):
        self.sweep()
        self.n_ring = n_max
        evicted = []
        for key in list(self.ring)[: max(0, len(self.ring) - n_max)]:
            if key in self.ready:
                self.evict(key)
                evicted.append(key)
            else:
                del self.ring[key]
                self.counts["wasted"] += 1
        return evicted

    def take_out(self, key):
        if self.ring.pop(key, None) is not None:
            self.counts["useful" if key in self.ready else "late"] += 1

    def pinned_hits(self, keys):
        if any(key not in self.ready for key in keys):
            return False
        self.use(keys)
        for key in keys:
            self.counts["hits"] += 1
            self.pin_ready(key)
        return True

    def pin_ready(self, key):
        self.take_out(key)
        self.ready[key] += 1
        self.forget(key)

    def forget(self, key):
        if key in self.cold:
            self.cold.remove(key)

    def commit(self, key):
        self.ready[key] = self.filling.pop(key)
        if not self.ready[key] and key not in self.ring:
            self.cold.append(key)

    def abort(self, key, how):
        del self.filling[key]
        if self.ring.pop(key, None) is not None:
            self.counts[how] += 1

    def victim(self):
        evictable = [k for k, pins in self.ready.items() if not pins and k not in self.ring]
        if self.cold:
            return self.cold[0]
        if self.policy == "lru":
            return min(evictable, key=self.last_use.get, default=None)
        return min(evictable, key=lambda k: (self.uses[k], self.last_use[k]), default=None)


class ResidencyMachine(RuleBasedStateMachine):
    """Random calls on both; entries in hand are pins to drop."""

    policy = "lru"

    @initialize(n_slots=st.integers(1, 6))
    def open(self, n_slots):
        policy = make_policy(self.policy, n_slots=n_slots, layers=LAYERS, top_k=2)
        self.residency = Residency(n_slots, policy)
        self.model = Model(n_slots, self.policy)
        self.limit_ring(n_slots // 2)
        self.in_hand = []
        self.filling = []

    keys = st.builds(
        lambda layer, experts: [ExpertKey(layer, expert) for expert in experts],
        st.sampled_from(LAYERS),
        st.lists(st.integers(0, N_EXPERTS - 1), unique=True, max_size=4),
    )

    @rule(keys=keys)
    def admit(self, keys):
        admission = self.residency.admit(keys)
        to_fill = self.model.admit(keys)
        assert (admission is None) == (to_fill is None)
        if admission is None:
            return
        assert [entry.key for entry in admission.entries] == keys
        assert [entry.key for entry in admission.to_fill] == to_fill
        assert all(entry.state is FILLING for entry in admission.to_fill)
        for entry in admission.to_fill:
            assert entry.slot_index < self.model.n_slots
            self.model.slots[entry.key] = entry.slot_index
        self.in_hand += admission.entries
        self.filling += admission.to_fill

    @rule(keys=keys)
    def pinned_hits(self, keys):
        entries = self.residency.pinned_hits(keys)
        assert (entries is not None) == self.model.pinned_hits(keys)
        if entries is not None:
            assert [entry.key for entry in entries] == keys
            assert all(entry.state is READY for entry in entries)
            self.in_hand += entries

    @rule(keys=keys)
    def whole_step(self, keys):
        """What most steps are: admitted, landed, released, so that uses add up."""
        in_hand, filling = len(self.in_hand), len(self.filling)
        self.admit(keys)
        for entry in self.filling[filling:]:
            self.land(entry)
        for entry in self.in_hand[in_hand:]:
            self.let_go(entry)
        del self.in_hand[in_hand:], self.filling[filling:]

    @rule(keys=keys)
    def prefetch(self, keys):
        entries = self.residency.prefetch(keys)
        assert [entry.key for entry in entries] == self.model.prefetch(keys)
        for entry in entries:
            assert entry.state is FILLING
            assert entry.slot_index < self.model.n_slots
            self.model.slots[entry.key] = entry.slot_index
        self.filling += entries

    @rule(keys=keys)
    def mark_wrong(self, keys):
        layer = keys[0].layer if keys else LAYERS[0]
        chosen = {key.expert for key in keys}
        found = self.residency.mark_wrong(layer, chosen)
        assert [entry.key for entry in found] == self.model.mark_wrong(layer, chosen)

    @rule(n_max=st.integers(0, 4))
    def limit_ring(self, n_max):
        assert self.residency.limit_ring(n_max) == self.model.limit_ring(n_max)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data):
        self.land(self.pick(data, self.filling))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort(self, data):
        entry = self.pick(data, self.filling)
        dropped = data.draw(st.booleans())
        self.residency.abort(entry, dropped=dropped)
        self.model.abort(entry.key, "dropped" if dropped else "failed")
        assert entry.state is ABSENT
        assert self.residency.entries.get(entry.key) is None

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data())
    def unpin(self, data):
        self.let_go(self.pick(data, self.in_hand))

    def land(self, entry):
        self.residency.commit(entry)
        self.model.commit(entry.key)
        assert entry.state is READY

    def let_go(self, entry):
        of_model = {FILLING: self.model.filling, READY: self.model.ready}.get(entry.state)
        unwanted = self.residency.unpin(entry)
        if of_model is not None:
            of_model[entry.key] -= 1
        assert unwanted == (entry.state is FILLING and not of_model[entry.key])

    @rule(keys=keys)
    def n_fitting(self, keys):
        assert self.residency.n_fitting(keys) == self.model.n_fitting(keys)

    @rule()
    def n_available(self):
        assert self.residency.n_available == self.model.room()

    @rule(n_slots=st.integers(1, 8))
    def resize(self, n_slots):
        self.residency.resize(n_slots)
        self.model.resize(n_slots)

    @rule()
    def sweep(self):
        self.model.sweep()
        assert sorted(self.residency.sweep()) == sorted(self.model.swept)
        self.model.swept = []
        stranded = [*self.model.filling, *self.model.ready]
        assert self.residency.n_stranded == len(stranded) - len(self.model.in_use(stranded))

    @staticmethod
    def pick(data, things):
        return things.pop(data.draw(st.integers(0, len(things) - 1)))

    @invariant()
    def everything_agrees(self):
        if not hasattr(self, "residency"):
            return
        residency, model = self.residency, self.model
        residency.check()
        assert residency.policy.victim() == model.victim()
        found = {FILLING: {}, READY: {}}
        for key, entry in residency.entries.items():
            found[entry.state][key] = entry.pins
        assert found == {FILLING: model.filling, READY: model.ready}
        counted = {name: getattr(residency, name) for name in COUNTERS}
        assert counted == {name: model.counts[name] for name in COUNTERS}
        assert {k: e.stale for k, e in residency.ring.entries.items()} == model.ring
        assert list(residency.ring.entries) == list(model.ring)
        for name in FATES:
            n = sum(getattr(counts, name) for counts in residency.ring.counts.values())
            assert n == model.counts[name], name


FATES = ("issued", "useful", "late", "wasted", "dropped", "failed")
COUNTERS = ("hits", "misses", "joins", "evictions")


class LfuLruMachine(ResidencyMachine):
    policy = "lfu_lru"


@pytest.mark.parametrize("machine", [ResidencyMachine, LfuLruMachine])
def test_residency_and_model_agree_whatever_is_called(machine):
    run_state_machine_as_test(machine)
