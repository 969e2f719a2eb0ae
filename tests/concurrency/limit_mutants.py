"""More bugs that the harnesses must find: in the limits, and in what the trace tells."""

from mutation import mutant

from tieredmoe import admission, trace
from tieredmoe.filling import Fills
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.lease import Lease, Leases

OF_LIMITS = [
    mutant(
        "any number may wait",
        admission.admit,
        "if tier.n_waiting >= leases.waiting_max and not goes_ahead:",
        "if False:",
    ),
    mutant(
        "a full queue refuses a holder who has not to wait",
        admission.admit,
        "and not goes_ahead:",
        "and True:",
    ),
]

OF_TRACES = [
    mutant(
        "who gives up waiting is not traced",
        admission._Waiting.give_up,
        "self._note(EventKind.LEFT, self._number)",
    ),
    mutant(
        "whom the close refuses is not traced",
        admission._Waiting._on_refused,
        "self._note(EventKind.LEFT, self._number)",
    ),
    mutant(
        "whom the close refuses is traced twice",
        admission._Waiting.give_up,
        "elif not self._refused:",
        "else:",
    ),
    mutant(
        "what was split off a wave is released under no number",
        Lease.take_landed,
        "lease.number = self.number",
    ),
    mutant("releases are not traced", Lease._claim, "self._note_release(self.number)"),
    mutant(
        "joins are traced as absent",
        Leases.grant,
        "joins=n_misses - len(admission.to_fill)",
        "joins=0",
    ),
    mutant(
        "a grant forgets that its acquire has queued",
        Leases.grant,
        "acquire=number",
        "acquire=None",
    ),
    mutant(
        "full hits of other threads are not traced",
        Hierarchy.hits,
        "if self._trace is not None:",
        "if False:",
    ),
    mutant(
        "evictions are not traced",
        trace.note_fills,
        "trace.note(EventKind.EVICTED, tier, entry.evicted)",
    ),
    mutant(
        "a dropped fill is not traced",
        Fills.drop,
        "tier.trace.note(EventKind.DROPPED, tier.name, entry.key)",
    ),
    mutant(
        "a failed fill is traced as landed",
        trace.note_end,
        "EventKind.LANDED if error is None else EventKind.FAILED",
        "EventKind.LANDED",
    ),
]

MUTANTS_OF_LIMITS = [*OF_LIMITS, *OF_TRACES]
