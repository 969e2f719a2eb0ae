"""What every read backend promises, as tests: subclass ``BackendContract`` and override one method.

::

    class TestMyBackend(BackendContract):
        async def open_backend(self, paths):
            return await my_open(paths)

The contract writes the files, aligns memory and offsets, and closes what it opens. It waits only
for futures, ``drain`` and ``close``, so a backend in virtual time runs it as well as a real one.
``contracts.files`` adds what only holds for real files.
"""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

import pytest

from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority
from tieredmoe.testing.contracts.reading import ReadingContract
from tieredmoe.testing.contracts.target import (
    BLOCK_NBYTES,
    N_BLOCKS,
    Target,
    bytes_of,
    read_anywhere,
)

if TYPE_CHECKING:
    from pathlib import Path


class BackendContract(ReadingContract):
    """Tests of one backend; see the module. Override ``open_backend``, the others if need be."""

    def test_a_cancelled_future_does_not_stop_its_read(self, paths: list[Path]) -> None:
        """The memory stays the backend's until the read has ended; ``drain`` waits for that."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                target = Target(4)
                op = target.op(0, 0)
                (future,) = backend.submit([op])
                future.cancel()
                await backend.drain()
                assert future.cancelled()
                assert backend.stats().in_flight == 0
                assert target.view == bytes_of(op, [paths[0].read_bytes()])

        self.run(main())

    def test_a_dropped_read_never_starts(self, paths: list[Path]) -> None:
        """``drop`` is true for queued reads only, and their memory is never written."""

        async def main() -> None:
            contents = [path.read_bytes() for path in paths]
            async with self.opened(paths) as backend:
                targets = [Target() for _ in range(200)]
                ops = [
                    target.op(0, i % N_BLOCKS * BLOCK_NBYTES) for i, target in enumerate(targets)
                ]
                futures = backend.submit(ops)
                dropped = [backend.drop(future) for future in reversed(futures)][::-1]
                await backend.drain()
                for target, op, future, gone in zip(targets, ops, futures, dropped, strict=True):
                    assert future.cancelled() == gone
                    assert target.untouched() if gone else target.view == bytes_of(op, contents)
                    assert not backend.drop(future)
                assert backend.stats().reads == len(targets) - sum(dropped)

        self.run(main())

    def test_a_thousand_reads_may_be_outstanding(self, paths: list[Path]) -> None:
        """More than any queue is deep, in two batches."""

        async def main() -> None:
            contents = [path.read_bytes() for path in paths]
            source = random.Random(3)  # noqa: S311 (test data)
            async with self.opened(paths) as backend:
                ops = [read_anywhere(source, Target()) for _ in range(1000)]
                futures = backend.submit(ops[:700]) + backend.submit(ops[700:])
                await asyncio.gather(*futures)
                for op in ops:
                    assert op.target == bytes_of(op, contents)

        self.run(main())

    def test_a_storm_of_cancellations_loses_no_read(self, paths: list[Path]) -> None:
        """Futures are cancelled and reads dropped while others are submitted and land."""

        async def main() -> None:
            contents = [path.read_bytes() for path in paths]
            source = random.Random(4)  # noqa: S311 (test data)
            async with self.opened(paths) as backend:
                targets = [Target() for _ in range(300)]
                ops = [read_anywhere(source, target) for target in targets]
                futures: list[asyncio.Future[None]] = []
                dropped: set[int] = set()
                for i, op in enumerate(ops):
                    futures += backend.submit([op], priority=source.choice(list(Priority)))
                    source.choice(futures).cancel()
                    victim = source.randrange(len(futures))
                    if backend.drop(futures[victim]):
                        dropped.add(victim)
                    backend.promote(source.choice(futures))
                    if i % 10 == 0:
                        await asyncio.wait([source.choice(futures)])
                await backend.drain()
                assert all(future.done() for future in futures)
                for i, (target, op) in enumerate(zip(targets, ops, strict=True)):
                    right = target.untouched() if i in dropped else None
                    assert target.view == bytes_of(op, contents) if right is None else right
                assert backend.stats().reads == len(ops) - len(dropped)

        self.run(main())

    @pytest.mark.parametrize("how", ["submitted as demand", "promoted"])
    def test_demand_goes_before_the_prefetch_that_waits(self, paths: list[Path], how: str) -> None:
        """Of 300 reads the last asked for is not the last to land."""

        async def main() -> None:
            order: list[str] = []
            async with self.opened(paths) as backend:
                ops = [Target().op(0, i % N_BLOCKS * BLOCK_NBYTES) for i in range(301)]
                futures = backend.submit(ops[:-1], priority=Priority.LOOKAHEAD)
                promoted = how == "promoted"
                last = Priority.LOOKAHEAD if promoted else Priority.DEMAND
                demand = backend.submit(ops[-1:], priority=last)[0]
                if backend.stats().queued < 100:
                    pytest.skip("too few reads wait to tell")
                if promoted:
                    backend.promote(demand)
                for future in futures:
                    future.add_done_callback(lambda _done: order.append("prefetch"))
                demand.add_done_callback(lambda _done: order.append("demand"))
                await backend.drain()
                await asyncio.sleep(0)
            assert len(order) == 301
            assert order[-1] == "prefetch"

        self.run(main())

    def test_promoting_what_runs_or_has_ended_changes_nothing(self, paths: list[Path]) -> None:
        """Nor does promoting demand, a dropped read, or somebody else's future."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                futures = backend.submit([Target().op(0, 0) for _ in range(50)])
                futures += backend.submit(
                    [Target().op(0, 0) for _ in range(50)], priority=Priority.WARMUP
                )
                n_dropped = sum(backend.drop(future) for future in futures[::-7])
                for future in (*futures, asyncio.get_running_loop().create_future()):
                    backend.promote(future)
                await backend.drain()
                for future in futures:
                    backend.promote(future)
                assert backend.stats().reads == 100 - n_dropped

        self.run(main())

    def test_reads_may_be_submitted_from_a_completion(self, paths: list[Path]) -> None:
        """Each of twenty reads is submitted by the callback of the one before."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                left = [Target() for _ in range(20)]
                all_read = asyncio.get_running_loop().create_future()

                def submit_next(_done: object = None) -> None:
                    if not left:
                        all_read.set_result(None)
                        return
                    (future,) = backend.submit([left.pop().op(0, 0)])
                    future.add_done_callback(submit_next)

                submit_next()
                await all_read
                assert backend.stats().reads == 20

        self.run(main())

    def test_counters_add_up(self, paths: list[Path]) -> None:
        """``reads`` and ``read_nbytes`` count what landed whole, ``errors`` the rest by name."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                good = [Target(2).op(0, BLOCK_NBYTES * i) for i in range(7)]
                bad = [Target().op(0, BLOCK_NBYTES * (N_BLOCKS + i)) for i in range(3)]
                backend.submit(good + bad)
                await backend.drain()
                stats = backend.stats()
                assert (stats.reads, stats.read_nbytes) == (7, 14 * BLOCK_NBYTES)
                assert stats.errors == {"eof": 3}

        self.run(main())

    def test_a_closed_backend_takes_no_reads(self, paths: list[Path]) -> None:
        """``ClosedError``, and the memory is not touched."""

        async def main() -> None:
            backend = await self.open_backend(paths)
            await backend.close()
            target = Target()
            with pytest.raises(ClosedError):
                backend.submit([target.op(0, 0)])
            assert target.untouched()

        self.run(main())

    @pytest.mark.parametrize("n_closers", [1, 2])
    def test_close_ends_every_read_one_way_or_the_other(
        self, paths: list[Path], n_closers: int
    ) -> None:
        """Read whole, or failed with ``ClosedError`` and never started; closing twice is once."""

        async def main() -> None:
            contents = [path.read_bytes() for path in paths]
            backend = await self.open_backend(paths)
            targets = [Target() for _ in range(300)]
            ops = [target.op(0, i % N_BLOCKS * BLOCK_NBYTES) for i, target in enumerate(targets)]
            futures = backend.submit(ops)
            others = [asyncio.ensure_future(backend.close()) for _ in range(n_closers - 1)]
            await backend.close()
            stats = backend.stats()
            assert (stats.in_flight, stats.queued) == (0, 0)
            for target, op, future in zip(targets, ops, futures, strict=True):
                assert future.done()
                if future.exception() is None:
                    assert target.view == bytes_of(op, contents)
                else:
                    assert isinstance(future.exception(), ClosedError)
                    assert target.untouched()
            await asyncio.gather(backend.close(), *others)

        self.run(main())

    def test_a_cancelled_close_can_be_finished(self, paths: list[Path]) -> None:
        """Reads are refused from its beginning on, and a second call waits for the rest."""

        async def main() -> None:
            backend = await self.open_backend(paths)
            futures = backend.submit([Target(4).op(0, 0) for _ in range(20)])
            closing = asyncio.ensure_future(backend.close())
            closing.cancel()
            await asyncio.wait({closing})
            await backend.close()
            with pytest.raises(ClosedError):
                backend.submit([Target().op(0, 0)])
            assert all(future.done() for future in futures)

        self.run(main())

    def test_errors_that_nobody_fetches_are_not_reported_as_lost(self, paths: list[Path]) -> None:
        """They are counted; asyncio's "never retrieved" would be noise after a cancellation."""

        async def main() -> None:
            reports: list[dict[str, Any]] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _loop, context: reports.append(context))
            async with self.opened(paths) as backend:
                backend.submit([Target().op(0, (N_BLOCKS + i) * BLOCK_NBYTES) for i in range(3)])
                await backend.drain()
                assert backend.stats().errors == {"eof": 3}
            gc.collect()
            assert reports == []

        self.run(main())
