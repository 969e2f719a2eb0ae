"""The hierarchy: ``await hierarchy.acquire(layer, experts)`` and what stands behind it.

It owns a chain of tiers (the top one and, through it, all below) and the leases on the top tier. It
lives in the loop in which it was made; everything but ``acquire``, ``stream`` and ``close`` is
synchronous. How the chain is composed is its owner's choice; ``tieredmoe.chain`` builds the usual
one.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from tieredmoe.admission import admit
from tieredmoe.lease import Lease, Leases
from tieredmoe.snapshots import SnapshotFile
from tieredmoe.spec import ExpertKey
from tieredmoe.stats import Stats
from tieredmoe.tier import Tier
from tieredmoe.waves import stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
    from pathlib import Path
    from types import TracebackType

    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec


class Hierarchy:
    """Serves the experts of ``spec`` from the tier ``top``; an async context manager.

    With a ``stats_path`` the counters are written there every ``stats_every`` steps (a step is an
    acquire or a stream) and at the close. Bound to the running loop and not thread-safe, save for
    ``hits``, ``keys`` and ``stats``, on which ``tieredmoe.threaded`` builds.
    """

    def __init__(
        self, top: Tier, spec: MoESpec, *, stats_path: Path | None = None, stats_every: int = 1000
    ) -> None:
        self.top = top
        self.spec = spec
        self._steps = count(1)
        self.executed_experts = dict.fromkeys(spec.layers, 0)
        self._leases = Leases(top)
        self._snapshots = (
            None
            if stats_path is None
            else SnapshotFile(stats_path, every=stats_every, snapshot=self.stats)
        )
        self._keys = {
            layer: {expert: ExpertKey(layer, expert) for expert in range(spec.n_experts)}
            for layer in spec.layers
        }

    def acquire(self, layer: int, experts: Iterable[int]) -> Acquire[Lease]:
        """Pin the distinct ``experts`` of ``layer``: await it, or ``async with`` it, for a lease.

        The lease comes as soon as every expert has a slot, which on a hit or with room in the tier
        needs no suspension; experts that were absent land one by one (``lease.as_completed()``). A
        set that must wait for slots waits in one first-come, first-served queue, holding nothing.

        Cancelling it at any await gives everything back. A task should hold one lease at a time.

        Raises ``WorkingSetTooLargeError`` at once for a set that can never fit (``stream`` serves
        it), ``ValueError`` for a layer or expert the model does not have, ``ClosedError``.
        """
        return Acquire(self.admit, layer, self.keys(layer, experts))

    def stream(
        self, layer: int, experts: Iterable[int], *, owner: object = None
    ) -> AsyncGenerator[Lease, None]:
        """Yield leases that together hold each distinct expert once, as they land; any set size.

        The leases belong to ``owner``, by default the task that iterates.
        A lease is released when the iteration goes on. Leaving the loop early needs ``aclose`` (use
        ``contextlib.aclosing``). Raises as ``acquire`` does, and ``ExpertLoadError``.
        """
        keys = self.keys(layer, experts)
        self._step()
        return stream(self._leases, layer, keys, owner=owner)

    def keys(self, layer: int, experts: Iterable[int]) -> list[ExpertKey]:
        """The keys of the distinct ``experts`` of ``layer``, in order of first mention."""
        try:
            of_layer = self._keys[layer]
        except KeyError:
            raise ValueError(f"layer {layer} has no routed experts; {self._known()}") from None
        try:
            return list(map(of_layer.__getitem__, dict.fromkeys(experts)))
        except KeyError as error:
            if hasattr(experts, "tolist"):  # a tensor's elements are no ints, its list's are
                return self.keys(layer, experts.tolist())
            raise ValueError(f"there is no expert {error.args[0]!r}; {self._known()}") from None
        except TypeError as error:
            raise ValueError(
                f"experts are a flat series of ints, not {experts!r}; {self._known()}"
            ) from error

    def count_executed(self, layer: int, n_pairs: int) -> None:
        """Book ``n_pairs`` (token, expert) pairs computed in ``layer``: the audit of top-k."""
        self.executed_experts[layer] += n_pairs

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        residency = self.top.residency
        below = self.top.source
        disk = below.counters
        read_errors = dict(disk.read_errors)  # in one step: the loop counts on
        return Stats(
            cache_hits=residency.hits,
            cache_misses=residency.misses,
            cache_joins=residency.joins,
            cache_evictions=residency.evictions,
            pack_reads=disk.pack_reads,
            pack_read_bytes=disk.pack_read_bytes,
            pack_payload_bytes=disk.pack_payload_bytes,
            h2d_bytes=below.copied_nbytes if isinstance(below, Tier) else 0,
            fallback_count=disk.fallback_count,
            io_errors=sum(read_errors.values()),
            read_errors=read_errors,
            retries=disk.retries,
            digest_mismatches=disk.digest_mismatches,
            repaired=disk.repaired,
            executed_experts=self.executed_experts,
            cache_policy=self.top.policy_name,
            cache_capacity_experts=residency.n_slots,
            cache_capacity_bytes=residency.n_slots * self.top.arena.slot_nbytes,
            resident_experts=len(residency.entries),
            backend=disk.backend,
            direct_io=disk.direct_io,
        )

    async def close(self) -> None:
        """Release all leases, refuse what waits, drain all I/O, free the memory. Idempotent.

        It always runs to its end: a cancellation that arrives meanwhile is raised afterwards, since
        memory must not go away under a running read.
        """
        cancelled: asyncio.CancelledError | None = None
        self.top.shut()  # first, or a released slot would go to someone in the queue
        self._leases.release_all()
        while True:
            try:
                await self.top.close()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        if self._snapshots is not None:
            await self._snapshots.close()
        if cancelled is not None:
            raise cancelled

    def check(self) -> None:
        """Assert the invariants of every tier; O(n), for tests."""
        tier: Source = self.top
        while isinstance(tier, Tier):
            tier.check()
            tier = tier.source

    async def admit(self, layer: int, keys: list[ExpertKey], *, owner: object = None) -> Lease:
        """A lease on ``keys``, all of ``layer``, for ``owner``: by default the current task."""
        lease = await admit(self._leases, layer, keys, owner=owner)
        self._step()
        return lease

    def hits(self, layer: int, keys: list[ExpertKey], *, owner: object) -> Lease | None:
        """A lease for ``owner`` if all ``keys`` are resident and nobody queues, in any thread.

        It is to be given back by ``release_landed``. In another thread than the loop's, look at
        ``closed`` afterwards: what was closed meanwhile may not have found it. Raises
        ``ClosedError``.
        """
        entries = self.top.try_hits(keys)
        if entries is None:
            return None
        lease = Lease(self._leases, layer, entries, owner=owner)
        self._step()
        return lease

    @property
    def closed(self) -> bool:
        """Whether ``close`` has begun."""
        return self.top.closed

    def _step(self) -> None:
        n_steps = next(self._steps)  # one step of the interpreter: no two threads get the same
        if self._snapshots is not None:
            self._snapshots.tick(n_steps)

    def _known(self) -> str:
        layers = self.spec.layers
        return (
            f"this model routes in layers {layers[0]}..{layers[-1]} "
            f"over experts 0..{self.spec.n_experts - 1}"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return (
            f"<Hierarchy {self.spec.architecture}, {len(self._leases.owners)} leases, {self.top!r}>"
        )


class Releasable(Protocol):
    """What ``Acquire`` can give back."""

    def release(self) -> None:
        """Give every pin back."""


L = TypeVar("L", bound=Releasable)


class Acquire(Generic[L]):
    """What ``acquire`` returns: await it once for a lease, or enter it with ``async with``."""

    __slots__ = ("_admit", "_keys", "_layer", "_lease")

    def __init__(
        self,
        admit: Callable[[int, list[ExpertKey]], Coroutine[Any, Any, L]],
        layer: int,
        keys: list[ExpertKey],
    ) -> None:
        self._admit = admit
        self._layer = layer
        self._keys = keys
        self._lease: L | None = None

    def __await__(self) -> Generator[object, object, L]:
        return self._admit(self._layer, self._keys).__await__()

    async def __aenter__(self) -> L:
        self._lease = await self
        return self._lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._lease is not None
        self._lease.release()
