"""An online estimate of when each expert is used next: the victim is the one used last.

Of each expert of a layer it keeps how often it was used lately, over several memories at once: the
mean of its uses, decayed with half-lives of 1 to 512 tokens, a number from 0 to 1. Each memory is a
predictor of its layer's next token; the estimate p is their mixture, one set of shares for the
whole model. An expert used with probability p in every token is used next after 1 / p of them on
average, so the victim has the largest (last step of its layer + 1 / p).

**Learning.** The shares move towards the memories that foresaw the experts that were then used:
share ← (1 - η) share + η mean over those of (share × memory / p), which is EM for the shares of a
mixture, one layer step at a time (Cappé and Moulines, J. R. Statist. Soc. B 71:3, 2009). They stay
positive and sum to 1, so a bad guess cannot run away, and a model whose routing changes quickly
gets a short memory by itself.

**Observations.** What the router thought of the experts it did *not* choose says more about the
next token than uses do. Where it is shown (``observe``), its probabilities × top-k, at most 1, and
their mean with a half-life of 8 tokens join the mixture.

**Cost.** ``step`` only notes what was used. The arithmetic is done in ``settle``, which whoever
steps calls when the reads are on their way, or at the latest by the next step: a victim is chosen
by what was known before its step. Choosing scans the experts of a layer in numpy; over all layers,
only those that changed.

Shares by layer as in ``lrfu``. Rejected: logistic regression on the logarithms of the same numbers
with time since use (more parameters, needs labels some tokens later, and two points worse on three
traces until it has learnt).
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, log
from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.policies.quotas import Quotas
from tieredmoe.policies.use_counts import UseCounts
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HALF_LIVES_TOKENS = (1, 4, 16, 64, 512)
OBSERVED_HALF_LIFE_TOKENS = 8
LEARNING_RATE = 0.02
_P_MIN = 1e-300
"""Less counts as never: what is left of a memory after half a million tokens has no reciprocal."""
_SLOWEST = 2 ** (-1 / HALF_LIVES_TOKENS[-1])
_N_USED = len(HALF_LIVES_TOKENS)
_NOW, _MEAN = _N_USED, _N_USED + 1


class NextUsePolicy:
    """Evicts the key whose next use is expected last, by layer where there are slots enough.

    See the module. Keys are of these ``layers``; how many experts they have is found out.
    """

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        self._top_k = top_k
        self._layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._quotas = Quotas(layers, n_slots=n_slots, least=top_k)
        self._resident: dict[ExpertKey, bool] = {}
        """Whether each key with a slot is evictable."""
        self._cold: OrderedDict[ExpertKey, None] = OrderedDict()
        self._layer = layers[0]
        self._n_steps = 0
        self._unsettled: tuple[int, list[int], float] | None = None
        self._shares = np.full(_N_USED, 1 / _N_USED)
        self._decay = np.array([[2 ** (-1 / half_life)] for half_life in HALF_LIVES_TOKENS])
        self._memories = np.zeros((len(layers), _N_USED + 2, 64))
        self._due = np.full((len(layers), 64), np.inf)
        """When each expert's next use is expected, in tokens; never for those never used."""
        self._evictable = np.zeros((len(layers), 64), bool)
        self._last = np.zeros(len(layers), np.int64)
        """The evictable expert of each layer that is due last."""
        self._stale = set(range(len(layers)))
        self._n_ran = [0] * len(layers)
        """Steps of each layer that its memories are made of."""

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """``keys`` are used; what follows from that is for ``settle`` to find out."""
        self.settle()
        self._n_steps += 1
        self._layer = layer
        experts = [key.expert for key in keys]
        self._unsettled = (self._rows[layer], experts, self._n_steps / len(self._layers))
        if self._cold:
            for key in keys:
                if key in self._cold:
                    del self._cold[key]
                    self._put(key)

    def settle(self) -> None:
        """Learn from the last step and expect anew the uses of its layer's experts."""
        if self._unsettled is None:
            return
        row, experts, now = self._unsettled
        self._unsettled = None
        self._grow(max(experts, default=0))
        memories = self._memories[row]
        foreseen = memories[: len(self._shares), experts] * self._weights(row)[:, None]
        p = foreseen.sum(axis=0)
        if (known := p > _P_MIN).any():
            responsible = (foreseen[:, known] / p[known]).mean(axis=1)
            self._shares += LEARNING_RATE * (responsible - self._shares)
        self._n_ran[row] += 1
        used = memories[:_N_USED]
        used *= self._decay
        used[:, experts] += 1 - self._decay
        self._expect(row, now)

    def observe(self, layer: int, probabilities: NDArray[np.floating]) -> None:
        """The router gave these probabilities to the experts of ``layer`` in its last step."""
        self.settle()
        if len(self._shares) == _N_USED:
            self._shares = np.full(_N_USED + 2, 1 / (_N_USED + 2))
        self._grow(len(probabilities) - 1)
        memories = self._memories[self._rows[layer], :, : len(probabilities)]
        memories[_NOW] = np.minimum(probabilities * self._top_k, 1)
        decay = 2 ** (-1 / OBSERVED_HALF_LIFE_TOKENS)
        memories[_MEAN] = decay * memories[_MEAN] + (1 - decay) * memories[_NOW]
        self._expect(self._rows[layer], self._n_steps / len(self._layers))

    def use_counts(self) -> UseCounts:
        """Uses as far back as the longest memory goes."""
        self.settle()
        slowest = self._memories[:, _N_USED - 1]
        # So many tokens at the rates of a full memory; it may not be full yet.
        n_tokens = sum(1 - _SLOWEST**n for n in self._n_ran) / len(self._n_ran) / (1 - _SLOWEST)
        rows, experts = slowest.nonzero()
        uses = (slowest[rows, experts] / (1 - _SLOWEST)).tolist()
        keys = map(ExpertKey, np.array(self._layers)[rows].tolist(), experts.tolist())
        return UseCounts(n_tokens, dict(zip(keys, uses, strict=True)))

    def recall(self, counts: UseCounts) -> None:
        """Begin with the longest memory as these tokens would have left it."""
        assert not self._n_steps, "recalled after the first step"
        if not counts.n_tokens:
            return
        filled = min(counts.n_tokens * (1 - _SLOWEST), 1 - 2**-20)
        self._n_ran = [ceil(log(1 - filled, _SLOWEST))] * len(self._layers)
        for key, uses in counts.uses.items():
            self._grow(key.expert)
            of_key = self._memories[self._rows[key.layer], :, key.expert]
            of_key[_N_USED - 1] = min(1, uses / counts.n_tokens * filled)
        for row in range(len(self._layers)):
            self._expect(row, 0)

    def admit(self, key: ExpertKey) -> None:
        """``key`` has taken a slot, which is its layer's now; it is held."""
        assert key not in self._resident, f"{key} is admitted already"
        self._resident[key] = False
        self._quotas.excess[self._quotas.group_of(key.layer)] += 1

    def hold(self, key: ExpertKey) -> None:
        """``key`` must not be proposed until ``release``."""
        assert self._resident.get(key), f"{key} is not evictable"
        self._resident[key] = False
        if key in self._cold:
            del self._cold[key]
        else:
            row = self._rows[key.layer]
            self._evictable[row, key.expert] = False
            self._stale.add(row)

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """``key`` may be proposed again; ``cold`` puts it behind the other cold ones."""
        evictable = self._resident.get(key)
        assert evictable is not None, f"{key} is not admitted"
        assert not evictable, f"{key} is not held"
        self._resident[key] = True
        if cold:
            self._cold[key] = None
        else:
            self._put(key)

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot, held or not; its memories stay."""
        evictable = self._resident.get(key)
        assert evictable is not None, f"{key} is not admitted"
        if evictable:
            self.hold(key)
        del self._resident[key]
        self._quotas.excess[self._quotas.group_of(key.layer)] -= 1

    def victim(self) -> ExpertKey | None:
        """The oldest cold key, else that due last in the layer whose turn it is to give a slot."""
        if self._cold:
            return next(iter(self._cold))
        if len(self._quotas.excess) == 1:
            return self._due_last(range(len(self._layers)))
        donors = self._quotas.donors(self._quotas.group_of(self._layer))
        victims = (self._due_last((row,)) for row in donors)
        return next((key for key in victims if key is not None), None)

    def resize(self, n_slots: int) -> None:
        """Share ``n_slots`` from now on, by layers or not."""
        self._quotas.share(n_slots)
        for key in self._resident:
            self._quotas.excess[self._quotas.group_of(key.layer)] += 1

    def _expect(self, row: int, now: float) -> None:
        """When the experts of a layer are due, which ran ``now``."""
        memories = self._memories[row]
        # Row by row: sums of equal columns must be equal, wherever they stand, or ties would go by
        # how the machine rounds.
        weights = self._weights(row)
        p = weights[0] * memories[0]
        for weight, memory in zip(weights[1:], memories[1:], strict=False):
            p += weight * memory
        self._due[row] = np.inf
        np.divide(1, p, out=self._due[row], where=p > _P_MIN)
        self._due[row] += now
        self._stale.add(row)

    def _weights(self, row: int) -> NDArray[np.float64]:
        """The shares of a layer's memories, over how full those are: they begin empty."""
        weights = self._shares.copy()
        weights[:_N_USED] /= 1 - self._decay[:, 0] ** max(1, self._n_ran[row])
        return weights

    def _due_last(self, rows: Sequence[int]) -> ExpertKey | None:
        """The evictable key of these layers that is due last; of equals, the first."""
        for row in self._stale.intersection(rows):
            self._last[row] = np.where(self._evictable[row], self._due[row], -np.inf).argmax()
            self._stale.discard(row)
        rows = [row for row in rows if self._evictable[row, self._last[row]]]
        if not rows:
            return None
        row = max(rows, key=lambda row: self._due[row, self._last[row]])
        return ExpertKey(self._layers[row], int(self._last[row]))

    def _put(self, key: ExpertKey) -> None:
        self._grow(key.expert)
        row = self._rows[key.layer]
        self._evictable[row, key.expert] = True
        self._stale.add(row)

    def _grow(self, expert: int) -> None:
        """Make room for an expert of this number."""
        n = self._due.shape[1]
        if expert < n:
            return
        more = max(n, expert + 1 - n)
        self._memories = np.pad(self._memories, ((0, 0), (0, 0), (0, more)))
        self._evictable = np.pad(self._evictable, ((0, 0), (0, more)))
        self._due = np.pad(self._due, ((0, 0), (0, more)), constant_values=np.inf)
