"""How fast a drive is, learnt from the reads that it completes: arithmetic, no I/O and no clock.

Bytes landed over time busy, both fading, so that reads that land together (a queue that completes
at once) and reads that overlap are counted for what they are. Rejected: bytes over a read's own
latency, which calls a drive slow because its queue is long, and an average per interval between two
completions, which is infinite when two land at once.
"""

from __future__ import annotations

import math

FADE_S = 1.0
"""After so many busy seconds, what was seen before counts 1/e."""


class DriveRate:
    """The rate of one drive and the work that it has; the caller says what time it is."""

    __slots__ = ("_busy_s", "_landed_nbytes", "_now_s", "outstanding_nbytes")

    def __init__(self) -> None:
        self.outstanding_nbytes = 0
        self._landed_nbytes = 0.0
        self._busy_s = 0.0
        self._now_s = 0.0

    @property
    def nbytes_per_s(self) -> float | None:
        """Bytes per busy second; None before the first read has landed."""
        if not self._landed_nbytes:
            return None
        # Reads that land in the instant of their submission are as fast as the clock can tell.
        return self._landed_nbytes / max(self._busy_s, 1e-9)

    def started(self, nbytes: int, *, now_s: float) -> None:
        """A read was given to the drive."""
        self._advance(now_s)
        self.outstanding_nbytes += nbytes

    def ended(self, nbytes: int, *, now_s: float, landed: bool) -> None:
        """That read is over; a failed one took its time all the same."""
        self._advance(now_s)
        self.outstanding_nbytes -= nbytes
        assert self.outstanding_nbytes >= 0
        if landed:
            self._landed_nbytes += nbytes

    def finish_s(self, nbytes: int, *, now_s: float, unknown_nbytes_per_s: float) -> float:
        """Seconds until a read of ``nbytes`` given now would land.

        A drive that has landed nothing yet is taken to do ``unknown_nbytes_per_s``.
        """
        self._advance(now_s)
        rate = self.nbytes_per_s or unknown_nbytes_per_s
        return (self.outstanding_nbytes + nbytes) / rate

    def _advance(self, now_s: float) -> None:
        if self.outstanding_nbytes:
            kept = math.exp((self._now_s - now_s) / FADE_S)
            self._landed_nbytes *= kept
            self._busy_s = self._busy_s * kept + FADE_S * (1 - kept)
        self._now_s = now_s
