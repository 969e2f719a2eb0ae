from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir():
    """The tiny models with known-right answers."""
    return Path(__file__).parents[1] / "data" / "deepseek_v4"
