"""`tieredmoe bench io`: every backend beside plain reads; no number comes from the page cache."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

from tieredmoe import ReadError
from tieredmoe.backends.kernel import Kernel
from tieredmoe.cli import main
from tieredmoe.cli.app import app
from tieredmoe.cli.io_contest import WAYS, Contest, PageCacheError, hold
from tieredmoe.cli.read_rate import Place, places
from tieredmoe.errors import DirectIOUnavailableError
from tieredmoe.pack import create_pack
from tieredmoe.testing import make_deepseek_v4

RECORD = 64 << 10


@pytest.fixture
def data(tmp_path):
    """A file of 16 records that is on the drive."""
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(16 * RECORD))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path


def contest(path, **changes):
    made = Contest(
        files=[path],
        where=places([path], RECORD),
        record_nbytes=RECORD,
        n_in_flight=4,
        n_records=8,
    )
    return attrs.evolve(made, **changes)


def held(path, *, n_rounds=2, kernel=None, **changes):
    standings = asyncio.run(hold(contest(path, **changes), n_rounds=n_rounds, kernel=kernel))
    return {standing.way: standing for standing in standings}


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "io", *map(str, arguments)])


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "io", *map(str, arguments)])
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_every_way_reads_the_same_in_every_round(data):
    standings = held(data, n_rounds=3, kernel=Kernel(find_liburing=lambda: None))
    assert tuple(standings) == WAYS
    for way in ("plain reads", "threads", "buffered"):
        assert [rate.nbytes for rate in standings[way].rates] == [8 * RECORD] * 3
        assert len(standings[way].shares) == 3
    assert standings["plain reads"].share == 1.0


def test_a_backend_that_cannot_be_had_is_absent_and_not_replaced(data):
    uring = held(data, kernel=Kernel(find_liburing=lambda: None))["uring"]
    assert (uring.absent, uring.rates) == ("no_library", ())


def test_a_share_is_of_the_same_rounds_plain_reads(data):
    standings = held(data)
    threads, plain = standings["threads"], standings["plain reads"]
    assert threads.shares == tuple(
        a.gb_per_s / b.gb_per_s for a, b in zip(threads.rates, plain.rates, strict=True)
    )


def test_what_stays_in_the_page_cache_is_not_measured(data):
    with pytest.raises(PageCacheError, match="stays in the page cache"):
        held(data, kernel=Kernel(drop_cached=lambda *_: data.read_bytes()))


def test_where_the_kernel_does_not_say_what_is_cached_nothing_is_measured(data):
    with pytest.raises(PageCacheError, match="does not say"):
        held(data, kernel=Kernel(cached_nbytes=lambda *_: None))


def test_memory_is_no_drive(data):
    with pytest.raises(PageCacheError, match="in memory"):
        held(data, kernel=Kernel(lives_in_memory=lambda _: True))


def test_without_direct_reads_there_is_no_ceiling(data):
    with pytest.raises(DirectIOUnavailableError):
        held(data, kernel=Kernel(direct_alignment=lambda _: 0))


def test_a_failing_read_is_an_error_not_a_number(data):
    def preadv(fd, targets, offset):
        if offset:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, targets, offset)

    with pytest.raises(ReadError):
        held(data, kernel=Kernel(preadv=preadv), where=[Place(0, RECORD)])


def test_the_command_reports_all_of_it_as_json(data):
    result = bench(data, "--record", RECORD, "--turn", "512KiB", "--rounds", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["record_bytes"], report["in_flight"], report["records_per_turn"]) == (
        RECORD,
        8,
        8,
    )
    assert list(report["backends"]) == list(WAYS)
    assert len(report["backends"]["threads"]["gb_per_s"]) == 2


def test_no_record_is_read_twice_in_a_turn_for_the_cache_would_have_it(data):
    result = bench(data, "--record", RECORD, "--turn", "1GiB", "--rounds", 1, "--json")
    assert json.loads(result.stdout)["records_per_turn"] == 16


def test_the_command_shows_a_row_for_each(data):
    result = bench(data, "--record", RECORD, "--turn", "512KiB", "--rounds", 1)
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert rows[-4:] == list(WAYS)


def test_in_a_folder_a_file_is_made_and_removed(tmp_path):
    result = bench(tmp_path, "--record", RECORD, "--make", "2MiB", "--turn", "1MiB", "--rounds", 1)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_measured_at_its_own_record_size(tmp_path):
    path = make_deepseek_v4(tmp_path / "tiny.gguf", seed=1).paths[0]
    os.sync()
    result = bench(path, "--turn", "64KiB", "--rounds", 1, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["record_bytes"] == 36864  # 3 envelopes of whole pages


def test_a_file_too_small_is_refused_with_the_way_out(capsys, data):
    line = fails(capsys, data, "--record", "1MiB")
    assert "has 1 records of 1 MiB" in line
    assert "--record" in line


def test_a_damaged_pack_is_refused_and_nothing_is_made_in_it(capsys, tmp_path):
    model = make_deepseek_v4(tmp_path / "tiny.gguf", seed=1)
    asyncio.run(create_pack(model.paths[0], tmp_path / "pack"))
    (tmp_path / "pack" / "manifest.json").write_bytes(b"{}")
    assert "first line is damaged" in fails(capsys, tmp_path / "pack", "--make", "1MiB")


def test_a_file_that_cannot_be_opened_is_one_line(capsys, data, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in fails(capsys, data)


def test_a_failing_read_of_a_file_made_in_a_folder_is_told_as_such(capsys, tmp_path, monkeypatch):
    async def hold(contest, *, n_rounds):
        raise ReadError(path=contest.files[0], offset=0, nbytes=1, errno=5, fact="it broke")

    monkeypatch.setattr("tieredmoe.cli.bench.hold", hold)
    line = fails(capsys, tmp_path, "--make", "1MiB", "--record", RECORD)
    assert "it broke" in line
    assert "cannot be made" not in line


@pytest.mark.parametrize("option", ["--record", "--turn", "--make"])
def test_a_wrong_size_is_refused_before_a_file_is_made(capsys, tmp_path, monkeypatch, option):
    def refuse(*args, **kwargs):
        pytest.fail("a file was made")

    monkeypatch.setattr("tieredmoe.cli.bench.tempfile.NamedTemporaryFile", refuse)
    assert "'many' is not a size" in fails(capsys, tmp_path, option, "many")


def test_memory_is_not_filled_to_be_refused(capsys, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr("os.urandom", lambda _: pytest.fail("it was written to"))
        assert "is in memory, not on a drive" in fails(capsys, folder, "--make", "1MiB")


def test_a_failing_plain_read_names_its_place(data, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(data.read_bytes())

    def preadv(fd, targets, offset):
        if offset:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, targets, offset)

    kernel = Kernel(preadv=preadv, cached_nbytes=lambda *_: 0)
    with pytest.raises(ReadError) as error:
        held(data, kernel=kernel, files=[data, other], where=[Place(1, RECORD)])
    assert (error.value.path, error.value.offset) == (other, RECORD)


def test_a_path_that_is_nothing_is_refused(capsys, tmp_path):
    assert "does not exist" in fails(capsys, tmp_path / "nothing")


def test_a_folder_that_takes_no_file_is_refused(capsys):
    assert "cannot be made there" in fails(capsys, Path("/proc/self"), "--make", "1MiB")
