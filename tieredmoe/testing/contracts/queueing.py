"""What a source that runs few reads at once promises beside ``SourceContract``: who goes first.

::

    class TestMySource(QueueingSourceContract):
        async def open_source(self, pack, *, broken):
            return MySource(pack, n_reads_at_once=1)

A source that starts everything at once keeps these promises by having nobody wait.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.spec import Priority
from tieredmoe.testing.contracts.source import SourceContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.source import Fill


class QueueingSourceContract(SourceContract):
    """Tests of one source that runs one read at a time; override ``open_source`` accordingly."""

    def test_demand_goes_before_all_prefetch_that_waits(self) -> None:
        """Asked for last, it lands right behind what runs (number 0); then the more certain."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                order: list[int] = []
                fills: list[Fill] = []
                urgencies = [Priority.WARMUP, Priority.WARMUP, Priority.LOOKAHEAD, Priority.CERTAIN]
                for i, priority in enumerate(urgencies):
                    asked = [(slots.keys[i], slots[i])]
                    fills += _note(source.read_into(asked, priority=priority), i, order)
                asked = [(slots.keys[i], slots[i]) for i in (4, 5)]
                fills += _note(source.read_into(asked), 4, order)
                await _all_ended(fills)
                assert [i for i in order if i] == [4, 5, 3, 2, 1]
                for i in order:
                    slots.check(slots.keys[i], i)

        self.run(main())

    def test_a_promoted_fill_goes_as_demand(self) -> None:
        """Behind the demand that waits already, before all that is not demand."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                order: list[int] = []
                hints = source.read_into(
                    [(slots.keys[i], slots[i]) for i in range(5)], priority=Priority.LOOKAHEAD
                )
                demand = source.read_into([(slots.keys[5], slots[5])])
                fills = [*_note(hints, 0, order), *_note(demand, 5, order)]
                hints[3].promote()
                hints[0].promote()  # runs, or did
                await _all_ended(fills)
                assert [i for i in order if i] == [5, 3, 1, 2, 4]
                hints[3].promote()
                for i in order:
                    slots.check(slots.keys[i], i)

        self.run(main())

    def test_what_waits_can_be_dropped_also_if_it_was_promoted(self) -> None:
        """``drop_if_queued`` says yes, nothing comes, and the others do."""

        async def main() -> None:
            async with self.opened() as (source, slots):
                order: list[int] = []
                hints = source.read_into(
                    [(slots.keys[i], slots[i]) for i in range(4)], priority=Priority.LOOKAHEAD
                )
                _note(hints, 0, order)
                hints[2].promote()
                for i in (2, 3):
                    slots.spoil(i)
                    assert hints[i].drop_if_queued()
                    assert hints[i].done.cancelled()
                    hints[i].promote()
                await _all_ended(hints)
                assert sorted(order) == [0, 1, 2, 3]
                assert slots.spoiled(2)
                assert slots.spoiled(3)
                for i in (0, 1):
                    slots.check(slots.keys[i], i)

        self.run(main())


def _note(fills: Sequence[Fill], first: int, order: list[int]) -> Sequence[Fill]:
    """Note in ``order`` the number of each fill, counted from ``first``, as it ends."""
    for i, fill in enumerate(fills, first):
        fill.done.add_done_callback(partial(_noted, i, order))
    return fills


def _noted(i: int, order: list[int], _done: object) -> None:
    order.append(i)


async def _all_ended(fills: Sequence[Fill]) -> None:
    await asyncio.wait([fill.done for fill in fills])
