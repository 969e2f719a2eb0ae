"""Tiles: how many rows and units of a row a program takes, and with how many warps.

Chosen on an H200 with cold caches: for single tokens and experts of MXFP4 and Q2_K/Q3_K, and for
dense matrices of Q2_K, Q3_K, Q6_K, Q8_0 and BF16, at the target models' dimensions
(benchmarks/moe_kernels.py); other types follow their nearest. Fixed, since a tile decides the order
of float additions: tuning at run time would make results differ between runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gguf import GGMLQuantizationType as T

from tieredmoe.moe.kernels.formats import FLOATS, QUARTERS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tile(NamedTuple):
    """``R`` rows by ``C`` units in flight, in ``warps`` warps of 32 lanes.

    ``registers`` per lane at most, where fewer let one more program onto a multiprocessor and so
    all of a launch run at once.
    """

    R: int
    C: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Launch options."""
        if self.registers is None:
            return {"num_warps": self.warps}
        return {"num_warps": self.warps, "maxnreg": self.registers}


N_TOGETHER = (1, 2, 4)
"""How many activation rows a kernel multiplies with each decoded weight. Eight were rejected: sums
and activations then fill the registers, and the kernel takes a minute to compile."""

N_TOGETHER_MAX = N_TOGETHER[-1]


def together(n: int) -> int:
    """The smallest kernel that takes ``n`` activation rows at once; n <= N_TOGETHER_MAX."""
    return next(m for m in N_TOGETHER if m >= n)


def matrix_tile(kind: Format, n_columns: int, m: int) -> Tile:
    """For a dense matrix times ``m`` activation rows at once.

    One matrix has far fewer rows than the experts of a layer, so several warps share long rows, and
    a lane takes four rows or fewer. More lanes than units side by side: else activations are loaded
    in another layout than they are needed in.
    """
    if m > 1:
        units = _most_units(kind, n_columns, 64)
        return Tile(8, units, 4) if units == 64 else Tile(16, units, 4)
    if kind.order == QUARTERS:
        units = _most_units(kind, n_columns, 64)
        return {64: Tile(8, 64, 4), 32: Tile(8, 32, 4)}.get(units, Tile(16, units, 2))
    units = _most_units(kind, n_columns, 128)
    return {128: Tile(8, 128, 8), 64: Tile(8, 64, 4)}.get(units, Tile(32, units, 8))


def row_tile(kind: Format, n_columns: int, m: int) -> Tile:
    """For plain products of experts with ``m`` activation rows at once."""
    units = _units(kind, n_columns)
    if m > 1:
        return Tile(16, units, 4)
    if kind.order == QUARTERS:
        # Four rows a lane: fewer load the activations too often, more run out of registers.
        return Tile(16, units, 2) if units == 16 else Tile(32, units, 4)
    if kind.ggml_type == T.MXFP4:
        return Tile(32, units, 4, 80)
    return Tile(32, units, 8)


def gate_up_tile(kind: Format, n_columns: int, m: int, *, h_order: int) -> Tile:
    """For gate and up with the activation; rows come in whole groups of the order of h."""
    rows = 64 if h_order == QUARTERS else 32
    units = _units(kind, n_columns, most=8)
    if kind.ggml_type == T.MXFP4 and m == 1:
        return Tile(rows, min(units, 16), 8, 80)
    if kind.ggml_type in _MANY_FIELDS or m > 1:
        return Tile(rows, units, 8)
    return Tile(rows, units, 8, 80)


_MANY_FIELDS = frozenset({T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K})
"""Types that would spill much at 80 registers, which let three programs of 256 lanes onto a
multiprocessor."""


def _units(kind: Format, n_columns: int, *, most: int = 16) -> int:
    """Units of a row side by side: a power of two that divides their number.

    ``most`` is for K-quants, whose units are the largest.
    """
    n = n_columns // kind.n_unit
    return min(n & -n, {FLOATS: 16, QUARTERS: most}.get(kind.order, 32))


def _most_units(kind: Format, n_columns: int, most: int) -> int:
    """Units of a row side by side, up to ``most``: a power of two that leaves few lanes idle."""
    n = n_columns // kind.n_unit
    units = most
    while -(-n // units) * units > n * 8 // 7:
        units //= 2
    return units


def unpack_tile(kind: Format, n_columns: int) -> Tile:
    """For writing weights as float32."""
    return Tile(16, _units(kind, n_columns), 4)
