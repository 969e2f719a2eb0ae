"""Checked reads of a real pack through the real backend, its files damaged after it was opened."""

import asyncio
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from small_moe import flip, make_small_moe

from tieredmoe import (
    ConfigError,
    DigestMismatchError,
    ExpertLoadError,
    GGUFError,
    HierarchyConfig,
    PackError,
    ReadError,
    open_hierarchy,
    open_pack,
)
from tieredmoe.pack import VerifyThreads
from tieredmoe.pack import threads as threads_module
from tieredmoe.spec import ExpertKey
from tieredmoe.threaded import ThreadedHierarchy

PAYLOAD_NBYTES = 3 * 1088


def place_of(pack, layer, expert, role="gate"):
    """The file and offset of the first byte of a role, or of the padding."""
    opened = open_pack(pack)
    where, layout = opened.locate(ExpertKey(layer, expert)), opened.spec.layouts[layer]
    begin = layout.by_name[role].offset if role in layout.by_name else layout.payload_nbytes
    return opened.data_files[where.file_index], where.offset + begin


async def record(hierarchy, layer, expert):
    async with hierarchy.acquire(layer, [expert]) as lease:
        await lease.ready()
        return bytes(lease.slots[expert].view[:PAYLOAD_NBYTES])


def right(model, layer, expert):
    return b"".join(model.slabs[layer, role, expert] for role in ("gate", "up", "down"))


def run(pack, scenario, **settings):
    """Play ``scenario(hierarchy)`` over the real files; no file and no thread is left."""

    async def main():
        settings.setdefault("vram", 4 * 4096)
        config = HierarchyConfig(reserve=0, stage_slots=2, **settings)
        async with await open_hierarchy(pack, config) as hierarchy:
            result = await scenario(hierarchy)
            hierarchy.check()
        return result, hierarchy.stats()

    before = n_open()
    result = asyncio.run(main())
    assert n_open() == before
    return result


def n_open():
    """Open files and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.mark.parametrize("mode", ["first_read", "always"])
@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_a_byte_that_went_bad_on_disk_fails_its_expert_alone(pack, small_pack, mode, role):
    file, offset = place_of(pack, 1, 2, role)

    async def scenario(hierarchy):
        flip(file, offset)
        for _ in range(2):
            with pytest.raises(ExpertLoadError) as failure:
                await record(hierarchy, 1, 2)
            cause = failure.value.__cause__
            assert isinstance(cause, DigestMismatchError)
            assert (cause.path, cause.offset, cause.nbytes) == (file, offset, 1088)
            assert str(cause) in str(failure.value)
        assert await record(hierarchy, 1, 3) == right(small_pack[1], 1, 3)
        flip(file, offset)
        assert await record(hierarchy, 1, 2) == right(small_pack[1], 1, 2)

    _, stats = run(pack, scenario, verify=mode)
    assert (stats.read_errors, stats.io_errors, stats.digest_mismatches) == ({"digest": 2}, 2, 4)


@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_a_byte_that_went_bad_on_disk_is_repaired_from_the_gguf(pack, small_pack, role):
    model = small_pack[1]
    file, offset = place_of(pack, 1, 2, role)
    before = file.read_bytes()

    async def scenario(hierarchy):
        flip(file, offset)
        return await record(hierarchy, 1, 2)

    got, stats = run(pack, scenario, verify="always", repair_from=model.paths[1])
    assert got == right(model, 1, 2)
    assert (stats.io_errors, stats.digest_mismatches, stats.repaired) == (0, 2, 1)
    flip(file, offset)
    assert file.read_bytes() == before, "a repair writes nothing to the pack"


def test_wrong_padding_on_disk_is_nobodys_error(pack, small_pack):
    file, offset = place_of(pack, 1, 2, "padding")
    flip(file, offset)

    async def scenario(hierarchy):
        return await record(hierarchy, 1, 2)

    got, stats = run(pack, scenario, verify="always")
    assert got == right(small_pack[1], 1, 2)
    assert (stats.io_errors, stats.digest_mismatches) == (0, 0)


@pytest.mark.parametrize(("mode", "noticed"), [("off", 0), ("first_read", 0), ("always", 1)])
def test_what_goes_bad_after_the_first_read_is_noticed_only_by_always(pack, mode, noticed):
    file, offset = place_of(pack, 0, 0)

    async def scenario(hierarchy):
        await record(hierarchy, 0, 0)
        flip(file, offset)
        for expert in range(4):  # as many as both tiers together have slots, and all other
            await record(hierarchy, 1, expert)
        try:
            await record(hierarchy, 0, 0)
        except ExpertLoadError:
            return 1
        return 0

    found, _ = run(pack, scenario, verify=mode, vram=2 * 4096)
    assert found == noticed


def test_many_at_once_are_all_right(pack, small_pack):
    async def scenario(hierarchy):
        keys = [(layer, expert) for layer in (0, 1) for expert in range(4)] * 5
        got = await asyncio.gather(*(record(hierarchy, *key) for key in keys))
        assert got == [right(small_pack[1], *key) for key in keys]

    _, stats = run(pack, scenario, verify="always", vram=2 * 4096)
    assert stats.io_errors == 0


def test_a_hierarchy_on_its_own_thread_checks_and_repairs(pack, small_pack):
    model = small_pack[1]
    flip(*place_of(pack, 1, 2))
    config = HierarchyConfig(vram=4 * 4096, reserve=0, verify="always", repair_from=model.paths[0])
    before = n_open()
    with (
        ThreadedHierarchy.open(partial(open_hierarchy, pack, config)) as hierarchy,
        hierarchy.acquire_blocking(1, [2]) as lease,
    ):
        lease.wait()
        assert bytes(lease.slots[2].view[:PAYLOAD_NBYTES]) == right(model, 1, 2)
        assert hierarchy.stats().repaired == 1
    assert n_open() == before


# ---- files that change while they are open


def test_a_file_cut_short_while_open_is_counted_as_its_end(pack):
    file, offset = place_of(pack, 1, 2)
    nbytes = file.stat().st_size

    async def scenario(hierarchy):
        os.truncate(file, offset)
        with pytest.raises(ExpertLoadError) as failure:
            await record(hierarchy, 1, 2)
        return str(failure.value)

    said, stats = run(pack, scenario)
    assert f"{file}: read of 4096 bytes at offset {offset}: expected 4096 bytes and got 0" in said
    assert f"was truncated after it was opened: it had {nbytes} bytes, now {offset}" in said
    assert stats.read_errors == {"eof": 1}


def test_retries_of_the_backend_are_in_the_statistics(pack):
    file, offset = place_of(pack, 1, 2)

    async def scenario(hierarchy):
        os.truncate(file, offset + 100)
        with pytest.raises(ExpertLoadError):
            await record(hierarchy, 1, 2)

    _, stats = run(pack, scenario)
    assert stats.retries == 1


# ---- opening


def test_a_gguf_of_another_model_is_refused_by_name(pack, tmp_path):
    other = make_small_moe(tmp_path / "other.gguf", n_experts=2)

    async def scenario(hierarchy):
        raise AssertionError("it opened")

    with pytest.raises(PackError, match=r"another model than .*other\.gguf; repair_from must name"):
        run(pack, scenario, verify="always", repair_from=other.paths[0])


def test_a_gguf_that_is_not_there_is_refused_by_name(pack, tmp_path):
    with pytest.raises(GGUFError, match=r"gone\.gguf"):
        run(pack, None, verify="always", repair_from=tmp_path / "gone.gguf")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"verify": "sometimes"}, "verify: 'sometimes' is not one of off, first_read, always"),
        ({"verify": None}, "verify: None is not one of"),
        ({"repair_from": "m.gguf"}, "repair_from: nothing is found to repair with verify='off'"),
    ],
)
def test_wrong_settings_are_named(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        HierarchyConfig(**settings)


def test_a_path_may_be_a_text():
    config = HierarchyConfig(verify="always", repair_from="m.gguf")
    assert config.repair_from.name == "m.gguf"


# ---- threads


def test_work_runs_in_threads_that_are_there_from_the_start_and_gone_at_the_end():
    async def main():
        n_before = threading.active_count()
        worker = VerifyThreads(3)
        assert threading.active_count() == n_before + 3
        assert await worker.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        worker.close()
        worker.close()
        assert threading.active_count() == n_before

    asyncio.run(main())


def test_threads_that_the_system_refuses_are_a_config_error_and_leave_nothing(pack, monkeypatch):
    class Refusing(threads_module.ThreadPoolExecutor):
        def submit(self, *args):
            if len(self._threads) == 2:
                raise RuntimeError("can't start new thread")
            return super().submit(*args)

    monkeypatch.setattr(threads_module, "ThreadPoolExecutor", Refusing)
    before = n_open()
    with pytest.raises(ConfigError, match="refused 4 hashing threads"):
        run(pack, None, verify="always")
    assert n_open() == before


def test_a_worker_that_takes_no_work_fails_the_expert(pack):
    async def scenario(hierarchy):
        hierarchy.top.source.source.worker._pool.shutdown()
        with pytest.raises(ExpertLoadError, match="cannot schedule new futures"):
            await record(hierarchy, 0, 0)

    run(pack, scenario, verify="always")


def test_a_mismatch_is_a_read_error():
    assert issubclass(DigestMismatchError, ReadError)
