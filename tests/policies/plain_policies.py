"""Policies by their definitions, searched from end to end, and a machine that holds both up."""

import copy
from math import exp2, log2

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tieredmoe.policies.s3_fifo import USES_MAX, USES_TO_STAY
from tieredmoe.spec import ExpertKey

LAYERS = (1, 2, 5)
N_EXPERTS = 7
TOP_K = 2


class Plain:
    """Who is held, who may go and who is cold; a subclass says who is the coldest of the free."""

    def __init__(self, *, n_slots, layers, top_k):
        self.n_slots = n_slots
        self.layers = layers
        self.top_k = top_k
        self.held = set()
        self.free = set()
        self.cold = []

    def step(self, layer, keys):
        for key in keys:
            if key in self.cold:
                self.cold.remove(key)
                self.free.add(key)

    def admit(self, key):
        self.held.add(key)

    def hold(self, key):
        self.forget_place(key)
        self.held.add(key)

    def release(self, key, *, cold=False):
        self.held.remove(key)
        if cold:
            self.cold.append(key)
        else:
            self.free.add(key)

    def forget(self, key):
        self.forget_place(key)
        self.held.discard(key)

    def forget_place(self, key):
        self.free.discard(key)
        if key in self.cold:
            self.cold.remove(key)

    def resize(self, n_slots):
        self.n_slots = n_slots

    def victim(self):
        return self.cold[0] if self.cold else self.coldest()


class PlainByLayer(Plain):
    """Shares slots by layer; a subclass ranks keys, the lowest goes first."""

    least_factor = 1

    def __init__(self, *, n_slots, layers, top_k):
        super().__init__(n_slots=n_slots, layers=layers, top_k=top_k)
        self.layer = layers[0]

    def step(self, layer, keys):
        super().step(layer, keys)
        self.layer = layer

    def groups(self):
        """Pairs of layers and quota."""
        if self.n_slots // len(self.layers) < self.top_k * self.least_factor:
            return [(self.layers, self.n_slots)]
        quota, rest = divmod(self.n_slots, len(self.layers))
        return [((layer,), quota + (i < rest)) for i, layer in enumerate(self.layers)]

    def coldest(self):
        resident = [*self.held, *self.free, *self.cold]

        def excess(group):
            layers, quota = group
            return sum(key.layer in layers for key in resident) - quota

        by_excess = sorted(self.groups(), key=excess, reverse=True)
        own = next(group for group in by_excess if self.layer in group[0])
        if excess(own) >= 0:
            by_excess.insert(0, own)
        for layers, _ in by_excess:
            free = [key for key in self.free if key.layer in layers]
            if free:
                return min(free, key=self.rank)
        return None


class PlainLRFU(PlainByLayer):
    """Sums of decayed uses, in half octaves, and the last use among equals.

    Sums are in 1024ths of a use at the layer's origin, which moves on every 8 octaves.
    """

    half_life = 32
    octaves_per_origin = 8

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.steps = 0
        self.uses = 0
        self.sums = {}
        self.ranks = {}
        self.origins = dict.fromkeys(self.layers, 0)

    def step(self, layer, keys):
        super().step(layer, keys)
        self.steps += 1
        self.move_origin(layer)
        octaves, quarter = self.now()
        use = round(1024 * exp2((quarter + 0.5) / 4)) << octaves - self.origins[layer]
        for key in keys:
            self.uses += 1
            self.sums[key] = self.sums.get(key, 0) + use
            half_octaves = int(2 * (log2(self.sums[key] / 1024) + self.origins[layer]))
            self.ranks[key] = (half_octaves, self.uses, key)

    def resize(self, n_slots):
        super().resize(n_slots)
        for layer in self.layers:
            self.move_origin(layer)

    def now(self):
        return divmod(self.steps // (len(self.layers) * self.half_life // 4), 4)

    def move_origin(self, layer):
        octaves, _ = self.now()
        moved = octaves - self.origins[layer]
        if moved >= self.octaves_per_origin:
            self.origins[layer] = octaves
            for key in self.sums:
                if key.layer == layer:
                    self.sums[key] >>= moved

    def rank(self, key):
        return self.ranks.get(key, (0, 0, key))


class PlainS3FIFO(Plain):
    """Two lists and a list of ghosts; held keys stay where they are and are stepped over."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.queues = ([], [])
        self.ghosts = []
        self.uses = {}

    @property
    def main_max(self):
        return self.n_slots - int(0.1 * self.n_slots)

    def step(self, layer, keys):
        super().step(layer, keys)
        for key in keys:
            if key in self.uses:
                self.uses[key] = min(self.uses[key] + 1, USES_MAX)

    def admit(self, key):
        super().admit(key)
        self.uses[key] = 0
        self.queues[key in self.ghosts].append(key)
        if key in self.ghosts:
            self.ghosts.remove(key)

    def forget(self, key):
        if not self.cold and key == self.coldest():
            self.queues, self.uses = self.searched()[1:]
            if key in self.queues[0]:
                self.ghosts = [*self.ghosts, key][-self.main_max :]
        super().forget(key)
        for queue in self.queues:
            if key in queue:
                queue.remove(key)
        del self.uses[key]

    def resize(self, n_slots):
        super().resize(n_slots)
        self.ghosts = self.ghosts[-self.main_max :]

    def coldest(self):
        return self.searched()[0]

    def searched(self):
        """The victim, and the queues and uses as they are when it is found."""
        (small, main), uses = copy.deepcopy(self.queues), dict(self.uses)
        if len(main) <= self.main_max or not self.free.intersection(main):
            for key in [key for key in small if key in self.free]:
                if uses[key] < USES_TO_STAY:
                    return key, (small, main), uses
                small.remove(key)
                main.append(key)
                uses[key] = 0
        while free := [key for key in main if key in self.free]:
            key = free[0]
            if not uses[key]:
                return key, (small, main), uses
            uses[key] -= 1
            main.remove(key)
            main.append(key)
        return None, (small, main), uses


class BesidePlain(RuleBasedStateMachine):
    """A policy and its plain model through the same life, as ``Residency`` leads it.

    A subclass sets ``policy_class`` and ``plain_class``.
    """

    @initialize(n_slots=st.integers(1, 12))
    def begin(self, n_slots):
        sizes = {"n_slots": n_slots, "layers": LAYERS, "top_k": TOP_K}
        self.both = (self.policy_class(**sizes), self.plain_class(**sizes))
        self.n_slots = n_slots
        self.pins = {}

    def tell(self, method, *args, **options):
        for each in self.both:
            getattr(each, method)(*args, **options)

    @rule(
        layer=st.sampled_from(LAYERS),
        experts=st.lists(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=4, unique=True),
        waits=st.booleans(),
        again=st.integers(1, 3),
    )
    def acquire(self, layer, experts, waits, again):
        """Admitted if it fits; now and then only stepped: a policy may not rely on more."""
        keys = [ExpertKey(layer, expert) for expert in experts]
        for _ in range(again):
            self.tell("step", layer, keys)
        pinned = sum(1 for key, pins in self.pins.items() if pins and key not in keys)
        if waits or pinned + len(keys) > self.n_slots:
            return
        for key in keys:
            if self.pins.get(key) == 0:
                self.tell("hold", key)
            if key in self.pins:
                self.pins[key] += 1
        for key in keys:
            if key not in self.pins:
                if len(self.pins) >= self.n_slots and 0 in self.pins.values():
                    self.evict()
                self.tell("admit", key)
                self.pins[key] = 1

    @rule(data=st.data(), cold=st.sampled_from([False, False, False, True]))
    def unpin(self, data, cold):
        pinned = sorted(key for key, pins in self.pins.items() if pins)
        if pinned:
            key = data.draw(st.sampled_from(pinned))
            self.pins[key] -= 1
            if not self.pins[key]:
                self.tell("release", key, cold=cold)

    @rule()
    def unpin_all(self):
        for key in [key for key, pins in self.pins.items() if pins]:
            self.pins[key] = 0
            self.tell("release", key)

    @rule(data=st.data())
    def lose(self, data):
        if self.pins:
            key = data.draw(st.sampled_from(sorted(self.pins)))
            self.tell("forget", key)
            del self.pins[key]

    @rule(key=st.builds(ExpertKey, st.sampled_from(LAYERS), st.integers(N_EXPERTS, N_EXPERTS + 2)))
    def bring(self, key):
        """An expert that was never asked for, as a hint brings one."""
        if key not in self.pins and len(self.pins) < self.n_slots:
            self.tell("admit", key)
            self.tell("release", key)
            self.pins[key] = 0

    @rule(n_slots=st.integers(1, 12))
    def resize(self, n_slots):
        self.n_slots = n_slots
        self.tell("resize", n_slots)
        while len(self.pins) > n_slots and 0 in self.pins.values():
            self.evict()

    @rule(n=st.integers(1, 3))
    def make_room(self, n):
        for _ in range(n):
            if 0 in self.pins.values():
                self.evict()

    @invariant()
    def victims_agree(self):
        if hasattr(self, "both"):
            policy, plain = self.both
            assert policy.victim() == plain.victim()

    def evict(self):
        victim = self.both[1].victim()
        self.tell("forget", victim)
        del self.pins[victim]


class PlainNextUse(PlainByLayer):
    """A table of memories, mixed anew for every key at every question."""

    half_lives = (1, 4, 16, 64, 512)
    rate = 0.02

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.steps = 0
        self.unsettled = None
        self.shares = np.full(len(self.half_lives), 1 / len(self.half_lives))
        self.memories = {}
        self.ran = {}
        self.due = {}

    def step(self, layer, keys):
        super().step(layer, keys)
        self.settle()
        self.steps += 1
        self.unsettled = (layer, keys, self.steps / len(self.layers))

    def settle(self):
        if self.unsettled is None:
            return
        layer, keys, now = self.unsettled
        self.unsettled = None
        known = [self.memories[key] for key in keys if key in self.memories]
        if known:
            foreseen = np.array(known).T * self.weights(layer)[:, None]
            responsible = (foreseen / foreseen.sum(axis=0)).mean(axis=1)
            self.shares += self.rate * (responsible - self.shares)
        self.ran[layer] = self.ran.get(layer, 0) + 1
        for key in keys:
            self.memories.setdefault(key, [0.0] * len(self.half_lives))
        for key, memories in self.memories.items():
            if key.layer == layer:
                for i, half_life in enumerate(self.half_lives):
                    memories[i] *= 2 ** (-1 / half_life)
                    memories[i] += (key in keys) * (1 - 2 ** (-1 / half_life))
                weights = self.weights(layer)
                p = sum(weight * memory for weight, memory in zip(weights, memories, strict=True))
                self.due[key] = now + 1 / p

    def weights(self, layer):
        """Shares of memories that begin empty, over how full they are."""
        full = [
            1 - (2 ** (-1 / half_life)) ** max(1, self.ran.get(layer, 0))
            for half_life in self.half_lives
        ]
        return self.shares / np.array(full)

    def rank(self, key):
        return (-self.due.get(key, float("inf")), self.layers.index(key.layer), key.expert)
