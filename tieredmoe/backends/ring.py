"""One io_uring and the eventfd that tells of completions, over the C functions of liburing.

The functions are those that the shared library of the PyPI package ``liburing`` exports; the
package itself is never imported. Rejected, each for what was seen: its Python interface (it
executes AVX-512 on processors without it, holds the interpreter's lock in waits, and replays a
read into its old memory after an exception), bare system calls (memory order is right on x86-64
only), and registered buffers (silent corruption once the memory is remapped, a limit on locked
memory, nothing gained on huge pages).

Calls that enter the kernel drop the interpreter's lock, those of nanoseconds keep it: to get it
back costs up to 5 ms while another thread computes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from errno import EAGAIN
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.backends.blockread import system_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

N_ENTRIES = 256
"""Reads in flight at most; the kernel gives twice as many places to completions."""
REAP_MAX = 64
_STRUCT_NBYTES = 512  # struct io_uring has 216 in liburing 2.x
_NOBODY = 0


def find_liburing() -> Path | None:
    """The package's shared library, found without importing the package; None if there is none."""
    spec = importlib.util.find_spec("liburing")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).with_name("liburing.so")
    return library if library.is_file() else None


class _Completion(ctypes.Structure):
    _fields_ = (
        ("user_data", ctypes.c_uint64),
        ("res", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
    )


class Liburing:
    """The C functions, with the types of every argument: an untyped pointer is cut to 32 bits."""

    def __init__(self, path: Path) -> None:
        """Load them. Raises ``OSError`` if that fails, ``AttributeError`` if one is missing."""
        drops_lock, keeps_lock = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        u32, u64 = ctypes.c_uint, ctypes.c_uint64
        self.queue_init = _typed(drops_lock.io_uring_queue_init, number, u32, pointer, u32)
        self.queue_exit = _typed(drops_lock.io_uring_queue_exit, None, pointer)
        self.register_eventfd = _typed(
            drops_lock.io_uring_register_eventfd, number, pointer, number
        )
        self.submit = _typed(drops_lock.io_uring_submit, number, pointer)
        self.submit_and_wait = _typed(drops_lock.io_uring_submit_and_wait, number, pointer, u32)
        self.get_sqe = _typed(keeps_lock.io_uring_get_sqe, pointer, pointer)
        self.prep_read = _typed(
            keeps_lock.io_uring_prep_read, None, pointer, number, pointer, u32, u64
        )
        self.prep_nop = _typed(keeps_lock.io_uring_prep_nop, None, pointer)
        self.set_data64 = _typed(keeps_lock.io_uring_sqe_set_data64, None, pointer, u64)
        self.peek_batch_cqe = _typed(keeps_lock.io_uring_peek_batch_cqe, u32, pointer, pointer, u32)
        self.cq_advance = _typed(keeps_lock.io_uring_cq_advance, None, pointer, u32)
        # A read of an eventfd that never blocks; os.eventfd_read would drop the lock.
        self.read = _typed(
            ctypes.PyDLL(None).read, ctypes.c_ssize_t, number, pointer, ctypes.c_size_t
        )


class Ring:
    """A ring of ``N_ENTRIES`` and ``event_fd``, readable when a completion has come.

    Tags are the caller's, above 0, and come back from ``reap`` once each, after which the kernel
    does not touch the read's memory any more. ``close`` does not wait for reads: have none.
    """

    def __init__(self, path: Path, n_entries: int = N_ENTRIES) -> None:
        """Raises ``OSError`` for what the kernel refuses, and what ``Liburing`` raises."""
        self._lib = Liburing(path)
        self._memory = ctypes.create_string_buffer(_STRUCT_NBYTES)
        self._ring = ctypes.addressof(self._memory)
        self._completions = (ctypes.c_size_t * REAP_MAX)()  # pointers
        self._unsubmitted: list[tuple[int, int]] = []
        self._counter = ctypes.create_string_buffer(8)
        _checked(self._lib.queue_init(n_entries, self._ring, 0))
        try:
            self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._lib.queue_exit(self._ring)
            raise
        try:
            _checked(self._lib.register_eventfd(self._ring, self.event_fd))
        except BaseException:
            self.close()
            raise

    @property
    def n_unsubmitted(self) -> int:
        """Reads that the kernel has not taken yet."""
        return sum(tag != _NOBODY for tag, _ in self._unsubmitted)

    def prep_read(self, fd: int, *, address: int, nbytes: int, offset: int, tag: int) -> bool:
        """Queue a read for the next ``submit``; False if there is no room before that."""
        assert tag > _NOBODY
        sqe = self._lib.get_sqe(self._ring)
        if sqe is None:
            return False
        self._lib.prep_read(sqe, fd, address, nbytes, offset)
        self._lib.set_data64(sqe, tag)
        self._unsubmitted.append((tag, sqe))
        return True

    def submit(self) -> None:
        """Give the kernel what is queued, or as much of it as it takes.

        Raises ``OSError``; what was not taken stays queued and goes with the next call.
        """
        assert self._ring, "submit to a closed ring"
        n_taken = _checked(self._lib.submit(self._ring))
        if self._unsubmitted and not n_taken:
            raise system_error(EAGAIN)
        del self._unsubmitted[:n_taken]

    def submit_and_wait(self) -> None:
        """``submit``, and return when there is a completion: blocks, whatever signals come."""
        while True:
            try:
                n_taken = _checked(self._lib.submit_and_wait(self._ring, 1))
            except InterruptedError:
                continue
            del self._unsubmitted[:n_taken]
            return

    def retract(self) -> list[int]:
        """The tags of all reads that the kernel has not taken: it never will, nor write for them.

        Their entries stay in the ring as operations that do nothing and belong to nobody.
        """
        tags = [tag for tag, _ in self._unsubmitted if tag != _NOBODY]
        for _, sqe in self._unsubmitted:
            self._lib.prep_nop(sqe)
            self._lib.set_data64(sqe, _NOBODY)
        self._unsubmitted = [(_NOBODY, sqe) for _, sqe in self._unsubmitted]
        return tags

    def clear_event(self) -> None:
        """Make ``event_fd`` unreadable until the next completion."""
        self._lib.read(self.event_fd, self._counter, 8)

    def reap(self) -> list[tuple[int, int]]:
        """At most ``REAP_MAX`` completions as (tag, count or negative errno); none if none came."""
        assert self._ring, "reap from a closed ring"
        while n := self._lib.peek_batch_cqe(self._ring, self._completions, REAP_MAX):
            completions = [_Completion.from_address(self._completions[i]) for i in range(n)]
            ended = [(each.user_data, each.res) for each in completions]
            self._lib.cq_advance(self._ring, n)
            if owned := [each for each in ended if each[0] != _NOBODY]:
                return owned
        return []

    def close(self) -> None:
        """Give the ring back to the kernel."""
        self._lib.queue_exit(self._ring)
        self._ring = 0
        os.close(self.event_fd)


def _typed(
    function: Callable[..., Any], result: type | None, *arguments: type
) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]  # of ctypes' functions
    return function


def _checked(result: int) -> int:
    if result < 0:
        raise system_error(-result)
    return result
