"""Errors are counted by kind in a snapshot, in differences of snapshots and on disk."""

import asyncio
import json

from tieredmoe.errors import ExpertLoadError
from tieredmoe.testing import Fault, FaultPlan, TinyPack, sim_run, tiny_hierarchy, tiny_spec


def snapshots():
    """Before anything, after an EIO, and after another EIO and an end of file."""
    pack = TinyPack(tiny_spec())

    async def main():
        plan = FaultPlan()
        hierarchy, _ = tiny_hierarchy(pack, (2, 4), faults=plan)
        found = [hierarchy.stats()]
        for kinds in (["error"], ["error", "eof"]):
            for expert, kind in enumerate(kinds):
                (key,) = hierarchy.keys(0, [expert])
                plan.at(0, pack.locate(key).offset, Fault(kind))
                async with hierarchy.acquire(0, [expert]) as lease:
                    try:
                        await lease.ready()
                    except ExpertLoadError:
                        continue
                    raise AssertionError("no fault")
            found.append(hierarchy.stats())
        await hierarchy.close()
        return found

    return sim_run(main(), collect_garbage=False)


def test_failed_reads_are_counted_by_kind_and_in_total():
    before, first, last = snapshots()
    assert (before.read_errors, before.io_errors) == ({}, 0)
    assert (first.read_errors, first.io_errors) == ({"EIO": 1}, 1)
    assert (last.read_errors, last.io_errors) == ({"EIO": 2, "eof": 1}, 3)


def test_a_difference_of_snapshots_has_only_the_kinds_met_in_between():
    before, first, last = snapshots()
    assert last.since(first).read_errors == {"EIO": 1, "eof": 1}
    assert last.since(first).io_errors == 2
    assert last.since(last).read_errors == {}
    assert last.since(before).read_errors == last.read_errors


def test_a_snapshot_on_disk_has_the_kinds(tmp_path):
    last = snapshots()[-1]
    asyncio.run(last.write(tmp_path / "stats.json"))
    on_disk = json.loads((tmp_path / "stats.json").read_text())
    assert on_disk["read_errors"] == {"EIO": 2, "eof": 1}
    names = ("io_errors", "retries", "digest_mismatches", "repaired")
    assert [on_disk[name] for name in names] == [3, 0, 0, 0]


def test_a_read_refused_at_the_close_is_no_error_of_the_disk():
    pack = TinyPack(tiny_spec())

    async def main():
        hierarchy, _ = tiny_hierarchy(pack, (4,))
        source = hierarchy.top.source
        await hierarchy.acquire(0, range(4))
        await source.close()
        await hierarchy.close()
        return hierarchy.stats()

    assert sim_run(main(), collect_garbage=False).read_errors == {}
