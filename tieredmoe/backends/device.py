"""How much a block device's queue takes before a submission blocks, from sysfs.

A submission waits once more requests are in flight than the queue has tags; then the event loop
hangs (39 to 265 ms were measured). Half the queue leaves the other half to everybody else. How much
one request carries depends on the memory's pages: with small ones it ends at ``max_segments``. The
pools here are of huge pages wherever the kernel has them, so that is what is counted on.
"""

from __future__ import annotations

import os
from pathlib import Path

from tieredmoe.spec import PAGE_NBYTES

SYS_BLOCK = Path("/sys/dev/block")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def queue_window_nbytes(
    device: int, *, root: Path = SYS_BLOCK, huge_pages: Path = HUGE_PAGES
) -> int | None:
    """Bytes in flight that fill half of the queue of ``device``; None where it has none to show.

    A file system over several disks (btrfs, ZFS), in memory or on a network has none.
    """
    queue = _queue_of(root / f"{os.major(device)}:{os.minor(device)}")
    if queue is None:
        return None
    n_requests, n_segments, n_kib = (
        _number(queue / name) for name in ("nr_requests", "max_segments", "max_sectors_kb")
    )
    if n_requests is None or n_segments is None or n_kib is None:
        return None
    request_nbytes = n_kib * 1024
    if not _has_huge_pages(huge_pages):
        request_nbytes = min(n_segments * PAGE_NBYTES, request_nbytes)
    return max(1, n_requests // 2) * request_nbytes


def _queue_of(node: Path) -> Path | None:
    """The queue of a disk, or of the disk that a partition is on."""
    try:
        real = node.resolve(strict=True)
    except OSError:
        return None
    for disk in (real, real.parent):
        if (disk / "queue").is_dir():
            return disk / "queue"
    return None


def _has_huge_pages(setting: Path) -> bool:
    """Whether a pool that asks for huge pages gets them."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def _number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None
