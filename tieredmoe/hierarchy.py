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
from tieredmoe.trace import EventKind, TraceRing
from tieredmoe.waves import stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec
    from tieredmoe.trace import Event


class Hierarchy:
    """Serves the experts of ``spec`` from the tier ``top``; an async context manager.

    At most ``waiting_max`` acquires and streams wait for slots; one more is refused. With a
    ``stats_path`` the counters are written there every ``stats_every`` steps (a step is an acquire
    or a stream) and at the close. With ``trace_events`` the last so many events of all tiers are
    kept (``trace``). Bound to the running loop and not thread-safe, save for ``hits``, ``keys``,
    ``stats`` and ``trace``, on which ``tieredmoe.threaded`` builds.
    """

    def __init__(
        self,
        top: Tier,
        spec: MoESpec,
        *,
        waiting_max: int = 1024,
        stats_path: Path | None = None,
        stats_every: int = 1000,
        trace_events: int = 0,
    ) -> None:
        self.top = top
        self.spec = spec
        self._steps = count(1)
        self.executed_experts = dict.fromkeys(spec.layers, 0)
        self._leases = Leases(top, waiting_max=waiting_max)
        self._trace: TraceRing | None = None
        if trace_events:
            self._trace = TraceRing(trace_events, clock=asyncio.get_running_loop().time)
            for tier in self._tiers():
                tier.trace = self._trace
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

        It waits for as long as other leases hold the slots; ``asyncio.timeout`` limits that.
        Cancelling it, at any await, takes it out of the queue or gives back what it was granted,
        and lets the next one in. A task should hold one lease at a time.

        Raises ``WorkingSetTooLargeError`` at once for a set that can never fit (``stream`` serves
        it), ``QueueFullError`` at once if it had to wait and as many do as may, ``ValueError`` for
        a layer or expert the model does not have, ``ClosedError``.
        """
        return Acquire(self.admit, layer, self.keys(layer, experts))

    def stream(
        self, layer: int, experts: Iterable[int], *, owner: object = None
    ) -> AsyncGenerator[Lease, None]:
        """Yield leases that together hold each distinct expert once, as they land; any set size.

        The leases belong to ``owner``, by default the task that iterates. A lease is released when
        the iteration goes on, which waits for arrivals, and with nothing in its hands for slots.
        Leaving the loop early needs ``aclose`` (use ``contextlib.aclosing``); an error, a timeout
        or a cancellation ends the stream with everything given back. Raises as ``acquire`` does
        (``QueueFullError`` also later, between two waves), and ``ExpertLoadError``.
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
        """Book ``n_pairs`` (token, expert) pairs computed in ``layer``: the audit of top-k.

        Raises ``ValueError`` for a layer that the model does not have.
        """
        if layer not in self.executed_experts:
            raise ValueError(f"layer {layer} has no routed experts; {self._known()}")
        # A plain int, or one sum of numpy's would make the statistics unfit for JSON.
        self.executed_experts[layer] += int(n_pairs)

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
            fallback_count=len(disk.fallbacks),
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
            fallbacks=disk.fallbacks,
            drives=disk.drives,
        )

    def trace(self) -> tuple[Event, ...]:
        """What happened last, in order; empty without ``trace_events``. Also after the close.

        The number of the first event says how many older ones have been dropped.
        """
        return () if self._trace is None else self._trace.snapshot()

    async def close(self) -> None:
        """Release all leases, refuse what waits, drain all I/O, free the memory. Idempotent.

        It always runs to its end, statistics written: a cancellation (or a timeout) that arrives
        meanwhile is raised afterwards, since memory must not go away under a running read.
        """
        cancelled: asyncio.CancelledError | None = None
        self.top.shut()  # first, or a released slot would go to someone in the queue
        self._leases.release_all()
        closers = [self.top.close]
        if self._snapshots is not None:
            closers.append(self._snapshots.close)
        while closers:
            try:
                await closers[0]()
                del closers[0]
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def check(self) -> None:
        """Assert the invariants and limits of every tier; O(n), for tests."""
        waiting_max = self._leases.waiting_max
        for tier in self._tiers():
            tier.check()
            assert tier.n_waiting <= waiting_max, f"{tier}: more than {waiting_max} wait"
            waiting_max = tier.residency.n_slots  # the next one's copies go into this one's slots
        if self._trace is not None:
            self._trace.check()

    async def admit(self, layer: int, keys: list[ExpertKey], *, owner: object = None) -> Lease:
        """A lease on ``keys``, all of ``layer``, for ``owner``: by default the current task.

        What ``acquire`` awaits, with its errors; cancelled, it gives everything back.
        """
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
        if self._trace is not None:
            lease.number = self._trace.note_acquire(
                EventKind.ACQUIRED, self.top.name, layer, lease.experts, hits=len(entries)
            )
        self._step()
        return lease

    @property
    def closed(self) -> bool:
        """Whether ``close`` has begun."""
        return self.top.closed

    def _tiers(self) -> Iterator[Tier]:
        """The tiers from the top down, as far as they follow each other."""
        source: Source = self.top
        while isinstance(source, Tier):
            yield source
            source = source.source

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
    """What ``acquire`` returns: await it once for a lease, or enter it with ``async with``.

    Nothing is asked for before that. Cancelled while it waits, it has taken nothing.
    """

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
