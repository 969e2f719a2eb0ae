"""`tieredmoe doctor` on a machine with a GPU: its name, its memory and what its link does."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from tieredmoe.cli.findings import Level  # noqa: E402 (it needs torch)
from tieredmoe.cli.machine_checks import machine_findings  # noqa: E402
from tieredmoe.errors import DeviceError  # noqa: E402
from tieredmoe.memory.cuda_driver import Driver  # noqa: E402


def link():
    return next(f for f in machine_findings() if f.subject == "link to GPU 0")


def test_each_gpu_is_named_and_its_link_measured(cuda):
    found = {finding.subject: finding for finding in machine_findings()}
    assert torch.cuda.get_device_name(0) in found["GPU 0"].fact
    assert found["link to GPU 0"].level is Level.OK
    assert "GB/s from pinned memory" in found["link to GPU 0"].fact


def test_memory_that_cannot_be_pinned_is_a_note_with_the_rate_it_has(cuda, monkeypatch):
    call = Driver.__call__

    def refuse(self, name, *arguments):
        if name == "cuMemHostRegister_v2":
            raise DeviceError(name, 304, "CUDA_ERROR_OPERATING_SYSTEM")
        return call(self, name, *arguments)

    monkeypatch.setattr(Driver, "__call__", refuse)
    found = link()
    assert found.level is Level.NOTE
    assert "could not be pinned" in found.fact


def test_a_link_that_cannot_be_measured_says_why(cuda, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty_like", fail)
    found = link()
    assert found.level is Level.NOTE
    assert "not measured: CUDA error: out of memory" in found.fact
