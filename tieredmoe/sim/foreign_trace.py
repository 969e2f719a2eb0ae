"""Opening any routing trace: ours, and the JSON lines, CSV and npz that other projects publish.

* **JSON lines** (waste, formerly warp): ``{"tok": 0, "layers": [[36, 38, …], …]}``, one line per
  decoded token, one list of ids per routed layer.
* **CSV** (BigMoeOnEdge, ``route_trace v1``): a head of ``# key=value …`` lines with the model's
  facts and the bytes of each layer's experts, then a table whose columns ``turn``, ``phase``,
  ``step`` (the token), ``layer``, ``slot`` (the rank), ``expert`` and ``weight`` are read.
* **npz**: ``expert`` [T, L, k]; ``weight`` [T, L, k] and ``phase`` [T] if there; ``meta``, JSON
  with ``model``, ``n_expert`` and ``expert_bytes`` if there.

Which form it is, the file's first bytes say, its name plays no part. What a form leaves unsaid gets
the plainest reading: layers 0, 1, 2…, as many experts as the largest id needs.
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from tieredmoe.errors import TraceError
from tieredmoe.sim.routing_trace import (
    NO_EXPERT,
    ModelFacts,
    RoutingTrace,
    decoded,
    id_type,
)
from tieredmoe.sim.trace_file import MAGIC, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


def load_trace(
    path: Path, *, n_experts: int | None = None, expert_nbytes: int | None = None
) -> RoutingTrace:
    """The trace in ``path``, ours or of one of the module's forms.

    ``n_experts`` and ``expert_nbytes`` are for what the file does not say, and go before what it
    says. Raises ``TraceError``, naming the line or the member, for a file that cannot be used.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if start.startswith(MAGIC):
        trace = read_trace(path)
    elif start.startswith(b"PK"):
        trace = _from_npz(path, n_experts)
    elif start.startswith(b"{"):
        trace = _from_json_lines(path, n_experts)
    elif start.startswith((b"#", b"turn")):
        trace = _from_csv(path, n_experts)
    else:
        raise TraceError(
            path, "no trace: it begins like none of tieredmoe's own, npz, JSON lines or CSV"
        )
    facts = trace.facts
    return attrs.evolve(
        trace,
        facts=attrs.evolve(
            facts,
            n_experts=n_experts or facts.n_experts,
            expert_nbytes=expert_nbytes or facts.expert_nbytes,
        ),
    )


def _from_json_lines(path: Path, n_experts: int | None) -> RoutingTrace:
    tokens: list[list[list[int]]] = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            token = json.loads(line)["layers"]
            sizes = [len(ids) for ids in token]
            whole = all(type(expert) is int for ids in token for expert in ids)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                path, f"line {number} is no token with its layers ({error})"
            ) from error
        if tokens and len(token) != len(tokens[0]):
            raise TraceError(
                path, f"line {number} has {len(token)} layers, those before it {len(tokens[0])}"
            )
        if not (whole and any(sizes)):
            raise TraceError(path, f"line {number}: a token has experts, which are whole numbers")
        tokens.append(token)
    if not tokens:
        raise TraceError(path, "it has no tokens")
    top_k = max(len(ids) for token in tokens for ids in token)
    experts = np.full((len(tokens), len(tokens[0]), top_k), NO_EXPERT, np.int32)
    for t, token in enumerate(tokens):
        for row, ids in enumerate(token):
            experts[t, row, : len(ids)] = ids
    return _traced(path, experts, n_experts)


def _from_npz(path: Path, n_experts: int | None) -> RoutingTrace:
    try:
        # Opened here: NumPy leaves a file open that it cannot understand.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as members:
            arrays = {name: members[name] for name in members.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(path, f"no sound npz ({error})") from error
    experts = arrays.get("expert")
    if experts is None or experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer):
        raise TraceError(path, "its member 'expert' has to be whole numbers [tokens, layers, k]")
    phase = arrays.get("phase")
    if phase is not None and phase.shape != experts.shape[:1]:
        raise TraceError(path, "its member 'phase' has to be [tokens]")
    try:
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
        sizes = np.max(meta["expert_bytes"]) if "expert_bytes" in meta else None
        known = n_experts or int(meta.get("n_expert", 0)) or None
        return _traced(
            path,
            experts.astype(np.int32),
            known,
            name=str(meta.get("model", path.stem)),
            expert_nbytes=None if sizes is None else int(sizes),
            weights=arrays.get("weight"),
            phase=phase,
        )
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, f"its member 'meta' cannot be understood ({error})") from error


def _from_csv(path: Path, n_experts: int | None) -> RoutingTrace:
    head: dict[str, str] = {}
    sizes: list[int] = []
    lines: list[tuple[int, str]] = []
    for number, line in _lines(path):
        if line.startswith("#"):
            pairs = dict(re.findall(r"(\w+)=(\S+)", line))
            sizes += [int(size) for size in [pairs.get("expert_bytes", "")] if size.isdecimal()]
            head |= pairs
        elif line.strip():
            lines.append((number, line))
    table = _table(path, lines)
    tokens, of_row = np.unique(table[:, [0, 2]], axis=0, return_inverse=True)
    layers, row = np.unique(table[:, 3], return_inverse=True)
    rank = table[:, 4].astype(int)
    if not len(rank) or rank.min() < 0 or rank.max() > 4096:
        raise TraceError(path, "its column 'slot' has to be the rank of an expert, from 0 on")
    shape = (len(tokens), len(layers), int(rank.max()) + 1)
    experts = np.full(shape, NO_EXPERT, np.int32)
    weights = np.zeros(shape, np.float16)
    phase = np.zeros(len(tokens), np.int8)
    place = (of_row.reshape(-1), row.reshape(-1), rank)
    experts[place] = table[:, 5]
    weights[place] = table[:, 6]
    phase[place[0]] = table[:, 1]
    known = head.get("n_expert", "")
    trace = _traced(
        path,
        experts,
        n_experts or (int(known) if known.isdecimal() else None),
        name=Path(head.get("model", path.stem)).name,
        expert_nbytes=max(sizes, default=None),
        layers=tuple(int(layer) for layer in layers),
        weights=weights,
        phase=phase,
    )
    requests = tokens[:, 0].astype(np.int32)
    turned = np.cumsum(np.diff(requests, prepend=requests[0]) != 0)
    both = trace.passes + turned * (int(trace.passes[-1]) + 1)
    return attrs.evolve(
        trace, requests=requests, passes=np.unique(both, return_inverse=True)[1].reshape(-1)
    )


def _table(path: Path, lines: list[tuple[int, str]]) -> NDArray[np.float64]:
    """The rows of a CSV, columns in the order of ``_COLUMNS``."""
    if not lines:
        raise TraceError(path, "it has no table")
    names = next(csv.reader([lines[0][1]]))
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise TraceError(path, f"line {lines[0][0]} names no column {', '.join(missing)}")
    columns = [names.index(name) for name in _COLUMNS]
    table = np.empty((len(lines) - 1, len(columns)))
    for i, (number, line) in enumerate(lines[1:]):
        try:
            cells = line.split(",")
            table[i] = [float(cells[column]) for column in columns]
        except (ValueError, IndexError) as error:
            raise TraceError(path, f"line {number} is no row of numbers ({error})") from error
        if not (np.isfinite(table[i]).all() and (table[i, :6] % 1 == 0).all()):
            raise TraceError(path, f"line {number} has a number that is none, or not whole")
    return table


def _traced(
    path: Path,
    experts: NDArray[np.int32],
    n_experts: int | None,
    *,
    name: str | None = None,
    expert_nbytes: int | None = None,
    layers: tuple[int, ...] | None = None,
    weights: NDArray[np.floating[Any]] | None = None,
    phase: NDArray[np.integer[Any]] | None = None,
) -> RoutingTrace:
    if not experts.size:
        raise TraceError(path, "it has no tokens")
    needed = int(experts.max()) + 1
    if n_experts is not None and n_experts < needed:
        raise TraceError(path, f"expert {needed - 1} is used, and there are to be {n_experts}")
    facts = ModelFacts(
        name=name or path.stem,
        layers=layers or tuple(range(experts.shape[1])),
        n_experts=n_experts or needed,
        top_k=experts.shape[2],
        expert_nbytes=expert_nbytes,
    )
    if experts.max() > np.iinfo(id_type(facts.n_experts)).max or experts.min() < NO_EXPERT:
        raise TraceError(path, f"experts are numbered from 0, not {experts.min()}")
    return decoded(facts, experts, weights=weights, phase=phase, source=str(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text, numbered from 1."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(path, f"no UTF-8 at offset {error.start}") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    yield from enumerate(text.splitlines(), start=1)
