"""Decayed frequency with a share of the slots for each layer: the default.

Each use of a key counts 2^(-age / 32 tokens), and the victim has the smallest sum (LRFU: Lee et
al., IEEE Trans. Computers 50:12, 2001, with F(x) = 2^(-x / 32)). So a hot expert outlives a passing
one, and that of a topic long past goes.

**Order.** Decay moves all sums alike, so it never changes their order. Written against a fixed
origin, a use at time t adds 2^(t / 32) and a sum changes only when its key is used. The rank is the
logarithm of that, rounded down to half an octave; the last use breaks ties. Sums are integers, of
which the logarithm is the length in bits (of the square, for halves): a fifth of the time of a
float's, on a path that every hit takes.

**Time.** A token is as many steps as there are layers, whoever's they are: time moves by a part of
a token with each layer step. So with several generations at once, however their steps interleave,
the half-life is 32 of their tokens together; a prefill's union is one step, for what it says of an
expert is that it was used; and a set served in several waves makes time run only a little faster.
(Rejected: a token begins when the layer number falls, which every change between two generations
would look like.) Time goes by in turns of 8 tokens, a quarter of an octave: within one,
all uses weigh the same, so that a hit costs no power of 2.

**Layers.** Each layer has an equal share of the slots, its quota, and a miss takes its victim from
its own layer, or, while that has less than its quota, from the layer furthest above its own. Flat
layers would lose all their slots to skewed ones otherwise. Where a quota would be less than one
token uses (top-k), sharing costs more than it gains, and there is one order for all layers.

Rejected: halving all counts now and then (a scan, and half a point worse); exact sums instead of
halves of octaves (a tree or a heap instead of lists; no difference in hits).
"""

from __future__ import annotations

from math import ceil, exp2, log, log2
from typing import TYPE_CHECKING

from tieredmoe.policies.order import CLASS_SHIFT, Group, VictimOrder
from tieredmoe.policies.quotas import Quotas
from tieredmoe.policies.use_counts import UseCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.policies.order import Ranked
    from tieredmoe.spec import ExpertKey

HALF_LIFE_TOKENS = 32
TURNS_PER_OCTAVE = 4
CLASSES_PER_OCTAVE = 2
_OCTAVES_BELOW = 8
"""Sums further below that of a use now are told apart by their order alone."""
_OCTAVES_PER_ORIGIN = 8
"""How far time runs before its origin is moved, so that sums stay within a machine word."""
UNIT = 1 << 10
"""What a use adds at the origin; then the uses of the turns of an octave, from their middles."""
_USES = tuple(round(UNIT * exp2((i + 0.5) / TURNS_PER_OCTAVE)) for i in range(TURNS_PER_OCTAVE))
_UNIT_CLASS = (UNIT * UNIT).bit_length()


class _Layer:
    """The keys of one layer and the origin, in octaves, that their sums are written against."""

    __slots__ = ("due", "group", "nodes", "origin", "origin_class", "use")

    def __init__(self) -> None:
        self.group: Group
        self.nodes: list[Ranked] = []
        self.origin = 0
        self.origin_class = -_UNIT_CLASS
        self.use = UNIT  # what a use adds in this turn
        self.due = 0  # the step at which the next turn begins


class LRFUPolicy:
    """Evicts the key with the smallest decayed count, by layer where there are slots enough.

    See the module for what a token and a layer's quota are. Keys are of these ``layers``.
    """

    __slots__ = (
        "_clock",
        "_groups",
        "_layer",
        "_layers",
        "_n_classes",
        "_order",
        "_quotas",
        "_recalled_tokens",
        "_steps",
        "_steps_per_turn",
        "hold",
        "release",
    )

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        self._steps_per_turn = max(1, len(layers) * HALF_LIFE_TOKENS // TURNS_PER_OCTAVE)
        # A key used in every step has the largest sum there can be, a geometric series.
        octaves_above = log2(self._steps_per_turn / (1 - exp2(-1 / TURNS_PER_OCTAVE)))
        self._n_classes = ceil(CLASSES_PER_OCTAVE * (octaves_above + _OCTAVES_BELOW)) + 2
        self._layers = {layer: _Layer() for layer in layers}
        self._steps = 0
        self._clock = 0
        self._recalled_tokens = 0.0
        self._layer = layers[0]
        self._quotas = Quotas(layers, n_slots=n_slots, least=top_k)
        self._group()
        order = self._order = VictimOrder(lambda key: self._layers[key.layer].group)
        # Bound, not wrapped: a hit calls these for each of its keys.
        self.hold = order.hold
        self.release = order.release

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Each of ``keys`` is used once more, the last of them most recently."""
        steps = self._steps = self._steps + 1
        self._layer = layer
        of_layer = self._layers[layer]
        if steps >= of_layer.due:
            self._turn(of_layer)
        use = of_layer.use
        origin_class = of_layer.origin_class
        ranked = self._order.ranked
        stamp = self._clock
        for key in keys:
            stamp += 1
            try:  # quicker than get, and hardly ever in vain
                node = ranked[key]
            except KeyError:
                node = self._see(key)
            node.uses += 1
            weight = node.weight = node.weight + use
            rank_class = (weight * weight).bit_length() + origin_class
            node.rank = rank_class << CLASS_SHIFT | stamp
        self._clock = stamp

    def admit(self, key: ExpertKey) -> None:
        """``key`` has taken a slot, which is its layer's now; it is held."""
        self._see(key)
        self._order.admit(key)
        self._quotas.excess[self._quotas.group_of(key.layer)] += 1

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot, held or not; its sum stays."""
        self._order.forget(key)
        self._quotas.excess[self._quotas.group_of(key.layer)] -= 1

    def victim(self) -> ExpertKey | None:
        """The coldest of the layer stepped last, or of that furthest above its quota.

        O(layers) while layers are on their way to their quotas, else O(1).
        """
        for group in self._quotas.donors(self._quotas.group_of(self._layer)):
            key = self._order.victim(self._groups[group])
            if key is not None:
                return key
        return None

    def resize(self, n_slots: int) -> None:
        """Share ``n_slots`` from now on, by layers or not."""
        self._quotas.share(n_slots)
        self._group()
        self._order.regroup()
        for key, node in self._order.ranked.items():
            self._quotas.excess[self._quotas.group_of(key.layer)] += node.has_slot

    def use_counts(self) -> UseCounts:
        """Uses since it was built and those recalled."""
        uses = {key: node.uses for key, node in self._order.ranked.items() if node.uses}
        return UseCounts(self._recalled_tokens + self._steps / len(self._layers), uses)

    def recall(self, counts: UseCounts) -> None:
        """Begin as if tokens with these rates of use had just gone by."""
        assert not self._steps, "recalled after the first step"
        counts = counts.faded()
        self._recalled_tokens = counts.n_tokens
        for key in reversed(counts.by_heat()):
            self._clock += 1
            node = self._see(key)
            node.uses = counts.uses[key]
            # What uses at this rate, for ever, have decayed to; and one, to be of class 0 or above.
            of_rate = node.uses / counts.n_tokens * HALF_LIFE_TOKENS / log(2)
            node.weight = UNIT + round(UNIT * of_rate)
            rank_class = (node.weight * node.weight).bit_length() - _UNIT_CLASS
            node.rank = rank_class << CLASS_SHIFT | self._clock

    def _group(self) -> None:
        """Give every layer its group, new and empty, classes at where time is."""
        self._groups = [Group(n_classes=self._n_classes) for _ in self._quotas.excess]
        for layer, of_layer in self._layers.items():
            of_layer.group = self._groups[self._quotas.group_of(layer)]
            self._turn(of_layer)

    def _see(self, key: ExpertKey) -> Ranked:
        node = self._order.ranked.get(key)
        if node is None:
            node = self._order.see(key)
            self._layers[key.layer].nodes.append(node)
        return node

    def _turn(self, of_layer: _Layer) -> None:
        """Bring the layer, and the classes of its group, to the turn that it is."""
        n_turns = self._steps // self._steps_per_turn
        of_layer.due = (n_turns + 1) * self._steps_per_turn
        octaves, quarter = divmod(n_turns, TURNS_PER_OCTAVE)
        if octaves >= of_layer.origin + _OCTAVES_PER_ORIGIN:
            for node in of_layer.nodes:
                node.weight >>= octaves - of_layer.origin
            of_layer.origin = octaves
            of_layer.origin_class = octaves * CLASSES_PER_OCTAVE - _UNIT_CLASS
        of_layer.use = _USES[quarter] << octaves - of_layer.origin
        lowest = (octaves - _OCTAVES_BELOW) * CLASSES_PER_OCTAVE
        if lowest > of_layer.group.base:
            of_layer.group.advance(lowest)
