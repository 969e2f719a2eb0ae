"""Bugs of prefetch: in the ring, in priorities, and in what becomes of a guess."""

from mutation import mutant

from tieredmoe.copying import CopyFill, queue_up
from tieredmoe.filling import Fills
from tieredmoe.pack.fills import ReadFill
from tieredmoe.prefetching import Prefetching
from tieredmoe.residency import Residency
from tieredmoe.ring import Ring
from tieredmoe.tier import Tier

MUTANTS_OF_PREFETCH = [
    mutant(
        "a prefetch evicts what is wanted",
        Residency._take_ring_slot,
        "return self._taken_from(victim)",
        "victim = next(iter(self.entries.values()))\n    return self._taken_from(victim)",
    ),
    mutant(
        "the ring grows into the cache",
        Residency._take_ring_slot,
        "if len(ring) < ring.n_max:",
        "if True:",
    ),
    mutant(
        "what is guessed again is evicted for its neighbour",
        Residency._take_ring_slot,
        "if victim is None or victim.key in spared:",
        "if victim is None:",
    ),
    mutant(
        "guesses go on while demand waits for slots",
        Prefetching.start,
        "if tier.closed or tier.n_waiting:",
        "if tier.closed:",
    ),
    mutant(
        "a closed tier prefetches", Prefetching.start, "if tier.closed or tier.n_waiting:", "if 0:"
    ),
    mutant("a promotion is forgotten", Tier.try_admit, "self.fills.want(admission.entries)"),
    mutant("a promotion is not passed on", Fills.want, "fill.promote()"),
    mutant("a promotion stops in the middle", CopyFill.promote, "self._tier.promote(self.ticket)"),
    mutant("the disk hears of no promotion", ReadFill.promote, "self._backend.promote(self.done)"),
    mutant(
        "what is promoted in the queue stays in its place",
        Tier.promote,
        "self._queue.remove(ticket)\n        queue_up(self._queue, ticket)",
        "pass",
    ),
    mutant(
        "a granted copy is not promoted",
        Tier.promote,
        "self.fills.want(ticket.admission.entries)",
    ),
    mutant(
        "demand that joins below promotes nothing",
        Fills.grant,
        "self.want(admission.entries)",
    ),
    mutant(
        "demand stands behind prefetch",
        queue_up,
        "queue[place - 1].priority > ticket.priority",
        "False",
    ),
    mutant(
        "what made way goes last",
        Tier.requeue,
        "again=True",
        "again=False",
    ),
    mutant("what made way is forgotten", Tier.requeue, "queue_up(self._queue, ticket, again=True)"),
    mutant(
        "a dropped prefetch leaks its pin below",
        CopyFill.drop_if_queued,
        "self._tier.withdraw(self.ticket)",
    ),
    mutant("guesses do not make way", Fills.grant, "self._make_way(ticket.keys)"),
    mutant(
        "what demand wants makes way for it",
        Fills._make_way,
        "if entry.key not in keys:",
        "if True:",
    ),
    mutant("a landed guess stays a guess", Fills._landed, "self.guesses.pop(entry.key, None)"),
    mutant("a dropped guess stays a guess", Fills.drop, "self.guesses.pop(entry.key, None)"),
    mutant("a dropped guess counts as failed", Fills.drop, "dropped=True", "dropped=False"),
    mutant("reads of guesses go as demand", Fills.start, "priority=priority", " "),
    mutant(
        "wrong guesses are not dropped", Prefetching.routed, "tier.fills.drop", "(lambda *_: None)"
    ),
    mutant(
        "right guesses are dropped",
        Ring.stale,
        "key.expert not in chosen",
        "True",
    ),
    mutant(
        "guesses for other layers are dropped",
        Ring.stale,
        "key.layer == layer and ",
        "",
    ),
    mutant("wrong guesses go last", Ring.stale, "gone | right", "right | gone"),
    mutant("what is guessed again stays wrong", Ring.refresh, "entry.stale = False"),
    mutant("a used guess stays in the ring", Residency._change_sides, "self.ring.use(entry)"),
    mutant(
        "the policy hears of no used guess", Residency._change_sides, "self.policy.admit(entry.key)"
    ),
    mutant(
        "a hit on a guess leaves it in the ring",
        Residency._pinned_hits,
        "if entry.in_ring:",
        "if False:",
    ),
    mutant(
        "a ring entry is counted twice",
        Residency.commit,
        "elif not entry.pins:",
        "if not entry.pins:",
    ),
    mutant(
        "demand finds no slot in the ring",
        Residency._n_fitting,
        " + self.ring.n_ready",
        "",
    ),
    mutant("an evicted guess stays in the ring", Residency._evict, "self.ring.waste(entry)"),
    mutant(
        "a failed guess stays in the ring", Residency.abort, "self.ring.end(entry, dropped=dropped)"
    ),
    mutant(
        "a ring that shrinks loses slots",
        Residency._shrink_ring,
        "self._free.append(entry.slot_index)",
    ),
    mutant("a ring that shrinks keeps all", Residency._shrink_ring, "self.ring.surplus()", "()"),
    mutant(
        "a tier that shrinks keeps its ring",
        Prefetching.resized,
        "tier.note_evicted(tier.residency.limit_ring(n_max))",
    ),
    mutant("useful and late are one", Ring.use, "if entry.state is READY:", "if True:"),
]
