"""The hierarchy: ``await hierarchy.acquire(layer, experts)`` and what stands behind it.

It owns a chain of tiers (the top one and, through it, all below) and the leases on the top tier. It
lives in the loop in which it was made; everything but ``acquire``, ``stream`` and ``close`` is
synchronous. How the chain is composed is its owner's choice; ``tieredmoe.chain`` builds the usual
one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Self

from tieredmoe.acquire import Acquire
from tieredmoe.admission import admit, hopeless
from tieredmoe.errors import BudgetError, ClosedError
from tieredmoe.lease import Lease, Leases
from tieredmoe.policy_file import PolicyMemory
from tieredmoe.prefetching import Prefetching, hint
from tieredmoe.snapshots import SnapshotFile
from tieredmoe.spec import ExpertKey, Priority
from tieredmoe.tier import Tier
from tieredmoe.tier_stats import hierarchy_stats
from tieredmoe.trace import EventKind, TraceRing
from tieredmoe.waves import stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.memory.protocol import Arena
    from tieredmoe.policies import UseCounts
    from tieredmoe.prefetching import PrefetchReport
    from tieredmoe.source import Source
    from tieredmoe.spec import MoESpec
    from tieredmoe.stats import Stats
    from tieredmoe.trace import Event


class Hierarchy:
    """Serves the experts of ``spec`` from the tier ``top``; an async context manager.

    At most ``waiting_max`` acquires and streams wait for slots; one more is refused. With a
    ``stats_path`` the counters are written there every ``stats_every`` steps (a step is an acquire
    or a stream) and at the close. With ``trace_events`` the last so many events of all tiers are
    kept (``trace``). Of the top tier's slots ``prefetch_slots`` are for prefetch, by default as
    many as ``ring.ring_slots`` says. The policy begins with what is ``recalled``, and what it
    remembers goes to ``policy_path`` at the close.

    Bound to the running loop and not thread-safe, save for ``hits``, ``keys``, ``stats`` and
    ``trace``, on which ``tieredmoe.threaded`` builds.
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
        prefetch_slots: int | None = None,
        policy_path: Path | None = None,
        recalled: UseCounts | None = None,
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
        self._prefetching = Prefetching(top, spec, n_asked=prefetch_slots)
        self._memory = PolicyMemory(top.residency, spec, path=policy_path, recalled=recalled)
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

    def prefetch(
        self, layer: int, experts: Iterable[int], *, priority: Priority = Priority.LOOKAHEAD
    ) -> int:
        """Start reading those ``experts`` of ``layer`` that are absent; how many it took on.

        A hint: it never waits and no error of a read ever comes of it. Experts land in a few slots
        of the top tier that are set apart for them, in idle time of the disk alone; what finds no
        slot is refused, as is all while an acquire waits for slots. An acquire of what was
        prefetched is a hit, or joins the transfer, which then goes on as demand. Raises
        ``ValueError`` for a layer or expert the model does not have, and for demand.
        """
        return self._prefetching.start(self.keys(layer, experts), hint(priority))

    def routed(self, layer: int, experts: Iterable[int]) -> None:
        """``layer`` was routed to ``experts``: what else was prefetched for it is given up.

        Reads that have not started are dropped, and what has landed is replaced first. To be called
        before ``experts`` are acquired; never raises but for a layer or expert that is not there.
        """
        self._prefetching.routed(layer, {key.expert for key in self.keys(layer, experts)})

    def prefetch_report(self) -> PrefetchReport:
        """What became of the prefetches of each layer, and of the disk's time; in any thread."""
        return self._prefetching.report()

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

    @property
    def arena(self) -> Arena:
        """The arena of the top tier: where leased experts are."""
        return self.top.arena

    async def resize(self, n_slots: int) -> int:
        """Keep ``n_slots`` slots in the top tier, which is how many there are when it returns.

        Fewer: experts in the others are evicted, and their memory is free for everyone once this
        returns, which waits for leases on them and for device work that reads them; a caller that
        holds one itself would wait for itself. More, up to as many as there were at open: they come
        back empty. Acquires in the queue that no longer fit are refused. Cancelling it stops the
        wait only.

        Raises ``BudgetError`` below one layer's top-k and if memory for more cannot be had,
        ``ValueError`` above the slots at open, ``ClosedError``.
        """
        n_max = len(self.top.slots)
        if n_slots > n_max:
            raise ValueError(f"the top tier was opened with {n_max} slots, not {n_slots}")
        if n_slots < self.spec.top_k:
            raise BudgetError(
                f"{n_slots} slots are fewer than one layer of one token needs ({self.spec.top_k})"
            )
        self.top.resize(n_slots, partial(hopeless, self._leases))
        self._prefetching.resized()
        await self.top.backing.settled()
        if self.closed:
            raise ClosedError("the hierarchy was closed while its slots were given up")
        return self.top.residency.n_slots

    @property
    def wants_observations(self) -> bool:
        """Whether the eviction policy learns from what routers think: ``observe`` is of use."""
        return self.top.residency.learner is not None

    def observe(self, layer: int, probabilities: NDArray[np.floating]) -> None:
        """Show the policy ``[n_experts]`` router probabilities, after the acquire they led to."""
        self.top.residency.observe(layer, probabilities)

    def keys_by_heat(self) -> list[ExpertKey]:
        """The experts that earlier runs used (``recalled``), the one used most first."""
        return list(self._memory.keys_by_heat)

    async def save_policy(self, path: Path) -> None:
        """Save what the policy remembers of use, to be recalled by a run of the same model.

        The file is replaced at once. Cancelling it stops the wait only. Raises ``PolicyFileError``
        where ``path`` holds anything else, and for a policy that remembers nothing.
        """
        await self._memory.save(path)

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
        tiers = tuple(self._tiers())
        return hierarchy_stats(tiers, self._prefetching, executed_experts=self.executed_experts)

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
        closers = [self._memory.close, self.top.close]
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
            waiting_max = len(tier.slots)  # the next one's copies go into this one's slots
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
