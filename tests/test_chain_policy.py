"""The usual chain: its policy is chosen, says why, and begins with what an earlier run learnt."""

import asyncio

import pytest

from tieredmoe import HierarchyConfig, open_hierarchy
from tieredmoe.errors import PolicyFileError
from tieredmoe.testing import make_deepseek_v4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_deepseek_v4(tmp_path_factory.mktemp("chain") / "tiny.gguf", seed=1).paths[0]


def opened(model, use, **settings):
    async def main():
        config = HierarchyConfig(**{"vram": 3 * 40960, "reserve": 0, **settings})
        async with await open_hierarchy(model, config) as hierarchy:
            return await use(hierarchy)

    return asyncio.run(main())


async def fill(hierarchy):
    async with hierarchy.acquire(0, [0, 1]) as lease:
        await lease.ready()
    return hierarchy


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ({}, "lrfu", "of a token"),
        ({"vram": "1GiB"}, "lru", "experts fit"),
        ({"policy": "s3_fifo"}, "s3_fifo", "it was asked for"),
    ],
)
def test_the_policy_and_its_reason_are_in_the_statistics(model, settings, name, reason):
    stats = opened(model, fill, **settings).stats()
    assert stats.cache_policy == name
    assert reason in stats.policy_reason
    assert stats.as_dict()["policy_reason"] == stats.policy_reason


def test_what_a_run_learns_is_recalled_by_the_next(model, tmp_path):
    path = tmp_path / "policy"
    assert opened(model, fill, policy_path=path).keys_by_heat() == []
    again = opened(model, fill, policy_path=path)
    assert again.keys_by_heat() == again.keys(0, [0, 1])


def test_a_foreign_file_is_refused_before_anything_is_opened(model, tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(PolicyFileError, match="notes is no policy file"):
        opened(model, fill, policy_path=path)
    assert path.read_text() == "mine"


def test_only_a_policy_that_learns_wants_observations(model):
    assert opened(model, fill, policy="next_use").wants_observations
    assert not opened(model, fill, policy="lrfu").wants_observations
