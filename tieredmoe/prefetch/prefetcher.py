"""Where what a model knows in advance meets the tiers: three hooks that never fail and never wait.

In order of certainty: layers routed by token (``on_tokens``), the next layer's router on this
layer's hidden state (``on_hidden``: the adapter computes it and hands over ids or scores), and for
layers that have neither, predictors that go by past routing (``on_routed``). A ``Governor`` says
how much of a guess is asked for; what is certain is asked for whole.

Nothing here can change a result: a hint names experts, the tiers read them or do not. So a
predictor may be wrong in any way. One that raises is switched off, and its first error is logged.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tieredmoe.errors import ClosedError
from tieredmoe.prefetch.governor import Governor
from tieredmoe.ring import PrefetchCounts
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tieredmoe.prefetch.hash_table import HashTable
    from tieredmoe.prefetch.protocol import Predictor
    from tieredmoe.prefetching import PrefetchReport
    from tieredmoe.spec import MoESpec

logger = logging.getLogger(__name__)


class Target(Protocol):
    """What takes hints: a ``Hierarchy`` or a ``ThreadedHierarchy``."""

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""

    def prefetch(
        self, layer: int, experts: Iterable[int], *, priority: Priority = Priority.LOOKAHEAD
    ) -> int:
        """Start reading what is absent; never waits."""

    def routed(self, layer: int, experts: Iterable[int]) -> None:
        """Give up other guesses for ``layer``."""

    def prefetch_report(self) -> PrefetchReport:
        """What became of the guesses so far."""


class Prefetcher:
    """Turns what a model knows into hints for ``target``; its hooks are called by one thread.

    ``table``: layers routed by token. ``predictors`` are asked in their order for layers that have
    no table and for which ``on_hidden`` is not called. ``width``: experts that one guess has at
    most, by default the model's top-k.
    """

    def __init__(
        self,
        target: Target,
        *,
        table: HashTable | None = None,
        predictors: Sequence[Predictor] = (),
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._spec = target.spec
        self._table = table
        self._predictors = list(predictors)
        width = self._spec.top_k if width is None else min(width, self._spec.n_experts)
        self.governor = Governor(width_max=width, clock=clock)
        layers = self._spec.layers
        self._next = dict(zip(layers, layers[1:] + layers[:1], strict=True))
        self._has_hidden: set[int] = set()
        self._last: int | None = None
        self._ahead_s = self._won_s = self._delay_s = 0.0

    def on_tokens(self, ids: object) -> None:
        """These tokens are run next (one sampled, or a prompt's chunk)."""
        if self._table is None:
            return
        for layer in self._table.layers:
            if layer in self._next:
                keys = self._table.predict(layer, ids)
                self._hint(layer, [key.expert for key in keys], Priority.CERTAIN)

    def on_hidden(self, layer: int, guess: object) -> None:
        """``layer``, which runs soon, will probably be routed as ``guess`` says.

        Ids, the likeliest first, or scores of all experts (floats); one row, or a row per token.
        What is neither is ignored.
        """
        if layer not in self._next or self._is_certain(layer):
            return
        self._has_hidden.add(layer)
        width = self.governor.width(layer)
        if width:
            self._hint(layer, _ranked(guess, self._spec.n_experts, width), Priority.LOOKAHEAD)

    def on_routed(self, layer: int, ids: object) -> None:
        """``layer`` was routed to ``ids`` (of one token or many); before they are acquired."""
        if layer not in self._next:
            return
        experts = _ids(ids, self._spec.n_experts)
        try:
            self._target.routed(layer, experts)
        except ClosedError:
            return
        self._account(layer)
        self._each(lambda predictor: predictor.observe(layer, experts))
        following = self._next[layer]
        if self._predictors and not self._is_certain(following):
            self._guess(following)

    def _guess(self, layer: int) -> None:
        if layer in self._has_hidden or not (width := self.governor.width(layer)):
            return
        for experts in self._each(lambda predictor: self._known(predictor, layer, width)):
            if experts:
                self._hint(layer, experts, Priority.LOOKAHEAD)
                return

    def _account(self, layer: int) -> None:
        """Tell the governor how the guesses for the layer before have done."""
        report = self._target.prefetch_report()
        last, won_s = self._last, self._won_s
        # What was read ahead since the last routing was for this layer; who waited since then,
        # waited behind guesses for the last one.
        self._won_s = report.ahead_s - self._ahead_s
        lost_s = report.demand_delay_s - self._delay_s
        self._last, self._ahead_s, self._delay_s = layer, report.ahead_s, report.demand_delay_s
        if last is not None:
            counts = report.by_layer.get(last, _NONE)
            self.governor.account(last, counts, won_s=won_s, lost_s=lost_s)

    def _hint(self, layer: int, experts: Sequence[int], priority: Priority) -> None:
        if experts:
            try:
                self._target.prefetch(layer, experts, priority=priority)
            except ClosedError:
                return

    def _is_certain(self, layer: int) -> bool:
        return self._table is not None and layer in self._table.layers

    def _known(self, predictor: Predictor, layer: int, width: int) -> list[int]:
        """What ``predictor`` says of ``layer``, as far as there is such a thing."""
        there_are = range(self._spec.n_experts)
        keys = islice(predictor.predict(layer), width)
        known = [int(e) for of_layer, e in keys if of_layer == layer and e in there_are]
        return list(dict.fromkeys(known))

    def _each(self, ask: Callable[[Predictor], list[int] | None]) -> list[list[int]]:
        """What each predictor answers; one that raises is asked no more."""
        answers = []
        for predictor in list(self._predictors):
            try:
                answers.append(ask(predictor) or [])
            except Exception:
                self._predictors.remove(predictor)
                logger.warning(
                    "%r failed and is switched off; the model runs on without its guesses",
                    predictor,
                    exc_info=True,
                )
        return answers


_NONE = PrefetchCounts()


def _ids(values: object, n_experts: int) -> list[int]:
    """The distinct experts among ``values``, in order of first mention."""
    array = _array(values)
    if array is None or not np.issubdtype(array.dtype, np.integer):
        return []
    experts = array.astype(np.int64).ravel()
    return list(dict.fromkeys(experts[(experts >= 0) & (experts < n_experts)].tolist()))


def _ranked(guess: object, n_experts: int, width: int) -> list[int]:
    """The likeliest experts of each row of ``guess``, ``width`` of a row at most."""
    array = _array(guess)
    if array is None or array.ndim not in {1, 2} or not array.size:
        return []
    rows = np.atleast_2d(array)
    if np.issubdtype(rows.dtype, np.floating):
        if rows.shape[1] != n_experts or not np.isfinite(rows).all():
            return []
        rows = np.argsort(-rows, axis=1, kind="stable")
    # Column by column: of many tokens, the likeliest of each come first.
    return _ids(rows[:, :width].T, n_experts)


def _array(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None:
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        return None
