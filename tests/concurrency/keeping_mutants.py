"""Bugs of a tier that keeps what the one above it evicts; ``mutants`` has all others."""

from mutation import mutant

from tieredmoe import keeping
from tieredmoe.copying import CopyFill
from tieredmoe.filling import Fills
from tieredmoe.keeping import Keeper
from tieredmoe.residency import Residency
from tieredmoe.slot_table import SlotTable
from tieredmoe.testing.arena import LateArena
from tieredmoe.tier import Tier

TAKE_BACK = "self._tier.below.take_back(entries, self._tier.slots)"

MUTANTS_OF_KEEPING = [
    mutant("nothing is kept", Fills.start, TAKE_BACK),
    mutant(
        "copied back after the slot was given away",
        Fills.start,
        TAKE_BACK,
        "pass",
        Fills.start,
        "self._tier.transfers.begin(len(fills))",
        "self._tier.transfers.begin(len(fills))\n"
        f"    if self._tier.below is not None:\n        {TAKE_BACK}",
    ),
    mutant(
        "what was copied up stays warm",
        Residency.demote,
        "cold=entry.copied_up",
        "cold=False",
    ),
    mutant("what was copied up is never known to be", CopyFill._copy, "entry.copied_up = True"),
    mutant(
        "what was evicted above stays cold",
        Residency.warm,
        "self.policy.step(key.layer, (key,))",
    ),
    mutant(
        "what was evicted above while its copy ran turns cold",
        Residency.warm,
        "entry.copied_up = False",
    ),
    mutant(
        "a slot may be rewritten while it is copied into",
        Keeper._copy_back,
        "fence.on_passed(partial(self._returned, entry))",
        "self._returned(entry)",
    ),
    mutant(
        "a slot stays pinned after the copy into it",
        Keeper._returned,
        "tier.unpin([entry])",
    ),
    mutant("the close does not wait for copies back", Keeper._copy_back, "begin()", "begin(0)"),
    mutant(
        "what is above is kept once more",
        SlotTable._taken_from,
        "victim.copied_up or victim.in_ring",
        "False",
    ),
    mutant(
        "what is here is kept once more",
        keeping.keep_evicted,
        "not residency.warm(entry.evicted)",
        "residency.warm(entry.evicted) is not None",
        Residency.take_in,
        "assert key not in self.entries",
        "pass",
    ),
    mutant(
        "keeping takes the slots that reads need",
        keeping.keep_evicted,
        "residency.n_available > n_reads",
        "residency.n_available",
    ),
    mutant(
        "keeping takes the slot of what is asked for",
        keeping.keep_evicted,
        "residency.pin_ready([entry.key for entry in entries])",
        "residency.pin_ready([])",
    ),
    mutant(
        "what is asked for stays pinned",
        keeping.keep_evicted,
        "residency.unpin(entry)",
    ),
    mutant(
        "a read takes the slot of what is asked for beside it",
        Tier.read_into,
        "if self.keeper is not None:",
        "if False:",
    ),
    mutant(
        "roles come back where no copy up looks for them",
        Keeper._copy_back,
        "Part(part.target_offset, part.source_offset, part.nbytes)",
        "part._replace(target_offset=part.target_offset + 8, nbytes=part.nbytes - 8)",
    ),
    mutant(
        "a copy back that the device refuses keeps its slot",
        Keeper._copy_back,
        "tier.residency.abort(entry)",
        "tier.residency.commit(entry)",
    ),
    mutant(
        "what the middle tier gives up is not kept",
        Keeper._copy_back,
        "tier.below.take_back([entry], tier.slots)",
    ),
    mutant(
        "experts of slots given up stay cold below",
        Tier.note_evicted,
        "self.below.gone_above(keys)",
    ),
    mutant(
        "an arena that would block is asked to copy out",
        Keeper._copy_back,
        "if not source.arena.copies_out:",
        "if False:",
    ),
    mutant(
        "evictions for what is kept are not traced",
        Keeper._copy_back,
        "tier.trace.note(EventKind.EVICTED, tier.name, entry.evicted)",
    ),
    mutant("copies back are not counted", Keeper._copy_back, "self.copied_back += 1"),
    mutant(
        "bytes copied back are not counted",
        Keeper._copy_back,
        "self.copied_back_nbytes += ",
        "_ = ",
    ),
    mutant(
        "a slot's next writer does not wait for the copy out of it",
        LateArena.copy_out,
        "ours.idle = joined(ours.idle, fence)",
    ),
    mutant(
        "a copy up does not wait for the copy back that it reads",
        LateArena._enqueue,
        "joined(target.idle, source.ready)",
        "target.idle",
        LateArena._enqueue,
        "if source.ready.passed() else None",
        "",
    ),
]
