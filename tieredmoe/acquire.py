"""What ``acquire`` returns: something to await, or to enter, for a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType

    from tieredmoe.spec import ExpertKey


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
