"""Checks every record against its digests before anybody sees it, and mends it where that can be.

The check sits at the leaf, between the disk and the first slot: what is above copies memory, and a
record checked here is right in every tier. A record that arrives wrong is read once more (the
transfer may have been bad, the disk good), then taken from the source GGUF if there is one, else it
fails like any other read. All that time its slot belongs to the fill, so the fill cannot be dropped
and ``close`` waits for it.

Padding is not checked: nothing reads it. Rejected: checking in the tier (it would have to know
digests, and every copy would pay again), and hashing in the loop's thread (4 ms for a large record,
in which nothing else is served).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

from tieredmoe.errors import ClosedError, ConfigError, DigestMismatchError, ReadError
from tieredmoe.pack.records import Digested
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.protocol import HostSlot, Part, Slot
    from tieredmoe.pack.repair import Repair
    from tieredmoe.source import Fill, Source
    from tieredmoe.spec import ExpertKey, RoleSpec
    from tieredmoe.stats import SourceCounters

T = TypeVar("T")

VerifyMode = Literal["first_read", "always"]


class Worker(Protocol):
    """Runs blocking work outside the loop's thread."""

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start ``work``; the future resolves with its result and is never cancelled by us."""

    def close(self) -> None:
        """Free the worker; called when no work is left."""


class VerifiedSource:
    """``source``, each record checked before its fill ends; a ``Source`` over ``records``.

    ``always`` checks every read; ``first_read`` checks each expert until one read of it was right,
    and holds one key per checked expert. An expert that only ``repair`` could bring stays unchecked
    in that sense: the next read of it is checked again. Owns ``source`` and ``worker``.

    A record that cannot be had whole fails its fill with ``DigestMismatchError``. Raises
    ``ConfigError`` if ``records`` carries no digests.
    """

    def __init__(
        self,
        source: Source,
        records: object,
        *,
        mode: VerifyMode,
        worker: Worker,
        repair: Repair | None = None,
    ) -> None:
        if not isinstance(records, Digested) or not records.has_digests:
            raise ConfigError(
                f"verify={mode!r}: a {type(records).__name__} carries no digests to check reads "
                "against; use verify='off', or a pack"
            )
        self.source = source
        self.records = records
        self.worker = worker
        self.repair = repair
        self._verified: set[ExpertKey] | None = set() if mode == "first_read" else None
        self._running: set[asyncio.Future[None]] = set()
        self._closed = False

    def read_into(
        self, requests: Sequence[tuple[ExpertKey, Slot]], *, priority: Priority = Priority.DEMAND
    ) -> Sequence[Fill]:
        """Start reading each record into its slot, which must be host memory, and checking it."""
        if self._closed:
            raise ClosedError("this source is closed; it reads no more")
        reads = self.source.read_into(requests, priority=priority)
        return [
            read
            if self._verified is not None and key in self._verified
            else self._checked(key, cast("HostSlot", slot), read, priority)
            for (key, slot), read in zip(requests, reads, strict=True)
        ]

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """Where ``source`` puts the bytes of ``key``."""
        return self.source.parts(key)

    @property
    def counters(self) -> SourceCounters:
        """Those of ``source``, with what was found wrong and what was mended."""
        return self.source.counters

    def note_verified(self, key: ExpertKey) -> None:
        """The pack's own bytes of ``key`` were right."""
        if self._verified is not None:
            self._verified.add(key)

    async def close(self) -> None:
        """Refuse new requests, drain reads, checks and repairs, close ``source`` and ``worker``.

        Idempotent. Cancelling it stops the wait; calling it again goes on where it was.
        """
        self._closed = True
        await self.source.close()
        while self._running:
            await asyncio.wait(self._running)
        self.worker.close()

    def _checked(
        self, key: ExpertKey, slot: HostSlot, read: Fill, priority: Priority
    ) -> VerifiedFill:
        assert all(p.source_offset == p.target_offset for p in self.parts(key)), (
            "records are checked in their uniform layout"
        )
        fill = VerifiedFill(self, key, slot, read, priority)
        self._running.add(fill.done)
        fill.done.add_done_callback(self._running.discard)
        return fill

    def __repr__(self) -> str:
        checked = "always" if self._verified is None else f"{len(self._verified)} experts checked"
        return f"<VerifiedSource {checked}, {len(self._running)} running>"


class VerifiedFill:
    """One record on its way: read, checked; if wrong read again, checked; if wrong repaired."""

    __slots__ = ("_key", "_mismatch", "_priority", "_read", "_slot", "_source", "done")

    def __init__(
        self, source: VerifiedSource, key: ExpertKey, slot: HostSlot, read: Fill, priority: Priority
    ) -> None:
        self._source = source
        self._key = key
        self._slot = slot
        self._priority = priority
        self._mismatch: DigestMismatchError | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._follow(read)

    def promote(self) -> None:
        """Let the read that waits, and one that may follow it, go as demand."""
        self._priority = Priority.DEMAND
        self._read.promote()

    def drop_if_queued(self) -> bool:
        """True if a read, the first or the second, was still queued; False while checking."""
        if self.done.done() or not self._read.drop_if_queued():
            return False
        self.done.cancel()
        return True

    def _follow(self, read: Fill) -> None:
        self._read = read
        read.done.add_done_callback(self._read_ended)

    def _read_ended(self, read: asyncio.Future[None]) -> None:
        if read.cancelled():
            self.done.cancel()  # by us, and it is already; or by the source itself
        elif error := read.exception():
            self._give_up(error)
        else:
            records = self._source.records
            layout = records.spec.layouts[self._key.layer]
            check = partial(
                first_mismatch,
                self._slot.view,
                layout.roles,
                records.digests(self._key),
                digest_of=records.digest_of,
            )
            self._work(check, self._check_ended)

    def _check_ended(self, check: asyncio.Future[RoleSpec | None]) -> None:
        if error := check.exception():
            self._fail(error)
            return
        role = check.result()
        if role is None:
            self._source.note_verified(self._key)
            self.done.set_result(None)
            return
        self._source.counters.digest_mismatches += 1
        known, self._mismatch = self._mismatch, self._mismatch_of(role)
        if known is None:
            self._read_again()
        else:
            self._give_up(self._mismatch)

    def _read_again(self) -> None:
        try:
            (read,) = self._source.source.read_into(
                [(self._key, self._slot)], priority=self._priority
            )
        except Exception as error:  # noqa: BLE001 (whatever a source raises reaches every waiter)
            self._fail(error)
            return
        self._follow(read)

    def _give_up(self, error: BaseException) -> None:
        """No read of the pack brings this record: repair it, or fail with ``error``.

        What failed before any mismatch was seen is an ordinary read error, which stays one.
        """
        repair = self._source.repair
        if self._mismatch is None or repair is None or isinstance(error, ClosedError):
            self._fail(error)
            return
        work = partial(repair.fill, self._key, self._slot.view)
        self._work(work, partial(self._repair_ended, error))

    def _repair_ended(self, error: BaseException, repair: asyncio.Future[None]) -> None:
        if problem := repair.exception():
            if isinstance(error, ReadError):
                error.args = (error.errno, f"{error}; it could not be repaired: {problem}")
            error.__cause__ = problem
            self._fail(error)
            return
        self._source.counters.repaired += 1
        self.done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, DigestMismatchError):
            self._source.counters.read_errors[error.kind] += 1
        self.done.set_exception(error)

    def _work(self, work: Callable[[], T], ended: Callable[[asyncio.Future[T]], None]) -> None:
        try:
            future = self._source.worker.run(work)
        except RuntimeError as error:
            self._fail(error)
            return
        future.add_done_callback(ended)

    def _mismatch_of(self, role: RoleSpec) -> DigestMismatchError:
        records = self._source.records
        file_index, offset = records.extents(self._key).place(role.offset)
        return DigestMismatchError(
            path=records.data_files[file_index],
            offset=offset,
            nbytes=role.nbytes,
            key=self._key,
            role=role.name,
        )


def first_mismatch(
    record: memoryview,
    roles: Sequence[RoleSpec],
    digests: Sequence[bytes],
    *,
    digest_of: Callable[[memoryview], bytes],
) -> RoleSpec | None:
    """The first role whose bytes in ``record`` do not have their digest; None if all have."""
    for role, digest in zip(roles, digests, strict=True):
        with record[role.offset : role.offset + role.nbytes] as slab:
            if digest_of(slab) != digest:
                return role
    return None
