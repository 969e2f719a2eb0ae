"""Host memory that a GPU's copy engine reads by itself: a pool, registered with CUDA in pieces.

Registered memory is copied at the speed of the link; from any other the driver copies through
buffers of its own, and the host waits. The pool's huge pages survive the registration.

Rejected: ``torch.empty(pin_memory=True)`` (no huge pages: measured at half the speed to read into
and at 0.6 of it to copy from), and registering all in one call (drivers have refused half a
terabyte at once).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tieredmoe.budget import format_size
from tieredmoe.errors import DeviceError
from tieredmoe.memory.cuda_driver import Driver
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from tieredmoe.memory.pages import HostPool

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context of the process
_ALREADY_REGISTERED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
_PIECE_NBYTES_MAX = 64 << 30


class PinnedHost:
    """A pool's memory, registered from ``register`` to ``close``; it outlives the pool's close."""

    def __init__(self, pool: HostPool, driver: Driver) -> None:
        """Hold the memory of ``pool``, of which nothing is registered yet; see ``register``."""
        self.refused: DeviceError | None = None
        """Why copies from this memory are slow; None if it is registered."""
        self.nbytes = pool.nbytes
        self._region = pool.whole()
        self._driver = driver
        self._pieces: list[int] = []

    @classmethod
    def register(
        cls, pool: HostPool, *, device: torch.device, record_nbytes: int = PAGE_NBYTES
    ) -> PinnedHost:
        """Register all of ``pool``; where the driver refuses, nothing, and ``refused`` says why.

        No copy may reach over the end of a piece, so pieces end between records of
        ``record_nbytes``, counted from the pool's start. Blocks, for about 35 ms per GiB. Raises
        ``DeviceError`` where a registration of other memory was forgotten at this address.
        """
        assert record_nbytes % PAGE_NBYTES == 0
        pinned = cls(pool, Driver(device))
        piece_nbytes = max(1, _PIECE_NBYTES_MAX // record_nbytes) * record_nbytes
        try:
            with pinned._driver.context():
                for start in range(0, pool.nbytes, piece_nbytes):
                    address = pool.address + start
                    nbytes = min(piece_nbytes, pool.nbytes - start)
                    pinned._driver("cuMemHostRegister_v2", address, nbytes, _PORTABLE)
                    pinned._pieces.append(address)
        except DeviceError as error:
            pinned._unregister()
            if error.code == _ALREADY_REGISTERED:
                # Not by us: this memory is new. The driver still holds the pages of memory that was
                # here before and was freed without ``close``, and would copy from those.
                pinned.close()
                raise
            pinned.refused = error
        return pinned

    def close(self) -> None:
        """Unregister and let go of the memory; idempotent. No copy from it may be running."""
        self._unregister()
        self._region.view.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _unregister(self) -> None:
        with self._driver.context():
            while self._pieces:
                self._driver("cuMemHostUnregister", self._pieces.pop())

    def __repr__(self) -> str:
        state = f"{len(self._pieces)} pieces" if self._pieces else "not registered"
        return f"<PinnedHost {format_size(self.nbytes)}, {state}>"
