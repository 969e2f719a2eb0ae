"""Random scenarios: a few tasks, overlapping sets, everything that a caller can do, and bad luck.

One seed is one scenario, always the same. ``storm(seed)`` plays it and raises what it finds.
"""

import asyncio
import random
from contextlib import aclosing

from stage import SPEC, Stage, sim_disk, simulate

from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority
from tieredmoe.testing.faults import Fault, FaultPlan

CHAINS = [
    (1,), (2,), (3,), (5,),
    (1, 1), (1, 2), (1, 3), (2, 4), (3, 2), (12, 2),
    (1, 1, 1), (2, 1, 3), (4, 1, 3), (1, 3, 2),
]  # fmt: skip
FAULTS = [
    Fault("error"),
    Fault("torn"),
    Fault("eof"),
    Fault("slow", delay_s=1e-3),
    Fault("error", delay_s=3e-4),
]


def storm(seed):
    """Play scenario ``seed``; returns how its operations ended."""
    return simulate(_Storm(seed).main())


class _Storm:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.luck_of_resizer = random.Random(f"resizer {seed}")
        self.luck_of_keeper = random.Random(f"keeper {seed}")
        self.luck_of_guesser = random.Random(f"guesser {seed}")
        self.trace_events = 0 if seed % 4 else 1000

    async def main(self):
        rng = self.rng
        slots = rng.choice(CHAINS)
        rate = rng.choice([0, 0, 0.1, 0.4])
        self.stage = stage = Stage(
            slots,
            policy=rng.choice(["lru", "lfu_lru"]),
            late=len(slots) > 1 and rng.random() < 0.4,
            keeps=self.luck_of_keeper.random() < 0.5,
            faulty=bool(rate),
            trace_events=self.trace_events,
            prefetch_slots=self.luck_of_guesser.choice([None, 1, 2, 3]),
            disk=sim_disk(
                seed=rng.randrange(10**6),
                queue_depth=rng.choice([1, 2, 8]),
                jitter=rng.choice([0, 0.9]),
                # At 1e-4 s a page, what lands without jitter lands together with timeouts.
                nbytes_per_s=rng.choice([4e9, 4096 / 1e-4]),
                faults=FaultPlan(seed=rng.randrange(10**6), rate=rate, faults=FAULTS),
            ),
        )
        for i in range(rng.randint(2, 4)):
            stage.spawn(f"caller {i}", self.caller())
        if rng.random() < 0.6:
            stage.spawn("saboteur", self.saboteur())
        if rng.random() < 0.25:
            stage.spawn("closer", self.closer())
        if self.luck_of_guesser.random() < 0.7:
            stage.spawn("guesser", self.guesser())
        if len(stage.top.slots) > SPEC.top_k and self.luck_of_resizer.random() < 0.4:
            stage.spawn("resizer", self.resizer())
        await stage.finish()
        await stage.settle()
        if not stage.closing and not rate:
            await stage.still_serves()
        await stage.close()
        return stage.outcomes

    # ---- the tasks

    async def caller(self):
        for _ in range(self.rng.randint(1, 3)):
            await self.pause(0.3)
            play = self.rng.choice(self.PLAYS)
            async with self.stage.excused():
                await play(self)

    async def saboteur(self):
        for _ in range(self.rng.randint(1, 3)):
            await self.pause(1)
            callers = [task for task in self.stage.tasks.values() if "caller" in task.get_name()]
            victim = self.rng.choice(callers)
            victim.cancel()
            if self.rng.random() < 0.2:
                victim.cancel()

    async def resizer(self):
        rng, capacity = self.luck_of_resizer, len(self.stage.top.slots)
        for _ in range(rng.randint(1, 5)):
            await asyncio.sleep(rng.choice([0, 5e-5, 2e-4, 6e-4]))
            n_slots = rng.randint(SPEC.top_k, capacity)
            async with self.stage.excused():
                resizing = self.stage.hierarchy.resize(n_slots)
                if rng.random() < 0.5:
                    async with asyncio.timeout(rng.choice([0, 1e-4])):
                        await resizing
                else:
                    assert await resizing == n_slots
                    assert not self.stage.top.backing.shrinking

    async def guesser(self):
        """Guesses in the middle of everything; who has to do with it later, is chance."""
        rng, hierarchy = self.luck_of_guesser, self.stage.hierarchy
        for _ in range(rng.randint(1, 12)):
            await asyncio.sleep(rng.choice([0, 0, 2e-5, 1e-4, 3e-4]))
            layer = rng.choice(SPEC.layers)
            experts = rng.choices(range(SPEC.n_experts), k=rng.randint(1, 4))
            if rng.random() < 0.25:
                hierarchy.routed(layer, experts)
            else:
                priority = rng.choice([Priority.CERTAIN, Priority.LOOKAHEAD, Priority.WARMUP])
                assert hierarchy.prefetch(layer, experts, priority=priority) <= len(set(experts))

    async def closer(self):
        await self.pause(1)
        self.stage.closing = True
        if self.rng.random() < 0.5:
            await self.stage.hierarchy.close()
            return
        closing = self.stage.spawn("closing", self.stage.hierarchy.close())
        await self.pause(0.8)
        closing.cancel()

    # ---- what a caller may do

    async def use_each_as_it_lands(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            async for expert in lease.as_completed():
                await self.stage.use(lease, [expert])
                await self.pause(0.2)
            await self.stage.use(lease, lease.slots)

    async def use_all_at_once(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            await lease.ready()
            await self.stage.use(lease, lease.slots)
            await self.pause(0.5)
            await self.stage.use(lease, lease.slots)

    async def play_with_futures(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            for expert, future in lease.futures.items():
                luck = self.rng.random()
                if luck < 0.2:
                    future.cancel()
                elif luck < 0.5:
                    try:
                        async with asyncio.timeout(self.duration()):
                            await future
                    except TimeoutError:
                        continue
                    await self.stage.use(lease, [expert])
                else:
                    await asyncio.wait({future})
                    if future.exception() is None:
                        await self.stage.use(lease, [expert])

    async def let_go_in_mid_flight(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            await self.pause(0.4)
        assert not lease.slots

    async def be_patient_for_so_long(self):
        async with asyncio.timeout(self.duration()):
            lease = await self.stage.lease(*self.some())
            with lease:
                await lease.ready()
                await self.stage.use(lease, lease.slots)

    async def stream_all(self):
        layer, experts = self.some(any_size=True)
        seen = []
        async with aclosing(self.stage.hierarchy.stream(layer, experts)) as leases:
            async for lease in leases:
                seen += lease.experts
                await self.stage.use(lease, lease.experts)
                await self.pause(0.2)
        assert sorted(seen) == sorted(set(experts)), "a stream serves each expert once"

    async def stream_and_leave(self):
        async with aclosing(self.stage.hierarchy.stream(*self.some(any_size=True))) as leases:
            async for lease in leases:
                await self.stage.use(lease, lease.experts)
                if self.rng.random() < 0.5:
                    break

    async def ask_for_more(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            await self.pause(0.2)
            more = await self.stage.lease(*self.some())
            with more:
                await more.ready()
                await self.stage.use(more, more.slots)
            await self.stage.use(lease, lease.slots)

    async def share_the_lease(self):
        lease = await self.stage.lease(*self.some())
        with lease:
            helper = self.stage.spawn(f"helper {len(self.stage.tasks)}", self.help_with(lease))
            if self.rng.random() < 0.3:
                await self.pause(1)
                helper.cancel()
            await lease.ready()
            await self.stage.use(lease, lease.slots)

    async def help_with(self, lease):
        async with self.stage.excused():
            try:
                async for expert in lease.as_completed():
                    await self.stage.use(lease, [expert])
                    await self.pause(0.2)
            except ClosedError:
                assert lease.released

    PLAYS = (
        use_each_as_it_lands,
        use_all_at_once,
        play_with_futures,
        let_go_in_mid_flight,
        be_patient_for_so_long,
        stream_all,
        stream_and_leave,
        ask_for_more,
        share_the_lease,
    )

    # ---- luck

    def some(self, *, any_size=False):
        limit = SPEC.n_experts if any_size else self.stage.top.residency.n_slots
        n = self.rng.randint(1, min(limit, 4))
        return self.rng.choice(SPEC.layers), self.rng.choices(range(SPEC.n_experts), k=n)

    def duration(self):
        return self.rng.choice([0, 5e-5, 1e-4, 2e-4, 6e-4])

    async def pause(self, likelihood):
        if self.rng.random() < likelihood:
            await asyncio.sleep(self.duration())
