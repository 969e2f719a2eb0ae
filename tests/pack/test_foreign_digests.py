"""The digests that SGLang's v1 packs carry are used: on reads, and to verify a whole pack."""

import asyncio
import hashlib

import pytest
from foreign_making import make
from small_moe import flip, make_small_moe

from tieredmoe.backends import open_backend
from tieredmoe.chain import open_hierarchy
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import (
    ConfigError,
    DigestMismatchError,
    ExpertLoadError,
    GGUFError,
    PackError,
)
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, VerifiedSource, VerifyThreads
from tieredmoe.pack.foreign import (
    SourceRepair,
    open_foreign_pack,
    open_foreign_repair,
    verify_foreign_pack,
)
from tieredmoe.policies import make_policy
from tieredmoe.spec import ROLES, ExpertKey
from tieredmoe.testing import host_arena
from tieredmoe.tier import Tier

MODES = ["first_read", "always"]
DAMAGED = ExpertKey(0, 3)
"""An expert of which nothing is looked at when a pack is opened."""


def place(pack, key, role):
    """Where the first byte of a role lies in the pack's file."""
    return (
        pack.places[key.layer].start
        + key.expert * pack.places[key.layer].stride
        + (pack.places[key.layer].role_offsets[role])
    )


def play(pack, scenario, **options):
    async def run():
        config = HierarchyConfig(vram="1MiB", reserve=0, **{"stage_slots": 2, **options})
        async with await open_hierarchy(pack, config) as hierarchy:
            return await scenario(hierarchy)

    return asyncio.run(run())


async def bytes_of(hierarchy, layer, expert, nbytes=3264):
    async with hierarchy.acquire(layer, [expert]) as lease:
        await lease.ready()
        return bytes(lease.slots[expert].view[:nbytes])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage_slots", [0, 2])
@pytest.mark.parametrize("alignment", [64, 4096])
def test_sound_experts_pass_the_check(tmp_path, mode, stage_slots, alignment):
    made = make(tmp_path, "v1", alignment=alignment)
    pack = open_foreign_pack(made.path)

    async def scenario(hierarchy):
        found = {key: await bytes_of(hierarchy, *key) for key in pack.spec.keys()}
        return found, hierarchy.stats()

    found, stats = play(pack, scenario, verify=mode, stage_slots=stage_slots)
    assert found == {key: made.right(key) for key in pack.spec.keys()}
    assert stats.digest_mismatches == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("alignment", [64, 4096])
def test_a_damaged_expert_is_not_served_and_named_to_the_byte(tmp_path, mode, role, alignment):
    made = make(tmp_path, "v1", alignment=alignment)
    where = place(open_foreign_pack(made.path), DAMAGED, role)
    flip(made.path, where + 1087)
    pack = open_foreign_pack(made.path)

    async def scenario(hierarchy):
        with pytest.raises(ExpertLoadError) as failed:
            await bytes_of(hierarchy, *DAMAGED)
        assert await bytes_of(hierarchy, 0, 2) == made.right((0, 2))
        return failed.value.__cause__

    error = play(pack, scenario, verify=mode)
    assert isinstance(error, DigestMismatchError)
    assert (error.path, error.offset, error.nbytes) == (made.path, where, 1088)
    assert (error.key, error.role) == (DAMAGED, role)


def test_digests_are_those_of_the_roles_in_uniform_order(tmp_path):
    made = make(tmp_path, "v1")
    pack = open_foreign_pack(made.path)
    for key in pack.spec.keys():
        slabs = [made.model.slabs[key.layer, role, key.expert] for role in ROLES]
        assert pack.digests(key) == tuple(hashlib.sha256(slab).digest() for slab in slabs)
        assert pack.digests(key) == tuple(map(pack.digest_of, slabs))


def test_a_format_without_digests_cannot_be_checked_and_says_so(tmp_path):
    pack = open_foreign_pack(make(tmp_path, "ggml").path)
    assert not pack.has_digests
    with pytest.raises(ConfigError, match="carries no digests to check reads against"):
        play(pack, None, verify="always")
    with pytest.raises(PackError, match="is GGMLMOEPACKv1, which carries no digests to verify"):
        asyncio.run(verify_foreign_pack(pack))


# ---- repair


def play_repaired(pack, scenario):
    """``scenario`` over one tier that checks its reads and repairs what is damaged."""

    async def run():
        source = VerifiedSource(
            PackSource(pack, open_backend("threads", pack.data_files)),
            pack,
            mode="always",
            worker=VerifyThreads(1),
            repair=open_foreign_repair(pack, pack.source.path),
        )
        spec = pack.spec
        policy = make_policy("lru", n_slots=4, layers=spec.layers, top_k=spec.top_k)
        tier = Tier(name="top", source=source, arena=host_arena(4, pack.slot_nbytes), policy=policy)
        async with Hierarchy(tier, spec) as hierarchy:
            return await scenario(hierarchy)

    return asyncio.run(run())


@pytest.mark.parametrize("alignment", [64, 4096])
def test_a_damaged_expert_is_served_from_the_source_and_the_pack_left_alone(tmp_path, alignment):
    made = make(tmp_path, "v1", alignment=alignment)
    flip(made.path, place(open_foreign_pack(made.path), DAMAGED, "up"))
    damaged = made.path.read_bytes()

    async def scenario(hierarchy):
        assert await bytes_of(hierarchy, *DAMAGED) == made.right(DAMAGED)
        return hierarchy.stats()

    stats = play_repaired(open_foreign_pack(made.path), scenario)
    assert (stats.digest_mismatches, stats.repaired) == (2, 1)
    assert made.path.read_bytes() == damaged


def test_a_source_that_is_damaged_too_repairs_nothing(tmp_path):
    made = make(tmp_path, "v1")
    flip(made.path, place(open_foreign_pack(made.path), DAMAGED, "up"))
    pack = open_foreign_pack(made.path)
    where = pack.source.experts.slab(DAMAGED.layer, "down", DAMAGED.expert)
    flip(made.model.paths[0], where.offset + 7)
    pack = open_foreign_pack(made.path)

    async def scenario(hierarchy):
        with pytest.raises(ExpertLoadError, match=r"could not be repaired: .* is damaged too"):
            await bytes_of(hierarchy, *DAMAGED)
        return hierarchy.stats()

    assert play_repaired(pack, scenario).repaired == 0


def test_another_model_repairs_nothing(tmp_path):
    made = make(tmp_path, "v1")
    other = make_small_moe(tmp_path / "other.gguf", seed=1)
    with pytest.raises(PackError, match="of another model"):
        open_foreign_repair(open_foreign_pack(made.path), other.paths[0])


def test_a_source_that_changed_since_it_was_opened_repairs_nothing(tmp_path):
    made = make(tmp_path, "v1")
    pack = open_foreign_pack(made.path)
    with made.model.paths[0].open("ab") as file:
        file.write(b"\0")
    record = bytearray(pack.slot_nbytes)
    with pytest.raises(GGUFError, match="changed since it was opened"):
        SourceRepair(pack).fill(DAMAGED, memoryview(record))
    assert not any(record)


# ---- the whole pack


def verify(path, progress=None):
    return asyncio.run(verify_foreign_pack(open_foreign_pack(path), progress=progress))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_a_sound_pack_verifies_and_every_byte_of_it_was_read(tmp_path, alignment):
    made = make(tmp_path, "v1", alignment=alignment)
    seen = []
    report = verify(made.path, seen.append)
    start = open_foreign_pack(made.path).places[0].start
    assert report.damage == ()
    assert report.read_nbytes == made.path.stat().st_size - start
    assert seen[-1][:2] == (report.read_nbytes, report.read_nbytes)


@pytest.mark.parametrize("role", [*ROLES, "padding"])
def test_every_damaged_place_is_named(tmp_path, role):
    made = make(tmp_path, "v1")
    pack = open_foreign_pack(made.path)
    keys = [ExpertKey(0, 3), ExpertKey(1, 2)]
    if role == "padding":
        offsets = [place(pack, key, "down") + 1088 for key in keys]
        nbytes, fact = 4096 - 3 * 1088, "is not zero"
    else:
        offsets = [place(pack, key, role) for key in keys]
        nbytes, fact = 1088, "does not match its digest"
    for offset in offsets:
        flip(made.path, offset + nbytes - 1)
    damage = verify(made.path).damage
    assert [(d.key, d.offset, d.nbytes, d.fact) for d in damage] == [
        (key, offset, nbytes, fact) for key, offset in zip(keys, offsets, strict=True)
    ]
    assert [d.what for d in damage] == [f"layer {k.layer}, expert {k.expert}, {role}" for k in keys]


def test_what_cannot_be_read_is_damage_like_any_other(tmp_path):
    made = make(tmp_path, "v1")
    pack = open_foreign_pack(made.path)
    with made.path.open("r+b") as file:
        file.truncate(made.path.stat().st_size - 4096 - 1)
    damage = asyncio.run(verify_foreign_pack(pack)).damage
    assert [d.key for d in damage] == [ExpertKey(1, 2), ExpertKey(1, 3)]
    assert all(d.fact.startswith("cannot be read: ends at byte") for d in damage)
