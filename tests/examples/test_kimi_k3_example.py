"""The example as people run it; what it shares with the others is tested there."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

EXAMPLE = Path(__file__).parents[2] / "examples" / "kimi_k3.py"
SHAPE = KimiK3Shape(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    kda_head_dim=32,
    intermediate_size=64,
    num_experts=4,
    num_experts_per_token=2,
    routed_expert_hidden_size=32,
    moe_intermediate_size=32,
)


def make(folder, **settings):
    types = KimiK3Types.uniform(Q.F32)
    made = make_kimi_k3(folder / "k3.gguf", shape=SHAPE, types=types, n_shards=3, **settings)
    return made.paths


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def failure(monkeypatch, *arguments):
    """The one line in which it ends."""
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    message = str(ended.value.code)
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a run without arguments in a process of its own, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return folder, done


def test_without_arguments_it_makes_three_shards_packs_and_generates(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    shards = [f"kimi-k3-demo-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    made = sorted(path.name for path in (folder / "models").iterdir())
    assert made == [*shards, "kimi-k3-demo.pack"]
    assert done.stdout.strip()
    assert "made a small random Kimi-K3 in 3 shards" in done.stderr
    assert "cache: 8 slots" in done.stderr
    for word in ("prefill", "decode", "hit rate", "GB read per token", "ended by: max_new_tokens"):
        assert word in done.stderr


def test_a_second_run_uses_the_pack_that_is_there_and_says_the_same(demo, monkeypatch, capsys):
    folder, first = demo
    monkeypatch.chdir(folder)
    run(monkeypatch, "--max-new-tokens", 6)
    again = capsys.readouterr()
    assert len(again.out.strip()) > 3
    assert first.stdout.startswith(again.out.rstrip("\n\ufffd"))
    assert "packed" not in again.err


def test_what_it_tells_has_no_empty_lines(demo):
    lines = demo[1].stderr.splitlines()
    # One line more where io_uring cannot be had.
    told = "64 routed experts of 72 KiB in 4 layers, top-4; cache: 8 slots, 576 KiB"
    assert any(told in line for line in lines)
    assert all(line.strip() for line in lines)


def test_a_pack_that_is_there_wants_no_more_memory_than_its_own_slots(demo, monkeypatch, capsys):
    """In place, a slot is larger than in the pack; beside a pack, the GGUF is not run."""
    monkeypatch.chdir(demo[0])
    run(monkeypatch, "--max-new-tokens", 1, "--vram", "288KiB")
    assert "cache: 4 slots, 288 KiB" in capsys.readouterr().err


def test_any_shard_runs_as_it_is_and_packed_alike(tmp_path, monkeypatch, capsys):
    paths = make(tmp_path, tokenizer=None)
    size = ["--vram", "50%", "--reserve", "100MiB"]
    asked = ["--ids", "--prompt", "3 4 5", "--max-new-tokens", 3, *size]
    run(monkeypatch, "--gguf", paths[2], *asked)
    in_place = capsys.readouterr().out
    assert len([int(word) for word in in_place.split()]) == 3
    assert sorted(tmp_path.iterdir()) == list(paths)
    pack = tmp_path / "k3.pack"
    run(monkeypatch, "--gguf", paths[1], "--pack", pack, *asked)
    assert capsys.readouterr().out == in_place
    assert (pack / "manifest.json").is_file()


def test_the_help_says_how_much_memory_the_real_model_wants(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "dense weights take 23.9 GB" in told
    assert "less than 40 GB some of its layers stream from host memory" in told
    assert "expert cache (default: 5GiB)" in told


def test_what_keeps_a_model_from_running_is_found_before_it_is_packed(tmp_path, monkeypatch):
    key, tensor = "kimi-k3.attn_res.block_size", "blk.2.ffn_routed_norm.weight"
    for fact, dropped in ((key, {"drop_keys": [key]}), (tensor, {"drop_tensors": [tensor]})):
        folder = tmp_path / fact
        folder.mkdir()
        paths = make(folder, **dropped)
        assert fact in failure(monkeypatch, "--gguf", paths[0])
        assert sorted(folder.iterdir()) == list(paths)


def test_a_shard_that_is_missing_or_of_another_set_is_named(tmp_path, monkeypatch):
    paths = make(tmp_path)
    shutil.copy(paths[0], paths[1])
    paths[2].unlink()
    message = failure(monkeypatch, "--gguf", paths[0])
    assert f"1 of 3 shards missing: {paths[2].name}" in message
    assert f"{paths[1].name}: split.no is 0, but this is shard 1 of 3" in message
    assert sorted(tmp_path.iterdir()) == list(paths[:2])
