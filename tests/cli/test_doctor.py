"""`tieredmoe doctor`: what is wrong is named with its way out, and nothing else is called wrong."""

import asyncio
import errno
import io
import json
import os
import shutil
import sys

import attrs
import pytest
from typer.testing import CliRunner

from tieredmoe import HierarchyConfig, ReadError
from tieredmoe.backends import open_backend
from tieredmoe.backends.kernel import Kernel
from tieredmoe.cli import main
from tieredmoe.cli.app import app
from tieredmoe.cli.doctor import findings
from tieredmoe.cli.findings import Level
from tieredmoe.cli.machine_checks import machine_findings
from tieredmoe.cli.model_checks import model_findings
from tieredmoe.cli.read_rate import Place, ReadRate, measure, places
from tieredmoe.cli.storage_checks import storage_findings
from tieredmoe.errors import BudgetError
from tieredmoe.memory import HostPool
from tieredmoe.pack import create_pack, mirror_pack, open_checkpoint
from tieredmoe.testing import make_deepseek_v4

CONFIG = HierarchyConfig(vram="1GiB", reserve="1MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """6 routed layers, 8 experts, top-3: a token uses 18 of 48."""
    return make_deepseek_v4(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1).paths[0]


def by_subject(found):
    return {finding.subject: finding for finding in found}


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_sound_model_has_no_problem(model):
    result = doctor(model, "--vram", "1GiB", "--reserve", "1MiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {f["level"] for f in found} <= {"ok", "note"}
    subjects = [f["subject"] for f in found]
    assert subjects[-6:] == [
        "model",
        "support",
        "tokenizer",
        "dense weights",
        "expert cache",
        "best speed",
    ]


def test_a_folder_without_a_model_is_told_what_its_disk_does(tmp_path):
    found = by_subject(findings(tmp_path, CONFIG))
    assert found[f"reads from {tmp_path}"].level is Level.OK
    assert f"free space at {tmp_path}" in found
    assert "model" not in found
    assert list(tmp_path.iterdir()) == []


def test_a_budget_too_small_is_a_problem_and_exit_code_1(model):
    result = doctor(model, "--vram", "1KiB")
    assert result.exit_code == 1
    assert "problem" in result.stdout
    assert "one layer needs 3" in " ".join(result.stdout.split())


def test_a_path_that_is_nothing_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", str(tmp_path / "nothing")])
    assert exit_.value.code == 1
    assert capsys.readouterr().err == f"tieredmoe: {tmp_path / 'nothing'}: does not exist\n"


def test_a_damaged_model_is_its_own_error(capsys, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(SystemExit):
        main(["doctor", str(tmp_path / "broken.gguf")])
    assert "broken.gguf" in capsys.readouterr().err


def test_a_damaged_pack_is_not_taken_for_an_ordinary_folder(capsys, model, tmp_path):
    asyncio.run(create_pack(model, tmp_path / "pack"))
    os.truncate(tmp_path / "pack" / "experts-00000.bin", 4096)
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", str(tmp_path / "pack")])
    assert exit_.value.code == 1
    assert "experts-00000.bin has 4,096 bytes instead of" in capsys.readouterr().err


def test_every_copy_of_a_mirror_is_looked_at_and_a_missing_one_is_noted(model, tmp_path):
    asyncio.run(create_pack(model, tmp_path / "pack"))
    for name in ("b", "c"):
        asyncio.run(mirror_pack(tmp_path / "pack", tmp_path / name))
    shutil.rmtree(tmp_path / "c")
    found = by_subject(findings(tmp_path / "pack", CONFIG))
    assert {f"reads from {tmp_path / name}" for name in ("pack", "b")} <= found.keys()
    assert found["copies"].level is Level.NOTE
    assert str(tmp_path / "c") in found["copies"].fact


def test_what_keeps_the_speed_from_being_measured_does_not_end_the_diagnosis(model, monkeypatch):
    def refuse(nbytes):
        raise BudgetError(f"no {nbytes} bytes of memory here")

    monkeypatch.setattr("tieredmoe.cli.doctor.HostPool.allocate", refuse)
    monkeypatch.setattr("tieredmoe.cli.machine_checks.machine_findings", lambda: iter(()))
    found = by_subject(findings(model, CONFIG))
    assert found["read speed"].level is Level.NOTE
    assert "bytes of memory here" in found["read speed"].advice
    assert "expert cache" in found


@pytest.mark.parametrize("name", ["a[red]b[madvise]", "a:fire:b"])
def test_a_path_is_shown_as_it_is(model, tmp_path, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / name).mkdir()
    result = doctor(shutil.copy(model, tmp_path / name), "--reserve", "1MiB")
    assert f"free space at {tmp_path / name} " in result.stdout


def test_a_terminal_without_arrows_gets_their_numbers(model, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit):
        main(["doctor", str(model), "--vram", "200KiB", "--reserve", "1MiB"])
    stdout.flush()
    assert b"\\u2192" in stdout.buffer.getvalue()


def test_a_long_path_hides_no_fact_on_a_narrow_terminal(model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    long = tmp_path / ("a-long-name-" * 8)
    long.mkdir()
    result = doctor(shutil.copy(model, long), "--reserve", "1MiB")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert "…" not in result.stdout
    assert "can be taken now" in " ".join(result.stdout.split())


def test_an_unsupported_architecture_is_a_problem(tmp_path):
    metadata = {
        "general.architecture": "mystery",
        "mystery.block_count": 6,
        "mystery.expert_count": 8,
        "mystery.expert_used_count": 3,
    }
    path = make_deepseek_v4(tmp_path / "m.gguf", seed=1, metadata=metadata).paths[0]
    support = by_subject(findings(path, CONFIG))["support"]
    assert support.level is Level.PROBLEM
    assert "mystery" in support.fact


def test_what_keeps_io_uring_away_is_said_with_its_hint():
    def refuse(_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    kernel = Kernel(make_ring=refuse, io_uring_disabled=lambda: 2)
    ring = by_subject(machine_findings(kernel))["io_uring"]
    assert ring.level is Level.NOTE
    assert "eperm_sysctl" in ring.fact
    assert "sysctl" in ring.advice


def test_huge_pages_that_are_not_given_are_noted(monkeypatch, tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    allocate = HostPool.allocate

    def without_huge_pages(nbytes):
        pool = allocate(nbytes)
        pool.huge_share = 0.0
        return pool

    monkeypatch.setattr(HostPool, "allocate", without_huge_pages)
    pages = by_subject(machine_findings(thp=setting))["huge pages"]
    assert pages.level is Level.NOTE
    assert "'never'" in pages.fact
    assert "echo madvise" in pages.advice


def test_reads_through_the_page_cache_are_a_problem(model):
    kernel = Kernel(direct_alignment=lambda _: 0)
    reads = by_subject(storage_findings(model.parent, [model], kernel))[
        f"reads from {model.parent}"
    ]
    assert reads.level is Level.PROBLEM
    assert "unsupported" in reads.fact


def test_a_folder_that_takes_no_file_is_noted(tmp_path):
    missing = tmp_path / "gone"
    missing.mkdir()
    found = storage_findings(missing, ())
    missing.rmdir()
    assert next(found).level is Level.NOTE


@pytest.mark.parametrize(
    ("n_slots", "share"),
    [(17, "no more than 94%"), (18, None), (47, None), (48, "nothing is read")],
)
def test_the_cache_is_judged_by_the_token_cycle(model, n_slots, share):
    checkpoint = open_checkpoint(model)
    config = attrs.evolve(CONFIG, vram=n_slots * checkpoint.slot_nbytes)
    cache = by_subject(model_findings(checkpoint, config, None))["expert cache"]
    assert f"{n_slots} slots" in cache.fact
    assert "a token uses 18" in cache.fact
    assert (cache.level is Level.NOTE) == (n_slots < 18)
    assert share is None or share in cache.fact


def test_the_best_speed_is_the_disks_rate_over_what_a_token_misses(model):
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec
    token_nbytes = 3 * sum(layout.payload_nbytes for layout in spec.layouts.values())
    rate = ReadRate(nbytes=10 * token_nbytes, wall_s=1.0, cpu_s=0.1)
    config = attrs.evolve(CONFIG, vram=9 * checkpoint.slot_nbytes)
    speed = by_subject(model_findings(checkpoint, config, rate))["best speed"]
    assert "10 tok/s at 0% hits, 13.3 tok/s at 25% hits, 20 tok/s at 50% hits" in speed.fact
    assert "75%" not in speed.fact  # 9 of 18 slots cannot give that


# -- the measurement -------------------------------------------------------------------------------


def measured(path, where, *, n_records=5, n_in_flight=3):
    async def main():
        backend = open_backend("threads", [path])
        try:
            pool = HostPool.allocate(n_in_flight * 4096)
            rate = await measure(
                backend,
                where,
                pool,
                record_nbytes=4096,
                n_in_flight=n_in_flight,
                n_records=n_records,
            )
            assert backend.stats().in_flight == 0
            return rate, backend.stats()
        finally:
            await backend.close()

    return asyncio.run(main())


@pytest.mark.parametrize("n_records", [1, 5, 40])
def test_so_many_records_are_read_as_were_asked_for(tmp_path, n_records):
    path = tmp_path / "data"
    path.write_bytes(bytes(7 * 4096 + 100))
    where = places([path], 4096)
    assert sorted(where) == [Place(0, i * 4096) for i in range(7)]
    rate, stats = measured(path, where, n_records=n_records)
    assert rate.nbytes == n_records * 4096
    assert stats.reads == n_records
    assert rate.wall_s > 0


def test_a_failing_read_ends_the_measurement_in_its_own_error(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    with pytest.raises(ReadError):
        measured(path, [Place(0, 0), Place(0, 1 << 20)])
