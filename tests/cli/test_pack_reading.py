"""`tieredmoe pack inspect`, `plan` and `check`: what people read, and what scripts rely on."""

import json

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from typer.testing import CliRunner

from tieredmoe.cli import main
from tieredmoe.cli.app import app
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

MACHINE = ("--vram", "2GiB", "--ram", "4GiB", "--disk-gbps", "12", "--reserve", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Kimi-K3 of four routed layers in three shards."""
    folder = tmp_path_factory.mktemp("reading")
    shape = KimiK3Shape(
        num_hidden_layers=5, vocab_size=300, num_experts=16, num_experts_per_token=4
    )
    make_kimi_k3(folder / "m.gguf", shape=shape, types=KimiK3Types.uniform(Q.Q8_0), n_shards=3)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["pack", *map(str, arguments)])


def fields(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_inspect_is_a_line_per_fact(folder):
    lines = run("inspect", folder).stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["model", "kimi-k3 (tiny Kimi-K3), 5 layers"]
    rows = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines}
    assert rows["routed"] == "4 layers (1-4) of 16 experts, top-4"
    assert rows["token"].startswith("16 experts, ")
    assert rows["form"].endswith(" in 3 files, run in place")
    assert "slots per GiB" in rows["slot"]
    assert rows["layers 1-4"].startswith("gate Q8_0, up Q8_0, down Q8_0; gate 256×256")
    assert rows["digests"].startswith("none")
    assert "to run it" not in rows


def test_inspect_names_types_that_are_slow_or_cannot_be_run(tmp_path):
    def stored(role, ggml_type):
        n_block, nbytes = GGML_QUANT_SIZES[ggml_type]
        data = np.zeros((2, 256, 256 // n_block * nbytes), np.uint8)
        return StoredTensor(f"blk.0.ffn_{role}_exps.weight", data, ggml_type)

    keys = {"block_count": 1, "expert_count": 2, "expert_used_count": 1}
    path = write_shards(
        tmp_path / "m.gguf",
        architecture="llama",
        metadata={f"llama.{key}": value for key, value in keys.items()},
        shards=[[stored("gate", Q.IQ2_XXS), stored("up", Q.I8), stored("down", Q.Q8_0)]],
    )[0]
    out = run("inspect", path).stdout
    assert "gate IQ2_XXS, up I8, down Q8_0" in out
    running = [line.split(maxsplit=3)[3] for line in out.splitlines() if "to run it" in line]
    assert "architecture 'llama' is not supported" in running[0]
    assert "experts of type IQ2_XXS are unpacked by the host, slowly" in running[1]
    assert "weights of type I8 cannot be dequantised" in running[2]


def test_the_keys_of_inspect_stay(folder):
    found = fields(run("inspect", folder, "--json"))
    assert set(found) == {
        "path", "form", "architecture", "name", "n_layers", "n_experts", "top_k", "routed_layers",
        "layers", "files", "drives", "experts_nbytes", "dense_nbytes", "types_nbytes",
        "token_nbytes", "token_experts", "slot_nbytes", "slots_per_gib", "read_nbytes",
        "padding_share", "digests", "source_digest", "config_digest", "unusual", "left_out",
        "running",
    }  # fmt: skip
    (layers,) = found["layers"]
    assert set(layers) == {"layers", "roles", "payload_nbytes", "stride_nbytes"}
    assert set(layers["roles"][0]) == {"name", "type", "rows", "columns", "nbytes"}
    assert set(found["files"][0]) == {"path", "nbytes", "alignment"}
    assert found["running"] == []


def test_plan_shows_memory_ceiling_costs_and_the_narrowest_way(folder):
    result = run("plan", folder, *MACHINE)
    assert result.exit_code == 0
    out = result.stdout
    for fact in (
        "memory of the GPU: 2 GiB free",
        "a token uses 16 of 64 experts (W)",
        "64 slots in VRAM are 100.0% of all experts and 4.00 W",
        "12 GB/s",
        "best possible: ",
        "bound by the memory",
    ):
        assert fact in out
    assert "\x1b" not in out


def test_the_keys_of_plan_stay(folder):
    found = fields(run("plan", folder, *MACHINE, "--json"))
    assert set(found) == {
        "path", "architecture", "token_experts", "token_bytes", "n_experts", "slot_nbytes",
        "top_slots", "host_slots", "top_ceiling", "ceiling", "rates", "costs", "costs_with_host",
        "best", "memory",
    }  # fmt: skip
    assert set(found["best"]) == {
        "top_hits", "host_hits", "disk_nbytes", "link_nbytes", "memory_nbytes", "disk_s", "link_s",
        "memory_s", "tokens_per_s", "bound",
    }  # fmt: skip
    assert found["costs"][-1] == found["best"]
    assert set(found["memory"]) == {"shares", "host_shares", "reserve_nbytes", "streamed_layers"}
    assert found["rates"] == {"disk": 12e9, "link": 25e9, "memory": 1e12}


def test_plan_says_what_more_memory_or_another_drive_would_change(folder):
    """A GPU whose cache is below the token cycle, and a host with nothing to spare."""
    found = fields(run("plan", folder, *MACHINE, "--json"))
    memory = found["memory"]
    fixed = sum(memory["shares"].values()) - memory["shares"]["expert cache"]
    vram = fixed + 8 * found["slot_nbytes"]
    ram = sum(memory["host_shares"].values())
    machine = ("--vram", vram, "--ram", ram, "--disk-gbps", 1, "--reserve", 0)
    out = run("plan", folder, *machine).stdout
    assert "8 slots in VRAM are 12.5% of all experts and 0.50 W: no policy hits more than 50" in out
    assert "max 50.0%" in out
    assert "bound by the SSD" in out
    assert "find no slot whatever the policy" in out
    assert "a second drive would halve their time" in out
    assert "with RAM" not in out
    link = (*machine[:4], "--disk-gbps", 1000, "--link-gbps", 0.01, "--reserve", 0)
    assert "cross to the GPU for every token" in run("plan", folder, *link).stdout


def test_plan_without_a_gpu_is_of_the_host(folder):
    out = run("plan", folder, "--ram", "4GiB", "--disk-gbps", 3, "--reserve", 0).stdout
    assert "memory of the host" in out
    assert "64 slots on the host" in out
    assert "link" not in out


@pytest.mark.parametrize("options", [(), ("--ram", "1GiB"), ("--ram", "1GiB", "--disk-gbps", 0)])
def test_plan_without_its_numbers_is_wrong_usage(folder, options):
    assert run("plan", folder, *options).exit_code == 2


def test_a_machine_that_is_too_small_is_one_line_and_1(folder, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["pack", "plan", str(folder), "--vram", "1MiB", "--ram", "4GiB", "--disk-gbps", "1"])
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the expert cache would have 0 slots and one layer needs 4" in line


def test_check_of_a_sound_source_says_what_it_takes(folder, tmp_path):
    result = run("check", folder, tmp_path / "pack")
    assert result.exit_code == 0
    assert " in 3 files become a pack that takes " in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_check_lists_every_problem_on_a_line_and_exits_with_1(folder, tmp_path):
    (tmp_path / "pack").mkdir()
    result = run("check", folder, tmp_path / "pack", "--safety-margin-gib", "9e9")
    assert result.exit_code == 1
    first, second, _ = result.stdout.splitlines()
    assert "already exists" in first
    assert "of margin, but" in second
    assert "2 problems" in result.stderr


def test_the_keys_of_check_stay(folder, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"nothing")
    found = fields(run("check", folder, tmp_path / "pack", "--json", "--reclaim-source"))
    assert set(found) == {
        "dest", "ready", "source_problems", "dest_problems", "notes", "needed_nbytes",
        "free_nbytes",
    }  # fmt: skip
    assert found["ready"] is True
    result = run("check", tmp_path / "m.gguf", tmp_path / "pack", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ready"] is False
    assert "is not a GGUF file" in found["source_problems"][0]
    assert found["needed_nbytes"] is None
