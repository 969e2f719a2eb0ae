"""Bugs of slots that are read, given up and taken again; ``mutants`` has all others."""

from mutation import mutant

from tieredmoe import admission, waves
from tieredmoe.backing import Backing
from tieredmoe.lease import Lease
from tieredmoe.residency import Residency
from tieredmoe.tier import Tier

MUTANTS_OF_MEMORY = [
    mutant(
        "released slots are not waited for",
        Lease.fences,
        "[fence(stream) for stream in self._streams]",
        "()",
    ),
    mutant("a lease forgets its streams", Lease.wait_on, "self._streams += (stream,)"),
    mutant(
        "a released lease still orders streams", Lease.wait_on, "if self._released:", "if False:"
    ),
    mutant(
        "one holder's fence replaces another's",
        Backing.keep_idle,
        "fence if slot.idle is PASSED else joined(slot.idle, fence)",
        "fence",
    ),
    mutant(
        "a release inside the mutex forgets its fences",
        Tier.unpin,
        "call_soon(self.unpin, entries, fences)",
        "call_soon(self.unpin, entries)",
    ),
    mutant(
        "a thread's release inside the mutex forgets its fences",
        Tier.unpin_landed,
        "post(partial(self.unpin, entries, fences))",
        "post(partial(self.unpin, entries))",
    ),
    mutant("memory goes under running kernels", Tier.close, "await self.backing.idle()"),
    mutant(
        "memory goes while somebody needs an expert in it",
        Backing.give_back,
        "if residency.n_stranded:",
        "if False:",
    ),
    mutant(
        "memory goes while a device uses it",
        Backing.give_back,
        "if not fence.passed():",
        "if False:",
    ),
    mutant("who waits for memory to go waits for ever", Backing.give_back, "self._wake()"),
    mutant(
        "a release does not let the memory go",
        Tier.unpin,
        "self._queue or self.backing.shrinking",
        "self._queue",
    ),
    mutant(
        "a thread's release does not let the memory go",
        Tier.unpin_landed,
        "self._queue or self.backing.shrinking",
        "self._queue",
    ),
    mutant("growing lets nobody in", Tier.resize, "self.pump()"),
    mutant("who never fits any more waits on", Tier.resize, "if error is not None:", "if False:"),
    mutant(
        "holders that never fit any more wait for each other",
        admission.hopeless,
        "return _never_fitting(leases, ticket.keys, leases.waiting)",
        "return None",
    ),
    mutant(
        "a slot given up is used again after a failed fill",
        Residency.abort,
        "if entry.slot_index < self.n_slots:",
        "if True:",
    ),
    mutant("a slot given up is a victim's", Residency.admit, "self._sweep()"),
    mutant("what is pinned is swept", Residency._sweep, " and not entry.pins", ""),
    mutant(
        "a stream gives up when its wave is refused",
        waves._Waves.wait_for_slots,
        "if n >= n_before:",
        "if True:",
    ),
]
