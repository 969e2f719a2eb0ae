"""`tieredmoe pack split`, `mirror` and `attach`: done, told, and refused in one line."""

import asyncio
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from tieredmoe.cli import main
from tieredmoe.cli.app import app
from tieredmoe.pack import create_pack, open_drives
from tieredmoe.pack import split as split_module
from tieredmoe.testing.tiny_container import StoredTensor, write_shards


@pytest.fixture
def pack(tmp_path):
    tensors = [
        StoredTensor(f"blk.0.ffn_{role}_exps.weight", np.zeros((8, n, 4 * m), np.uint8), 0)
        for role, n, m in [("gate", 16, 32), ("up", 16, 32), ("down", 32, 16)]
    ]
    keys = {"block_count": 1, "expert_count": 8, "expert_used_count": 2}
    source = write_shards(
        tmp_path / "model.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=[tensors],
    )[0]
    asyncio.run(create_pack(source, tmp_path / "pack"))
    return tmp_path / "pack"


def run(*arguments):
    return CliRunner().invoke(app, ["pack", *map(str, arguments)])


def test_split_says_what_each_drive_got(pack, tmp_path):
    result = run("split", pack, tmp_path / "a", tmp_path / "b", "--weights", "3,1")
    assert result.exit_code == 0
    first, second, last = result.stdout.splitlines()
    assert first == f"{tmp_path / 'a'}: 6 experts, a share of 75%"
    assert second == f"{tmp_path / 'b'}: 2 experts, a share of 25%"
    assert last.startswith(f"{pack}: split, ")
    assert open_drives(pack).drives == (tmp_path / "a", tmp_path / "b")


def test_split_removes_the_original_only_if_asked(pack, tmp_path):
    result = run("split", pack, tmp_path / "a", tmp_path / "b", "--remove-original")
    assert result.exit_code == 0
    assert " removed" in result.stdout
    assert not (pack / "experts-00000.bin").exists()


@pytest.mark.parametrize("weights", ["fast", "1,x", ""])
def test_weights_that_are_no_numbers_are_wrong_usage(pack, tmp_path, weights):
    result = run("split", pack, tmp_path / "a", "--weights", weights)
    assert result.exit_code == 2
    assert "neither" in result.stderr


def test_measured_weights_reach_the_split(pack, tmp_path, monkeypatch):
    async def measured(directory):
        return 2e9

    monkeypatch.setattr(split_module, "measure_drive", measured)
    result = run("split", pack, tmp_path / "a", tmp_path / "b", "--weights", "measured")
    assert "a share of 50%" in result.stdout


def test_mirror_says_what_is_read_from_now_on(pack, tmp_path):
    result = run("mirror", pack, tmp_path / "copy")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"read from {pack}, {tmp_path / 'copy'} now\n")
    assert len(open_drives(pack).drives) == 2


def test_attach_finds_a_part_that_moved(pack, tmp_path):
    run("split", pack, tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "moved")
    result = run("attach", pack, tmp_path / "moved")
    assert result.exit_code == 0
    assert result.stdout == f"{pack}: split over {tmp_path / 'moved'}, {tmp_path / 'b'}\n"


def test_attach_makes_a_mirror_of_a_copy(pack, tmp_path):
    shutil.copytree(pack, tmp_path / "copy")
    result = run("attach", pack, tmp_path / "copy")
    assert result.stdout == f"{pack}: a copy each in {pack}, {tmp_path / 'copy'}\n"


@pytest.mark.parametrize("command", ["split", "mirror", "attach"])
def test_what_is_no_pack_is_one_line_and_1(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["pack", command, str(tmp_path), str(tmp_path / "a")])
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"tieredmoe: {tmp_path}: ")
