"""A batch before its reads start and a read after its end: what every backend does alike.

Rejected: a base class of backends; these few functions are all they share by nature.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tieredmoe.errors import ClosedError, ReadError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tieredmoe.backends.protocol import ReadOp

OFFSET_MAX = 2**63 - 1
"""File offsets are signed 64-bit numbers; a ring would cut a larger one down to another."""


def check_batch(batch: Sequence[ReadOp], *, n_files: int, alignment: int) -> None:
    """Raise ``ValueError`` naming the first operation of ``batch`` that cannot be a read."""
    for i, op in enumerate(batch):
        objection = _objection(op, n_files=n_files, alignment=alignment)
        if objection is not None:
            raise refused(batch, i, objection)


def refused(batch: Sequence[ReadOp], i: int, objection: str) -> ValueError:
    """What is raised for read ``i`` of ``batch``."""
    op = batch[i]
    return ValueError(
        f"read {i} of a batch of {len(batch)} (file {op.file_index}, offset {op.offset}, "
        f"{op.target.nbytes} bytes to {op.address:#x}): {objection}; nothing was started"
    )


def check_process(pid: int) -> None:
    """Raise ``ClosedError`` in a child of the process ``pid``, which opened the backend.

    Threads do not survive a fork, and a ring would be shared with the parent, whose completions the
    child would steal.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"this backend belongs to process {pid} and is dead in its forked child; open another "
            "in the child, or start children with the method 'spawn'"
        )


def fail_read(future: asyncio.Future[None], error: BaseException) -> None:
    """Fail ``future`` unless its owner gave it up; an error nobody fetches is not reported twice.

    Failed reads are counted, so a future dropped by a cancelled owner hides nothing, and asyncio's
    "exception was never retrieved" would be noise.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()


def error_kind(error: BaseException) -> str:
    """What a failed read is counted as."""
    return error.kind if isinstance(error, ReadError) else type(error).__name__


def _objection(op: ReadOp, *, n_files: int, alignment: int) -> str | None:
    target = op.target
    if not 0 <= op.file_index < n_files:
        return f"there are {n_files} files"
    if target.readonly or not target.c_contiguous or target.itemsize != 1 or target.ndim != 1:
        return "the target is no writable, contiguous view of bytes"
    if not target.nbytes or not 0 <= op.offset <= OFFSET_MAX - target.nbytes:
        return (
            "it reads nothing, or from before the start of the file or past the last byte that a "
            "file can have"
        )
    if op.needed_nbytes is not None and not 0 < op.needed_nbytes <= target.nbytes:
        return f"{op.needed_nbytes} needed bytes are none, or more than it reads"
    if op.offset % alignment or target.nbytes % alignment or op.address % alignment:
        return f"offset, length and address must be multiples of {alignment}"
    return None
