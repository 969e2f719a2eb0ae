"""One small pack for tests that only read it, and copies of it for tests that damage it."""

import asyncio
import shutil

import pytest
from small_moe import make_small_moe

from tieredmoe.pack import create_pack, open_repair


@pytest.fixture(scope="session")
def small_pack(tmp_path_factory):
    """A pack that nobody may change, and the model it was made from."""
    directory = tmp_path_factory.mktemp("small_pack")
    model = make_small_moe(directory / "model.gguf", n_shards=2)
    asyncio.run(create_pack(model.paths[0], directory / "pack"))
    return directory / "pack", model


@pytest.fixture
def pack(small_pack, tmp_path):
    """A copy of the small pack, to be damaged."""
    shutil.copytree(small_pack[0], tmp_path / "pack")
    return tmp_path / "pack"


@pytest.fixture
def model(tmp_path):
    """A small model of two shards."""
    return make_small_moe(tmp_path / "model.gguf", n_shards=2)


@pytest.fixture
def path(small_pack):
    """The small pack, not to be changed."""
    return small_pack[0]


@pytest.fixture
def gguf(small_pack):
    """Makes repairs of a pack from the small pack's own source."""
    return lambda pack: open_repair(pack, small_pack[1].paths[0])
