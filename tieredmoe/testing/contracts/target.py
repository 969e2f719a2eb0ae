"""Memory and reads for the backend contract: aligned, poisoned, and broken on purpose."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from tieredmoe.backends.protocol import ReadOp

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

BLOCK_NBYTES = 4096
"""The unit of the contract's reads; every alignment that a backend may ask for divides it."""
N_BLOCKS = 64
"""Whole blocks of each of the contract's files."""
TAIL_NBYTES = 100
"""What the second file has after them."""
POISON = 0xA5
BROKEN = (
    "offset",
    "length",
    "address",
    "file",
    "negative",
    "empty",
    "read-only",
    "strided",
    "needs nothing",
    "needs more",
)
"""The ways in which ``broken_read`` breaks a read; the first three need an alignment above 1."""


class Target:
    """Page-aligned memory for one read, full of poison."""

    def __init__(self, n_blocks: int = 1) -> None:
        self._map = mmap.mmap(-1, n_blocks * BLOCK_NBYTES)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view[:] = bytes([POISON]) * self.view.nbytes

    def op(self, file_index: int, offset: int, needed_nbytes: int | None = None) -> ReadOp:
        """The read of as many bytes at ``offset``."""
        return ReadOp(file_index, offset, self.view, self.address, needed_nbytes)

    def untouched(self) -> bool:
        """Whether the poison is all there."""
        return self.view == bytes([POISON]) * self.view.nbytes


def read_anywhere(source: random.Random, target: Target) -> ReadOp:
    """A read of whole blocks into ``target`` from anywhere in either file."""
    n_blocks = target.view.nbytes // BLOCK_NBYTES
    offset = source.randint(0, N_BLOCKS - n_blocks) * BLOCK_NBYTES
    return target.op(source.randint(0, 1), offset)


def bytes_of(op: ReadOp, contents: Sequence[bytes]) -> bytes:
    """What ``op`` must have read."""
    return contents[op.file_index][op.offset : op.offset + op.target.nbytes]


def broken_read(target: Target, what: str) -> ReadOp:
    """A read that a backend must refuse; ``what`` is one of ``BROKEN``."""
    view, address = target.view, target.address
    return {
        "offset": ReadOp(0, 1, view, address),
        "length": ReadOp(0, 0, view[:-1], address),
        "address": ReadOp(0, 0, view[1 : BLOCK_NBYTES + 1], address + 1),
        "file": ReadOp(2, 0, view, address),
        "negative": ReadOp(0, -BLOCK_NBYTES, view, address),
        "empty": ReadOp(0, 0, view[:0], address),
        "strided": ReadOp(0, 0, view[::2], address),
        "read-only": ReadOp(0, 0, view.toreadonly(), address),
        "needs nothing": ReadOp(0, 0, view, address, 0),
        "needs more": ReadOp(0, 0, view, address, view.nbytes + 1),
    }[what]
