"""What this machine offers, whatever the model: kernel, io_uring, memory, huge pages, GPU."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.ringprobe import open_ring
from tieredmoe.budget import available_host_nbytes, format_size
from tieredmoe.cli.findings import Finding, note, ok, problem
from tieredmoe.errors import BackendUnavailableError, BudgetError
from tieredmoe.memory import HostPool

if TYPE_CHECKING:
    from collections.abc import Iterator

_POOL_NBYTES = 32 << 20
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PORTABLE = 1  # cudaHostRegisterPortable


def machine_findings(kernel: Kernel | None = None, *, thp: Path = _THP) -> Iterator[Finding]:
    """Everything about the machine; nothing of it depends on a path or a model."""
    kernel = kernel or Kernel()
    yield ok(
        "system",
        f"{platform.system()} {platform.release()} on {platform.machine()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}",
    )
    yield _ring(kernel)
    yield _locked_memory()
    yield _host_memory()
    yield _huge_pages(thp)
    yield from _devices()


def _ring(kernel: Kernel) -> Finding:
    try:
        ring = open_ring(kernel)
    except BackendUnavailableError as error:
        return note("io_uring", f"not available: {error.reason}", str(error))
    ring.close()
    return ok("io_uring", "available: reads cost almost no CPU")


def _locked_memory() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if resource.RLIM_INFINITY in {soft, hard}:
        return ok("locked memory", "unlimited")
    fact = f"{format_size(soft)} now, {format_size(hard)} at most"
    return ok("locked memory", f"{fact}; nothing here needs more on Linux 5.12 or later")


def _host_memory() -> Finding:
    try:
        return ok("host memory", f"{format_size(available_host_nbytes())} can be taken now")
    except BudgetError as error:
        return problem("host memory", str(error))


def _huge_pages(thp: Path) -> Finding:
    subject = "huge pages"
    advice = (
        "reads into small pages take up to twice as long and five times the CPU: as root run "
        f"`echo madvise > {_THP}`"
    )
    try:
        setting = thp.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        setting = ""
    try:
        pool = HostPool.allocate(_POOL_NBYTES)
    except BudgetError as error:
        return problem(subject, str(error))
    share = pool.huge_share
    pool.close()
    if share is None:
        return note(subject, f"the kernel does not say whether it gives them (set to {setting!r})")
    fact = f"{share:.0%} of a pool of {format_size(_POOL_NBYTES)} is in them"
    if share < 1:
        return note(subject, f"{fact}; the setting is {setting!r}", advice)
    return ok(subject, fact)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield note(
            "GPU", "none that torch can use; the expert cache is in host memory, models run on CPU"
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield ok(f"GPU {index}", f"{name}, {format_size(free)} of {format_size(total)} free")
    yield _pinned_memory()


def _pinned_memory() -> Finding:
    pool = HostPool.allocate(_POOL_NBYTES)
    runtime = torch.cuda.cudart()
    try:
        code = int(runtime.cudaHostRegister(pool.address, pool.nbytes, _PORTABLE))
        if code == 0:
            runtime.cudaHostUnregister(pool.address)
    finally:
        pool.close()
    if code:
        return note(
            "pinned memory",
            f"the driver refused to pin {format_size(_POOL_NBYTES)} (error {code})",
            "copies to the GPU will be slower; WSL and containers limit it: see their settings",
        )
    return ok("pinned memory", "host pools can be pinned for the GPU")
