import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.budget import available_host_nbytes, format_size, parse_size, slots_for_budget
from tieredmoe.errors import BudgetError, ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("  512MiB ", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * GIB // 2),
        (".5kB", 500),
        ("3TB", 3 * 10**12),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("1.", 1),
        ("0.1GB", 100_000_000),
    ],
)
def test_sizes_mean_what_their_units_say(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("80%", 800), ("100%", 1000), ("12.55 %", 125)])
def test_a_percentage_is_a_share_of_the_whole(text, nbytes):
    assert parse_size(text, whole_nbytes=1000) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "0",
        0,
        -4096,
        "0.2B",
        "nan",
        "inf",
        "1e9",
        "24G",
        "24 GiBs",
        "1,5GB",
        "1 2MB",
        "\u0663GiB",
        "101%",
        "0%",
        "-5%",
        True,
        "%",
        "1..5GB",
        "9" * 5000,
    ],
)
def test_anything_else_is_refused_by_name_and_with_the_grammar(text):
    with pytest.raises(ConfigError, match="24GiB") as refusal:
        parse_size(text, whole_nbytes=1000)
    assert repr(text) in str(refusal.value)


def test_a_percentage_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'80%' is a share of nothing here; give bytes"):
        parse_size("80%")


@given(st.integers(min_value=1, max_value=2**60))
def test_a_formatted_size_parses_to_within_half_a_percent(nbytes):
    # And a byte, which parsing takes off where the size is no whole number of them.
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes / 200 + 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (24 * GIB, "24 GiB"), (1536, "1.5 KiB"), (100 * GIB, "100 GiB")],
)
def test_sizes_are_written_in_binary_units(nbytes, text):
    assert format_size(nbytes) == text


def slots(**changes):
    numbers = {
        "requested_nbytes": 100,
        "free_nbytes": 1000,
        "reserve_nbytes": 0,
        "slot_nbytes": 10,
        "top_k": 6,
        "n_records": 256,
    }
    return slots_for_budget(**(numbers | changes))


@pytest.mark.parametrize(
    ("changes", "n_slots"),
    [
        ({}, 10),
        ({"requested_nbytes": 109}, 10),
        ({"free_nbytes": 90}, 9),
        ({"free_nbytes": 90, "reserve_nbytes": 30}, 6),
        ({"n_records": 7}, 7),
        ({"requested_nbytes": 60}, 6),
    ],
)
def test_slots_follow_the_published_rule(changes, n_slots):
    assert slots(**changes) == n_slots


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"requested_nbytes": 59}, r"have 5 slots .* set the budget to at least 60 B"),
        (
            {"free_nbytes": 70, "reserve_nbytes": 11},
            r"have 5 slots .* free another 1 B .* or set the reserve to at most 10 B",
        ),
        (
            {"free_nbytes": 20, "reserve_nbytes": 30},
            r"have 0 slots .* free another 70 B \(70 bytes\)$",
        ),
        (
            {"requested_nbytes": 1, "free_nbytes": 1},
            r"at least 60 B \(60 bytes\) and free another 59 B",
        ),
    ],
)
def test_fewer_slots_than_top_k_are_refused_with_the_way_out(changes, way_out):
    with pytest.raises(BudgetError, match=way_out):
        slots(**changes)


def test_the_refusal_carries_every_number():
    with pytest.raises(BudgetError) as refusal:
        slots(requested_nbytes=41, free_nbytes=82, reserve_nbytes=53, slot_nbytes=17)
    for number in ("1 slots", "needs 6", "41 bytes", "82 bytes", "53 bytes", "17 bytes"):
        assert number in str(refusal.value)


@pytest.fixture
def host(tmp_path):
    """A fake /proc and /sys: ``host({path: text})``; 1 MiB of memory is available."""

    def build(files):
        for path, text in (
            {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1024 kB\n"} | files
        ).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return build


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
TOP = "sys/fs/cgroup"


def v2(directory, limit, used, *, inactive=0, high="max"):
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.high": f"{high}\n",
        f"{directory}/memory.current": f"{used}\n",
        f"{directory}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


def in_v2(path):
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT}


def test_without_cgroups_available_memory_is_the_machines(host):
    assert available_host_nbytes(host({})) == 2**20


def test_a_v2_limit_counts_less_what_is_used(host):
    files = in_v2("/app") | v2(f"{TOP}/app", 5000, 2000)
    assert available_host_nbytes(host(files)) == 3000


def test_inactive_file_pages_count_as_free(host):
    files = in_v2("/app") | v2(f"{TOP}/app", 5000, 4000, inactive=1500)
    assert available_host_nbytes(host(files)) == 2500


def test_the_tightest_ancestor_decides(host):
    files = in_v2("/a/b") | v2(f"{TOP}/a/b", "max", 10) | v2(f"{TOP}/a", 700, 100)
    assert available_host_nbytes(host(files)) == 600


def test_throttling_counts_as_a_limit(host):
    files = in_v2("/app") | v2(f"{TOP}/app", 5000, 2000, high=2500)
    assert available_host_nbytes(host(files)) == 500


def test_a_group_over_its_limit_has_nothing_left(host):
    assert available_host_nbytes(host(in_v2("/app") | v2(f"{TOP}/app", 5000, 6000))) == 0


def test_inside_a_container_the_mounts_top_is_our_group(host):
    files = in_v2("/docker/abc") | v2(TOP, 5000, 1000)
    assert available_host_nbytes(host(files)) == 4000


def test_a_v1_limit_counts_too(host):
    memory = f"{TOP}/memory/box"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT,
        f"{memory}/memory.limit_in_bytes": "9000\n",
        f"{memory}/memory.usage_in_bytes": "5000\n",
        f"{memory}/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
        f"{TOP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{TOP}/memory/memory.usage_in_bytes": "5000\n",
    }
    assert available_host_nbytes(host(files)) == 6000


def test_a_v1_mount_of_a_part_of_the_tree_is_understood(host):
    mount = V1_MOUNT.replace(" / /sys", " /docker/abc /sys")
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
        "proc/self/mountinfo": mount,
        f"{TOP}/memory/inner/memory.limit_in_bytes": "800\n",
        f"{TOP}/memory/inner/memory.usage_in_bytes": "500\n",
    }
    assert available_host_nbytes(host(files)) == 300


def test_this_machine_has_memory_available():
    assert available_host_nbytes() > 2**20


def test_a_machine_that_does_not_say_is_an_error(tmp_path):
    with pytest.raises(BudgetError, match="does not state MemAvailable"):
        available_host_nbytes(tmp_path)
