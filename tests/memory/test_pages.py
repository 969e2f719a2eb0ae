import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tieredmoe.errors import BudgetError
from tieredmoe.memory import HostPool
from tieredmoe.memory.pages import (
    HUGE_PAGE_NBYTES,
    MADV_COLLAPSE,
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    huge_page_nbytes,
    kernel_madvise,
)

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def pool():
    pool = HostPool.allocate(4 * MIB)
    yield pool
    pool.close()


def mappings():
    """(first address, last address, {field: bytes}) of every mapping of this process."""
    found = []
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            found.append((*(int(part, 16) for part in name.split("-")), {}))
        elif rest[-1] == "kB":
            found[-1][2][name[:-1]] = int(rest[0]) * 1024
    return found


def smaps_field(address, name):
    """What smaps says of the mapping around ``address``."""
    return next(fields[name] for first, last, fields in mappings() if first <= address < last)


def is_mapped(address):
    return any(first <= address < last for first, last, _ in mappings())


def refusing(code, *advices):
    def madvise(address, nbytes, advice):
        if advice in advices:
            raise OSError(code, os.strerror(code))
        kernel_madvise(address, nbytes, advice)

    return madvise


def test_a_pool_is_aligned_to_huge_pages_and_rounded_up_to_them(pool):
    assert pool.address % HUGE_PAGE_NBYTES == 0
    odd = HostPool.allocate(HUGE_PAGE_NBYTES + 1)
    assert odd.nbytes == 2 * HUGE_PAGE_NBYTES
    odd.close()


def test_every_page_is_resident_and_zero_before_the_first_use(pool):
    assert smaps_field(pool.address, "Rss") == pool.nbytes
    assert not np.frombuffer(pool.carve(pool.nbytes).view, np.uint8).any()


def test_the_huge_share_is_what_the_kernel_reports_of_the_pool_alone(pool):
    plain = refusing(errno.EINVAL, MADV_HUGEPAGE, MADV_COLLAPSE)
    neighbours = [HostPool.allocate(2 * MIB, madvise=plain) for _ in range(2)]
    assert pool.huge_share == smaps_field(pool.address, "AnonHugePages") / pool.nbytes
    for neighbour in neighbours:
        neighbour.close()


def test_huge_pages_are_had_where_the_system_offers_them(pool):
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text(encoding="ascii"):
        pytest.skip("this system has huge pages turned off")
    assert pool.huge_share > 0


def test_a_kernel_without_any_of_the_advice_still_gives_touched_memory():
    advices = (MADV_HUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE)
    pool = HostPool.allocate(4 * MIB, madvise=refusing(errno.EINVAL, *advices))
    assert smaps_field(pool.address, "Rss") >= pool.nbytes
    region = pool.carve(4 * MIB)
    region.view[:3] = b"abc"
    assert bytes(region.view[:4]) == b"abc\0"
    pool.close()


def test_memory_that_the_kernel_refuses_to_touch_is_a_budget_error_and_leaves_nothing():
    addresses = []

    def madvise(address, nbytes, advice):
        addresses.append(address)
        refusing(errno.ENOMEM, MADV_POPULATE_WRITE)(address, nbytes, advice)

    with pytest.raises(BudgetError, match=r"refused 4 MiB \(4194304 bytes\)") as refusal:
        HostPool.allocate(4 * MIB, madvise=madvise)
    assert "are available: set a smaller budget" in str(refusal.value)
    assert not is_mapped(addresses[0])  # though the error's traceback still holds the pool


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 63, 1 << 70])
def test_more_memory_than_there_can_be_is_a_budget_error(nbytes):
    with pytest.raises(BudgetError, match=r"refused .*PiB .*set a smaller budget"):
        HostPool.allocate(nbytes)


def test_regions_are_page_aligned_disjoint_and_where_they_say(pool):
    first, second = pool.carve(PAGE), pool.carve(3 * PAGE)
    assert first.address == pool.address
    assert second.address == first.address + PAGE
    first.view[:] = b"\x11" * PAGE
    second.view[:] = b"\x22" * (3 * PAGE)
    assert bytes(first.view) == b"\x11" * PAGE
    assert np.frombuffer(second.view, np.uint8).ctypes.data == second.address
    assert pool.free_nbytes == pool.nbytes - 4 * PAGE


def test_carving_more_than_is_left_is_refused_and_takes_nothing(pool):
    pool.carve(MIB)
    with pytest.raises(BudgetError, match=r"pool of 4 MiB has 3 MiB left and 4 MiB were asked"):
        pool.carve(4 * MIB)
    assert pool.carve(3 * MIB).nbytes == 3 * MIB


def test_closing_gives_the_memory_back(pool):
    assert is_mapped(pool.address)
    pool.close()
    pool.close()
    assert not is_mapped(pool.address)


def test_closing_under_a_living_view_unmaps_when_the_view_dies(pool):
    array = np.frombuffer(pool.carve(PAGE).view, np.uint8)
    pool.close()
    assert array.sum() == 0
    del array
    assert not is_mapped(pool.address)


def test_a_pool_says_what_it_is(pool):
    pool.carve(MIB)
    assert repr(pool).startswith("<HostPool 4 MiB, 3 MiB free, huge pages ")
    pool.close()
    assert "closed" in repr(pool)


def test_huge_pages_are_counted_inside_the_range_only(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "00200000-00400000 rw-p 00000000 00:00 0 \nSize: 2048 kB\nAnonHugePages:      2048 kB\n"
        "00400000-00800000 rw-p 00000000 00:00 0 \nSize: 4096 kB\nAnonHugePages:      4096 kB\n"
        "00800000-00a00000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:      2048 kB\n"
    )
    assert huge_page_nbytes(0x400000, 0x400000, smaps=smaps) == 4 * MIB


def test_without_smaps_the_share_is_unknown(tmp_path):
    assert huge_page_nbytes(0x400000, 0x400000, smaps=tmp_path / "none") is None
