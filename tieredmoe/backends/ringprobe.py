"""Opens a ring and proves it by one read, or says by name what is in the way and what would help.

The same refusal means different things: EPERM comes from a container's filter or from a setting,
ENOSYS from an old kernel or from a sandbox. So each reason has its own hint, and what tells them
apart is looked up at the moment of the refusal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from typing import TYPE_CHECKING

from tieredmoe.errors import BackendUnavailableError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from tieredmoe.backends.datafile import DataFile
    from tieredmoe.backends.kernel import Kernel
    from tieredmoe.backends.ring import Ring

LIBURING = "liburing==2026.3.30"
_FIRST_RELEASE = (5, 6)  # of the read operation
_THREADS_WILL_DO = "the backend 'threads' reads as fast, for more CPU time"
_PROBE_TAG = 1


def open_ring(kernel: Kernel) -> Ring:
    """A ring with its eventfd. Raises ``BackendUnavailableError`` with reason and way out."""
    system, machine = kernel.system_and_machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise _unavailable(
            "no_wheel_arch",
            f"liburing is built for Linux on x86_64, and this is {system} on {machine}; "
            f"{_THREADS_WILL_DO}",
        )
    library = kernel.find_liburing()
    if library is None:
        raise _unavailable(
            "no_library", f"liburing is not installed; run: pip install {LIBURING!r}"
        )
    try:
        return kernel.make_ring(library)
    except AttributeError as error:
        fact = f"{library} lacks a function ({error}); run: pip install {LIBURING!r}"
        raise _unavailable("no_library", fact) from error
    except OSError as error:
        if error.errno is None:  # the dynamic linker speaks no errno
            fact = f"{library} cannot be loaded ({error}); run: pip install {LIBURING!r}"
            raise _unavailable("no_library", fact) from error
        raise _refused(error.errno, kernel) from error


def prove_ring(ring: Ring, file: DataFile, kernel: Kernel) -> None:
    """Return if a read through ``ring`` gives the same bytes as a plain read of ``file``.

    Blocks for two small reads. Raises ``BackendUnavailableError``.
    """
    with mmap.mmap(-1, PAGE_NBYTES) as memory, mmap.mmap(-1, PAGE_NBYTES) as expected:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ring.prep_read(file.fd, address=address, nbytes=PAGE_NBYTES, offset=0, tag=_PROBE_TAG)
        try:
            ring.submit_and_wait()
        except OSError as error:
            ring.retract()
            raise _refused(error.errno or errno.EIO, kernel) from error
        ((_, count),) = ring.reap()
        ring.clear_event()
        if count < 0:
            name, text = _named(-count)
            fact = f"a read through the ring failed ({text}); {_THREADS_WILL_DO}"
            raise _unavailable(f"probe_{name}", fact)
        try:
            n_expected = _plainly_read(file, expected, kernel)
        except OSError as error:
            raise _refused(error.errno or errno.EIO, kernel) from error
        if count != n_expected or memory[:count] != expected[:count]:
            raise _unavailable(
                "probe_mismatch",
                f"{file.path}: a read through the ring gave other bytes than a plain read; do not "
                "trust io_uring on this file system, and report it",
            )


def _plainly_read(file: DataFile, target: mmap.mmap, kernel: Kernel) -> int:
    fd = kernel.open(file.path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # one page, without read-ahead
        with memoryview(target) as view:
            return kernel.preadv(fd, [view], 0)
    finally:
        os.close(fd)


def _refused(code: int, kernel: Kernel) -> BackendUnavailableError:
    if code in {errno.EPERM, errno.EACCES}:
        return _forbidden(kernel.io_uring_disabled())
    if code == errno.ENOSYS:
        return _unavailable("enosys", _absent(kernel.release()))
    if code == errno.ENOMEM:
        soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
        return _unavailable(
            "enomem",
            "the kernel had no memory for the ring; kernels before 5.12 take it from the locked "
            f"memory that a process may have (now {soft}, at most {hard}): raise it with "
            "`ulimit -l`, LimitMEMLOCK= or --ulimit memlock=-1",
        )
    name, text = _named(code)
    if code in {errno.EMFILE, errno.ENFILE}:
        return _unavailable(name, f"{text}; raise `ulimit -n`: a ring needs two descriptors")
    return _unavailable(f"ring_{name}", f"the kernel refused the ring ({text}); {_THREADS_WILL_DO}")


def _forbidden(disabled: int) -> BackendUnavailableError:
    if disabled == 0:
        return _unavailable(
            "eperm_seccomp",
            "a filter of the container forbids it (those of Docker and containerd do by default); "
            "allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile, or "
            "run it with --security-opt seccomp=unconfined",
        )
    also = " or join the group of kernel.io_uring_group" if disabled == 1 else ""
    return _unavailable(
        "eperm_sysctl",
        f"kernel.io_uring_disabled is {disabled}; as root run "
        f"`sysctl -w kernel.io_uring_disabled=0`{also}",
    )


def _absent(release: str) -> str:
    numbers = release.split("-", maxsplit=1)[0].split(".")
    known = tuple(int(n) for n in numbers[:2] if n.isdigit())
    if len(known) == len(_FIRST_RELEASE) and known < _FIRST_RELEASE:
        return f"Linux {release} has no io_uring that reads, 5.6 is the first; {_THREADS_WILL_DO}"
    return (
        f"Linux {release} answers that it has no io_uring: it is built without (CONFIG_IO_URING), "
        "or a sandbox (gVisor, a seccomp profile) hides it; ask whoever runs the sandbox, "
        f"{_THREADS_WILL_DO}"
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} bytes"


def _named(code: int) -> tuple[str, str]:
    return errno.errorcode.get(code, str(code)).lower(), os.strerror(code)


def _unavailable(reason: str, hint: str) -> BackendUnavailableError:
    return BackendUnavailableError("uring", reason, hint)
