"""Counters on disk: whole files, whoever else writes there, and never a run that ends of it."""

import asyncio
import json
import logging
import os

import numpy as np
import pytest

from tieredmoe import ConfigError, HierarchyConfig, open_hierarchy
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.snapshots import SnapshotFile
from tieredmoe.testing import TinyPack, make_deepseek_v4, tiny_hierarchy, tiny_spec

PACK = TinyPack(tiny_spec())


def hierarchy_of(path):
    chain, _ = tiny_hierarchy(PACK, (2, 4))
    return Hierarchy(chain.top, chain.spec, stats_path=path, stats_every=1)


def test_two_hierarchies_may_share_a_statistics_file(tmp_path, caplog):
    async def main():
        both = [hierarchy_of(tmp_path / "s.json") for _ in range(2)]
        for _ in range(20):
            for outcome in await asyncio.gather(
                *(hierarchy.stats().write(tmp_path / "s.json") for hierarchy in both),
                return_exceptions=True,
            ):
                assert outcome is None
        for hierarchy in both:
            await hierarchy.close()

    asyncio.run(main())
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_what_cannot_be_written_is_one_warning_each_and_leaves_nothing(tmp_path, caplog):
    (tmp_path / "s.json").mkdir()

    async def main():
        await hierarchy_of(tmp_path / "s.json").close()
        await hierarchy_of(tmp_path / "missing" / "s.json").close()

    asyncio.run(main())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_close(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")

    async def main():
        await hierarchy_of(tmp_path / "pipe").close()

    asyncio.run(main())
    assert "could not be written" in caplog.text


def test_a_link_to_itself_ends_no_run(tmp_path, caplog):
    (tmp_path / "s.json").symlink_to(tmp_path / "s.json")

    async def main():
        await hierarchy_of(tmp_path / "s.json").close()

    asyncio.run(main())
    assert json.loads((tmp_path / "s.json").read_text())["cache_hits"] == 0
    assert not caplog.records


@pytest.mark.filterwarnings(  # a file whose opening was cancelled is closed by its finaliser
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_cancelled_write_leaves_no_half_of_one(tmp_path):
    async def main():
        stats = hierarchy_of(None).stats()
        await stats.write(tmp_path / "s.json")
        started = asyncio.Event()

        async def write():
            started.set()
            await stats.write(tmp_path / "s.json")

        for n_steps in range(12):
            started.clear()
            task = asyncio.ensure_future(write())
            await started.wait()
            for _ in range(n_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert json.loads((tmp_path / "s.json").read_text())["cache_hits"] == 0

    asyncio.run(main())


def test_pairs_are_counted_as_plain_numbers(tmp_path):
    async def main():
        hierarchy = hierarchy_of(tmp_path / "s.json")
        hierarchy.count_executed(1, np.int64(6))
        await hierarchy.close()
        return hierarchy.stats()

    stats = asyncio.run(main())
    assert type(stats.executed_experts[1]) is int
    assert json.loads((tmp_path / "s.json").read_text())["executed_experts"]["1"] == 6


def test_pairs_of_a_layer_without_experts_are_refused():
    async def main():
        with pytest.raises(ValueError, match=r"layer 99 has no routed experts; .* layers 0\.\.2"):
            hierarchy_of(None).count_executed(99, 3)

    asyncio.run(main())


def test_a_file_that_holds_something_else_is_not_replaced(tmp_path):
    model = make_deepseek_v4(tmp_path / "m.gguf", seed=1).paths[0]
    before = model.read_bytes()

    async def main():
        with pytest.raises(ConfigError, match="holds something else"):
            await open_hierarchy(model, HierarchyConfig(vram="1GiB", reserve=0, stats_path=model))
        with pytest.raises(ConfigError, match="holds something else"):
            hierarchy_of(model)

    asyncio.run(main())
    assert model.read_bytes() == before


def test_statistics_of_an_earlier_run_are_replaced(tmp_path):
    async def main():
        await hierarchy_of(tmp_path / "s.json").close()

    (tmp_path / "s.json").touch()
    for _ in range(2):
        asyncio.run(main())
    assert json.loads((tmp_path / "s.json").read_text())["cache_hits"] == 0


def test_what_fails_every_time_is_warned_of_once(tmp_path, caplog):
    async def main():
        hierarchy = hierarchy_of(None)
        file = SnapshotFile(tmp_path / "missing" / "s.json", every=1, snapshot=hierarchy.stats)
        for _ in range(3):
            await file.close()
        await hierarchy.close()

    asyncio.run(main())
    assert len(caplog.records) == 1
