"""`tieredmoe pack`: the work is done, and every error is one line and an exit code."""

import asyncio
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tieredmoe
from tieredmoe.cli import main
from tieredmoe.cli.app import app
from tieredmoe.pack import mirror_pack, open_drives, open_pack, split_pack
from tieredmoe.testing.tiny_container import StoredTensor, write_shards


@pytest.fixture
def source(tmp_path):
    """A model of one layer: two experts of three 4x32 F32 matrices."""
    tensors = [
        StoredTensor(
            f"blk.0.ffn_{role}_exps.weight",
            np.arange(2 * n_rows * n_columns * 4).reshape(2, n_rows, -1).astype(np.uint8),
            0,
        )
        for role, n_rows, n_columns in [("gate", 4, 32), ("up", 4, 32), ("down", 32, 4)]
    ]
    return write_shards(
        tmp_path / "model.gguf",
        architecture="deepseek4",
        metadata={
            f"deepseek4.{key}": value
            for key, value in [("block_count", 1), ("expert_count", 2), ("expert_used_count", 1)]
        },
        shards=[tensors],
    )[0]


def run(*arguments):
    return CliRunner().invoke(app, ["pack", *map(str, arguments)])


def fails(capsys, *arguments):
    """The one line on stderr of a command that fails."""
    with pytest.raises(SystemExit) as exit_:
        main(["pack", *map(str, arguments)])
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return line


def test_create_makes_a_pack(source, tmp_path):
    result = run("create", source, tmp_path / "pack")
    assert result.exit_code == 0
    assert "converted in" in result.output
    assert open_pack(tmp_path / "pack").spec.n_experts == 2


def test_inspect_describes_a_pack(source, tmp_path):
    run("create", source, tmp_path / "pack")
    result = run("inspect", tmp_path / "pack")
    assert result.exit_code == 0
    for fact in (
        "deepseek4",
        "1 layer (0) of 2 experts, top-1",
        "gate F32, up F32, down F32",
        "4,096",
    ):
        assert fact in result.output
    assert open_pack(tmp_path / "pack").manifest.source_digest.hex() in result.output


def test_inspect_says_on_which_drives_a_pack_is(source, tmp_path):
    def rows(pack):
        return [" ".join(row.split()) for row in run("inspect", pack).output.splitlines()]

    pack, other = tmp_path / "pack", tmp_path / "other"
    run("create", source, pack)
    shutil.copytree(pack, other)
    asyncio.run(split_pack(pack, [tmp_path / "a", tmp_path / "b"]))
    assert any(row.endswith(f"split over {tmp_path / 'a'}, {tmp_path / 'b'}") for row in rows(pack))
    for name in ("c", "d"):
        asyncio.run(mirror_pack(other, tmp_path / name))
    shutil.rmtree(tmp_path / "d")
    assert any(row.endswith(f"a copy each in {other}, {tmp_path / 'c'}") for row in rows(other))
    assert f"left out {tmp_path / 'd'}: does not exist" in rows(other)
    assert f"source digest {open_drives(other).manifest.source_digest.hex()}" in rows(other)


def test_verify_passes_a_sound_pack(source, tmp_path):
    run("create", source, tmp_path / "pack")
    result = run("verify", tmp_path / "pack")
    assert result.exit_code == 0
    assert "sound" in result.output


def test_verify_names_damage_and_exits_with_1(source, tmp_path):
    run("create", source, tmp_path / "pack")
    with (tmp_path / "pack" / "experts-00000.bin").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    result = run("verify", tmp_path / "pack")
    assert result.exit_code == 1
    assert "layer 0, expert 1, gate" in result.output
    assert "damaged in 1 place;" in result.output


def test_a_source_that_is_not_there_is_one_line(capsys, tmp_path):
    line = fails(capsys, "create", tmp_path / "gone.gguf", tmp_path / "pack")
    assert line.startswith(f"tieredmoe: {tmp_path / 'gone.gguf'}: ")
    assert not (tmp_path / "pack").exists()


def test_an_existing_destination_is_one_line(capsys, source, tmp_path):
    (tmp_path / "pack").mkdir()
    assert "already exists" in fails(capsys, "create", source, tmp_path / "pack")


def test_a_path_that_is_no_pack_is_one_line(capsys, tmp_path):
    for command in ("inspect", "verify"):
        assert "is not a pack" in fails(capsys, command, tmp_path)


def test_inspect_describes_a_gguf_that_is_run_in_place(source):
    result = run("inspect", source)
    assert result.exit_code == 0
    for fact in (
        "deepseek4",
        "1 layer (0) of 2 experts, top-1",
        "in 1 file, run in place",
        "24,576 bytes hold what is read",
        "gate F32, up F32, down F32",
        "none; a pack has them",
    ):
        assert fact in result.output


def test_verify_of_a_gguf_says_what_it_verifies(capsys, source):
    assert "is a file, not a pack; make one" in fails(capsys, "verify", source)


def test_the_command_as_a_process_ends_in_one_line_and_1(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tieredmoe.cli import main; main()",
            "pack",
            "inspect",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(tieredmoe.__file__).parents[1])},
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"tieredmoe: {tmp_path}: is not a pack")
    assert result.stderr.count("\n") == 1


def test_a_path_that_is_no_text_is_shown_by_its_bytes(source, tmp_path, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as exit_:
        main(["pack", "create", str(source), str(tmp_path / os.fsdecode(b"p\xff"))])
    assert exit_.value.code == 0
    stdout.flush()
    assert b"/p\\udcff: " in stdout.buffer.getvalue()


def test_the_version_is_told():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tieredmoe {tieredmoe.__version__}\n")


def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from tieredmoe.cli import main; main(['--version'])"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be written" in done.stderr
