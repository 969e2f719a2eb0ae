"""A configuration is right, or one error lists all that is wrong."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tieredmoe import HierarchyConfig
from tieredmoe.errors import ConfigError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.testing import TinyPack, sim_run, tiny_hierarchy, tiny_spec

WRONG = {
    "vram": [True, 1.5, None, [], "lots", "24G", 0, -1, "120%"],
    "reserve": [False, 0.5, None, {}, "much"],
    "stage_slots": [True, -1, 1.5, "8", 10**6],
    "policy": [[], {}, None, "clock", np.array(["lru", "lfu_lru"])],
    "backend": [[], 5, "mmap"],
    "allow_buffered": [1, None, "yes"],
    "strict": [0, None, "no"],
    "read_splits": [True, 0, -1, 17, 2.0, "2"],
    "window": [True, [], 0, "80%", "lots", 1.5],
    "waiting_max": [True, 0, 2.5, "9", 2**21],
    "verify": [True, "often", []],
    "repair_from": [True, 5, b"x", (), "\0"],
    "stats_path": [True, 5, b"x", [], "\0"],
    "stats_every": [True, 0, 2.5, "9"],
    "prefetch_slots": [True, -1, 1.5, "8", 10**6],
    "trace_events": [True, -1, 0.5, "9", 2**25],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_one_line_that_names_the_setting(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        HierarchyConfig(**{name: value})
    assert "\n" not in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        HierarchyConfig(**{name: values[0] for name, values in WRONG.items()})
    assert all(f"{name}: " in str(caught.value) for name in WRONG)


@pytest.mark.parametrize("name", ["stage_slots", "read_splits", "waiting_max", "trace_events"])
def test_what_only_looks_like_an_int_is_told_so(name):
    with pytest.raises(ConfigError, match=rf"{name}: .*int64\(5\) is n.* int from "):
        HierarchyConfig(**{name: np.int64(5)})


def test_strict_and_allow_buffered_contradict_each_other():
    with pytest.raises(ConfigError, match="strict: it refuses what allow_buffered allows"):
        HierarchyConfig(strict=True, allow_buffered=True)


@pytest.mark.parametrize("name", ["auto", "uring", "threads", "buffered"])
def test_every_backend_can_be_chosen(name):
    assert HierarchyConfig(backend=name, read_splits=16).backend == name


def test_unknown_settings_are_told_along_with_wrong_values():
    with pytest.raises(ConfigError) as caught:
        HierarchyConfig.from_mapping({"vrm": 1, 3: 4, "policy": "zz"})
    for part in ("'vrm'", "3", "'zz'", "known are device, vram"):
        assert part in str(caught.value)


def test_plain_data_makes_the_same_configuration():
    settings = {"vram": "1GiB", "policy": "lru", "stats_path": "s.json"}
    assert HierarchyConfig.from_mapping(settings) == HierarchyConfig(**settings)


@pytest.mark.parametrize(
    ("window", "nbytes"), [("32MiB", 32 << 20), ("1kB", 1000), (4096, 4096), (None, None)]
)
def test_a_window_is_a_size_or_left_to_the_drive(window, nbytes):
    assert HierarchyConfig(window=window).window_nbytes == nbytes


@pytest.mark.parametrize("nothing", [0, "0", "0B", "0GiB", "0 %", "0.0MB"])
def test_nothing_may_be_reserved(nothing):
    assert HierarchyConfig(reserve=nothing).reserve_nbytes(10**9) == 0


@pytest.mark.parametrize("name", ["stats_path", "repair_from"])
def test_an_empty_path_is_no_path(name):
    with pytest.raises(ConfigError, match=f"{name}: '' is not a path"):
        HierarchyConfig(**{name: "", "verify": "always"})


def test_paths_are_those_of_the_moment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = HierarchyConfig(stats_path="s.json")
    monkeypatch.chdir("/")
    assert config.stats_path == tmp_path / "s.json"


def written_stats(path):
    async def main():
        hierarchy, _ = tiny_hierarchy(TinyPack(tiny_spec()), (2, 4))
        assert isinstance(hierarchy, Hierarchy)
        stats = hierarchy.stats()
        await hierarchy.close()
        return stats

    asyncio.run(sim_run(main(), collect_garbage=False).write(path))


def test_statistics_follow_a_link_and_leave_it(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    written_stats(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["cache_hits"] == 0


def test_statistics_are_written_to_a_pipe_and_never_replace_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        written_stats(tmp_path / "pipe")
        assert json.loads(os.read(reader, 1 << 16))["cache_hits"] == 0
    finally:
        os.close(reader)
    assert Path(tmp_path / "pipe").is_fifo()
