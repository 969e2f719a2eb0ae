"""`tieredmoe doctor`: what is wrong is named with its way out, and nothing else is called wrong."""

import asyncio
import errno
import json
import os

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
from tieredmoe.memory import HostPool
from tieredmoe.pack import open_checkpoint
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
    # Staging is taken from what is free, not from the budget.
    config = attrs.evolve(CONFIG, vram=n_slots * checkpoint.spec.slot_nbytes)
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
    config = attrs.evolve(CONFIG, vram=9 * spec.slot_nbytes)
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
