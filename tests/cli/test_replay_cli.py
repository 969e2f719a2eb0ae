"""``tieredmoe replay``: figures that follow from the trace, in words and in JSON."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tieredmoe.cli.replay import replay
from tieredmoe.errors import BudgetError, ConfigError

TRACES = Path(__file__).parent.parent / "data" / "traces"
QWEN = str(TRACES / "qwen3_4_tokens.route.csv")
KIMI = str(TRACES / "kimi_linear_12_tokens.jsonl")
SMALL = ["--vram", "900MiB", "--ram", "300MiB", "--ssd-gbps", "3"]


def run(*arguments):
    app = typer.Typer()
    app.command()(replay)
    return CliRunner().invoke(app, arguments)


def test_it_says_what_the_budget_brings_and_what_bounds_it():
    done = run(QWEN, *SMALL)
    assert done.exit_code == 0, done.output
    for words in (
        "2 decoded tokens of 4, 48 layers × top-6 of 128, an expert is 2.92 MiB",
        "W = 288 lookups a token",
        "308 slots and 102 in RAM: 1.07 × W",
        "at 3 GB/s",
        "bound by the drive",
        "◀",
    ):
        assert words in done.output


def test_json_holds_the_same_and_the_whole_curve():
    told = json.loads(run(QWEN, *SMALL, "--policy", "lru", "--json").output)
    asked, curve = told["asked"], told["curve"]
    assert (asked["slots"], asked["ram_slots"], asked["policy"]) == (308, 102, "lru")
    assert told["token_cycle"] == 288
    assert asked["slots"] in [row["slots"] for row in curve]
    assert curve[-1]["slots"] == 48 * 128
    for row in curve:
        assert row["hit_rate"] <= row["belady_hit_rate"] <= row["ceiling_hit_rate"]
        assert row["hit_rate"] <= row["hit_rate_with_ram"]
        lanes = [row[f"{lane}_s_per_token"] for lane in ("drive", "link", "device")]
        assert row["floor_s_per_token"] == max(lanes) <= row["serial_s_per_token"]
    assert asked["belady_with_bypass_hit_rate"] >= asked["belady_hit_rate"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ([KIMI], ConfigError, "give --expert-mib"),
        ([KIMI, "--expert-mib", "-1"], ConfigError, "--expert-mib -1"),
        ([QWEN, "--vram", "9MiB"], BudgetError, "holds 3 experts .* needs 6"),
        ([QWEN, "--ssd-gbps", "0"], ConfigError, "drive's GB/s is 0"),
        ([QWEN, "--policy", "best"], ConfigError, "'best'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_way_out(arguments, kind, message):
    done = run(*arguments)
    assert isinstance(done.exception, kind)
    with pytest.raises(kind, match=message):
        raise done.exception
