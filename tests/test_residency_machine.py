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

from tieredmoe.policies import make_policy
from tieredmoe.residency import ABSENT, FILLING, READY, Residency
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

    def room(self):
        taken = len(self.filling) + sum(pins > 0 for pins in self.ready.values())
        return self.n_slots - taken

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
                self.filling[key] += 1
        for key in absent:
            self.counts["misses"] += 1
            if len(self.ready) + len(self.filling) == self.n_slots:
                victim = self.victim()
                del self.ready[victim]
                self.forget(victim)
                self.counts["evictions"] += 1
            self.filling[key] = 1
        return absent

    def pinned_hits(self, keys):
        if any(key not in self.ready for key in keys):
            return False
        self.use(keys)
        for key in keys:
            self.counts["hits"] += 1
            self.pin_ready(key)
        return True

    def pin_ready(self, key):
        self.ready[key] += 1
        self.forget(key)

    def forget(self, key):
        if key in self.cold:
            self.cold.remove(key)

    def commit(self, key):
        self.ready[key] = self.filling.pop(key)
        if not self.ready[key]:
            self.cold.append(key)

    def victim(self):
        evictable = [key for key, pins in self.ready.items() if not pins]
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

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data):
        self.land(self.pick(data, self.filling))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort(self, data):
        entry = self.pick(data, self.filling)
        self.residency.abort(entry)
        del self.model.filling[entry.key]
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
        assert residency.n_available == model.room()
        found = {FILLING: {}, READY: {}}
        for key, entry in residency.entries.items():
            found[entry.state][key] = entry.pins
        assert found == {FILLING: model.filling, READY: model.ready}
        counted = {name: getattr(residency, name) for name in COUNTERS}
        assert counted == {name: model.counts[name] for name in COUNTERS}


COUNTERS = ("hits", "misses", "joins", "evictions")


class LfuLruMachine(ResidencyMachine):
    policy = "lfu_lru"


@pytest.mark.parametrize("machine", [ResidencyMachine, LfuLruMachine])
def test_residency_and_model_agree_whatever_is_called(machine):
    run_state_machine_as_test(machine)
