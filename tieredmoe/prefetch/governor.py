"""How much may be guessed for each layer: as much as pays, measured while it runs.

A guess wins the time that it had the disk to itself, if it is used; it costs the time for which
demand, as it came, found it in flight. Both are the disk's time, so they can be compared whatever
the disk and whoever shares it. Where the second exceeds the first, or too few guesses are used at
all, the width is halved, at last to none, and where it is more than twice the first, at once to
none; later it is tried again with one guess, each time after twice as long. Where guessing pays,
the width doubles.

It is decided for each layer, since layers differ by a factor of two in what can be foreseen, and
for the model: whether the disk is idle at all shows in a token or two over all layers, and would
take each of them alone as many tokens as there are layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.ring import PrefetchCounts

PRECISION_MIN = 0.3
"""Used guesses per guess that was read, below which guessing is not worth it."""
PRECISION_GOOD = 0.5
EVIDENCE = 8
"""Guesses whose end must be known before anything is decided for a layer."""
EVIDENCE_OF_MODEL = 32
"""The same for all layers together; with a narrower width, so much less."""
HALF_LIFE: Final = 4
"""In times the evidence: what is so many guesses ago counts half."""
PROBE_S = 2.0
PROBE_S_MAX = 60.0


@attrs.define
class _Course:
    """How guessing has gone lately, for a layer or for all."""

    width: int
    width_max: int
    evidence: int
    used: float = 0.0
    wasted: float = 0.0
    dropped: float = 0.0
    won_s: float = 0.0
    lost_s: float = 0.0
    off_until: float = 0.0
    off_s: float = PROBE_S

    def add(self, ended: tuple[int, int, int], won_s: float, lost_s: float) -> None:
        used, wasted, dropped = ended
        fade = 0.5 ** (sum(ended) / (HALF_LIFE * self.evidence))
        self.used = self.used * fade + used
        self.wasted = self.wasted * fade + wasted
        self.dropped = self.dropped * fade + dropped
        self.won_s = self.won_s * fade + won_s
        self.lost_s = self.lost_s * fade + lost_s

    def decide(self, now: float) -> None:
        n_read, n_ended = self.used + self.wasted, self.used + self.wasted + self.dropped
        if not self.width or n_ended < max(EVIDENCE, self.evidence * self.width / self.width_max):
            return
        # Dropped in time, a guess costs nothing; too late, it is in the time that was lost.
        won_s = self.won_s * self.used / n_ended
        if self.lost_s > 2 * won_s:
            self._narrow(now, to=0)
        elif self.used < PRECISION_MIN * n_read or self.lost_s > won_s:
            self._narrow(now, to=self.width // 2)
        elif self.used >= PRECISION_GOOD * n_read and 2 * self.lost_s <= won_s:
            self.off_s = PROBE_S
            if self.width < self.width_max:
                self.width = min(self.width_max, 2 * self.width)
                self.forget()

    def forget(self) -> None:
        """Begin to collect evidence anew."""
        self.used = self.wasted = self.dropped = self.won_s = self.lost_s = 0.0

    def width_at(self, now: float) -> int:
        if not self.width and now >= self.off_until:
            self.width = 1
            self.forget()
        return self.width

    def _narrow(self, now: float, *, to: int) -> None:
        self.width = to
        self.forget()
        if not self.width:
            self.off_until = now + self.off_s
            self.off_s = min(PROBE_S_MAX, 2 * self.off_s)


class Governor:
    """Widths of guesses by layer, from 0 to ``width_max``. Bound to nothing but its ``clock``."""

    def __init__(self, *, width_max: int, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds, the loop's in a simulation."""
        assert width_max > 0
        self.width_max = width_max
        self._clock = clock
        self._layers: dict[int, _Course] = {}
        self._model = _Course(width_max, width_max, EVIDENCE_OF_MODEL)
        self._counted: dict[int, tuple[int, int, int]] = {}

    def width(self, layer: int) -> int:
        """How many experts to guess for ``layer`` now; 0 while that does not pay."""
        now = self._clock()
        return min(self._model.width_at(now), self._of(layer).width_at(now))

    def account(
        self, layer: int, counts: PrefetchCounts, *, won_s: float = 0.0, lost_s: float = 0.0
    ) -> None:
        """Decide anew by what became of all guesses for ``layer`` so far (``counts``).

        Since the last call for it, they had the disk to themselves for ``won_s`` seconds, and
        demand had to wait behind them for ``lost_s``.
        """
        counted = (counts.useful + counts.late, counts.wasted, counts.dropped)
        used, wasted, dropped = self._counted.get(layer, (0, 0, 0))
        self._counted[layer] = counted
        ended = (counted[0] - used, counted[1] - wasted, counted[2] - dropped)
        now = self._clock()
        for course in (self._of(layer), self._model):
            course.add(ended, won_s, lost_s)
            course.decide(now)

    def _of(self, layer: int) -> _Course:
        course = self._layers.get(layer)
        if course is None:
            course = self._layers[layer] = _Course(self.width_max, self.width_max, EVIDENCE)
        return course

    def __repr__(self) -> str:
        widths = {layer: course.width for layer, course in sorted(self._layers.items())}
        return f"<Governor {self._model.width}, by layer {widths}>"
