"""Recording which experts a running model's tokens are routed to.

Whoever runs layers calls ``routed`` once per layer, with what its router said; nothing else of the
model, the tiers or the loop is touched, so it fits any of them. Calls only copy small arrays: the
trace is put together when it is asked for, and written in one go (``write_trace``), which is file
work for a thread. Rejected: a file that grows while the model runs (a step would wait for it, or a
thread and a queue would stand between); dropping the oldest tokens when memory is full, which would
leave a replay without its beginning.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredmoe.sim.routing_trace import (
    DECODE,
    NO_EXPERT,
    PREFILL,
    ModelFacts,
    RoutingTrace,
    id_type,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class _Pass:
    """The tokens that one request runs through all layers together; rows of layers as they come."""

    __slots__ = ("experts", "phase", "probabilities", "request", "weights")

    def __init__(self, recorder: TraceRecorder, n_tokens: int, request: int, phase: int) -> None:
        facts = recorder.facts
        rows = (n_tokens, len(facts.layers))
        self.experts = np.full((*rows, facts.top_k), NO_EXPERT, id_type(facts.n_experts))
        self.weights = np.zeros((*rows, facts.top_k), np.float16) if recorder.weights else None
        self.probabilities = (
            np.zeros((*rows, facts.n_experts), np.float16) if recorder.probabilities else None
        )
        self.request = request
        self.phase = phase

    @property
    def nbytes(self) -> int:
        arrays = (self.experts, self.weights, self.probabilities)
        return sum(array.nbytes for array in arrays if array is not None)


class TraceRecorder:
    """Keeps the routing of the first ``nbytes_max`` bytes of tokens; later ones are only counted.

    With ``weights`` or ``probabilities`` these are recorded too, and every call must give them.
    ``routed`` may be called in any thread, for several requests by turns.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        weights: bool = True,
        probabilities: bool = False,
        nbytes_max: int = 256 << 20,
    ) -> None:
        self.facts = facts
        self.weights = weights
        self.probabilities = probabilities
        self.n_dropped = 0
        self._nbytes_left = nbytes_max
        self._rows: Mapping[int, int] = {layer: row for row, layer in enumerate(facts.layers)}
        self._passes: list[_Pass] = []
        self._open: dict[int, _Pass | None] = {}
        self._open_row: dict[int, int] = {}
        self._mutex = threading.Lock()

    def routed(
        self,
        layer: int,
        ids: NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
        probabilities: NDArray[np.floating] | None = None,
        *,
        request: int = 0,
        phase: int | None = None,
    ) -> None:
        """One layer of ``request`` was routed to ``ids`` [n, k'], k' ≤ top-k, for n tokens at once.

        ``weights`` [n, k'] and ``probabilities`` [n, E] belong to them. A pass ends when a layer
        comes that is not behind the last one. ``phase`` is that of the pass; None means prefill
        for several tokens and decode for one. Anything that NumPy can see as an array will do.
        """
        ids = np.atleast_2d(np.asarray(ids))
        row = self._rows[layer]
        with self._mutex:
            if row <= self._open_row.get(request, len(self._rows)):
                self._open[request] = self._begun(len(ids), request, phase)
            self._open_row[request] = row
            current = self._open[request]
            if current is None:
                return
            assert len(current.experts) == len(ids), "the number of tokens changed within a pass"
            n_chosen = ids.shape[1]
            current.experts[:, row, :n_chosen] = ids
            _put(current.weights, row, n_chosen, weights, "weights")
            _put(current.probabilities, row, self.facts.n_experts, probabilities, "probabilities")

    def trace(self, source: str = "recorded") -> RoutingTrace:
        """All tokens recorded so far, in the order in which their passes began.

        Passes that have not come to their end have no experts in the layers still to come.
        """
        with self._mutex:
            passes = list(self._passes)
            experts = _joined([p.experts for p in passes])
            weights = _joined([p.weights for p in passes if p.weights is not None])
            probabilities = _joined(
                [p.probabilities for p in passes if p.probabilities is not None]
            )
        sizes = [len(p.experts) for p in passes]
        rows = (0, len(self.facts.layers), self.facts.top_k)
        return RoutingTrace(
            facts=self.facts,
            experts=np.empty(rows, id_type(self.facts.n_experts)) if experts is None else experts,
            phase=np.repeat(np.array([p.phase for p in passes], np.int8), sizes),
            requests=np.repeat(np.array([p.request for p in passes], np.int32), sizes),
            passes=np.repeat(np.arange(len(passes), dtype=np.int32), sizes),
            weights=weights,
            probabilities=probabilities,
            source=source,
        )

    def _begun(self, n_tokens: int, request: int, phase: int | None) -> _Pass | None:
        """A new pass, or None: there is no room for it, nor for any that comes after it."""
        if phase is None:
            phase = DECODE if n_tokens == 1 else PREFILL
        begun = _Pass(self, n_tokens, request, phase)
        if self.n_dropped or begun.nbytes > self._nbytes_left:
            self.n_dropped += n_tokens
            return None
        self._nbytes_left -= begun.nbytes
        self._passes.append(begun)
        return begun

    def __repr__(self) -> str:
        return (
            f"<TraceRecorder {self.facts.name}: {len(self._passes)} passes, "
            f"{self.n_dropped} tokens dropped>"
        )


def _put(
    kept: NDArray[np.float16] | None,
    row: int,
    width: int,
    given: NDArray[np.floating] | None,
    what: str,
) -> None:
    if kept is not None:
        assert given is not None, f"this recorder keeps {what}, and was given none"
        kept[:, row, :width] = np.asarray(given)


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any] | None:
    return np.concatenate(arrays) if arrays else None
