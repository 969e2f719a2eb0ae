import os

import pytest

from tieredmoe.backends.device import queue_window_nbytes

DEVICE = os.makedev(254, 1)


def disk(root, **numbers):
    """A disk with a partition, as sysfs shows them; returns the node of either."""
    queue = root / "devices" / "vda" / "queue"
    queue.mkdir(parents=True)
    (queue.parent / "vda1").mkdir()
    for name, number in numbers.items():
        (queue / name).write_text(f"{number}\n")
    return queue.parent


def window(tmp_path, target, *, huge_pages="always madvise [never]"):
    (tmp_path / "254:1").symlink_to(target)
    (tmp_path / "huge_pages").write_text(huge_pages)
    return queue_window_nbytes(DEVICE, root=tmp_path, huge_pages=tmp_path / "huge_pages")


@pytest.mark.parametrize("part", ["", "vda1"])
@pytest.mark.parametrize(
    ("n_segments", "n_kib", "expected"),
    [(254, 4096, 128 * 254 * 4096), (254, 512, 128 * 512 * 1024)],
)
def test_half_the_queue_of_the_smallest_request(tmp_path, part, n_segments, n_kib, expected):
    node = disk(tmp_path, nr_requests=256, max_segments=n_segments, max_sectors_kb=n_kib)
    assert window(tmp_path, node / part) == expected


@pytest.mark.parametrize("setting", ["[always] madvise never", "always [madvise] never"])
def test_huge_pages_fill_a_request_whatever_its_segments(tmp_path, setting):
    node = disk(tmp_path, nr_requests=256, max_segments=254, max_sectors_kb=4096)
    assert window(tmp_path, node, huge_pages=setting) == 128 * 4096 * 1024


def test_a_kernel_without_huge_pages_has_small_ones(tmp_path):
    node = disk(tmp_path, nr_requests=256, max_segments=254, max_sectors_kb=4096)
    (tmp_path / "254:1").symlink_to(node)
    got = queue_window_nbytes(DEVICE, root=tmp_path, huge_pages=tmp_path / "missing")
    assert got == 128 * 254 * 4096


def test_a_queue_of_one_takes_one(tmp_path):
    node = disk(tmp_path, nr_requests=1, max_segments=1, max_sectors_kb=64)
    assert window(tmp_path, node) == 4096


@pytest.mark.parametrize("missing", ["nr_requests", "max_segments", "max_sectors_kb"])
@pytest.mark.parametrize("value", [None, "0", "many"])
def test_what_is_not_told_is_not_guessed(tmp_path, missing, value):
    numbers = {"nr_requests": 256, "max_segments": 254, "max_sectors_kb": 4096}
    node = disk(tmp_path, **numbers)
    path = node / "queue" / missing
    path.unlink() if value is None else path.write_text(value)
    assert window(tmp_path, node) is None


def test_a_device_without_a_disk_has_no_queue(tmp_path):
    assert queue_window_nbytes(DEVICE, root=tmp_path) is None
    (tmp_path / "devices").mkdir()
    assert window(tmp_path, tmp_path / "devices") is None


def test_this_machines_disks_tell_something_sensible(tmp_path):
    nbytes = queue_window_nbytes(tmp_path.stat().st_dev)
    assert nbytes is None or nbytes >= 4096
