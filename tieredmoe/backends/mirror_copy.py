"""One copy of a mirror: its rate, what it is reading, and whether it is to be avoided at present.

A copy that failed a read is avoided for a while, twice as long after each further failure in a row,
and then gets one read to prove itself: a bad sector must not cost half the bandwidth for ever, and
a dead drive must not be asked again and again. It is never given up: when nothing else is left it
is asked at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.drive_rate import DriveRate
from tieredmoe.backends.drives import DriveStats, drive_stats
from tieredmoe.errors import ReadError

if TYPE_CHECKING:
    import asyncio

    from tieredmoe.backends.drives import Drive
    from tieredmoe.backends.protocol import ReadOp
    from tieredmoe.spec import Priority

logger = logging.getLogger(__name__)

AVOIDED_S_MIN = 1.0
AVOIDED_S_MAX = 60.0
"""A copy is avoided so long after a first failure, and no longer than that after any."""

N_READS_UNASKED_MAX = 512
"""A copy that was thought too slow for so many reads gets one: it may have become faster."""


@attrs.define(eq=False)
class MirroredRead:
    """A read of a mirror, from ``submit`` to its end.

    ``op`` holds a view of the mirror's own. ``running`` is the read of the copy that serves it now;
    there is never more than one, since a second would write the same memory.
    """

    op: ReadOp
    future: asyncio.Future[None]
    priority: Priority
    copy: Copy | None = None
    running: asyncio.Future[None] | None = None
    failures: dict[Copy, BaseException] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the target."""
        return self.op.target.nbytes


class Copy:
    """One drive of a mirror, as the mirror sees it."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.rate = DriveRate()
        self.reads: dict[asyncio.Future[None], MirroredRead] = {}
        self.failing = False
        self.asked = 0
        self._avoided_s = 0.0
        self._avoided_until_s = 0.0
        self._reported = False

    @property
    def busy(self) -> bool:
        """Whether it has a read, or is about to be given one."""
        return self.rate.outstanding_nbytes > 0

    def avoided(self, now_s: float) -> bool:
        """Whether reads go elsewhere as long as there is an elsewhere."""
        return self.failing and (self.busy or now_s < self._avoided_until_s)

    def overdue(self, n_asked: int) -> bool:
        """Whether an idle copy should get a read for the sake of knowing how it does.

        ``n_asked`` counts the reads of the mirror, as ``asked`` does: it is the number of the last
        that came here.
        """
        return not self.busy and (self.failing or n_asked - self.asked > N_READS_UNASKED_MAX)

    def succeeded(self) -> None:
        """A read landed: whatever failed before does not hold."""
        if self.failing:
            logger.debug("%s serves reads again", self.drive.directory)
        self.failing = False
        self._avoided_s = 0.0

    def failed(self, error: BaseException, *, now_s: float) -> None:
        """A read failed: avoid this copy for a while, and say so the first time."""
        self.failing = True
        if now_s >= self._avoided_until_s:  # else it is one of several that failed together
            self._avoided_s = min(max(2 * self._avoided_s, AVOIDED_S_MIN), AVOIDED_S_MAX)
            self._avoided_until_s = now_s + self._avoided_s
        logger.log(
            logging.DEBUG if self._reported else logging.WARNING,
            "a mirrored drive failed a read, which goes to another copy: %s. Drive %s is avoided "
            "for now and tried again later; further failures are counted in its statistics",
            error,
            self.drive.directory,
        )
        self._reported = True

    def stats(self) -> DriveStats:
        """The backend's counters, with what is known of the drive."""
        return attrs.evolve(
            drive_stats(self.drive), nbytes_per_s=self.rate.nbytes_per_s, failing=self.failing
        )

    def __repr__(self) -> str:
        state = "failing" if self.failing else "well"
        return f"<Copy {self.drive.directory} {state}, {len(self.reads)} reads>"


def no_copy_left(failures: dict[Copy, BaseException], copies: tuple[Copy, ...]) -> BaseException:
    """The error of a read that every copy asked has failed; names each, in the mirror's order."""
    errors = [failures[copy] for copy in copies if copy in failures]
    reads = [error for error in errors if isinstance(error, ReadError)]
    if len(errors) == 1 or not reads:
        return errors[0]
    first = reads[0]
    facts = "; ".join(
        f"{error.path}: {error.fact} ({error.kind})" if isinstance(error, ReadError) else str(error)
        for error in errors
    )
    return ReadError(
        path=first.path,
        offset=first.offset,
        nbytes=first.nbytes,
        errno=first.errno or 0,
        fact=f"none of {len(errors)} copies could be read: {facts}",
        kind=first.kind,
    )
