"""The example as people run it: a process of its own, its output, exit codes and errors."""

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tieredmoe import create_pack
from tieredmoe.testing import make_deepseek_v4

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepseek_v4_flash.py"


def start(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, EXAMPLE, *map(str, arguments)],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A model whose tokenizer is "none"."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    make_deepseek_v4(path, tokenizer=None)
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a run without arguments, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run(folder)


def test_without_arguments_it_makes_packs_and_generates(demo):
    folder, (code, out, err) = demo
    assert code == 0, err
    assert (folder / "models" / "deepseek-v4-demo.pack" / "manifest.json").is_file()
    assert out.strip()
    for word in ("prefill", "decode", "hit rate", "GB read per token", "evictions", "ended by"):
        assert word in err


def test_a_second_run_uses_the_pack_that_is_there_and_says_the_same(demo):
    folder, (_, first, _) = demo
    code, out, err = run(folder)
    assert (code, out) == (0, first)
    assert "packed" not in err


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids(gguf, tmp_path):
    stats = tmp_path / "stats.json"
    arguments = ["--gguf", gguf, "--prompt", "3 4 5", "--max-new-tokens", 4, "--stats", stats]
    code, out, err = run(tmp_path, *arguments, "--ids", "--vram", "50%", "--reserve", "100MiB")
    assert code == 0, err
    assert len([int(word) for word in out.split()]) == 4
    assert stats.is_file()


def test_what_keeps_a_model_from_running_is_found_before_it_is_packed(tmp_path, monkeypatch):
    keys = ["expert_used_count", "attention.q_lora_rank", "hyper_connection.count"]
    dropped = [f"deepseek4.{key}" for key in keys]
    make_deepseek_v4(tmp_path / "m.gguf", drop_keys=dropped)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--gguf", str(tmp_path / "m.gguf")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert all(key in str(ended.value.code) for key in dropped)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.gguf"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_the_table_statistics_and_its_exit_code(gguf, tmp_path, sent, code):
    stats = tmp_path / "stats.json"
    process = start(
        tmp_path, "--gguf", gguf, "--pack", tmp_path / "c.pack", "--ids", "--prompt", "3 4",
        "--max-new-tokens", 60000, "--vram", "1GiB", "--reserve", "100MiB", "--stats", stats,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "ended by: unfinished" in err
    assert "Traceback" not in err
    assert json.loads(stats.read_text())["pack_reads"] > 0


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--gguf", "missing.gguf"], "missing.gguf"),
        (["--gguf", __file__], "a model is a pack's directory; a GGUF file"),
        (["--pack", "nowhere"], "nowhere"),
        (["--gguf", "GGUF", "--prompt", "text"], "give token ids"),
        (["--gguf", "GGUF", "--ids", "--prompt", "one two"], "--ids wants token ids"),
        (["--gguf", "GGUF", "--ids", "--prompt", "3", "--vram", "lots"], "lots"),
        (["--gguf", "GGUF", "--ids", "--prompt", "3", "--vram", "20KiB"], "20"),
        (["--gguf", "GGUF", "--ids", "--prompt", "3 4 5", "--context", "3"], "context of 3"),
        (["--gguf", "GGUF", "--pack", "OTHER", "--ids", "--prompt", "3"], "another model"),
    ],
)
def test_bad_input_ends_in_one_line(gguf, monkeypatch, arguments, fact, tmp_path):
    names = {"GGUF": str(gguf), "OTHER": str(tmp_path / "other.pack")}
    if "OTHER" in arguments:
        # Another seed: the weights differ, sizes and headers do not.
        make_deepseek_v4(tmp_path / "other.gguf", tokenizer=None, seed=9)
        asyncio.run(create_pack(tmp_path / "other.gguf", tmp_path / "other.pack"))
    argv = [str(EXAMPLE), *(names.get(argument, argument) for argument in arguments)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    message = str(ended.value.code)
    assert message.startswith("error: ")
    assert fact in message
    assert "\n" not in message
