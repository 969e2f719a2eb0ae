"""The shipped policies against plain models of themselves, and the structure under them."""

import random

import pytest

from tieredmoe.policies import LfuLruPolicy, LRUPolicy
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.policy import PolicyContract

POLICIES = pytest.mark.parametrize("policy_class", [LRUPolicy, LfuLruPolicy])


class TestLRU(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return LRUPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class TestLfuLru(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return LfuLruPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


def make(policy_class, n_slots=8):
    return policy_class(n_slots=n_slots, layers=[1, 2, 3], top_k=2)


def key(expert):
    return ExpertKey(1, expert)


def use(policy, *experts):
    """A working set of resident experts, pinned and released at once."""
    keys = [key(expert) for expert in experts]
    policy.step(1, keys)
    for k in keys:
        policy.hold(k)
    for k in keys:
        policy.release(k)


def filled(policy_class, n):
    policy = make(policy_class, n)
    for expert in range(n):
        policy.step(1, [key(expert)])
        policy.admit(key(expert))
        policy.release(key(expert))
    return policy


def drain(policy):
    """The experts in the order in which they would be evicted."""
    order = []
    while (victim := policy.victim()) is not None:
        policy.forget(victim)
        order.append(victim.expert)
    return order


class Plain:
    """Both policies by their definitions: a table of uses, searched from end to end."""

    def __init__(self, policy_class):
        self.counts_frequency = policy_class is LfuLruPolicy
        self.uses = {}
        self.clock = 0

    def step(self, keys):
        for k in keys:
            self.clock += 1
            count, _ = self.uses.get(k, (0, 0))
            self.uses[k] = (min(count + 1, 255), self.clock)

    def victim(self, candidates):
        def rank(k):
            count, last = self.uses.get(k, (0, 0))
            return (count if self.counts_frequency else 0, last, k)

        return min(candidates, key=rank, default=None)


@POLICIES
@pytest.mark.parametrize("seed", range(5))
def test_misses_on_a_trace_of_single_keys_equal_the_plain_models(policy_class, seed):
    source = random.Random(seed)
    trace = [key(min(int(source.paretovariate(0.7)), 60)) for _ in range(4000)]
    n_slots = 12

    plain, resident, expected = Plain(policy_class), set(), []
    for k in trace:
        plain.step([k])
        if k not in resident:
            expected.append(k)
            if len(resident) == n_slots:
                resident.remove(plain.victim(resident))
            resident.add(k)

    policy, resident, misses = make(policy_class, n_slots), set(), []
    for k in trace:
        policy.step(1, [k])
        if k in resident:
            policy.hold(k)
        else:
            misses.append(k)
            if len(resident) == n_slots:
                victim = policy.victim()
                policy.forget(victim)
                resident.remove(victim)
            policy.admit(k)
            resident.add(k)
        policy.release(k)
    assert misses == expected
    assert 200 < len(misses) < 3000


@POLICIES
@pytest.mark.parametrize("seed", range(20))
def test_every_victim_is_the_plain_models_whatever_the_order_of_releases(policy_class, seed):
    """Overlapping leases, uses that wait for room, failed fills, keys that were never used."""
    source = random.Random(seed)
    n_slots = 24
    policy, plain = make(policy_class, n_slots), Plain(policy_class)
    pins = {}
    for _ in range(1500):
        match source.randrange(8):
            case 0 | 1 | 2:
                keys = [key(e) for e in source.sample(range(60), source.randint(1, 4))]
                policy.step(1, keys)
                plain.step(keys)
                room = n_slots - sum(1 for k, n in pins.items() if n and k not in keys)
                if len(keys) <= room and source.random() < 0.9:
                    for k in keys:
                        if pins.get(k) == 0:
                            policy.hold(k)
                    for k in keys:
                        pins[k] = pins[k] + 1 if k in pins else None
                    for k in [k for k in keys if pins[k] is None]:
                        del pins[k]
                        if len(pins) >= n_slots:
                            victim = policy.victim()
                            policy.forget(victim)
                            del pins[victim]
                        policy.admit(k)
                        pins[k] = 1
            case 3 | 4 | 5 | 6:
                if pinned := [k for k, n in pins.items() if n]:
                    k = source.choice(pinned)
                    pins[k] -= 1
                    if not pins[k]:
                        policy.release(k)
            case 7:
                if source.random() < 0.3 and pins:
                    k = source.choice(list(pins))
                    policy.forget(k)
                    del pins[k]
                elif len(pins) < n_slots:
                    k = key(source.randrange(60, 80))  # a prefetch: resident before any use
                    if k not in pins:
                        policy.admit(k)
                        pins[k] = 0
                        policy.release(k)
        assert policy.victim() == plain.victim([k for k, n in pins.items() if not n])


@POLICIES
def test_the_order_of_releases_does_not_matter(policy_class):
    orders = []
    for releases in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        policy = make(policy_class)
        policy.step(1, [key(e) for e in range(4)])
        for expert in range(4):
            policy.admit(key(expert))
        for expert in releases:
            policy.release(key(expert))
        orders.append(drain(policy))
    assert orders == [[0, 1, 2, 3]] * 3


@POLICIES
def test_an_expert_held_long_keeps_the_rank_of_its_use(policy_class):
    policy = filled(policy_class, 4)
    policy.step(1, [key(0)])
    policy.hold(key(0))
    use(policy, 1)
    use(policy, 2)
    use(policy, 3)
    policy.release(key(0))
    assert drain(policy) == [0, 1, 2, 3]


@POLICIES
def test_an_evictable_expert_that_is_routed_to_moves_back_before_it_is_held(policy_class):
    policy = filled(policy_class, 3)
    policy.step(1, [key(0)])
    assert policy.victim() == key(1)
    policy.hold(key(0))
    policy.release(key(0))
    assert drain(policy) == [1, 2, 0]


@POLICIES
def test_a_cold_expert_that_is_routed_to_is_not_cold_any_more(policy_class):
    policy = filled(policy_class, 3)
    policy.hold(key(2))
    policy.release(key(2), cold=True)
    assert policy.victim() == key(2)
    policy.step(1, [key(2)])
    assert drain(policy) == [0, 1, 2]


@POLICIES
def test_the_oldest_cold_expert_goes_first(policy_class):
    policy = filled(policy_class, 4)
    for expert in (2, 3, 0):
        policy.hold(key(expert))
        policy.release(key(expert), cold=True)
    assert drain(policy) == [2, 3, 0, 1]


def test_lru_follows_the_last_use_alone():
    policy = filled(LRUPolicy, 4)
    for _ in range(10):
        use(policy, 0)
    use(policy, 3, 1)
    assert drain(policy) == [2, 0, 3, 1]


def test_lfu_lru_follows_counts_first_and_the_last_use_among_equals():
    policy = filled(LfuLruPolicy, 5)
    use(policy, 0)
    use(policy, 0)
    use(policy, 3)
    use(policy, 1)
    assert drain(policy) == [2, 4, 3, 1, 0]


def test_lfu_lru_counts_survive_eviction():
    policy = filled(LfuLruPolicy, 3)
    use(policy, 0)
    policy.forget(key(0))
    policy.admit(key(0))
    policy.release(key(0))
    assert drain(policy) == [1, 2, 0]


@pytest.mark.parametrize("more", [0, 1, 100])
def test_lfu_lru_counts_stop_at_255_so_that_recency_decides(more):
    policy = filled(LfuLruPolicy, 2)
    for _ in range(254 + more):
        use(policy, 0)
    for _ in range(254):
        use(policy, 1)
    assert drain(policy) == [0, 1]


def test_lfu_lru_at_254_is_still_below_255():
    policy = filled(LfuLruPolicy, 2)
    for _ in range(254):
        use(policy, 0)
    for _ in range(253):
        use(policy, 1)
    assert drain(policy) == [1, 0]


@POLICIES
@pytest.mark.parametrize("method", ["hold", "release", "forget"])
def test_using_a_key_without_a_slot_is_an_assertion(policy_class, method):
    policy = filled(policy_class, 2)
    policy.forget(key(1))
    with pytest.raises(AssertionError, match="ExpertKey"):
        getattr(policy, method)(key(1))


@POLICIES
def test_holding_twice_is_an_assertion(policy_class):
    policy = filled(policy_class, 2)
    policy.hold(key(0))
    with pytest.raises(AssertionError, match="not evictable"):
        policy.hold(key(0))


@POLICIES
@pytest.mark.parametrize("cold", [True, False])
def test_releasing_twice_is_an_assertion(policy_class, cold):
    policy = filled(policy_class, 2)
    policy.hold(key(0))
    policy.release(key(0), cold=cold)
    with pytest.raises(AssertionError, match="not held"):
        policy.release(key(0), cold=cold)
