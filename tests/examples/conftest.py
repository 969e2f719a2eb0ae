"""Examples run in this process find what they share, as they do when they are started."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
