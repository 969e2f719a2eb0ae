"""What this machine offers, whatever the model: kernel, io_uring, memory, huge pages, GPU."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.ringprobe import open_ring
from tieredmoe.budget import available_host_nbytes, format_size
from tieredmoe.cli.findings import Finding, note, ok, problem
from tieredmoe.errors import BackendUnavailableError, BudgetError, DeviceError
from tieredmoe.memory import HostPool
from tieredmoe.memory.pinning import PinnedHost

if TYPE_CHECKING:
    from collections.abc import Iterator

_POOL_NBYTES = 32 << 20
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_N_COPIES = 16


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
        yield _link(torch.device("cuda", index))


def _link(device: torch.device) -> Finding:
    """How fast experts can get onto the GPU from memory, and whether that memory can be pinned."""
    subject = f"link to GPU {device.index}"
    pool = HostPool.allocate(_POOL_NBYTES)
    try:
        with PinnedHost.register(pool, device=device) as pinned:
            gb_per_s = _copy_rate(pool, device)
            refused = pinned.refused
    except (DeviceError, RuntimeError) as error:  # torch's errors of a device are the latter
        return note(subject, f"not measured: {error}")
    finally:
        pool.close()
    if refused is not None:
        return note(
            subject,
            f"{gb_per_s:.1f} GB/s, from memory that could not be pinned ({refused})",
            "pinned memory is copied up to twice as fast; WSL and containers limit it",
        )
    return ok(subject, f"{gb_per_s:.1f} GB/s from pinned memory")


def _copy_rate(pool: HostPool, device: torch.device) -> float:
    region = pool.carve(pool.nbytes)
    source = torch.frombuffer(region.view, dtype=torch.uint8)
    target = torch.empty_like(source, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_N_COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return _N_COPIES * region.nbytes / (time.perf_counter() - begin) / 1e9
