"""The path of full hits, which other threads take: here in one thread, tick by tick."""

import asyncio
import json

import pytest
from stage import SPEC, Stage, full, play, queued, take

from tieredmoe.errors import ClosedError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.snapshots import SnapshotFile


def hits(stage, layer, experts):
    return stage.hierarchy.hits(layer, stage.hierarchy.keys(layer, experts), owner="a thread")


def test_only_a_set_that_is_all_there_is_served():
    async def scenario(stage):
        assert hits(stage, 0, [0, 1]) is None
        flying = await stage.lease(0, [0, 1])
        assert hits(stage, 0, [0, 1]) is None
        await flying.ready()
        posted = []
        hit = hits(stage, 0, [1, 0])
        assert hit.misses == {}
        stage.holds(hit, 1)
        hit.release_landed(posted.append)
        hit.release_landed(posted.append)
        assert stage.entry(0, 1).pins == 1
        assert posted == []
        flying.release()
        await stage.close()
        with pytest.raises(ClosedError):
            hits(stage, 0, [0])

    play(scenario)


def test_it_does_not_overtake_the_queue_and_its_release_wakes_the_head():
    async def scenario(stage):
        log = []
        lease = await full(stage)
        hit = hits(stage, 0, [0])
        await queued(stage, "waiting", 1, [0, 1, 2, 3], log)
        assert hits(stage, 0, [0]) is None
        lease.release()
        posted = []
        hit.release_landed(posted.append)
        assert not log
        for callback in posted:
            callback()
        await stage.finish()
        assert log == ["waiting"]

    play(scenario)


@pytest.mark.parametrize("name", ["release", "release_landed"])
def test_a_release_while_another_thread_is_in_the_mutex_happens_one_tick_later(name):
    async def scenario(stage):
        lease = await full(stage)
        how = [] if name == "release" else [stage.loop.call_soon]
        with stage.top.residency._mutex:
            getattr(lease, name)(*how)
        assert lease.released
        assert stage.entry(0, 0).pins == 1
        await asyncio.sleep(0)
        assert stage.entry(0, 0).pins == 0
        await take(stage, 1, [0, 1, 2, 3])

    play(scenario)


def test_an_entry_says_what_it_is():
    async def scenario(stage):
        async with stage.hierarchy.acquire(1, [4]):
            assert repr(stage.entry(1, 4)) == "<Entry L1.E4 filling slot=0 pins=1>"

    play(scenario)


def test_the_close_writes_the_last_snapshot(tmp_path):
    path = tmp_path / "stats.json"

    async def main():
        stage = Stage((2,))
        counting = Hierarchy(stage.top, SPEC, stats_path=path, stats_every=1)
        async with counting, counting.acquire(0, [0]) as lease:
            await lease.ready()

    asyncio.run(main())
    assert json.loads(path.read_text())["cache_misses"] == 1


def test_a_close_cancelled_while_it_writes_the_last_snapshot_has_written_it(tmp_path, monkeypatch):
    path = tmp_path / "stats.json"
    writing, go = asyncio.Event(), asyncio.Event()
    write = SnapshotFile._write

    async def slowly(self, stats):
        writing.set()
        await go.wait()
        await write(self, stats)

    async def main():
        monkeypatch.setattr(SnapshotFile, "_write", slowly)
        counting = Hierarchy(Stage((2,)).top, SPEC, stats_path=path)
        closing = asyncio.ensure_future(counting.close())
        await writing.wait()
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert json.loads(path.read_text())["cache_misses"] == 0

    asyncio.run(main())
