"""What every read backend promises of the reads themselves; see ``contracts.backend``."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ReadError
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


class ReadingContract:
    """The half of ``BackendContract`` that is about bytes: which arrive, which are refused."""

    async def open_backend(self, paths: Sequence[Path]) -> ReadBackend:
        """Open a fresh backend over these files, in this order."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides open_backend, to say what is tested"
        )

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

    @pytest.mark.parametrize("needed_nbytes", [BLOCK_NBYTES + TAIL_NBYTES, BLOCK_NBYTES + 1])
    def test_padding_may_lie_behind_the_end_of_the_file(
        self, paths: list[Path], needed_nbytes: int
    ) -> None:
        """An envelope is read whole pages at a time, and its last page may not be whole."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                target = Target(4)
                op = target.op(1, (N_BLOCKS - 1) * BLOCK_NBYTES, needed_nbytes)
                await backend.submit([op])[0]
                content = paths[1].read_bytes()[op.offset :]
                assert target.view[: len(content)] == content
                assert backend.stats().errors == {}

        self.run(main())

    def test_what_is_needed_must_be_there(self, paths: list[Path]) -> None:
        """One byte less is the end of the file."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                op = Target(2).op(1, N_BLOCKS * BLOCK_NBYTES, TAIL_NBYTES + 1)
                with pytest.raises(ReadError) as caught:
                    await backend.submit([op])[0]
                assert (caught.value.errno, caught.value.nbytes) == (0, 2 * BLOCK_NBYTES)
                assert backend.stats().errors == {"eof": 1}

        self.run(main())
