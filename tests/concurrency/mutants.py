"""Bugs that the harnesses must find; ``mutation`` says how they get into the code."""

from mutation import mutant

from tieredmoe import admission, waves
from tieredmoe.copying import CopyFill
from tieredmoe.filling import Fills
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.lease import Lease, Leases
from tieredmoe.residency import Residency
from tieredmoe.source import load_error
from tieredmoe.tier import Tier
from tieredmoe.transfers import Transfers

SEEDED = [
    mutant(
        "waiters await one shared future",
        Lease._watch,
        "asyncio.get_running_loop().create_future()",
        "entry.fill.done",
    ),
    mutant(
        "a cancelled acquire releases nothing",
        admission.admit,
        "waiting.give_up()",
    ),
    mutant(
        "a slot is published before its read has ended",
        Fills.start,
        "fill.done.add_done_callback(partial(self._landed, entry))",
        "fill.done.add_done_callback(lambda _: self._tier.transfers.end())\n"
        "        self._tier.residency.commit(entry)",
    ),
    mutant(
        "the victim is among the keys being acquired",
        Residency.admit,
        "entries = [self._pin_resident(key) for key in keys]",
        "entries = [None] * len(keys)",
        Residency.admit,
        "if entries[i] is None:",
        "entries[i] = self._pin_resident(key)\n            if entries[i] is None:",
    ),
    mutant(
        "a cancelled queue head does not wake the next",
        Tier.withdraw,
        "self._queue.remove(ticket)\n        self.pump()",
        "self._queue.remove(ticket)",
    ),
    mutant(
        "grant and cancel in one tick leak the grant",
        admission._Waiting.give_up,
        "self._lease.release()",
    ),
    mutant(
        "shutdown leaves reads writing",
        Tier.close,
        "await self.transfers.drain()\n    await self.source.close()",
    ),
]
"""The seven that a prototype had; two of them escaped fuzzing."""

OF_RESIDENCY = [
    mutant(
        "an aborted entry stays in the table",
        Residency.abort,
        "del self.entries[entry.key]",
    ),
    mutant(
        "an aborted entry's slot is lost",
        Residency.abort,
        "self._free.append(entry.slot_index)",
    ),
    mutant(
        "the last unpin of a filling entry makes it evictable",
        Residency._unpin,
        "if entry.state is READY:",
        "if entry.state is not ABSENT:",
    ),
    mutant(
        "an unwanted fill lands pinned for ever",
        Residency.commit,
        "if not entry.pins:",
        "if False:",
    ),
    mutant(
        "an unwanted fill lands warm",
        Residency.commit,
        "cold=True",
        "cold=False",
    ),
    mutant(
        "a pinned expert may still be proposed",
        Residency._pin_resident,
        "self.policy.hold(key)",
    ),
    mutant(
        "pinning an evictable expert costs no room",
        Residency._n_fitting,
        "entry is None or (entry.state is READY and not entry.pins)",
        "entry is None",
    ),
    mutant(
        "a filling expert costs room again",
        Residency._n_fitting,
        "entry is None or (entry.state is READY and not entry.pins)",
        "entry is None or not entry.pins",
    ),
    mutant(
        "a filling expert is a hit",
        Residency._pinned_hits,
        "entry is None or entry.state is not READY",
        "entry is None",
    ),
    mutant("hits are one short", Residency._pinned_hits, "len(entries)\n", "len(entries) - 1\n"),
    mutant("joins are not misses", Residency._pin_resident, "self.misses += 1"),
    mutant("joins are not counted", Residency._pin_resident, "self.joins += 1"),
    mutant("evictions are not counted", Residency._evict, "self.evictions += 1"),
    mutant("misses count every key", Residency.admit, "len(to_fill)\n", "len(keys)\n"),
    mutant("the policy is not told of a step", Residency.admit, "policy.step(keys[0].layer, keys)"),
]

OF_TIERS = [
    mutant(
        "a failed read is committed as ready",
        Fills._landed,
        "if error is None:",
        "if True:",
    ),
    mutant(
        "waiters are told before the state changes",
        Fills._landed,
        "for waiter in waiters:\n        waiter(entry, error)",
        "pass",
        Fills._landed,
        "if error is None:",
        "for waiter in waiters:\n        waiter(entry, error)\n    if error is None:",
    ),
    mutant("a failed fill does not pump", Fills._landed, "tier.pump()", "error or tier.pump()"),
    mutant("a landed fill does not pump", Fills._landed, "tier.pump()", "error and tier.pump()"),
    mutant("released slots do not pump", Tier.unpin, "self.pump()"),
    mutant(
        "a dropped fill frees the slot of a running read",
        Fills.drop,
        "if not fill.drop_if_queued():\n        return",
        "fill.drop_if_queued()",
    ),
    mutant(
        "an unwanted fill is never dropped",
        Tier.unpin,
        "reversed(unwanted)",
        "()",
    ),
    mutant(
        "the first asked is dropped first, which starts the next",
        Tier.unpin,
        "reversed(unwanted)",
        "unwanted",
    ),
    mutant("whoever fits jumps the queue", Tier.try_admit, "if self._queue:", "if False:"),
    mutant(
        "full hits of other threads overtake the queue",
        Tier.try_hits,
        "None if self._queue else self",
        "self",
    ),
    mutant("what a thread gives back wakes nobody", Tier.unpin_landed, "post(self.pump)"),
    mutant(
        "a release inside the mutex is forgotten",
        Tier.unpin,
        "asyncio.get_running_loop().call_soon(self.unpin, entries, fences)",
    ),
    mutant(
        "a thread's release inside the mutex is forgotten",
        Tier.unpin_landed,
        "post(partial(self.unpin, entries, fences))",
    ),
    mutant("a drained tier does not say so", Transfers.end, "future.set_result(None)"),
    mutant("shutting refuses nobody", Tier.shut, "ticket.on_refused", "str"),
    mutant("a shut tier takes new work", Tier._check_open, "if self._closed:", "if False:"),
    mutant("closing drops nothing", Tier.close, "self.fills.drop(entry, error)"),
    mutant("closing does not wait for copies", Tier.begin_copy, "begin()", "begin(0)"),
    mutant(
        "memory goes before the source below is closed",
        Tier.close,
        "self.transfers.drain()\n    await self.source.close()",
        "self.transfers.drain()\n    self.arena.close()\n    await self.source.close()",
    ),
    mutant(
        "a tier below sees offsets of the disk",
        Tier.parts,
        "part._replace(source_offset=part.target_offset)",
        "part._replace(source_offset=part.target_offset + 8, nbytes=part.nbytes - 8)",
    ),
    mutant(
        "a raw read error reaches the caller",
        load_error,
        "ExpertLoadError(entry.key, error)",
        "error",
    ),
]

OF_COPIES = [
    mutant(
        "the source is unpinned before the copy's fence has passed",
        CopyFill._copy,
        "fence.on_passed(partial(tier.end_copy, entry))",
        "tier.end_copy(entry)",
    ),
    mutant(
        "the source of a copy stays pinned",
        CopyFill._copy,
        "fence.on_passed",
        "bool",
    ),
    mutant(
        "a failed copy leaves its source pinned",
        CopyFill._copy,
        "tier.end_copy(entry)\n        self.done",
        "tier.transfers.end()\n        self.done",
    ),
    mutant(
        "a dropped copy stays in the queue below",
        CopyFill.drop_if_queued,
        "self._tier.withdraw(self.ticket)",
    ),
    mutant(
        "a dropped copy is made when its expert arrives below",
        CopyFill.drop_if_queued,
        "entry.waiters.remove(self._arrived)",
    ),
    mutant(
        "an enqueued copy counts as droppable",
        CopyFill.drop_if_queued,
        "if self.done.done():\n        return False",
        "if self.done.done():\n        return True",
    ),
    mutant("copied bytes are not counted", CopyFill._copy, "tier.copied_nbytes += ", "_ = "),
]

OF_LEASES = [
    mutant(
        "the lease is made when its task wakes up",
        admission._Waiting._on_granted,
        "self._lease = self._make(self.ticket.admission)",
        "pass",
        admission.admit,
        "lease = await waiting.granted",
        "await waiting.granted\n        lease = waiting._make(waiting.ticket.admission)",
    ),
    mutant(
        "a lease released by the close in the tick of its grant is handed out",
        admission.admit,
        "if lease.released:",
        "if False:",
    ),
    mutant("releasing twice unpins twice", Lease._claim, "return False", "return True"),
    mutant("a released lease still listens", Lease._abandon, "entry.waiters.remove(self._landed)"),
    mutant("a release leaves futures pending", Lease._abandon, "self._settle(expert, error)"),
    mutant("a release wakes nobody", Lease._abandon, "self._wake.set()"),
    mutant("an arrival wakes nobody", Lease._landed, "self._wake.set()"),
    mutant("an arrival is forgotten", Lease._arrival, "<= n_seen", "< n_seen"),
    mutant(
        "an iteration over a released lease goes on",
        Lease._check_held,
        "if self._released:",
        "if False:",
    ),
    mutant("slots outlive the lease", Lease.slots.fget, "if self._released:", "if False:"),
    mutant("slots in flight are shown", Lease.slots.fget, "if entry.state is READY", "if True"),
    mutant(
        "a split lease keeps what it gave away",
        Lease.take_landed,
        "self._entries = [entry for entry in self._entries if entry.state is not READY]",
    ),
    mutant("a failed expert of a stream is skipped", Lease.take_landed, "raise error"),
    mutant(
        "a device stream waits for nothing",
        Lease.wait_on,
        "slots[entry.slot_index].ready.wait_on(stream)",
    ),
    mutant("failed experts count as held", Lease.keys, " if entry.state is not ABSENT", ""),
]

OF_HIERARCHIES = [
    mutant("closing releases no lease", Hierarchy.close, "self._leases.release_all()"),
    mutant(
        "leases are released before the queue is refused",
        Hierarchy.close,
        "self.top.shut()",
        "pass",
    ),
    mutant(
        "a cancelled close ends in the middle",
        Hierarchy.close,
        "cancelled = error",
        "raise",
    ),
    mutant("a cancelled close is not reported", Hierarchy.close, "raise cancelled"),
    mutant(
        "a holder waits behind those who wait for him",
        admission.admit,
        "ahead=holds",
        "ahead=False",
    ),
    mutant(
        "two holders wait for each other",
        admission.admit,
        "_never_fitting(leases, keys, leases.waiting | {owner})",
        "_never_fitting(leases, keys, {owner})",
    ),
    mutant(
        "a holder who gave up counts as waiting for ever",
        admission.admit,
        "leases.waiting.discard(owner)",
    ),
    mutant(
        "leases of anybody count as the caller's own",
        Leases.held_by,
        "if self.owners.get(lease) in owners",
        "if True",
    ),
    mutant("a stream does not release what it yielded", waves.stream, "landed.release()"),
    mutant("a stream left early keeps what flies", waves.stream, "waves.release()"),
    mutant(
        "a stream waits for slots with some in its hands",
        waves.stream,
        "if not waves.flying:",
        "if waves.waiting:",
    ),
    mutant(
        "a stream serves what is absent first",
        waves._Waves.__init__,
        "resident + [key for key in keys if key not in entries]",
        "[key for key in keys if key not in entries] + resident",
    ),
    mutant(
        "a stream asks for more slots than holders leave",
        waves._Waves._n_to_wait_for,
        "if self._leases.held_by({self._owner}):",
        "if False:",
    ),
    mutant(
        "an empty wave is never let go",
        waves._Waves.landed,
        "self.flying.remove(lease)\n                    lease.release()",
        "self.flying.remove(lease)",
    ),
]

MUTANTS = [*SEEDED, *OF_RESIDENCY, *OF_TIERS, *OF_COPIES, *OF_LEASES, *OF_HIERARCHIES]
