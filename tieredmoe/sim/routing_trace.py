"""Which experts a model's tokens were routed to: the one form that all of the laboratory works on.

Arrays over (token, routed layer, rank), because statistics over 10 million lookups are to take
milliseconds, and one object per lookup would not fit in memory. Tokens that ran together (a chunk
of a prompt) carry the same ``passes`` number: a tier sees their union, layer by layer. Rejected: a
list of steps (it has lost who was routed together, and gate weights have no place in it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from tieredmoe.errors import TraceError
from tieredmoe.sim.replay import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PREFILL = 0
DECODE = 1
NO_EXPERT = -1
"""Fills ``experts`` where a token was routed to fewer than top-k."""


@attrs.frozen
class ModelFacts:
    """What a trace knows of its model; ``expert_nbytes`` (a slot's size) only if it was recorded.

    ``layers`` are the model's own numbers of its routed layers, ascending.
    """

    name: str
    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    expert_nbytes: int | None = None

    @property
    def cycle(self) -> int:
        """W = layers × top-k: the lookups of one token."""
        return len(self.layers) * self.top_k

    @property
    def n_records(self) -> int:
        """Experts of the whole model."""
        return len(self.layers) * self.n_experts


def _int32(array: object) -> NDArray[np.int32]:
    return np.ascontiguousarray(array, np.int32)


@attrs.frozen(eq=False)
class RoutingTrace:
    """A checked, read-only trace of ``n_tokens`` tokens; T tokens, L layers, k = top-k, E experts.

    ``experts`` int16 or int32 [T, L, k], distinct within a row, ``NO_EXPERT`` only at its end;
    ``weights`` float16 [T, L, k], the gate weights; ``probabilities`` float16 [T, L, E], of the
    whole router; ``phase`` int8 [T], ``PREFILL`` or ``DECODE``; ``requests`` and ``passes`` int32
    [T], the latter never falling. ``source`` names the trace in errors. Raises ``TraceError`` for
    arrays that contradict each other or the facts.
    """

    facts: ModelFacts
    experts: NDArray[np.signedinteger[Any]]
    phase: NDArray[np.int8]
    requests: NDArray[np.int32] = attrs.field(converter=_int32)
    passes: NDArray[np.int32] = attrs.field(converter=_int32)
    weights: NDArray[np.float16] | None = None
    probabilities: NDArray[np.float16] | None = None
    source: str = "trace"

    def __attrs_post_init__(self) -> None:
        for problem in _problems(self):
            raise TraceError(self.source, problem)
        for array in (self.experts, self.phase, self.requests, self.passes):
            array.flags.writeable = False
        for optional in (self.weights, self.probabilities):
            if optional is not None:
                optional.flags.writeable = False

    @property
    def n_tokens(self) -> int:
        """Tokens of all requests and phases."""
        return len(self.experts)

    @property
    def n_passes(self) -> int:
        """Forward passes: each decoded token is one, each chunk of a prompt is one."""
        return int(np.count_nonzero(np.diff(self.passes))) + 1 if self.n_tokens else 0

    @property
    def n_decoded(self) -> int:
        """Tokens of the decode phase."""
        return int(np.count_nonzero(self.phase == DECODE))

    def spans(self) -> Iterator[tuple[int, int]]:
        """First token and the one after the last, of each pass in order."""
        starts = np.flatnonzero(np.diff(self.passes, prepend=-1)).tolist()
        yield from zip(starts, [*starts, self.n_tokens][1:], strict=True)

    def steps(self) -> Iterator[Step]:
        """One step per pass and layer, passes in order: what a tier was asked for.

        A union of several tokens is ascending, as the providers ask for it; a lone token's experts
        keep the router's order. Layers that nothing was routed to make an empty step.
        """
        for start, stop in self.spans():
            chunk = self.experts[start:stop]
            for row, layer in enumerate(self.facts.layers):
                ids = chunk[0, row] if stop - start == 1 else np.unique(chunk[:, row])
                yield Step(layer, ids[ids != NO_EXPERT].tolist())

    def only(self, phase: int) -> RoutingTrace:
        """The tokens of one phase, as a trace of their own."""
        return self.tokens(self.phase == phase)

    def tokens(self, chosen: NDArray[np.bool_] | slice) -> RoutingTrace:
        """The ``chosen`` tokens, as a trace of their own; pass and request numbers are kept."""
        return attrs.evolve(
            self,
            experts=self.experts[chosen],
            phase=self.phase[chosen],
            requests=self.requests[chosen],
            passes=self.passes[chosen],
            weights=None if self.weights is None else self.weights[chosen],
            probabilities=None if self.probabilities is None else self.probabilities[chosen],
        )


def decoded(
    facts: ModelFacts,
    experts: NDArray[np.integer],
    *,
    weights: NDArray[np.floating] | None = None,
    phase: NDArray[np.integer] | None = None,
    source: str = "trace",
) -> RoutingTrace:
    """A trace of one request from ``experts`` [T, L, k]; without ``phase``, all were decoded.

    Tokens of the prefill phase that follow each other make one pass. Raises ``TraceError`` as
    ``RoutingTrace`` does.
    """
    n_tokens = len(experts)
    phases = np.full(n_tokens, DECODE, np.int8) if phase is None else phase.astype(np.int8)
    begins = (phases == DECODE) | (np.diff(phases, prepend=DECODE) != 0)
    return RoutingTrace(
        facts=facts,
        experts=np.ascontiguousarray(experts, id_type(facts.n_experts)),
        phase=phases,
        requests=np.zeros(n_tokens, np.int32),
        passes=np.cumsum(begins) - 1,
        weights=None if weights is None else np.ascontiguousarray(weights, np.float16),
        source=source,
    )


def id_type(n_experts: int) -> type[np.signedinteger[Any]]:
    """The smallest type of ``experts`` for a model of so many."""
    return np.int16 if n_experts <= np.iinfo(np.int16).max else np.int32


def _problems(trace: RoutingTrace) -> Iterator[str]:
    """What is wrong, the first thing first: later checks rely on the earlier ones."""
    facts = trace.facts
    if not facts.layers or facts.top_k < 1 or facts.n_experts < facts.top_k:
        yield (
            f"a model of {len(facts.layers)} routed layers, {facts.n_experts} experts and top-"
            f"{facts.top_k} is none"
        )
    if list(facts.layers) != sorted(set(facts.layers)):
        yield "the numbers of the routed layers do not ascend"
    if facts.expert_nbytes is not None and facts.expert_nbytes < 1:
        yield f"an expert of {facts.expert_nbytes} bytes is none"
    yield from _misshapen(trace)
    experts = trace.experts
    if experts.size and not (NO_EXPERT <= experts.min() <= experts.max() < facts.n_experts):
        token, row, rank = np.argwhere((experts < NO_EXPERT) | (experts >= facts.n_experts))[0]
        yield (
            f"token {token} is routed to expert {experts[token, row, rank]} in layer "
            f"{facts.layers[row]}, whose experts are 0 to {facts.n_experts - 1}"
        )
    ordered = np.sort(experts, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)
    if twice.any():
        token, row, _ = np.argwhere(twice)[0]
        yield f"token {token} is routed to one expert twice in layer {facts.layers[row]}"
    absent = experts == NO_EXPERT
    if (absent[..., :-1] & ~absent[..., 1:]).any():
        yield f"only the end of a row may be {NO_EXPERT}"
    if not np.isin(trace.phase, (PREFILL, DECODE)).all():
        yield f"a token's phase is {PREFILL} (prefill) or {DECODE} (decode)"
    if (np.diff(trace.passes, prepend=0) < 0).any():
        yield "the numbers of the passes fall"


def _misshapen(trace: RoutingTrace) -> Iterator[str]:
    facts = trace.facts
    rows = (len(trace.experts), len(facts.layers))
    for name, array, shape, kind in (
        ("experts", trace.experts, (*rows, facts.top_k), np.signedinteger),
        ("phase", trace.phase, rows[:1], np.int8),
        ("requests", trace.requests, rows[:1], np.int32),
        ("passes", trace.passes, rows[:1], np.int32),
        ("weights", trace.weights, (*rows, facts.top_k), np.float16),
        ("probabilities", trace.probabilities, (*rows, facts.n_experts), np.float16),
    ):
        if array is None:
            continue
        if array.shape != shape:
            yield f"{name} has the shape {list(array.shape)} where the facts say {list(shape)}"
        if not np.issubdtype(array.dtype, kind):
            yield f"{name} is {array.dtype}, not {kind.__name__}"
