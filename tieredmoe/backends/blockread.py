"""One block, read whole: resumed when short, retried when that may help; alike in all backends.

``BlockRead`` is free of I/O and asyncio: it is told what a read brought and says what to read next,
so threads and ring obey the same rules and each way in which a disk can fail is one small test.
Rejected: splitting a block into small chunks (128 KiB chunks on threads gave 0.57 of the bandwidth
for ten times the CPU), and retrying until it works (a dead disk would hang the model).
"""

from __future__ import annotations

import errno
import os
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import ReadError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from tieredmoe.backends.datafile import DataFile
    from tieredmoe.backends.kernel import Preadv
    from tieredmoe.backends.protocol import ReadOp

N_RETRIES = MappingProxyType(
    {errno.EINTR: 3, errno.EAGAIN: 3}
    | dict.fromkeys((errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.ETIMEDOUT), 1)
    | dict.fromkeys((errno.ESTALE, errno.EBADF), 1)
)
"""How often one block may be tried again after each error; any other error is final at once."""

REOPENED = frozenset({errno.ESTALE, errno.EBADF})
"""Errors of the descriptor, not of the disk: the file is opened again before the second try."""


@attrs.define(eq=False)
class BlockRead:
    """The part of ``op`` from byte ``start`` of its target on, ``nbytes`` long, on its way.

    ``needed_nbytes`` of it must arrive; the rest is padding. ``short_reads`` and ``retries`` count
    what it took beyond one read.
    """

    op: ReadOp
    file: DataFile
    alignment: int
    start: int
    nbytes: int
    needed_nbytes: int
    short_reads: int = 0
    retries: int = 0
    _done: int = 0
    _restarted: bool = False
    _left: dict[int, int] = attrs.field(init=False, factory=lambda: dict(N_RETRIES))

    @property
    def offset(self) -> int:
        """Where in the file the next read starts."""
        return self.op.offset + self.start + self._done

    @property
    def address(self) -> int:
        """Where in memory the next read goes."""
        return self.op.address + self.start + self._done

    @property
    def rest_nbytes(self) -> int:
        """How long the next read is."""
        return self.nbytes - self._done

    def rest(self) -> memoryview:
        """The memory of the next read."""
        return self.op.target[self.start + self._done : self.start + self.nbytes]

    def took(self, count: int) -> bool:
        """Whether the block is whole after a read that brought ``count`` bytes.

        A short count that is a multiple of the alignment is continued; any other means that a
        direct read ended in mid-block, and the block is read once more from its start. A count of 0
        is the file's end: an error with errno 0, since every block was whole when the pack was
        made. ``ReadError`` says so when the file is no longer the one that was opened; its kind is
        then "changed", or "eof" for a file that was cut short.
        """
        self._done += count
        if self._done >= self.needed_nbytes:
            return True
        self.short_reads += 1
        is_odd = count % self.alignment != 0
        if count == 0 or (is_odd and self._restarted):
            raise self._ended()
        if is_odd:
            self._restarted = True
            self.retries += 1
            self._done = 0
        return False

    def failed(self, code: int, *, fd: int) -> None:
        """Return if a read through ``fd`` that failed with errno ``code`` may be tried again.

        Else raises ``ReadError``.
        """
        can_try = self._left.get(code, 0) > 0
        if can_try and code in REOPENED:
            can_try = self.file.reopen(fd, code=code)
        if not can_try:
            raise self.failure(code)
        self._left[code] -= 1
        self.retries += 1

    def failure(self, code: int) -> ReadError:
        """The error of a block that is given up after errno ``code``."""
        fact = "the read failed"
        if code == errno.EINVAL:
            fact += f" at address {self.op.address:#x} with alignment {self.alignment}"
        change = self.file.change()
        return ReadError(
            path=self.file.path,
            offset=self.op.offset,
            nbytes=self.op.target.nbytes,
            errno=code,
            fact=f"{fact}; the file {change}" if change else fact,
            kind="changed" if change else None,
        )

    def _ended(self) -> ReadError:
        change = self.file.change()
        nature = change or f"has {self.file.opened_as.st_size}, as when it was opened"
        expected = self.op.needed_nbytes or self.op.target.nbytes
        return ReadError(
            path=self.file.path,
            offset=self.op.offset,
            nbytes=self.op.target.nbytes,
            errno=0,
            fact=f"expected {expected} bytes and got {self.start + self._done} of a file that "
            f"{nature}",
            kind="changed" if change and not self.file.truncated else "eof",
        )


def blocks_of(op: ReadOp, file: DataFile, *, alignment: int, n_splits: int = 1) -> list[BlockRead]:
    """``op`` in at most ``n_splits`` blocks to read in parallel, whole pages all but the last.

    What is padding only is left out.
    """
    whole = op.target.nbytes
    needed = whole if op.needed_nbytes is None else op.needed_nbytes
    if n_splits == 1:
        return [BlockRead(op, file, alignment, 0, whole, needed)]
    part = -(-whole // (n_splits * PAGE_NBYTES)) * PAGE_NBYTES
    return [
        BlockRead(op, file, alignment, start, min(part, whole - start), min(part, needed - start))
        for start in range(0, needed, part)
    ]


def read_block(block: BlockRead, preadv: Preadv) -> None:
    """Fill ``block``, or raise ``ReadError`` after which nothing writes its memory any more."""
    while True:
        fd = block.file.fd
        try:
            with block.rest() as rest:
                count = preadv(fd, [rest], block.offset)
        except OSError as error:
            code = error.errno or errno.EIO
            try:
                block.failed(code, fd=fd)
            except ReadError as final:
                raise final from error
            continue
        if block.took(count):
            return


def system_error(code: int) -> OSError:
    """What the kernel said by number, as Python says it."""
    return OSError(code, os.strerror(code))
