"""`tieredmoe pack verify`: samples, JSON, exit codes, and what a person reads."""

import asyncio
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tieredmoe.cli import pack_verify as pack_verify_module
from tieredmoe.cli.app import app
from tieredmoe.pack import create_pack, open_pack
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.foreign_packs import make_sglang_v1
from tieredmoe.testing.tiny_container import StoredTensor, write_shards


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    tensors = [
        StoredTensor(
            f"blk.0.ffn_{role}_exps.weight", rng.integers(0, 256, (8, n, 4 * m), np.uint8), 0
        )
        for role, n, m in [("gate", 16, 32), ("up", 16, 32), ("down", 32, 16)]
    ]
    keys = {"block_count": 1, "expert_count": 8, "expert_used_count": 2}
    return write_shards(
        tmp_path / "model.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=[tensors],
    )[0]


@pytest.fixture
def pack(source, tmp_path):
    asyncio.run(create_pack(source, tmp_path / "pack"))
    return tmp_path / "pack"


def run(*arguments):
    return CliRunner().invoke(app, ["pack", "verify", *map(str, arguments)])


def damage(pack, expert):
    where = open_pack(pack).locate(ExpertKey(0, expert))
    with (pack / "experts-00000.bin").open("r+b") as file:
        file.seek(where.offset)
        file.write(b"\xff\x00\xff")


def test_all_of_it_is_the_default_and_full_says_so(pack):
    for options in ([], ["--full"]):
        result = run(pack, *options)
        assert result.exit_code == 0
        assert f"{pack}: sound, every byte: " in result.stdout


def test_a_sample_says_how_much_it_would_have_met(pack):
    result = run(pack, "--sample", 3)
    assert result.exit_code == 0
    assert "sound as far as was looked: 3 of 9 parts" in result.stdout
    assert "if more than 63.2% of it were damaged, that would have shown with 95" in result.stdout


def test_a_sample_and_all_of_it_exclude_each_other(pack):
    result = run(pack, "--sample", 3, "--full")
    assert result.exit_code == 2
    assert "--full and --sample exclude each other" in result.stderr
    assert run(pack, "--sample", 0).exit_code == 2


def test_json_has_every_damage_and_the_exit_code_stays(pack):
    damage(pack, 5)
    result = run(pack, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    (place,) = found.pop("damage")
    assert (place["layer"], place["expert"]) == (0, 5)
    assert place["what"] == "layer 0, expert 5, gate"
    assert place["fact"] == "does not match its digest"
    assert place["path"] == str(pack / "experts-00000.bin")
    layout = open_pack(pack).manifest.layout
    seconds = found.pop("seconds")
    assert seconds >= 0
    assert found == {
        "path": str(pack),
        "sound": False,
        "complete": True,
        "read_nbytes": layout.data_nbytes,
        "total_nbytes": layout.data_nbytes,
        "parts_read": 9,
        "parts": 9,
        "damaged_share_met": 0.0,
        "not_direct": [],
    }


def test_the_keys_of_json_are_those_of_a_sound_pack_too(pack):
    found = json.loads(run(pack, "--json", "--sample", 2).stdout)
    assert found["sound"] is True
    assert found["complete"] is False
    assert found["damage"] == []


def test_damage_is_a_line_each_on_stdout_and_the_way_out_on_stderr(pack):
    damage(pack, 1)
    damage(pack, 6)
    result = run(pack)
    assert result.exit_code == 1
    assert [line.split(" (")[0] for line in result.stdout.splitlines()] == [
        f"{pack}/experts-00000.bin: layer 0, expert {expert}, gate" for expert in (1, 6)
    ]
    assert "damaged in 2 places" in result.stderr
    assert "repair_from" in result.stderr


def test_a_sample_by_a_seed_finds_what_it_found_before(pack):
    for expert in range(8):
        damage(pack, expert)
    first, again = (run(pack, "--sample", 2, "--seed", 3).stdout for _ in range(2))
    assert first == again
    assert len(first.splitlines()) == 2


def test_a_foreign_pack_is_verified_by_its_own_digests(source, tmp_path):
    foreign = tmp_path / "v1.pack"
    make_sglang_v1(source, foreign)
    result = run(foreign, "--sample", 4)
    assert result.exit_code == 0
    assert "4 of 8 parts" in result.stdout


def test_ctrl_c_is_130(pack, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pack_verify_module, "verify_pack", interrupted)
    assert run(pack).exit_code == 130


def test_progress_goes_to_stderr_in_plain_lines(pack):
    result = run(pack)
    assert "\x1b" not in result.output
    assert result.stderr == "" or result.stderr.startswith("verify: ")
