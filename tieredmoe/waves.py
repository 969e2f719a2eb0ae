"""Streaming a set of experts of any size through a tier: in waves, as slots come free.

Hits come first, so that a wave never evicts what a later one still needs. Further waves are
admitted only while that needs no waiting; only with nothing in its hands does a stream stand in the
queue. So two streams that together want more than the tier holds take turns instead of deadlocking.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tieredmoe.admission import admit
from tieredmoe.errors import WorkingSetTooLargeError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tieredmoe.lease import Lease, Leases
    from tieredmoe.spec import ExpertKey


async def stream(
    leases: Leases, layer: int, keys: Sequence[ExpertKey], *, owner: object = None
) -> AsyncGenerator[Lease, None]:
    """Yield leases that together hold every key of ``layer`` once, each lease's experts landed.

    They belong to ``owner``, by default the task that iterates first.

    A lease is released when the iteration goes on; leaving early needs ``aclose`` (or
    ``contextlib.aclosing``). A failed expert raises ``ExpertLoadError``, a cancellation or timeout
    is passed on, ``admit`` raises what it raises: always with everything given back.
    """
    waves = _Waves(leases, layer, keys, owner or asyncio.current_task())
    try:
        while waves.waiting or waves.flying:
            waves.top_up()
            if not waves.flying:
                await waves.wait_for_slots()
            landed = await waves.landed()
            try:
                yield landed
            finally:
                landed.release()
    finally:
        waves.release()


class _Waves:
    """The keys of one stream still ``waiting`` for slots, and its leases with experts in flight."""

    def __init__(
        self, leases: Leases, layer: int, keys: Sequence[ExpertKey], owner: object
    ) -> None:
        entries = leases.tier.residency.entries
        resident = [key for key in keys if key in entries]
        self.waiting = resident + [key for key in keys if key not in entries]
        self.flying: list[Lease] = []
        self._leases = leases
        self._layer = layer
        self._owner = owner
        self._arrival = asyncio.Event()

    def top_up(self) -> None:
        """Admit as many of the waiting keys as fit now."""
        tier = self._leases.tier
        n = tier.residency.n_fitting(self.waiting)
        admission = tier.try_admit(self.waiting[:n]) if n else None
        if admission is not None:
            lease = self._leases.grant(
                self._layer, admission, owner=self._owner, wake=self._arrival
            )
            self.flying.append(lease)
            del self.waiting[:n]

    async def wait_for_slots(self) -> None:
        """Queue, holding nothing, for a quarter of the tier: enough to keep the source busy.

        A tier that loses slots meanwhile refuses what it could never grant; then for less.
        """
        n = self._n_to_wait_for()
        while True:
            try:
                lease = await admit(
                    self._leases,
                    self._layer,
                    self.waiting[:n],
                    owner=self._owner,
                    wake=self._arrival,
                )
                break
            except WorkingSetTooLargeError:
                n_before, n = n, self._n_to_wait_for()
                if n >= n_before:
                    raise
        self.flying.append(lease)
        del self.waiting[:n]

    def _n_to_wait_for(self) -> int:
        """A quarter of the slots, or less if leases leave less.

        That is, the owner's others and those of owners that wait while they hold: such a wave would
        be refused though smaller ones can be served.
        """
        n_slots = self._leases.tier.residency.n_slots
        n = min(len(self.waiting), n_slots // 4)
        if self._leases.held_by({self._owner}):
            held = self._leases.held_by(self._leases.waiting | {self._owner})
            n = min(n, n_slots - len(held))
        return max(1, n)

    async def landed(self) -> Lease:
        """The next lease whose experts have all landed, split off the first wave that has some."""
        while True:
            for lease in self.flying:
                ready = lease.take_landed()
                if ready is not None:
                    if not lease.experts:
                        self.flying.remove(lease)
                        lease.release()
                    return ready
            self._arrival.clear()
            await self._arrival.wait()

    def release(self) -> None:
        """Give back whatever is still in flight."""
        for lease in self.flying:
            lease.release()
