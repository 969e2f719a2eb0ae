"""One block, read whole by positioned reads: resumed when short, retried when that may help.

Synchronous and free of asyncio, so that each way in which a disk can fail is one small test.
Rejected: splitting a block into chunks (128 KiB chunks on threads gave 0.57 of the bandwidth for
ten times the CPU), and retrying until it works (a dead disk would hang the model).
"""

from __future__ import annotations

import errno
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import ReadError

if TYPE_CHECKING:
    from tieredmoe.backends.kernel import Preadv
    from tieredmoe.backends.probe import DataFile
    from tieredmoe.backends.protocol import ReadOp

N_RETRIES = MappingProxyType(
    {errno.EINTR: 3, errno.EAGAIN: 3}
    | dict.fromkeys((errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.ETIMEDOUT), 1)
)
"""How often one block may be tried again after each error; any other error is final at once."""


@attrs.define(eq=False)
class Effort:
    """What reading one block took beyond one call."""

    short_reads: int = 0
    retries: int = 0


def read_block(
    op: ReadOp, file: DataFile, *, preadv: Preadv, alignment: int, effort: Effort
) -> None:
    """Fill ``op.target``, or raise ``ReadError`` after which nothing writes it any more.

    A short count that is a multiple of ``alignment`` is continued; any other means that a direct
    read ended in mid-block, and the block is read once more from its start. A count of 0 is the
    file's end: an error with errno 0, since every block was whole when the pack was made. An error
    says so when the file is no longer the one that was opened; its kind is then "changed", or "eof"
    for a file that was cut short.
    """
    done = 0
    restarted = False
    left = dict(N_RETRIES)
    while done < op.target.nbytes:
        try:
            with op.target[done:] as rest:
                count = preadv(file.fd, [rest], op.offset + done)
        except OSError as error:
            code = error.errno or errno.EIO
            if left.get(code, 0) == 0:
                raise _failed(op, file, code, alignment) from error
            left[code] -= 1
            effort.retries += 1
            continue
        done += count
        whole = done == op.target.nbytes
        effort.short_reads += not whole
        if count == 0 or (count % alignment and not whole and restarted):
            raise _ended(op, file, done)
        if count % alignment and not whole:
            restarted = True
            effort.retries += 1
            done = 0


def _failed(op: ReadOp, file: DataFile, code: int, alignment: int) -> ReadError:
    fact = "the read failed"
    if code == errno.EINVAL:
        fact += f" at address {op.address:#x} with alignment {alignment}"
    change = file.change()
    return ReadError(
        path=file.path,
        offset=op.offset,
        nbytes=op.target.nbytes,
        errno=code,
        fact=f"{fact}; the file {change}" if change else fact,
        kind="changed" if change else None,
    )


def _ended(op: ReadOp, file: DataFile, done: int) -> ReadError:
    change = file.change()
    nature = change or f"has {file.opened_as.st_size}, as when it was opened"
    return ReadError(
        path=file.path,
        offset=op.offset,
        nbytes=op.target.nbytes,
        errno=0,
        fact=f"expected {op.target.nbytes} bytes and got {done} of a file that {nature}",
        kind="changed" if change and not file.truncated else "eof",
    )
