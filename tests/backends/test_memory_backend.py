import asyncio
from pathlib import Path

import pytest

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ReadError
from tieredmoe.spec import Priority
from tieredmoe.testing.contracts.backend import BackendContract


class TestMemoryBackend(BackendContract):
    @pytest.fixture(params=[1, 4096], autouse=True)
    def _alignment(self, request):
        self.alignment = request.param

    async def open_backend(self, paths):
        contents = [path.read_bytes() for path in paths]
        return MemoryBackend(contents, paths=paths, alignment=self.alignment)


def read_op(target: bytearray, offset: int) -> ReadOp:
    return ReadOp(0, offset, memoryview(target), 0)


def test_a_read_ends_in_the_next_iteration_and_not_in_submit():
    async def main():
        backend = MemoryBackend([b"0123456789"])
        target = bytearray(4)
        (future,) = backend.submit([read_op(target, 3)])
        assert not future.done()
        assert target == bytes(4)
        assert backend.stats().in_flight == 1
        await asyncio.sleep(0)
        assert future.done()
        assert target == b"3456"

    asyncio.run(main())


def test_reads_end_in_order_of_submission():
    async def main():
        backend = MemoryBackend([bytes(64)])
        ended = []
        for i, future in enumerate(backend.submit([read_op(bytearray(8), 0) for _ in range(8)])):
            future.add_done_callback(lambda _done, i=i: ended.append(i))
        await backend.drain()
        await asyncio.sleep(0)
        assert ended == list(range(8))

    asyncio.run(main())


def test_of_reads_that_are_due_the_urgent_end_first():
    async def main():
        backend = MemoryBackend([bytes(64)])
        ended = []
        for priority in (Priority.WARMUP, Priority.DEMAND, Priority.LOOKAHEAD, Priority.DEMAND):
            (future,) = backend.submit([read_op(bytearray(8), 0)], priority=priority)
            future.add_done_callback(lambda _done, p=priority: ended.append(p))
        await backend.drain()
        await asyncio.sleep(0)
        assert ended == sorted(ended)

    asyncio.run(main())


def test_a_view_released_by_its_owner_is_still_written():
    async def main():
        backend = MemoryBackend([b"0123456789"])
        target = bytearray(4)
        with memoryview(target) as view:
            (future,) = backend.submit([ReadOp(0, 0, view, 0)])
        await future
        assert target == b"0123"
        target.append(0)  # and the backend has let go of it

    asyncio.run(main())


def test_errors_name_files_without_a_path_by_number():
    async def main():
        backend = MemoryBackend([b"01"])
        with pytest.raises(ReadError, match="memory:0: read of 4 bytes at offset 0") as caught:
            await backend.submit([read_op(bytearray(4), 0)])[0]
        assert caught.value.path == "memory:0"

    asyncio.run(main())


def test_files_and_paths_must_pair_up():
    with pytest.raises(AssertionError, match="one path for each file"):
        MemoryBackend([b"", b""], paths=[Path("only-one")])
