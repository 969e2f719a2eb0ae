"""Ways of reading the same records, side by side in rounds.

Whatever else the machine does happens to all of them: within a round every way reads as much as
every other, in an order that turns from round to round, and what is compared are ratios inside a
round. Before each turn the files are dropped from the page cache and it is looked up that they are
gone: a number that the cache produced is not reported.
"""

from __future__ import annotations

import os
from statistics import median
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends import open_backend
from tieredmoe.backends.kernel import Kernel
from tieredmoe.cli.raw_reads import read_raw
from tieredmoe.cli.read_rate import measure
from tieredmoe.errors import BackendUnavailableError, DirectIOUnavailableError, TieredMoEError
from tieredmoe.memory import HostPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.cli.read_rate import Place, ReadRate

CEILING = "plain reads"
WAYS = (CEILING, "uring", "threads", "buffered")
_CACHED_SHARE_MAX = 0.01


@attrs.frozen(kw_only=True)
class Contest:
    """What is read, how much of it at once, and how much in a turn."""

    files: Sequence[Path]
    where: Sequence[Place]
    record_nbytes: int
    n_in_flight: int
    n_records: int


@attrs.frozen
class Standing:
    """How one way of reading did over all rounds, or why it could not take part."""

    way: str
    rates: tuple[ReadRate, ...] = ()
    shares: tuple[float, ...] = ()
    """Of the plain reads of the same round."""
    absent: str | None = None

    @property
    def gb_per_s(self) -> float:
        """The median of all rounds."""
        return median(rate.gb_per_s for rate in self.rates)

    @property
    def cpu_s_per_gb(self) -> float:
        """The median of all rounds."""
        return median(rate.cpu_s_per_gb for rate in self.rates)

    @property
    def share(self) -> float:
        """The median of all rounds."""
        return median(self.shares)


async def hold(contest: Contest, *, n_rounds: int, kernel: Kernel | None = None) -> list[Standing]:
    """Let every way of ``WAYS`` read in each of ``n_rounds``; a lesser one is never put in for it.

    Raises ``PageCacheError`` where reads may come from the page cache, and what the plain reads
    raise.
    """
    kernel = kernel or Kernel()
    rounds: dict[str, list[ReadRate]] = {way: [] for way in WAYS}
    absent: dict[str, str] = {}
    for number in range(n_rounds):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            if way in absent:
                continue
            _forget(contest.files, kernel)
            try:
                rounds[way].append(await _turn(way, contest, kernel))
            except (BackendUnavailableError, DirectIOUnavailableError) as error:
                if way == CEILING:
                    raise
                absent[way] = error.reason
    return [
        Standing(way, absent=absent[way])
        if way in absent
        else Standing(way, tuple(rates), _shares(rates, rounds[CEILING]))
        for way, rates in rounds.items()
    ]


class PageCacheError(TieredMoEError):
    """What would be measured is the page cache, not the drive."""


def refuse_memory(path: Path, fd: int, kernel: Kernel) -> None:
    """Raise ``PageCacheError`` if ``fd``, a file at or in ``path``, has no drive under it."""
    if kernel.lives_in_memory(fd):
        raise PageCacheError(f"{path} is in memory, not on a drive; name a path on the drive")


def _shares(rates: Sequence[ReadRate], ceiling: Sequence[ReadRate]) -> tuple[float, ...]:
    return tuple(rate.gb_per_s / plain.gb_per_s for rate, plain in zip(rates, ceiling, strict=True))


async def _turn(way: str, contest: Contest, kernel: Kernel) -> ReadRate:
    pool = HostPool.allocate(contest.n_in_flight * contest.record_nbytes)
    sizes = {
        "record_nbytes": contest.record_nbytes,
        "n_in_flight": contest.n_in_flight,
        "n_records": contest.n_records,
    }
    try:
        if way == CEILING:
            return read_raw(contest.files, contest.where, pool, kernel=kernel, **sizes)
        backend = open_backend(
            way, contest.files, record_nbytes=contest.record_nbytes, kernel=kernel
        )
        try:
            return await measure(backend, contest.where, pool, **sizes)
        finally:
            await backend.close()
    finally:
        pool.close()


def _forget(files: Sequence[Path], kernel: Kernel) -> None:
    """Drop ``files`` from the page cache; ``PageCacheError`` if they stay there."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            refuse_memory(path, fd, kernel)
            kernel.drop_cached(fd, 0, 0)
            cached_nbytes = kernel.cached_nbytes(fd, 0, nbytes)
        finally:
            os.close(fd)
        if cached_nbytes is None:
            raise PageCacheError(
                f"{path}: the kernel does not say what of it the page cache holds, so no number "
                "could be trusted; Linux 6.5 says it"
            )
        if cached_nbytes > _CACHED_SHARE_MAX * nbytes:
            raise PageCacheError(
                f"{path}: {cached_nbytes / nbytes:.0%} of it stays in the page cache (written just "
                "now, or mapped by a running program?); run `sync`, or end the program"
            )
