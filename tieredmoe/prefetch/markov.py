"""Which experts follow which: a first-order Markov chain from one routed layer to the next.

It reads no model state, so it works for any model, and it is what a predictor that does has to
beat. For each expert of a layer it counts the experts that the next layer was routed to in the same
step; the first layer follows the last one of the step before. The score of an expert is the sum,
over the experts of the layer before, of its share in what followed each. Taking shares matters:
sums of counts let the experts that are always on drown the others.

Recall of the next k experts, learning as it goes, on the three public traces (299, 300 and 128
decoded tokens), beside the k used most often so far and the k of the same layer in the last step:

========================  ======  =========  =========
trace                     markov  frequency  last step
========================  ======  =========  =========
OLMoE-1B-7B, top-8          0.62       0.36       0.44
Kimi-Linear-48B, top-8      0.48       0.30       0.34
Qwen3-30B-A3B, top-6        0.56       0.35       0.38
========================  ======  =========  =========

Much of that a cache holds anyway. Of what an ``lfu_lru`` cache of a quarter of the experts missed,
it named 0.33, 0.04 and 0.08, with 0.5 to 0.7 experts named in vain for each; with twice the width
0.61, 0.15 and 0.19, and about 2 in vain.

Counts are halved at a limit, so that what followed long ago fades. For limits from 8 to 255 the
recall differs by less than 0.02 on these traces, which are too short to tell; a small limit follows
a change of topic sooner. Rejected: counts of pairs in dicts (ten times the memory), smoothing with
the frequency (0.01 to 0.09 less recall for one to ten pseudo-counts), products of likelihoods (0.02
to 0.04 more, with an exponent that was fitted to these traces).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNT_MAX = 32
"""When a count gets here, all counts of its row are halved."""


class MarkovPredictor:
    """A ``Predictor`` that needs no signal: it goes by the experts of the layer before.

    It has a guess for ``layer`` only while the layer before was the last one observed. Its memory
    is n_layers × n_experts² bytes, taken at once (2.8 MB for 43 layers of 256 experts). Unions of
    many tokens' experts, as in prefill, teach it nothing; leave them out.
    """

    def __init__(
        self, *, layers: Sequence[int], n_experts: int, top_k: int, width: int | None = None
    ) -> None:
        """For the routed ``layers``, in the order in which they run; ``width`` is top-k if None."""
        self._layers = {layer: i for i, layer in enumerate(layers)}
        self._n_experts = n_experts
        self._width = min(n_experts, top_k if width is None else width)
        self._followers = np.zeros((len(self._layers), n_experts, n_experts), np.uint8)
        self._last: tuple[int, list[int]] | None = None

    @property
    def width(self) -> int:
        """The most keys that one prediction has."""
        return self._width

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """Learn from ``layer`` being routed to ``experts``, if the layer before came just before.

        O(top-k × n_experts). Layers and experts that the model does not have are ignored.
        """
        index = self._layers.get(layer)
        if index is None:
            return
        known = [e for e in dict.fromkeys(map(int, experts)) if 0 <= e < self._n_experts]
        before = self._before(index)
        if before and known:
            table = self._followers[index]
            rows = table[before]
            rows[:, known] += 1
            if rows.max() >= COUNT_MAX:
                rows >>= rows.max(axis=1, keepdims=True) >= COUNT_MAX
            table[before] = rows
        self._last = (index, known)

    def predict(self, layer: int, signal: object = None) -> Sequence[ExpertKey]:
        """The likeliest experts of ``layer``, if the layer before was the last one observed.

        O(top-k × n_experts). Ties go to the smaller expert number; ``signal`` is not looked at.
        """
        del signal
        index = self._layers.get(layer)
        before = None if index is None else self._before(index)
        if not before:
            return ()
        counts = self._followers[index][before]
        scores = (1 / np.maximum(counts.sum(axis=1), 1)) @ counts
        best = np.argsort(-scores, kind="stable")[: self._width]
        return tuple(ExpertKey(layer, int(e)) for e in best if scores[e] > 0)

    def _before(self, index: int) -> list[int] | None:
        """The experts of the layer before, if that is what was observed last."""
        if self._last is None or (self._last[0] + 1) % len(self._layers) != index:
            return None
        return self._last[1]

    def __repr__(self) -> str:
        n_layers = len(self._layers)
        return f"<MarkovPredictor {n_layers} layers of {self._n_experts}, width {self._width}>"
