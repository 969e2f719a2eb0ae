import numpy as np
import pytest
from gated import N_PAGES, PAGE, POISON

from tieredmoe.memory import HostPool


@pytest.fixture
def path(tmp_path):
    """A file whose every page is filled with its own number."""
    path = tmp_path / "experts.bin"
    np.repeat(np.arange(N_PAGES, dtype=np.uint8), PAGE).tofile(path)
    return path


@pytest.fixture
def memory():
    """Writable, page-aligned memory, poisoned."""
    pool = HostPool.allocate(2 << 20)
    region = pool.carve(2 << 20)
    region.view[:] = bytes([POISON]) * region.nbytes
    yield region
    region.view.release()
    pool.close()
