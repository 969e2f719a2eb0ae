"""Sizes as people write them, free host memory, and how many slots a budget buys.

One grammar serves every option and every message: ``24GiB``, ``512 MiB``, ``1.5GB``, ``4096``,
``80%``. Rejected: bare ``K``, ``M`` and ``G``, which mean 1000 to some programs and 1024 to others;
and cutting a cache below one layer's top-k, which would fail in the middle of a token instead of at
start.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from tieredmoe.errors import BudgetError, ConfigError

_UNITS = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)}
)
_SIZE = re.compile(
    r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([a-z]*|%)\s*", re.IGNORECASE
)
_GRAMMAR = (
    "a size is a positive number with an optional unit: B, kB, MB, GB, TB (powers of 1000), "
    "KiB, MiB, GiB, TiB (powers of 1024), or a percentage up to 100%; for example 24GiB, 1.5GB, 80%"
)


def parse_size(text: str | int, *, whole_nbytes: int | None = None) -> int:
    """Bytes that ``text`` stands for, at least 1; ``80%`` is that share of ``whole_nbytes``.

    Fractions of a byte are cut off. Raises ``ConfigError``, which names the text and the grammar,
    for anything else, and for a percentage where ``whole_nbytes`` is None.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise ConfigError(f"{text!r} is not a size: {_GRAMMAR}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        nbytes = _share(text, number, whole_nbytes)
    elif unit in _UNITS:
        nbytes = int(number * _UNITS[unit])
    else:
        raise ConfigError(f"{text!r} has the unknown unit {match[2]!r}: {_GRAMMAR}")
    if nbytes < 1:
        raise ConfigError(f"{text!r} is less than one byte: {_GRAMMAR}")
    return nbytes


def format_size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that leaves at least 1, with two decimals at most."""
    for power, prefix in reversed(list(enumerate("KMGTP", start=1))):
        unit = 1024**power
        if abs(nbytes) >= unit:
            number = f"{nbytes / unit:.2f}".rstrip("0").rstrip(".")
            return f"{number} {prefix}iB"
    return f"{nbytes} B"


def slots_for_budget(
    *,
    requested_nbytes: int,
    free_nbytes: int,
    reserve_nbytes: int,
    slot_nbytes: int,
    top_k: int,
    n_records: int,
) -> int:
    """Slots to allocate, never fewer than ``top_k``.

    min(n_records, ⌊min(requested, free - reserve) / slot⌋), as in the published system. Raises
    ``BudgetError`` with every number and what to set when that is fewer than ``top_k``: one layer
    of one token could not run.
    """
    assert slot_nbytes > 0
    assert n_records >= top_k > 0
    usable_nbytes = max(0, min(requested_nbytes, free_nbytes - reserve_nbytes))
    n_slots = min(n_records, usable_nbytes // slot_nbytes)
    if n_slots >= top_k:
        return n_slots
    needed_nbytes = top_k * slot_nbytes
    ways_out = []
    if requested_nbytes < needed_nbytes:
        ways_out.append(f"set the budget to at least {_exact(needed_nbytes)}")
    if free_nbytes - reserve_nbytes < needed_nbytes:
        missing_nbytes = needed_nbytes + reserve_nbytes - free_nbytes
        way_out = f"free another {_exact(missing_nbytes)}"
        if free_nbytes >= needed_nbytes:
            way_out += f" or set the reserve to at most {_exact(free_nbytes - needed_nbytes)}"
        ways_out.append(way_out)
    raise BudgetError(
        f"the expert cache would have {n_slots} slots and one layer needs {top_k}: "
        f"requested {_exact(requested_nbytes)}, free {_exact(free_nbytes)}, "
        f"reserve {_exact(reserve_nbytes)}, slot {_exact(slot_nbytes)}; " + " and ".join(ways_out)
    )


def available_host_nbytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be taken now without swapping or being killed.

    min(MemAvailable, limit - usage) over the process's memory cgroup and all its ancestors (v1 and
    v2); file pages that the kernel lists as inactive count as free, since it drops them first.
    ``root`` is where /proc and /sys are looked up. Raises ``BudgetError`` where the kernel says
    nothing.
    """
    available_nbytes = _mem_available(root / "proc/meminfo")
    for directory, v2 in _memory_cgroups(root):
        room_nbytes = _room_v2(directory) if v2 else _room_v1(directory)
        if room_nbytes is not None:
            available_nbytes = min(available_nbytes, room_nbytes)
    return max(0, available_nbytes)


def _share(text: str | int, percent: Fraction, whole_nbytes: int | None) -> int:
    if whole_nbytes is None:
        raise ConfigError(f"{text!r} is a share of nothing here; give bytes: {_GRAMMAR}")
    if percent > 100:
        raise ConfigError(f"{text!r} is more than the whole: {_GRAMMAR}")
    return int(percent * whole_nbytes / 100)


def _exact(nbytes: int) -> str:
    return f"{format_size(nbytes)} ({nbytes} bytes)"


def _mem_available(meminfo: Path) -> int:
    fields = _read(meminfo)
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", fields or "", re.MULTILINE)
    if match is None:
        raise BudgetError(f"{meminfo} does not state MemAvailable, so free memory is unknown")
    return int(match[1]) * 1024


def _memory_cgroups(root: Path) -> list[tuple[Path, bool]]:
    """Directories of the process's memory cgroup up to the mount's top, each with "is it v2".

    ``/proc/self/cgroup`` names the path as the host sees it, ``mountinfo`` which part of that tree
    is mounted here: inside a container without a cgroup namespace the two differ, and a path that
    does not exist below the mount means that the mount's top is our own cgroup.
    """
    paths: dict[bool, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[True] = path
        elif "memory" in controllers.split(","):
            paths[False] = path
    found: list[tuple[Path, bool]] = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        v2 = kind == "cgroup2"
        if v2 not in paths or not (v2 or (kind == "cgroup" and "memory" in options.split(","))):
            continue
        mounted_root, mount_point = mount.split(" ")[3:5]
        top, ours = root / mount_point.lstrip("/"), PurePosixPath(paths[v2])
        inner = ours.relative_to(mounted_root if ours.is_relative_to(mounted_root) else "/")
        directory = top / inner
        while directory != top and not directory.is_dir():
            directory = directory.parent
        steps = [directory, *directory.parents]
        found += [(step, v2) for step in steps[: steps.index(top) + 1]]
    return found


def _room_v2(directory: Path) -> int | None:
    # memory.high is no hard limit, but a process of unreclaimable memory above it is throttled to
    # a standstill, so it counts as one.
    limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
    return _room(directory, limits, usage="memory.current", reclaimable="inactive_file")


def _room_v1(directory: Path) -> int | None:
    limits = [_number(directory / "memory.limit_in_bytes")]
    return _room(
        directory, limits, usage="memory.usage_in_bytes", reclaimable="total_inactive_file"
    )


def _room(directory: Path, limits: list[int | None], *, usage: str, reclaimable: str) -> int | None:
    used_nbytes = _number(directory / usage)
    known = [limit for limit in limits if limit is not None]
    if used_nbytes is None or not known:
        return None
    statistics = _read(directory / "memory.stat") or ""
    match = re.search(rf"^{reclaimable} (\d+)$", statistics, re.MULTILINE)
    inactive_nbytes = int(match[1]) if match else 0
    return min(known) - max(0, used_nbytes - inactive_nbytes)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None  # "max" means no limit


def _read(path: Path) -> str | None:
    """The file's text, or None: a kernel or container that does not show it sets no limit by it."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
