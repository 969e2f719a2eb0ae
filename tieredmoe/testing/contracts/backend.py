"""What every read backend promises, as tests: subclass ``BackendContract`` and override one method.

::

    class TestMyBackend(BackendContract):
        async def open_backend(self, paths):
            return await my_open(paths)

The contract writes the files, aligns memory and offsets, and closes what it opens. It waits only
for futures, ``drain`` and ``close``, so a backend in virtual time runs it as well as a real one.
"""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.testing.contracts.target import (
    BLOCK_NBYTES,
    BROKEN,
    N_BLOCKS,
    TAIL_NBYTES,
    Target,
    broken_read,
    bytes_of,
    read_anywhere,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from tieredmoe.backends.protocol import ReadBackend

T = TypeVar("T")


class BackendContract:
    """Tests of one backend; see the module. Override ``open_backend``, the others if need be."""

    async def open_backend(self, paths: Sequence[Path]) -> ReadBackend:
        """Open a fresh backend over these files, in this order."""
        raise NotImplementedError

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a test's coroutine; override it for a backend that lives on another kind of loop."""
        return asyncio.run(main)

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Where the files are written; override it if the backend cannot read there."""
        return tmp_path

    @pytest.fixture
    def paths(self, directory: Path) -> list[Path]:
        """Two files of random bytes: one of whole blocks, one with a tail that is no block."""
        source = random.Random(1)  # noqa: S311 (test data)
        whole = N_BLOCKS * BLOCK_NBYTES
        paths = [directory / "whole.bin", directory / "tail.bin"]
        for path, nbytes in zip(paths, (whole, whole + TAIL_NBYTES), strict=True):
            path.write_bytes(source.randbytes(nbytes))
        return paths

    @asynccontextmanager
    async def opened(self, paths: Sequence[Path]) -> AsyncIterator[ReadBackend]:
        """An open backend, closed at the end, with nothing left in it."""
        backend = await self.open_backend(paths)
        try:
            yield backend
        finally:
            await backend.close()
        stats = backend.stats()
        assert (stats.in_flight, stats.queued) == (0, 0)

    def test_alignment_is_a_power_of_two_up_to_a_page(self, paths: list[Path]) -> None:
        """The packs are laid out in pages, so no backend may need more."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                assert backend.info.alignment in {2**i for i in range(13)}

        self.run(main())

    def test_every_read_gets_its_own_bytes(self, paths: list[Path]) -> None:
        """Random files, offsets and lengths, in batches of random size."""

        async def main() -> None:
            source = random.Random(2)  # noqa: S311 (test data)
            contents = [path.read_bytes() for path in paths]
            async with self.opened(paths) as backend:
                for _ in range(20):
                    targets = [Target(source.randint(1, 4)) for _ in range(source.randint(1, 8))]
                    ops = [read_anywhere(source, target) for target in targets]
                    await asyncio.gather(*backend.submit(ops))
                    for op in ops:
                        assert op.target == bytes_of(op, contents)

        self.run(main())

    def test_offsets_need_no_more_than_the_alignment(self, paths: list[Path]) -> None:
        """The smallest unit that the backend names is accepted and read right."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                unit = backend.info.alignment
                memory = Target()
                target = memory.view[unit : 2 * unit] if unit < BLOCK_NBYTES else memory.view
                skew = unit if unit < BLOCK_NBYTES else 0
                op = ReadOp(0, 3 * unit, target, memory.address + skew)
                await backend.submit([op])[0]
                assert target == bytes_of(op, [paths[0].read_bytes()])

        self.run(main())

    def test_there_is_one_future_per_read_in_order(self, paths: list[Path]) -> None:
        """Of five reads the third fails: that future and no other."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                ops = [Target().op(0, b * BLOCK_NBYTES) for b in (4, 3, N_BLOCKS + 5, 1, 0)]
                futures = backend.submit(ops)
                outcomes = await asyncio.gather(*futures, return_exceptions=True)
                assert isinstance(outcomes.pop(2), ReadError)
                assert outcomes == [None] * 4
                for op in ops[:2] + ops[3:]:
                    assert op.target == bytes_of(op, [paths[0].read_bytes()])

        self.run(main())

    def test_an_empty_batch_is_nothing(self, paths: list[Path]) -> None:
        """No futures, nothing outstanding."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                assert backend.submit([]) == []
                await backend.drain()

        self.run(main())

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_bad_read_is_refused_and_nothing_started(
        self, paths: list[Path], broken: str
    ) -> None:
        """One bad read among good ones: ``ValueError``, and the good ones are not read either."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                if backend.info.alignment == 1 and broken in {"offset", "length", "address"}:
                    pytest.skip("every range is aligned to 1")
                before, bad, after = Target(), Target(2), Target()
                ops = [before.op(0, 0), broken_read(bad, broken), after.op(0, BLOCK_NBYTES)]
                with pytest.raises(ValueError, match=r".+"):
                    backend.submit(ops)
                stats = backend.stats()
                assert (stats.reads, stats.in_flight, stats.queued) == (0, 0, 0)
                await backend.drain()
                assert all(target.untouched() for target in (before, bad, after))

        self.run(main())

    @pytest.mark.parametrize("block", [N_BLOCKS, N_BLOCKS - 1, N_BLOCKS + 1000])
    def test_the_end_of_the_file_is_an_error_with_all_the_facts(
        self, paths: list[Path], block: int
    ) -> None:
        """Past the end and across it; errno 0, for the system reported none."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                target, other = Target(2), Target()
                offset = block * BLOCK_NBYTES
                futures = backend.submit([target.op(1, offset), other.op(1, 0)])
                with pytest.raises(ReadError) as caught:
                    await futures[0]
                await futures[1]
                error = caught.value
                assert Path(error.path) == paths[1]
                assert (error.offset, error.nbytes, error.errno) == (offset, 2 * BLOCK_NBYTES, 0)
                assert str(paths[1]) in str(error)
                assert str(offset) in str(error)
                assert other.view == paths[1].read_bytes()[:BLOCK_NBYTES]
                assert backend.stats().errors == {"eof": 1}

        self.run(main())

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
