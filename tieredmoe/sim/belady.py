"""The policy that knows the future: a bound for the others, for replays of a known trace.

Source: Belady, IBM Systems Journal 5:2, 1966. The victim is the key whose next use is furthest
away. Every miss takes a slot, as it does for all policies here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tieredmoe.sim.replay import Step


class BeladyPolicy:
    """Evicts the key of ``trace`` that is used next after all others; of equals, the least.

    It must be stepped as the trace says, from its first step on.
    """

    def __init__(self, trace: Iterable[Step]) -> None:
        self._uses: defaultdict[ExpertKey, deque[int]] = defaultdict(deque)
        for i, (layer, experts) in enumerate(step for step in trace if step.experts):
            for expert in experts:
                self._uses[ExpertKey(layer, expert)].append(i)
        self._n_steps = 0
        self._evictable: dict[ExpertKey, bool] = {}
        self._cold: OrderedDict[ExpertKey, None] = OrderedDict()
        self._last: list[tuple[float, ExpertKey]] = []

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """The next step of the trace."""
        del layer
        for key in keys:
            use = self._uses[key].popleft()
            assert use == self._n_steps, f"{key} is used in step {use}, not {self._n_steps}"
            self._cold.pop(key, None)
            if self._evictable.get(key):
                heappush(self._last, self._place(key))
        self._n_steps += 1

    def admit(self, key: ExpertKey) -> None:
        """``key`` has taken a slot; it is held."""
        assert key not in self._evictable, f"{key} is admitted already"
        self._evictable[key] = False

    def hold(self, key: ExpertKey) -> None:
        """``key`` must not be proposed until ``release``."""
        assert self._evictable.get(key), f"{key} is not evictable"
        self._evictable[key] = False
        self._cold.pop(key, None)

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """``key`` may be proposed again."""
        assert key in self._evictable, f"{key} is not admitted"
        assert not self._evictable[key], f"{key} is not held"
        self._evictable[key] = True
        if cold:
            self._cold[key] = None
        heappush(self._last, self._place(key))

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot."""
        assert key in self._evictable, f"{key} is not admitted"
        del self._evictable[key]
        self._cold.pop(key, None)

    def victim(self) -> ExpertKey | None:
        """The oldest cold key, else that used next after all others."""
        if self._cold:
            return next(iter(self._cold))
        while self._last:
            place = self._last[0]
            key = place[1]
            if self._evictable.get(key) and place == self._place(key):
                return key
            heappop(self._last)  # held, gone, or used since
        return None

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots

    def _place(self, key: ExpertKey) -> tuple[float, ExpertKey]:
        uses = self._uses[key]
        return (-uses[0] if uses else -inf, key)
