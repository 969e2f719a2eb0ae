"""A source that misbehaves on purpose: put it between any two tiers to torture what is above.

It poisons every slot before its fill, so a byte that nobody wrote cannot pass for the right one,
and it fails the experts it is told to fail, after having ruined their slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tieredmoe.errors import ClosedError
from tieredmoe.source import Fill, RefusedFill
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.protocol import HostSlot, Part, Slot
    from tieredmoe.source import Source
    from tieredmoe.spec import ExpertKey
    from tieredmoe.stats import SourceCounters


def _no_failure(_: ExpertKey) -> BaseException | None:
    return None


class FaultySource:
    """``source`` with faults: the requests that ``failure`` names an error for fail with it.

    ``failure`` is asked once per request, so a function that counts can fail the first try only.
    Slots must be host memory; each is filled with the byte ``poison`` before anything else.
    """

    def __init__(
        self,
        source: Source,
        *,
        failure: Callable[[ExpertKey], BaseException | None] = _no_failure,
        poison: int = 0xA5,
    ) -> None:
        self._source = source
        self._failure = failure
        self._poison = bytes([poison])
        self._closed = False
        self.n_injected = 0

    def read_into(
        self, requests: Sequence[tuple[ExpertKey, Slot]], *, priority: Priority = Priority.DEMAND
    ) -> Sequence[Fill]:
        """Poison all slots, fail some requests, pass the others on as one batch."""
        if self._closed:
            raise ClosedError("this source is closed; it reads no more")
        fills: list[Fill | None] = []
        passed: list[tuple[ExpertKey, Slot]] = []
        for key, slot in requests:
            view = cast("HostSlot", slot).view
            view[:] = self._poison * view.nbytes
            error = self._failure(key)
            if error is None:
                passed.append((key, slot))
                fills.append(None)
            else:
                self.n_injected += 1
                fills.append(RefusedFill(error))
        started = iter(self._source.read_into(passed, priority=priority) if passed else ())
        return [fill or next(started) for fill in fills]

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """Where ``source`` puts the bytes of ``key``."""
        return self._source.parts(key)

    @property
    def counters(self) -> SourceCounters:
        """Those of ``source``."""
        return self._source.counters

    async def close(self) -> None:
        """Refuse new requests and close ``source``; cancelled, it may be called again."""
        self._closed = True
        await self._source.close()
