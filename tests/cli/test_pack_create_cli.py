"""`tieredmoe pack create`, `restore` and `rollback`: questions, answers, exit codes, what to do."""

import errno
import os
import signal
import sys
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from tieredmoe.cli import main
from tieredmoe.cli import pack_create as pack_create_module
from tieredmoe.cli import pack_progress as pack_progress_module
from tieredmoe.cli.app import app
from tieredmoe.cli.pack_progress import show_progress
from tieredmoe.pack import PackProgress, open_pack
from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.pack.progress import Reporter
from tieredmoe.testing.tiny_container import StoredTensor, write_shards


@pytest.fixture
def source(tmp_path):
    """A model of two layers with a few pages of experts."""
    rng = np.random.default_rng(0)
    tensors = [
        StoredTensor(
            f"blk.{layer}.ffn_{role}_exps.weight",
            rng.integers(0, 256, (2, n_rows, 4 * n_columns), np.uint8),
            0,
        )
        for layer in range(2)
        for role, n_rows, n_columns in [("gate", 64, 32), ("up", 64, 32), ("down", 32, 64)]
    ]
    (tmp_path / "model").mkdir()
    return write_shards(
        tmp_path / "model" / "model.gguf",
        architecture="deepseek4",
        metadata={
            f"deepseek4.{key}": value
            for key, value in [("block_count", 2), ("expert_count", 2), ("expert_used_count", 1)]
        },
        shards=[tensors],
    )[0]


def run(*arguments, **options):
    return CliRunner().invoke(app, ["pack", *map(str, arguments)], **options)


def interrupt(monkeypatch):
    """Ctrl-C at the second piece of data, and the work has heard of it before it goes on."""
    real_write, real_stop = os.pwrite, Reporter.stop
    n, heard = iter(range(1000)), threading.Event()

    def write(*arguments):
        if next(n) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.wait(10)
        return real_write(*arguments)

    def stop(reporter):
        real_stop(reporter)
        heard.set()

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Reporter, "stop", stop)
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", 4096)


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch)
        result = run("create", source, tmp_path / "pack")
    assert result.exit_code == 130
    assert "interrupted; the same command goes on after what is done" in result.output
    assert not (tmp_path / "pack").exists()
    result = run("create", source, tmp_path / "pack")
    assert result.exit_code == 0
    assert "converted in" in result.output
    assert open_pack(tmp_path / "pack").spec.n_experts == 2


def test_giving_a_source_up_asks_first_and_no_is_no(source, tmp_path, monkeypatch):
    before = source.read_bytes()
    monkeypatch.setattr(pack_create_module, "_is_terminal", lambda: True)
    result = run("create", source, tmp_path / "pack", "--reclaim-source", input="n\n")
    assert result.exit_code == 2
    assert "Give the source up?" in result.output
    assert "nothing was done" in result.output
    assert source.read_bytes() == before
    assert not (tmp_path / "pack").exists()


def test_an_interrupted_question_is_no_and_130(source, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_create_module, "_is_terminal", lambda: True)
    result = run("create", source, tmp_path / "pack", "--reclaim-source", input="")
    assert result.exit_code == 130
    assert "nothing was done" in result.output


@pytest.mark.parametrize("option", ["--safety-margin-gib", "--max-file-gib"])
@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_size_that_is_no_number_is_wrong_usage(source, tmp_path, option, size):
    result = run("create", source, tmp_path / "pack", option, size)
    assert result.exit_code == 2
    assert not (tmp_path / "pack").exists()


def test_where_nobody_can_answer_a_yes_must_be_said(source, tmp_path):
    result = run("create", source, tmp_path / "pack", "--reclaim-source")
    assert result.exit_code == 2
    assert "say --yes" in result.output
    assert source.exists()


@pytest.mark.parametrize("how", ["--yes", "answer"])
def test_a_yes_gives_it_up_and_restore_brings_it_back(source, tmp_path, monkeypatch, how):
    before = source.read_bytes()
    monkeypatch.setattr(pack_create_module, "_is_terminal", lambda: True)
    more = ["--yes"] if how == "--yes" else []
    result = run("create", source, tmp_path / "pack", "--reclaim-source", *more, input="y\n")
    assert result.exit_code == 0
    assert "given up in the source" in result.output
    assert f"`tieredmoe pack restore {tmp_path / 'pack'} FOLDER`" in result.output
    assert not source.exists()
    result = run("restore", tmp_path / "pack", tmp_path / "back")
    assert result.exit_code == 0
    assert str(tmp_path / "back" / "model.gguf") in result.output
    assert (tmp_path / "back" / "model.gguf").read_bytes() == before


def failing_rename(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_rollback_undoes_what_was_begun(source, tmp_path, monkeypatch):
    before = source.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing_rename)
        assert run("create", source, tmp_path / "pack", "--reclaim-source", "--yes").exit_code == 1
    assert source.read_bytes() != before
    result = run("rollback", tmp_path / "pack")
    assert result.exit_code == 0
    assert "conversion undone" in result.output
    assert "given back to its source" in result.output
    assert source.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_an_earlier_run_did_is_told(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing_rename)
        run("create", source, tmp_path / "pack")
    result = run("create", source, tmp_path / "pack")
    assert "were there from an earlier run" in result.output


def test_options_reach_the_conversion(source, tmp_path):
    run("create", source, tmp_path / "pack", "--max-file-gib", "1e-9")
    assert len(open_pack(tmp_path / "pack").data_files) == 2
    with pytest.raises(SystemExit) as exit_:
        main(["pack", "create", str(source), str(tmp_path / "b"), "--safety-margin-gib", "9e9"])
    assert exit_.value.code == 1


def test_a_failure_is_one_line_and_1(source, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["pack", "restore", str(source), str(tmp_path / "back")])
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "is a file, not a pack" in line


def test_without_a_terminal_progress_is_plain_lines_with_rate_and_time_left(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 11.0, 12.0, 31.0])
    monkeypatch.setattr(pack_progress_module.time, "monotonic", lambda: next(clock))
    with show_progress() as progress:
        for done in (0, 500_000_000, 600_000_000, 2_000_000_000):
            progress(PackProgress(done, 2_000_000_000, "copy"))
    assert capsys.readouterr().err.splitlines() == [
        "copy: 500.0 MB of 2.0 GB, 45.5 MB/s, 1 min left",
        "copy: 2.0 GB of 2.0 GB, 64.5 MB/s",
    ]


def test_on_a_terminal_progress_is_a_bar(monkeypatch):
    shown = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        pack_progress_module.Progress, "update", lambda *_, **kw: shown.append(kw["completed"])
    )
    with show_progress() as progress:
        progress(PackProgress(5, 10, "copy"))
        progress(PackProgress(10, 10, "copy"))
    assert shown == [5, 10]
