"""The device of kernel tests: CUDA, or the CPU under Triton's interpreter."""

import pytest


@pytest.fixture
def device():
    triton = pytest.importorskip("triton", reason="kernels are written in Triton")
    torch = pytest.importorskip("torch")
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
    return torch.device("cuda")


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    return device
