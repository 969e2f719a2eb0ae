"""What goes wrong with reads, by script or by seed.

A fault belongs to a place in a file, like a bad sector: every read that covers the place meets it,
whatever the read's own range. That keeps a scenario valid when the way of reading changes (whole
records, envelopes, chunks).
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING, Literal, Self

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.backends.protocol import ReadOp

FaultKind = Literal["error", "torn", "eof", "slow"]


@attrs.frozen
class Fault:
    """How one read goes wrong, after ``delay_s`` more seconds than it would have taken.

    ``error`` fails with ``errno`` and leaves garbage in the target; ``torn`` fails so too, but some
    of the right bytes arrived; ``eof`` is the end of the file within the range, as if the file had
    been cut; ``slow`` is late and otherwise well.
    """

    kind: FaultKind = "error"
    errno: int = errno.EIO
    delay_s: float = 0.0


@attrs.define(eq=False)
class _Scripted:
    file_index: int
    offset: int
    fault: Fault
    n_left: int | None


class FaultPlan:
    """Which reads fail: scripted places first, then each read with probability ``rate``.

    Random faults are drawn from ``faults`` by ``seed``, in the order in which reads start. A plan
    is used up by one run; ``n_injected`` counts the faults given out.
    """

    def __init__(
        self, *, seed: int = 0, rate: float = 0.0, faults: Sequence[Fault] = (Fault(),)
    ) -> None:
        self._random = random.Random(seed)  # noqa: S311 (a scenario, not a secret)
        self._rate = rate
        self._faults = list(faults)
        self._script: list[_Scripted] = []
        self.n_injected = 0

    def at(
        self, file_index: int, offset: int, fault: Fault | None = None, *, times: int | None = 1
    ) -> Self:
        """Let the next ``times`` reads that cover byte ``offset`` meet ``fault`` (None: all)."""
        self._script.append(_Scripted(file_index, offset, fault or Fault(), times))
        return self

    def take(self, op: ReadOp) -> Fault | None:
        """The fault that ``op`` meets now, if any; a counted one is thereby used."""
        for scripted in self._script:
            if (
                scripted.n_left != 0
                and scripted.file_index == op.file_index
                and 0 <= scripted.offset - op.offset < op.target.nbytes
            ):
                if scripted.n_left is not None:
                    scripted.n_left -= 1
                self.n_injected += 1
                return scripted.fault
        if self._rate and self._random.random() < self._rate:
            self.n_injected += 1
            return self._random.choice(self._faults)
        return None
