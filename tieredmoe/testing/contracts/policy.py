"""What every eviction policy promises, as tests: subclass ``PolicyContract``, override one method.

::

    class TestMyPolicy(PolicyContract):
        def make_policy(self, *, n_slots, layers, top_k):
            return MyPolicy(n_slots=n_slots, layers=layers, top_k=top_k)

The contract knows which keys may be proposed, never which of them should be: that is the policy's
own business, and wants a test of its own against a plain model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tieredmoe.policies.protocol import LearningPolicy, RememberingPolicy
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from tieredmoe.policies.protocol import EvictionPolicy

LAYERS = (1, 2, 5)
N_EXPERTS = 6
TOP_K = 3


class PolicyContract:
    """Tests of one eviction policy; see the module. Override ``make_policy``."""

    def make_policy(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> EvictionPolicy:
        """Build a fresh policy."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides make_policy, to say what is tested"
        )

    def test_it_proposes_evictable_keys_and_none_else(self) -> None:
        """Whatever working sets come, land, fail, overlap and go, as in ``PolicyLife``."""
        machine = type("Life", (PolicyLife,), {"make_policy": staticmethod(self.make_policy)})
        run_state_machine_as_test(machine, settings=settings(stateful_step_count=60, deadline=None))

    def test_an_empty_policy_has_no_victim(self) -> None:
        """Nothing was admitted, so nothing can go."""
        assert self._filled(0).victim() is None

    def test_choosing_a_victim_changes_nothing(self) -> None:
        """Asked again and again it names the same key; two policies, one asked, end up alike."""
        asked, quiet = self._filled(20), self._filled(20)
        order = []
        for policy in (asked, quiet):
            left = []
            for _ in range(20):
                victim = policy.victim()
                assert victim is not None
                if policy is asked:
                    assert [policy.victim() for _ in range(5)] == [victim] * 5
                policy.forget(victim)
                left.append(victim)
            order.append(left)
        assert order[0] == order[1]

    def test_cold_keys_go_before_all_others(self) -> None:
        """Also when they have been used more often, and more recently, than the rest."""
        policy = self._filled(20)
        cold = [ExpertKey(1, 7), ExpertKey(1, 3)]
        for _ in range(10):
            policy.step(1, cold)
        for key in cold:
            policy.hold(key)
        for key in cold:
            policy.release(key, cold=True)
        victims = set()
        for _ in cold:
            victim = policy.victim()
            assert victim is not None
            policy.forget(victim)
            victims.add(victim)
        assert victims == set(cold)
        assert policy.victim() is not None

    def test_a_cold_key_that_is_used_is_an_ordinary_key_again(self) -> None:
        """Held and released once more, it does not go before a key that waits longer."""
        policy = self._filled(2)
        cold = ExpertKey(1, 0)
        policy.hold(cold)
        policy.release(cold, cold=True)
        for _ in range(300):
            policy.step(1, [cold])
            policy.hold(cold)
            policy.release(cold)
        assert policy.victim() == ExpertKey(1, 1)

    def test_a_key_is_admitted_once(self) -> None:
        """Twice is a bug of the caller, found by an assertion, held or not."""
        policy = self._filled(1)
        with pytest.raises(AssertionError):
            policy.admit(ExpertKey(1, 0))
        policy.hold(ExpertKey(1, 0))
        with pytest.raises(AssertionError):
            policy.admit(ExpertKey(1, 0))

    def test_a_forgotten_key_may_come_back(self) -> None:
        """Forgotten while held (its fill failed) and while evictable (it was the victim)."""
        policy = self._filled(1)
        key = ExpertKey(1, 0)
        policy.forget(key)
        assert policy.victim() is None
        policy.admit(key)
        policy.forget(key)
        assert policy.victim() is None
        policy.admit(key)
        policy.release(key)
        assert policy.victim() == key

    def test_the_cost_of_a_miss_does_not_grow_with_the_slots(self) -> None:
        """With all but eight of 10,000 slots held, and with none held: operations are counted.

        Every bytecode counts, and every hash and comparison of a key. What C does to numbers alone
        does not, so a benchmark has the last word.
        """
        for all_but in (8, None):
            small = self._cost_of_misses(100, n_evictable=all_but or 100)
            large = self._cost_of_misses(10_000, n_evictable=all_but or 10_000)
            # A logarithm doubles from 100 to 10,000; a scan grows a hundredfold.
            assert large <= 2 * small + 100, f"{small} operations at 100 slots, {large} at 10,000"

    def test_when_it_learns_changes_no_victim(self) -> None:
        """Of a ``LearningPolicy``: settled after each step or by the next one, it is the same."""
        orders = []
        for settles in (False, True):
            policy = self._filled(12)
            if not isinstance(policy, LearningPolicy):
                pytest.skip("it does not learn")
            order = []
            for i in range(60):
                policy.step(1, [ExpertKey(1, i * i % 12)])
                order.append(policy.victim())
                if settles:
                    policy.settle()
            orders.append(order)
        assert orders[0] == orders[1]

    def test_what_it_remembers_another_recalls(self) -> None:
        """Of a ``RememberingPolicy``: what was used most is the last to go, and is counted on."""
        policy, recalling = self._filled(4), self.make_policy(n_slots=4, layers=LAYERS, top_k=2)
        if not isinstance(policy, RememberingPolicy):
            pytest.skip("it remembers nothing between runs")
        assert isinstance(recalling, RememberingPolicy)
        for i in range(40):
            policy.step(1, [ExpertKey(1, 2 if i % 2 else 1)])
        counts = policy.use_counts()
        assert set(counts.by_heat()[:2]) == {ExpertKey(1, 1), ExpertKey(1, 2)}
        recalling.recall(counts)
        assert recalling.use_counts().by_heat() == counts.by_heat()
        for expert in (2, 0, 1, 3):
            recalling.admit(ExpertKey(1, expert))
            recalling.release(ExpertKey(1, expert))
        for _ in range(2):
            victim = recalling.victim()
            assert victim in {ExpertKey(1, 0), ExpertKey(1, 3)}
            recalling.forget(victim)

    def _filled(self, n_slots: int) -> EvictionPolicy:
        """A policy whose slots hold evictable experts of layer 1, each used once."""
        policy = self.make_policy(n_slots=max(n_slots, 1), layers=LAYERS, top_k=2)
        for expert in range(n_slots):
            key = _TracedKey(1, expert)
            policy.step(1, [key])
            policy.admit(key)
            policy.release(key)
        return policy

    def _cost_of_misses(self, n_slots: int, *, n_evictable: int) -> int:
        """The most operations that one of eight misses took, with all other slots held."""
        policy = self._filled(n_slots)
        for expert in range(n_slots - n_evictable):
            policy.hold(_TracedKey(1, expert))
        return max(_count_operations(policy, _TracedKey(2, i)) for i in range(8))


class PolicyLife(RuleBasedStateMachine):
    """Random working sets over a policy, as ``Residency`` drives it, beside sets that know better.

    ``make_policy`` is set by a subclass.
    """

    make_policy: Callable[..., EvictionPolicy]

    @initialize(n_slots=st.integers(1, 8))
    def begin(self, n_slots: int) -> None:
        """Start empty, with few slots, so that everything is contended."""
        self.policy = self.make_policy(n_slots=n_slots, layers=LAYERS, top_k=TOP_K)
        self.n_slots = n_slots
        self.pins: dict[ExpertKey, int] = {}
        self.cold: set[ExpertKey] = set()

    @rule(
        layer=st.sampled_from(LAYERS),
        experts=st.sets(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=TOP_K),
    )
    def acquire(self, layer: int, experts: set[int]) -> None:
        """Pin a working set if it fits; otherwise it was routed to and has to wait."""
        keys = [ExpertKey(layer, expert) for expert in experts]
        self.policy.step(layer, keys)
        self.cold.difference_update(keys)
        pinned = sum(1 for key, pins in self.pins.items() if pins and key not in keys)
        if pinned + len(keys) > self.n_slots:
            return
        for key in keys:
            if self.pins.get(key) == 0:
                self.policy.hold(key)
            if key in self.pins:
                self.pins[key] += 1
        for key in keys:
            if key not in self.pins:
                if len(self.pins) >= self.n_slots and 0 in self.pins.values():
                    self._evict()
                self.policy.admit(key)
                self.pins[key] = 1

    @rule(data=st.data(), cold=st.booleans())
    def unpin(self, *, data: st.DataObject, cold: bool) -> None:
        """Drop one pin of any pinned key, in any order."""
        pinned = sorted(key for key, pins in self.pins.items() if pins)
        if not pinned:
            return
        key = data.draw(st.sampled_from(pinned))
        self.pins[key] -= 1
        if not self.pins[key]:
            self.policy.release(key, cold=cold)
            if cold:
                self.cold.add(key)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A resident key loses its slot, held (its fill failed) or not."""
        if self.pins:
            key = data.draw(st.sampled_from(sorted(self.pins)))
            self.policy.forget(key)
            self.cold.discard(key)
            del self.pins[key]

    @rule(n_slots=st.integers(1, 8))
    def resize(self, n_slots: int) -> None:
        """Slots are given up or come back; those with keys that are held go later."""
        self.n_slots = n_slots
        self.policy.resize(n_slots)
        while len(self.pins) > n_slots and 0 in self.pins.values():
            self._evict()

    @rule()
    def evict_one(self) -> None:
        """Make room ahead of need."""
        if 0 in self.pins.values():
            self._evict()

    @invariant()
    def victim_is_evictable(self) -> None:
        """None if and only if every key is held; a cold key as long as there is one."""
        if not hasattr(self, "policy"):
            return
        victim = self.policy.victim()
        evictable = {key for key, pins in self.pins.items() if not pins}
        if not evictable:
            assert victim is None, f"{victim} proposed, but nothing is evictable"
        else:
            assert victim in (self.cold or evictable), f"{victim} proposed of {evictable}"
        assert self.policy.victim() == victim, "asking changed the answer"

    def _evict(self) -> None:
        victim = self.policy.victim()
        assert victim is not None, "no victim, though some key is evictable"
        self.policy.forget(victim)
        self.cold.discard(victim)
        del self.pins[victim]


class _TracedKey(ExpertKey):
    """A key whose hashes and comparisons are Python, so that tracing sees them."""

    __slots__ = ()

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    def __lt__(self, other: tuple[int, ...]) -> bool:
        return super().__lt__(other)


def _count_operations(policy: EvictionPolicy, key: ExpertKey) -> int:
    """The bytecodes that a miss of ``key`` executes, and then a hit of it."""
    n_operations = 0

    def trace(frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any]:
        nonlocal n_operations
        n_operations += 1
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _miss_and_hit(policy, key)
    finally:
        sys.settrace(before)
    return n_operations


def _miss_and_hit(policy: EvictionPolicy, key: ExpertKey) -> None:
    policy.step(key.layer, [key])
    victim = policy.victim()
    assert victim is not None
    policy.forget(victim)
    policy.admit(key)
    policy.release(key)
    policy.step(key.layer, [key])
    policy.hold(key)
    policy.release(key)
