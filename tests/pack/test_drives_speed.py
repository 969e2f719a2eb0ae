"""A drive's speed is measured by reading, and nothing is left of the measurement."""

import asyncio
import errno

import pytest
from pack_faults import failing, hook

from tieredmoe.errors import PackError, ReadError
from tieredmoe.pack import drive_speed
from tieredmoe.pack.drive_speed import measure_drive
from tieredmoe.testing import Fault, FaultPlan, SimDisk, sim_run

BLOCK = 1 << 16


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(drive_speed, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(drive_speed, "MEASURED_S", 0.01)


def measure(path, **options):
    return asyncio.run(measure_drive(path, backend="buffered", sample_nbytes=8 * BLOCK, **options))


def test_a_directory_is_measured_and_left_empty(tmp_path):
    assert measure(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_measured_and_left_as_it_is(tmp_path):
    (tmp_path / "x").write_bytes(b"x" * 3 * BLOCK)
    assert measure(tmp_path / "x") > 0
    assert (tmp_path / "x").read_bytes() == b"x" * 3 * BLOCK


@pytest.mark.parametrize("n_blocks", [1, 3, 64])
def test_the_rate_is_that_of_the_drive(tmp_path, monkeypatch, n_blocks):
    path = tmp_path / "x"
    path.write_bytes(bytes(n_blocks * BLOCK))
    disk = {"nbytes_per_s": 1e9, "latency_s": 0.0, "jitter": 0.0}

    def open_backend(name, files):
        assert name == "auto"
        return SimDisk([file.read_bytes() for file in files], **disk)

    monkeypatch.setattr(drive_speed, "open_backend", open_backend)
    assert sim_run(measure_drive(path)) == pytest.approx(1e9, rel=0.01)


def test_a_file_too_small_to_measure_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(PackError, match="is too small to measure its drive; 65,536 bytes would do"):
        measure(tmp_path / "x")


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(PackError, match="gone: its speed cannot be measured: No such file"):
        measure(tmp_path / "gone")


def test_a_full_drive_is_named_and_left_empty(tmp_path, monkeypatch):
    hook(monkeypatch, "fsync", failing(errno.ENOSPC))
    with pytest.raises(PackError, match=f"{tmp_path}: its speed cannot be measured: No space left"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_cannot_be_read_is_an_error_and_left_empty(tmp_path, monkeypatch):
    def open_backend(_, files):
        faults = FaultPlan().at(0, 2 * BLOCK, Fault(errno=errno.EIO))
        return SimDisk([file.read_bytes() for file in files], paths=files, faults=faults)

    monkeypatch.setattr(drive_speed, "open_backend", open_backend)
    with pytest.raises(ReadError, match="EIO"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cancelling_leaves_nothing(tmp_path, monkeypatch):
    async def main():
        started, loop = asyncio.Event(), asyncio.get_running_loop()
        hook(monkeypatch, "urandom", lambda: loop.call_soon_threadsafe(started.set), at=2)
        task = asyncio.create_task(measure_drive(tmp_path, backend="buffered"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
