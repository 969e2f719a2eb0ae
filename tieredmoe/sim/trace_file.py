"""Routing traces on disk: one file, small, checked as a whole.

::

    magic       8 bytes   b"TMOETRC" and a zero byte
    version     uint32    1
    n_header    uint32    bytes of the header
    header      UTF-8     JSON: the model's facts, n_tokens, the sections' names and types, in order
    sections    arrays, C order, end to end
    digest      8 bytes   XXH3-64 of everything before it, big-endian

All numbers are little-endian. Sections: ``experts`` [T, L, k] in the smallest unsigned type that
holds every id; ``n_chosen`` uint8 or uint16 [T, L], only where some token has fewer than top-k;
``phase`` int8 [T]; ``requests`` and ``passes`` int32 [T]; ``weights`` float16 [T, L, k] and
``probabilities`` float16 [T, L, E] where they were recorded. A token of DeepSeek-V4-Flash (43
layers, top-6 of 256) takes 783 bytes with its gate weights, one of Kimi-K3 (92 layers, top-16 of
896) 5,897.

The digest makes a torn file an error instead of a shorter run, and the header tells the size, so
nothing is allocated on a damaged file's word. Rejected: npz (a zip whose directory is at the end
and whose members may be pickles); compression (ids are nearly random: a tenth smaller, ten times
slower).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import xxhash

from tieredmoe.errors import TraceError
from tieredmoe.sim.routing_trace import NO_EXPERT, ModelFacts, RoutingTrace, id_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from numpy.typing import NDArray

MAGIC = b"TMOETRC\0"
VERSION = 1
_N_FIXED = len(MAGIC) + 8
_N_DIGEST = 8
_HEADER_NBYTES_MAX = 1 << 20
_TYPES = frozenset(("<u1", "<u2", "<u4", "<i1", "<i4", "<f2"))


def write_trace(trace: RoutingTrace, path: Path) -> None:
    """Write ``trace`` to ``path`` whole or not at all; a file there is replaced.

    Raises ``TraceError`` if it cannot be written.
    """
    sections = _sections(trace)
    header = json.dumps(
        {
            "facts": attrs.asdict(trace.facts),
            "n_tokens": trace.n_tokens,
            "sections": [[name, _code(array)] for name, array in sections.items()],
        }
    ).encode()
    start = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    digest = xxhash.xxh3_64(start)
    try:
        with _replacing(path) as file:
            file.write(start)
            for array in sections.values():
                data = array.tobytes()
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
    except OSError as error:
        raise TraceError(path, f"cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> RoutingTrace:
    """The trace in ``path``, whose every byte has been checked.

    Raises ``TraceError``, naming the offset, for a file that is torn, damaged, of a newer version
    or none of this kind.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise TraceError(path, "no trace of tieredmoe (offset 0 has another magic)")
    version = int.from_bytes(data[8:12], "little")
    if version > VERSION:
        raise TraceError(
            path,
            f"a trace of version {version}, and this tieredmoe reads up to {VERSION}: upgrade it",
        )
    n_header = int.from_bytes(data[12:_N_FIXED], "little")
    if len(data) < _N_FIXED + n_header + _N_DIGEST or n_header > _HEADER_NBYTES_MAX:
        raise TraceError(
            path, f"torn: it ends at offset {len(data)}, within a header of {n_header} bytes"
        )
    try:
        header = json.loads(data[_N_FIXED : _N_FIXED + n_header])
        facts = ModelFacts(**header["facts"] | {"layers": tuple(header["facts"]["layers"])})
        shapes = _shapes(facts, header["n_tokens"])
        plan = [(name, np.dtype(_checked(code)), shapes[name]) for name, code in header["sections"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            path, f"damaged: the header at offset {_N_FIXED} cannot be understood ({error})"
        ) from error
    wanted = _N_FIXED + n_header + sum(_nbytes(kind, shape) for _, kind, shape in plan) + _N_DIGEST
    if len(data) != wanted:
        raise TraceError(
            path,
            f"torn: {len(data)} bytes where the header says {wanted}; the rest is missing from "
            f"offset {min(len(data), wanted)} on, or does not belong to it",
        )
    if xxhash.xxh3_64(memoryview(data)[:-_N_DIGEST]).digest() != data[-_N_DIGEST:]:
        raise TraceError(
            path, f"damaged: the digest at offset {wanted - _N_DIGEST} is of other bytes"
        )
    sections: dict[str, NDArray[Any]] = {}
    offset = _N_FIXED + n_header
    for name, kind, shape in plan:
        n = prod(shape)
        sections[name] = np.frombuffer(data, kind, n, offset).reshape(shape)
        offset += n * kind.itemsize
    return _assembled(path, facts, sections)


def _sections(trace: RoutingTrace) -> dict[str, NDArray[Any]]:
    absent = trace.experts == NO_EXPERT
    ids = np.min_scalar_type(trace.facts.n_experts - 1)
    sections: dict[str, NDArray[Any]] = {"experts": np.where(absent, 0, trace.experts).astype(ids)}
    if absent.any():
        kind = np.min_scalar_type(trace.facts.top_k)
        sections["n_chosen"] = np.count_nonzero(~absent, axis=2).astype(kind)
    sections["phase"] = trace.phase
    sections["requests"] = trace.requests
    sections["passes"] = trace.passes
    if trace.weights is not None:
        sections["weights"] = trace.weights
    if trace.probabilities is not None:
        sections["probabilities"] = trace.probabilities
    return {name: array.astype(array.dtype.newbyteorder("<")) for name, array in sections.items()}


def _assembled(path: Path, facts: ModelFacts, sections: Mapping[str, NDArray[Any]]) -> RoutingTrace:
    missing = {"experts", "phase", "requests", "passes"} - sections.keys()
    if missing:
        raise TraceError(path, f"the header names no {', '.join(sorted(missing))}")
    experts = sections["experts"].astype(id_type(facts.n_experts))
    if "n_chosen" in sections:
        experts[np.arange(facts.top_k) >= sections["n_chosen"][..., None]] = NO_EXPERT
    return RoutingTrace(
        facts=facts,
        experts=experts,
        phase=sections["phase"].astype(np.int8),
        requests=sections["requests"],
        passes=sections["passes"],
        weights=_half(sections.get("weights")),
        probabilities=_half(sections.get("probabilities")),
        source=str(path),
    )


def _half(array: NDArray[Any] | None) -> NDArray[np.float16] | None:
    return None if array is None else array.astype(np.float16)


def _shapes(facts: ModelFacts, n_tokens: int) -> dict[str, tuple[int, ...]]:
    rows = (n_tokens, len(facts.layers))
    if not isinstance(n_tokens, int) or min(n_tokens, facts.n_experts, facts.top_k) < 0:
        raise ValueError("a negative size")
    return {
        "experts": (*rows, facts.top_k),
        "n_chosen": rows,
        "phase": rows[:1],
        "requests": rows[:1],
        "passes": rows[:1],
        "weights": (*rows, facts.top_k),
        "probabilities": (*rows, facts.n_experts),
    }


def _checked(code: str) -> str:
    if code not in _TYPES:
        raise ValueError(f"{code!r} is no type of a section")
    return code


def _code(array: NDArray[Any]) -> str:
    return f"<{array.dtype.kind}{array.dtype.itemsize}"


def _nbytes(kind: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return kind.itemsize * prod(shape)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside ``path`` that takes its place when it is whole and on the drive."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
