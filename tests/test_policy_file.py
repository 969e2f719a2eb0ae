"""What a policy remembers survives a run: in a file, of its model only, whole or not at all."""

import asyncio
import json

import attrs
import pytest

from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import ConfigError, PolicyFileError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import UseCounts, make_policy
from tieredmoe.policy_file import load_use_counts, save_use_counts
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_spec
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(1, 3), n_experts=6)
PACK = TinyPack(SPEC)
COUNTS = UseCounts(12.5, {ExpertKey(1, 0): 3.0, ExpertKey(3, 5): 7.25, ExpertKey(1, 4): 7.25})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.json"
    save_use_counts(path, SPEC, COUNTS)
    return path


def test_counts_come_back_as_they_were_saved(path):
    assert load_use_counts(path, SPEC) == COUNTS
    assert [child.name for child in path.parent.iterdir()] == ["policy.json"]


def test_no_file_is_no_counts(tmp_path):
    assert load_use_counts(tmp_path / "none", SPEC) is None


def test_the_hottest_come_first():
    assert COUNTS.by_heat() == [ExpertKey(1, 4), ExpertKey(3, 5), ExpertKey(1, 0)]


@pytest.mark.parametrize(
    "change",
    [{"architecture": "other"}, {"top_k": 1}, {"n_experts": 7}],
    ids=lambda change: next(iter(change)),
)
def test_another_models_file_is_neither_read_nor_replaced(path, change):
    other = attrs.evolve(SPEC, **change)
    before = path.read_bytes()
    with pytest.raises(PolicyFileError, match=r"policy\.json is of another model"):
        load_use_counts(path, other)
    with pytest.raises(PolicyFileError, match="another model"):
        save_use_counts(path, other, COUNTS)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"format": "x"}', b"[" * 9999]
)
def test_a_file_of_something_else_is_neither_read_nor_replaced(tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(PolicyFileError, match="notes is no policy file; name another"):
        load_use_counts(path, SPEC)
    with pytest.raises(PolicyFileError):
        save_use_counts(path, SPEC, COUNTS)
    assert path.read_bytes() == content


def test_a_folder_is_no_policy_file(tmp_path):
    with pytest.raises(PolicyFileError, match="is no policy file"):
        load_use_counts(tmp_path, SPEC)


def test_a_later_version_is_refused_by_name(path):
    document = json.loads(path.read_text()) | {"version": 2}
    path.write_text(json.dumps(document))
    with pytest.raises(PolicyFileError, match="version 2, and this tieredmoe reads version 1"):
        load_use_counts(path, SPEC)


@pytest.mark.parametrize(
    "damage",
    [
        {"n_tokens": "many"},
        {"n_tokens": -1},
        {"n_tokens": True},
        {"uses": None},
        {"uses": {"1": [0] * 6}},
        {"uses": {"1": [0] * 6, "3": [0] * 5}},
        {"uses": {"1": [0] * 6, "3": [0] * 5 + ["x"]}},
        {"uses": {"1": [0] * 6, "3": [0] * 5 + [float("nan")]}},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(path, damage):
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(PolicyFileError, match="is damaged"):
        load_use_counts(path, SPEC)


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(PolicyFileError, match="cannot be written"):
        save_use_counts(tmp_path / "no" / "such" / "policy", SPEC, COUNTS)
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    save_use_counts(link, SPEC, UseCounts(1, {ExpertKey(1, 1): 1}))
    assert link.is_symlink()
    assert load_use_counts(path, SPEC) == UseCounts(1, {ExpertKey(1, 1): 1})


def served(policy, **options):
    """A hierarchy of one tier in a real loop: files are written in threads."""
    top = Tier(
        name="top",
        source=PackSource(PACK, MemoryBackend([PACK.image], alignment=4096)),
        arena=host_arena(6),
        policy=make_policy(policy, n_slots=6, layers=SPEC.layers, top_k=SPEC.top_k),
    )
    return Hierarchy(top, SPEC, **options)


def run_with(policy, steps, **options):
    """A whole run of ``steps``; the hierarchy that served them."""

    async def main():
        async with served(policy, **options) as hierarchy:
            for layer, experts in steps:
                async with hierarchy.acquire(layer, experts) as lease:
                    await lease.ready()
        return hierarchy

    return asyncio.run(main())


STEPS = [(1, (0, 1)), (3, (0, 2)), (1, (0, 2)), (3, (0, 1)), (1, (0, 3)), (3, (2, 4))]


@pytest.mark.parametrize("policy", ["lrfu", "next_use"])
def test_a_run_saves_at_its_end_what_the_next_begins_with(policy, tmp_path):
    path = tmp_path / "policy"
    run_with(policy, STEPS, policy_path=path)
    counts = load_use_counts(path, SPEC)
    assert counts.n_tokens == pytest.approx(3, abs=0.01)
    assert counts.by_heat()[0] == ExpertKey(1, 0)
    again = run_with(policy, STEPS, policy_path=path, recalled=counts)
    assert again.keys_by_heat() == counts.by_heat()
    more = load_use_counts(path, SPEC)
    assert more.uses[ExpertKey(1, 0)] == pytest.approx(2 * counts.uses[ExpertKey(1, 0)], rel=0.01)


@pytest.mark.parametrize("policy", ["lru", "lfu_lru", "s3_fifo"])
def test_a_policy_that_remembers_nothing_says_so(policy, tmp_path):
    async def main():
        async with served(policy) as hierarchy:
            with pytest.raises(PolicyFileError, match="remembers nothing"):
                await hierarchy.save_policy(tmp_path / "policy")

    asyncio.run(main())
    with pytest.raises(ConfigError, match=f"policy_path: {policy} remembers nothing; use auto"):
        HierarchyConfig(policy=policy, policy_path=tmp_path / "policy")


def test_a_save_on_the_way_is_one_too(tmp_path):
    async def main():
        async with served("lrfu") as hierarchy:
            async with hierarchy.acquire(1, (0, 1)) as lease:
                await lease.ready()
            await hierarchy.save_policy(tmp_path / "policy")

    asyncio.run(main())
    uses = load_use_counts(tmp_path / "policy", SPEC).uses
    assert uses == {ExpertKey(1, 0): 1, ExpertKey(1, 1): 1}


def test_a_file_that_cannot_be_saved_does_not_fail_the_close(tmp_path, caplog):
    hierarchy = run_with("lrfu", STEPS, policy_path=tmp_path / "no" / "policy")
    assert hierarchy.closed
    assert "what the policy learnt is not saved" in caplog.text


@pytest.mark.parametrize("name", ["lrfu", "next_use"])
def test_a_recalled_expert_outlives_one_that_was_never_used(name):
    policy = make_policy(name, n_slots=4, layers=(1, 3), top_k=2)
    policy.recall(UseCounts(100, {ExpertKey(1, 0): 50, ExpertKey(1, 1): 2}))
    for expert in (0, 1, 2):
        policy.admit(ExpertKey(1, expert))
        policy.release(ExpertKey(1, expert))
    order = []
    while (victim := policy.victim()) is not None:
        policy.forget(victim)
        order.append(victim.expert)
    assert order == [2, 1, 0]


def test_old_counts_fade_so_that_new_ones_matter():
    old = UseCounts(1e6, {ExpertKey(1, 0): 5e5})
    faded = old.faded()
    assert faded.n_tokens == 16384
    assert faded.uses[ExpertKey(1, 0)] == 8192
    assert COUNTS.faded() == COUNTS
