"""What backends over real files promise on top of ``BackendContract``.

Far offsets, descriptors that go away, and forked children. ``descriptors`` tells the contract which
ones to take away.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import TYPE_CHECKING

import pytest

from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.testing.contracts.backend import BackendContract
from tieredmoe.testing.contracts.target import BLOCK_NBYTES, N_BLOCKS, Target, bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.backends.protocol import ReadBackend

FAR_OFFSETS = (2**31 - BLOCK_NBYTES, 2**31, 2**32, 2**32 + BLOCK_NBYTES, 5 * 2**30)


class FileBackendContract(BackendContract):
    """Tests of one backend over files; override ``open_backend`` and ``descriptors``."""

    def descriptors(self, backend: ReadBackend) -> Sequence[int]:
        """The descriptors of the files, in their order."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides descriptors, to say what is tested"
        )

    def test_offsets_beyond_four_gib_are_read(self, directory: Path) -> None:
        """A sparse file with a page of its own at each place where 32 bits end."""
        path = directory / "sparse.bin"
        with path.open("wb") as file:
            for i, offset in enumerate(FAR_OFFSETS, start=1):
                file.seek(offset)
                file.write(bytes([i]) * BLOCK_NBYTES)

        async def main() -> None:
            async with self.opened([path]) as backend:
                targets = [Target() for _ in FAR_OFFSETS]
                ops = [t.op(0, offset) for t, offset in zip(targets, FAR_OFFSETS, strict=True)]
                await asyncio.gather(*backend.submit(ops))
                assert [set(target.view) for target in targets] == [{i} for i in range(1, 6)]

        self.run(main())

    def test_a_descriptor_closed_under_us_is_opened_again(self, paths: list[Path]) -> None:
        """The file is still what it was, so the reads land, and the retry is counted."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                os.close(self.descriptors(backend)[0])
                ops = [Target().op(0, i * BLOCK_NBYTES) for i in range(20)]
                await asyncio.gather(*backend.submit(ops))
                for op in ops:
                    assert op.target == bytes_of(op, [paths[0].read_bytes()])
                stats = backend.stats()
                assert stats.retries >= 1
                assert (stats.reads, stats.errors) == (20, {})

        self.run(main())

    def test_another_file_under_the_same_name_is_not_read(self, paths: list[Path]) -> None:
        """A lost descriptor is not replaced by one of a file that came later."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                other = paths[0].with_name("other.bin")
                other.write_bytes(paths[0].read_bytes())
                other.replace(paths[0])
                os.close(self.descriptors(backend)[0])
                target, good = Target(), Target()
                futures = backend.submit([target.op(0, 0), good.op(1, 0)])
                with pytest.raises(ReadError, match="was replaced by another") as caught:
                    await futures[0]
                await futures[1]
                assert caught.value.kind == "changed"
                assert target.untouched()

        self.run(main())

    def test_a_number_that_was_given_to_another_file_is_not_closed(self, paths: list[Path]) -> None:
        """After a descriptor was closed under us, ``close`` leaves its number's new owner alone."""

        async def main() -> None:
            async with self.opened(paths) as backend:
                number = self.descriptors(backend)[1]
                os.close(number)
                os.dup2(os.open(paths[0].parent, os.O_RDONLY), number)
            os.close(number)  # fails if the backend has done so

        self.run(main())

    def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(
        self, paths: list[Path]
    ) -> None:
        """``ClosedError`` in the child, where nothing else changes; the parent's reads land."""

        async def main() -> None:
            contents = [path.read_bytes() for path in paths]
            async with self.opened(paths) as backend:
                ops = [Target().op(0, i % N_BLOCKS * BLOCK_NBYTES) for i in range(100)]
                futures = backend.submit(ops)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a fork beside threads: that is the test
                    child = os.fork()
                if not child:
                    os._exit(_refusal(backend, futures))
                _, status = os.waitpid(child, 0)  # noqa: ASYNC222 (the child ends at once)
                assert os.waitstatus_to_exitcode(status) == 0
                await asyncio.gather(*futures)
                for op in ops:
                    assert op.target == bytes_of(op, contents)
                await backend.submit([Target().op(0, 0)])[0]

        self.run(main())


def _refusal(backend: ReadBackend, futures: Sequence[asyncio.Future[None]]) -> int:
    """Exit status of the child: 0 if the backend is dead here and says so."""
    for future in futures:
        backend.promote(future)
        if backend.drop(future):
            return 4
    try:
        backend.submit([Target().op(0, 0)])
    except ClosedError as error:
        closing = backend.close()
        try:
            closing.send(None)  # the loop is the parent's: a close that waits would not end
        except StopIteration:
            return 0 if "forked child" in str(error) else 1
        return 2
    return 3
