"""Records that stay wrong are taken from the source GGUF, if that can be trusted."""

import os

import pytest
from small_moe import flip
from verified_stage import counted, play

from tieredmoe.errors import ClosedError, ExpertLoadError, GGUFError
from tieredmoe.pack import open_pack, open_repair
from tieredmoe.testing import Fault, FaultPlan

MODES = ["first_read", "always"]
ROLES = ["gate", "up", "down"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_record_that_stays_wrong_is_taken_from_the_source_gguf(path, gguf, role, mode):
    async def scenario(stage):
        stage.spoil(1, 2, role)
        assert await stage.serves(1, 2)
        assert counted(stage) == ({}, 2, 1)

    play(scenario, path, mode=mode, repair=gguf)


def test_a_wrong_record_whose_second_read_fails_is_taken_from_the_source_gguf(path, gguf):
    async def scenario(stage):
        fail_the_second_read(stage)
        assert await stage.serves(1, 2)
        assert counted(stage) == ({"EIO": 1}, 1, 1)

    play(scenario, path, repair=gguf, faults=FaultPlan())


def test_without_a_gguf_a_failing_second_read_is_the_error(path):
    async def scenario(stage):
        fail_the_second_read(stage)
        with pytest.raises(ExpertLoadError, match="EIO"):
            await stage.bytes_of(1, 2)
        assert counted(stage) == ({"EIO": 1}, 1, 0)

    play(scenario, path, faults=FaultPlan())


def fail_the_second_read(stage):
    """The first read arrives wrong, the second not at all."""
    file_index, offset, _ = stage.place(1, 2)
    stage.spoil(1, 2)
    stage.disk._faults.at(file_index, offset, Fault("slow")).at(file_index, offset, Fault())


def test_a_read_error_before_any_mismatch_is_not_hidden_by_a_repair(path, gguf):
    async def scenario(stage):
        file_index, offset, _ = stage.place(1, 2)
        stage.disk._faults.at(file_index, offset)
        with pytest.raises(ExpertLoadError, match="EIO"):
            await stage.bytes_of(1, 2)
        assert counted(stage) == ({"EIO": 1}, 0, 0)

    play(scenario, path, repair=gguf, faults=FaultPlan())


GGUF_CHANGES = {
    "written": (lambda path: os.utime(path, ns=(1, 1)), "changed since it was opened"),
    "cut": (lambda path: os.truncate(path, 100), "changed since it was opened"),
    "gone": (lambda path: path.unlink(), "cannot be opened"),
}


@pytest.mark.parametrize("change", GGUF_CHANGES)
def test_a_gguf_that_changed_since_it_was_opened_repairs_nothing(path, model, change):
    make, fact = GGUF_CHANGES[change]

    async def scenario(stage):
        stage.spoil(1, 2, "up")
        for shard in model.paths:
            make(shard)
        with pytest.raises(ExpertLoadError, match="EBADMSG") as failure:
            await stage.bytes_of(1, 2)
        return failure.value.__cause__, counted(stage)

    error, counts = play(
        scenario, path, slots=(4,), repair=lambda pack: open_repair(pack, model.paths[0])
    )
    assert isinstance(error.__cause__, GGUFError)
    assert f"could not be repaired: {error.__cause__}" in str(error)
    assert fact in str(error.__cause__)
    assert counts == ({"digest": 1}, 2, 0)


def test_a_gguf_damaged_in_the_same_place_repairs_nothing(path, model):
    stored = open_pack(path).manifest.layout.tensors["blk.1.ffn_up_exps.weight"]
    flip(model.paths[stored.shard_index], stored.source_offset + 2 * (stored.nbytes // 4))

    async def scenario(stage):
        stage.spoil(1, 2, "up")
        with pytest.raises(ExpertLoadError) as failure:
            await stage.bytes_of(1, 2)
        cause = failure.value.__cause__.__cause__
        assert "the up matrix of layer 1, expert 2 has another digest" in str(cause)
        stage.spoil(1, 3, "up")
        assert await stage.serves(1, 3)
        assert counted(stage) == ({"digest": 1}, 4, 1)

    play(scenario, path, slots=(4,), repair=lambda pack: open_repair(pack, model.paths[0]))


# ---- parts that fail


def test_a_check_that_raises_fails_its_expert(path):
    async def scenario(stage):
        sound, stage.source.records = stage.source.records, TwoDigests(stage.pack)
        with pytest.raises(ExpertLoadError, match="zip"):
            await stage.bytes_of(0, 1)
        stage.source.records = sound
        assert await stage.serves(0, 1)

    play(scenario, path)


class TwoDigests:
    """Records with too few digests, which no check can compare."""

    def __init__(self, pack):
        self.spec = pack.spec
        self.digests = lambda key: pack.digests(key)[:2]
        self.digest_of = pack.digest_of


def test_a_read_that_is_dropped_below_ends_its_fill(path):
    async def scenario(stage):
        file_index, offset, _ = stage.place(1, 0)
        stage.disk._faults.at(file_index, offset, Fault("slow", delay_s=1.0))
        other = await stage.hierarchy.acquire(1, [0])
        lease = await stage.hierarchy.acquire(0, [1])
        assert stage.entry(0, 1).fill._read.drop_if_queued()
        with pytest.raises(ClosedError):
            await lease.ready()
        lease.release()
        other.release()
        assert await stage.serves(0, 1)

    play(scenario, path, slots=(4,), queue_depth=1, faults=FaultPlan())
