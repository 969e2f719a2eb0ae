"""What a disk can do wrong, through a hierarchy whose reads are checked, on virtual time."""

import errno

import pytest
from verified_stage import counted, play

from tieredmoe.errors import ConfigError, DigestMismatchError, ExpertLoadError, ReadError
from tieredmoe.pack import PackSource, VerifiedSource
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import Fault, FaultPlan, SimDisk, SimWorker, TinyPack, sim_run, tiny_spec

MODES = ["first_read", "always"]
ROLES = ["gate", "up", "down"]


# ---- sound disks


@pytest.mark.parametrize("mode", MODES)
def test_sound_reads_are_served_and_nothing_is_counted(path, mode):
    async def scenario(stage):
        for layer in stage.pack.spec.layers:
            for expert in range(4):
                assert await stage.serves(layer, expert)
        assert stage.worker.n_done == 8
        assert counted(stage) == ({}, 0, 0)

    play(scenario, path, mode=mode)


def test_a_future_resolves_only_after_the_check(path):
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [1]) as lease:
            await stage.until(lambda: stage.worker.n_running)
            assert not lease.futures[1].done()
            await lease.ready()
            assert stage.worker.n_done == 1

    play(scenario, path)


# ---- reads that fail


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(), "EIO"),
        (Fault("torn"), "EIO"),
        (Fault("error", errno.ENOMEM), "ENOMEM"),
        (Fault("torn", errno.ETIMEDOUT), "ETIMEDOUT"),
        (Fault("eof"), "eof"),
    ],
)
@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_a_failed_read_reaches_every_waiter_and_the_next_acquire_is_served(
    path, fault, kind, slots
):
    async def scenario(stage):
        file_index, offset, _ = stage.place(1, 2)
        stage.disk._faults.at(file_index, offset, fault)
        leases = [await stage.hierarchy.acquire(1, [2, expert]) for expert in (0, 1)]
        for lease in leases:
            with pytest.raises(ExpertLoadError, match="layer 1, expert 2") as failure:
                await lease.futures[2]
            assert isinstance(failure.value.__cause__, ReadError)
            said = str(failure.value)
            assert str(stage.pack.data_files[file_index]) in said
            assert f"4096 bytes at offset {offset}" in said
            assert ("unexpected end of file" if kind == "eof" else kind) in said
            lease.release()
        assert counted(stage) == ({kind: 1}, 0, 0)
        assert await stage.serves(1, 2)
        assert counted(stage) == ({kind: 1}, 0, 0)

    play(scenario, path, slots=slots, faults=FaultPlan())


def test_a_sector_that_never_reads_fails_every_time_and_is_counted_every_time(path):
    async def scenario(stage):
        file_index, offset, _ = stage.place(0, 3)
        stage.disk._faults.at(file_index, offset, times=None)
        for n in (1, 2, 3):
            with pytest.raises(ExpertLoadError, match="EIO"):
                await stage.bytes_of(0, 3)
            assert counted(stage) == ({"EIO": n}, 0, 0)
        assert stage.entry(0, 3) is None

    play(scenario, path, faults=FaultPlan())


def test_a_slow_read_is_late_and_right(path):
    async def scenario(stage):
        file_index, offset, _ = stage.place(0, 3)
        stage.disk._faults.at(file_index, offset, Fault("slow", delay_s=2.0))
        assert await stage.serves(0, 3)
        assert stage.loop.time() > 2
        assert counted(stage) == ({}, 0, 0)

    play(scenario, path, faults=FaultPlan())


# ---- reads that arrive wrong


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_record_that_arrives_wrong_once_is_read_again(path, role, mode):
    async def scenario(stage):
        stage.spoil(1, 2, role, times=1)
        assert await stage.serves(1, 2)
        assert counted(stage) == ({}, 1, 0)
        assert stage.hierarchy.stats().pack_reads == 2

    play(scenario, path, mode=mode)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_a_record_that_stays_wrong_fails_every_waiter_by_name(path, role, slots):
    async def scenario(stage):
        stage.spoil(1, 2, role)
        file_index, offset, nbytes = stage.place(1, 2, role)
        leases = [await stage.hierarchy.acquire(1, [2]) for _ in range(3)]
        for lease in leases:
            with pytest.raises(ExpertLoadError, match="layer 1, expert 2") as failure:
                await lease.ready()
            said = str(failure.value)
            assert f"{stage.pack.data_files[file_index]}: read of {nbytes} bytes" in said
            assert f"at offset {offset}: the {role} matrix of layer 1, expert 2" in said
            assert "EBADMSG" in said
            lease.release()
        assert counted(stage) == ({"digest": 1}, 2, 0)
        stage.heal()
        assert await stage.serves(1, 2)

    play(scenario, path, slots=slots)


def test_a_mismatch_carries_what_a_program_needs(path):
    async def scenario(stage):
        stage.spoil(0, 1, "down")
        with pytest.raises(ExpertLoadError) as failure:
            await stage.bytes_of(0, 1)
        return stage, failure.value.__cause__

    stage, error = play(scenario, path, slots=(4,))
    assert isinstance(error, DigestMismatchError)
    file_index, offset, nbytes = stage.place(0, 1, "down")
    assert (error.path, error.offset, error.nbytes, error.errno, error.kind) == (
        stage.pack.data_files[file_index],
        offset,
        nbytes,
        errno.EBADMSG,
        "digest",
    )
    assert (error.key, error.role) == (ExpertKey(0, 1), "down")


@pytest.mark.parametrize("mode", MODES)
def test_wrong_padding_is_nobodys_error(path, mode):
    async def scenario(stage):
        stage.spoil(0, 1, "padding")
        assert await stage.serves(0, 1)
        assert counted(stage) == ({}, 0, 0)

    play(scenario, path, mode=mode)


# ---- modes


def test_first_read_checks_an_expert_until_one_read_of_it_was_right(path):
    async def scenario(stage):
        stage.spoil(0, 1)
        with pytest.raises(ExpertLoadError):
            await stage.bytes_of(0, 1)
        stage.heal()
        assert await stage.serves(0, 1)
        await evict(stage)
        n_done = stage.worker.n_done
        stage.spoil(0, 1)
        assert not await stage.serves(0, 1)
        assert stage.worker.n_done == n_done
        assert counted(stage) == ({"digest": 1}, 2, 0)

    play(scenario, path, mode="first_read", slots=(1, 2), watched=False)


def test_always_checks_every_read(path):
    async def scenario(stage):
        assert await stage.serves(0, 1)
        await evict(stage)
        stage.spoil(0, 1)
        with pytest.raises(ExpertLoadError):
            await stage.bytes_of(0, 1)

    play(scenario, path, slots=(1, 2))


def test_first_read_goes_on_checking_an_expert_that_had_to_be_repaired(path, gguf):
    async def scenario(stage):
        stage.spoil(0, 1)
        for n in (1, 2):
            assert await stage.serves(0, 1)
            assert counted(stage) == ({}, 2 * n, n)
            await evict(stage)

    play(scenario, path, mode="first_read", slots=(1, 2), repair=gguf)


async def evict(stage):
    """Let layer 1 take every slot there is."""
    for expert in (0, 1, 2):
        assert await stage.serves(1, expert)
    assert stage.entry(0, 1) is None
    assert stage.entry(0, 1, tier=1) is None


def test_a_source_without_digests_is_refused_by_name():
    async def main():
        pack = TinyPack(tiny_spec())
        source = PackSource(pack, SimDisk([pack.image]))
        for mode in MODES:
            with pytest.raises(ConfigError, match=rf"verify='{mode}': a TinyPack carries no dig"):
                VerifiedSource(source, pack, mode=mode, worker=SimWorker())

    sim_run(main())
