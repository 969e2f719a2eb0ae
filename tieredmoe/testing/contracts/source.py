"""What every source promises, as tests: subclass ``SourceContract`` and override one method.

::

    class TestMySource(SourceContract):
        async def open_source(self, pack, *, broken):
            return MySource(pack, ...)

        def run(self, main):            # for a source in virtual time
            return sim_run(main)

The contract gives the experts, the slots and the right answers, and closes what it opens. It waits
only for fills and ``close``, so it runs in real and in virtual time.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tieredmoe.errors import ClosedError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.slots import Slots
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Coroutine

    from tieredmoe.memory.protocol import Slot
    from tieredmoe.source import Source

T = TypeVar("T")

BROKEN = ExpertKey(1, 3)
"""The expert that cannot be read in the tests of failures."""


class SourceContract:
    """Tests of one source; see the module. Override ``open_source``, the others if need be."""

    settle_s = 0.0
    """Seconds, by the loop's clock, in which late writes are looked for after a close."""
    counts_failures = True
    """Whether a broken expert is one that the disk at the bottom reports, and counts."""

    async def open_source(self, pack: TinyPack, *, broken: Collection[ExpertKey]) -> Source:
        """Open a fresh source over the experts of ``pack`` (``image`` is their file).

        Reading one of those in ``broken`` must fail, however often it is tried.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides open_source, to say what is tested"
        )

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a test's coroutine; override it for a source that lives on another kind of loop."""
        return asyncio.run(main)

    def make_pack(self) -> TinyPack:
        """Three layers of eight experts, records of different sizes and none that fills its pages.

        Override it for a source with experts of its own: ``spec`` and ``payload`` are asked for.
        """
        return TinyPack(tiny_spec(role_nbytes=[1360, 800, 2000]))

    @asynccontextmanager
    async def opened(
        self, *, broken: Collection[ExpertKey] = ()
    ) -> AsyncIterator[tuple[Source, Slots]]:
        """An open source and a slot for every expert; closed at the end, nothing written later."""
        pack = self.make_pack()
        source = await self.open_source(pack, broken=broken)
        slots = Slots(pack, source.parts)
        try:
            yield source, slots
        finally:
            await source.close()
        slots.spoil()
        await asyncio.sleep(self.settle_s)
        assert slots.all_spoiled(), "written into after the close"

    def test_there_is_one_fill_per_request_each_with_its_own_expert(self) -> None:
        """In the order of the requests, whatever that is; slots are used again and again."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                luck = random.Random(1)  # noqa: S311 (test data)
                for _ in range(10):
                    asked = luck.sample(slots.keys, k=luck.randint(1, 9))
                    where = luck.sample(range(slots.n_slots), k=len(asked))
                    fills = source.read_into(
                        [(key, slots[i]) for key, i in zip(asked, where, strict=True)]
                    )
                    assert len(fills) == len(asked)
                    for key, i, fill in zip(asked, where, fills, strict=True):
                        await fill.done
                        slots.check(key, i)

        self.run(main())

    def test_the_bytes_are_right_when_done_resolves_and_nothing_is_written_after(self) -> None:
        """Looked at in the very callback; then the slot is spoilt, and has to stay so."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                wrong: list[str] = []

                def look(key: ExpertKey, i: int, _done: object) -> None:
                    if not slots.right(key, i):
                        wrong.append(f"{key} has other bytes")
                    slots.spoil(i)

                fills = source.read_into([(key, slots[i]) for i, key in enumerate(slots.keys)])
                for i, (key, fill) in enumerate(zip(slots.keys, fills, strict=True)):
                    fill.done.add_done_callback(partial(look, key, i))
                await asyncio.gather(*(fill.done for fill in fills))
                assert wrong == []
                await source.close()
                assert slots.all_spoiled(), "written into after done had resolved"

        self.run(main())

    def test_its_parts_are_the_whole_payload_once(self) -> None:
        """Every byte of an expert has one place in the slot, and goes to its uniform one."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                for key in slots.keys:
                    end = 0
                    for part in sorted(source.parts(key), key=lambda part: part.target_offset):
                        assert part.target_offset == end, f"{key}: a gap, or two parts overlap"
                        assert part.nbytes > 0
                        assert 0 <= part.source_offset <= slots.slot_nbytes - part.nbytes
                        end += part.nbytes
                    assert end == len(slots.payload(key))

        self.run(main())

    def test_an_empty_batch_is_nothing(self) -> None:
        """No fills, and nothing to wait for at the close."""

        async def main() -> None:
            async with self.opened() as (source, _):
                assert list(source.read_into([])) == []

        self.run(main())

    def test_one_expert_may_be_read_into_two_slots_at_once(self) -> None:
        """Whether it is read once or twice, both have it."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                key = slots.keys[5]
                fills = source.read_into([(key, slots[0]), (key, slots[1])])
                await asyncio.gather(*(fill.done for fill in fills))
                for i in (0, 1):
                    slots.check(key, i)

        self.run(main())

    def test_a_failed_fill_is_one_fill_and_leaves_nothing_writing(self) -> None:
        """The others of its batch are right, and it fails again when it is asked for again."""

        async def main() -> None:
            async with self.opened(broken=[BROKEN]) as (source, slots):
                for _ in range(2):
                    asked = [slots.keys[0], BROKEN, *slots.keys[1:4]]
                    fills = source.read_into([(key, slots[i]) for i, key in enumerate(asked)])
                    assert await _failure(fills[1].done) is not None
                    slots.spoil(1)
                    for i in (0, 2, 3, 4):
                        await fills[i].done
                        slots.check(asked[i], i)
                    assert slots.spoiled(1), "written into after the failure"
                assert not fills[1].drop_if_queued()

        self.run(main())

    def test_a_dropped_fill_never_writes_and_what_cannot_be_dropped_ends_well(self) -> None:
        """Dropped, it is cancelled at once; of the rest every one is filled as if nothing were."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                fills = source.read_into([(key, slots[i]) for i, key in enumerate(slots.keys)])
                dropped = {}
                for i in reversed(range(len(fills))):
                    dropped[i] = fills[i].drop_if_queued()
                    assert fills[i].done.cancelled() == dropped[i]
                    if dropped[i]:
                        slots.spoil(i)
                        assert not fills[i].drop_if_queued(), "dropped twice"
                for i, key in enumerate(slots.keys):
                    if not dropped[i]:
                        await fills[i].done
                        slots.check(key, i)
                        assert not fills[i].drop_if_queued(), "dropped after its end"
                await source.close()
                for i in (i for i, gone in dropped.items() if gone):
                    assert slots.spoiled(i), "a dropped fill was written"

        self.run(main())

    def test_counters_add_up(self) -> None:
        """Reads are counted per expert, bytes asked for and bytes of experts that came."""

        async def main() -> None:
            async with self.opened(broken=[BROKEN]) as (source, slots):
                asked = [BROKEN, *(key for key in slots.keys if key != BROKEN)]
                fills = source.read_into([(key, slots[i]) for i, key in enumerate(asked)])
                assert await _failure(fills[0].done) is not None
                await asyncio.gather(*(fill.done for fill in fills[1:]))
                counters = source.counters
                n_failed = 1 if self.counts_failures else 0
                came = sum(len(slots.payload(key)) for key in asked[1:])
                assert counters.pack_reads == len(asked) - 1 + n_failed
                assert counters.pack_payload_bytes == came
                assert counters.pack_read_bytes >= came
                assert counters.read_errors.total() == n_failed
                assert counters.backend

        self.run(main())

    @pytest.mark.parametrize("n_closers", [1, 2])
    def test_closing_ends_every_fill_and_can_be_repeated(self, n_closers: int) -> None:
        """Filled whole, dropped, or failed with ``ClosedError``; then nothing writes any more."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                fills = source.read_into([(key, slots[i]) for i, key in enumerate(slots.keys)])
                await asyncio.gather(*(source.close() for _ in range(n_closers)))
                for i, (key, fill) in enumerate(zip(slots.keys, fills, strict=True)):
                    assert fill.done.done(), f"{key} is still on its way after the close"
                    if fill.done.cancelled():
                        continue
                    error = fill.done.exception()
                    if error is None:
                        slots.check(key, i)
                    else:
                        assert isinstance(error, ClosedError)

        self.run(main())

    def test_a_closed_source_refuses_and_writes_nothing(self) -> None:
        """``ClosedError``, raised or in each fill; from the beginning of the close on."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                flying = source.read_into([(slots.keys[0], slots[0])])
                closing = asyncio.ensure_future(source.close())
                await asyncio.sleep(0)
                slots.spoil(1)
                for _ in range(2):
                    with pytest.raises(ClosedError):
                        await _read(source, slots.keys[1], slots[1])
                    await closing
                await _failure(flying[0].done)
                assert slots.spoiled(1)

        self.run(main())

    def test_a_cancelled_close_can_be_finished(self) -> None:
        """Whatever was still on its way then has ended when the second call returns."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                fills = source.read_into([(key, slots[i]) for i, key in enumerate(slots.keys)])
                closing = asyncio.ensure_future(source.close())
                await asyncio.sleep(0)
                closing.cancel()
                await asyncio.wait({closing})
                await source.close()
                assert all(fill.done.done() for fill in fills)
                for fill in fills:
                    await _failure(fill.done)

        self.run(main())


async def _read(source: Source, key: ExpertKey, slot: Slot) -> None:
    (fill,) = source.read_into([(key, slot)])
    await fill.done


async def _failure(done: asyncio.Future[None]) -> BaseException | None:
    """How ``done`` failed, None if it did not; its cancellation is no failure of ours."""
    await asyncio.wait({done})
    return None if done.cancelled() else done.exception()
