"""Random bytes faster than a drive takes them: windows of one pool, combined in pairs.

A generator makes about 1.5 GB/s on one core, less than a drive writes. Every piece here is the
exclusive or of two windows of a pool of random words, at places drawn anew: no block of a drive
comes twice, nothing in one can be compressed, and it takes a fraction of a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POOL_WORDS = 1 << 21
_PIECE_WORDS = 1 << 17


class Noise:
    """Incompressible bytes, determined by ``seed``; safe to use in several threads at once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.Generator(np.random.SFC64([seed, 0]))
        self._pool = rng.integers(0, 1 << 64, _POOL_WORDS, dtype=np.uint64)

    def fill(self, out: NDArray[np.uint64], *where: int) -> None:
        """Fill ``out`` with the words that belong to ``where``, the numbers of its place."""
        rng = np.random.Generator(np.random.SFC64([self._seed, 1, *where]))
        for start in range(0, len(out), _PIECE_WORDS):
            piece = out[start : start + _PIECE_WORDS]
            a, b = rng.choice(_POOL_WORDS - _PIECE_WORDS, 2, replace=False)
            n = len(piece)
            np.bitwise_xor(self._pool[a : a + n], self._pool[b : b + n], out=piece)
