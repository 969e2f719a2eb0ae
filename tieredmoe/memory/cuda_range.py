"""A range of a GPU's addresses whose memory can be given back without moving the rest.

A cache that has to shrink while kernels, tables and captured graphs know its address cannot be
allocated anew. CUDA's virtual memory calls reserve addresses once and map memory into them piece
by piece; a piece that is unmapped is free for everyone on the device at once.

Rejected: ``torch.empty`` and a smaller copy of it later (both have to fit at once, and every
address changes); one allocation per slot (kernels take one base address and an index).

Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import TYPE_CHECKING

import torch

from tieredmoe.budget import format_size
from tieredmoe.errors import BudgetError, DeviceError

if TYPE_CHECKING:
    from tieredmoe.memory.cuda_driver import Driver

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PIECE_NBYTES = 64 << 20
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("index", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", c_int),
        ("handle_kinds", c_int),
        ("location", _Location),
        ("metadata", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class DeviceRange:
    """``nbytes`` of addresses of one GPU; the first ``backed_nbytes`` of them have memory."""

    def __init__(self, nbytes: int, *, device: torch.device, driver: Driver) -> None:
        """Reserve addresses and back all of them. Raises ``BudgetError`` if memory is short."""
        assert nbytes > 0
        self._driver = driver
        self._device = device
        self._location = _Location(_DEVICE, device.index)
        self._pieces: list[int] = []
        granularity = c_size_t()
        with driver.context():
            driver(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granularity),
                ctypes.byref(self._properties()),
                0,
            )
            self._granularity = granularity.value
            self.nbytes = self._rounded(nbytes)
            address = c_ulonglong()
            driver("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        self.address = address.value
        try:
            self.resize(nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def backed_nbytes(self) -> int:
        """Bytes from the start on that have memory."""
        return sum(self._pieces)

    def resize(self, nbytes: int) -> None:
        """Back at least the first ``nbytes``, and no piece that begins behind them.

        Nobody may use what is given back, now or later. Blocks for as long as the driver takes.
        Raises ``BudgetError``, with nothing changed, if there is not that much free memory.
        """
        assert 0 <= nbytes <= self.nbytes
        with self._driver.context():
            while self._pieces and self.backed_nbytes - self._pieces[-1] >= nbytes:
                self._unmap()
            n_before = len(self._pieces)
            try:
                while self.backed_nbytes < nbytes:
                    self._map(min(_PIECE_NBYTES, self.nbytes - self.backed_nbytes))
            except BaseException:
                while len(self._pieces) > n_before:
                    self._unmap()
                raise

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` as uint8 on the device; what is not backed must not be touched."""
        return torch.as_tensor(_Exported(self, nbytes), device=self._device)

    def close(self) -> None:
        """Give everything back; idempotent. Nobody may use an address of the range any more."""
        if not self.address:
            return
        with self._driver.context():
            while self._pieces:
                self._unmap()
            address, self.address = self.address, 0
            self._driver("cuMemAddressFree", address, self.nbytes)

    def _map(self, nbytes: int) -> None:
        driver = self._driver
        handle = c_ulonglong()
        try:
            driver("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(self._properties()), 0)
        except DeviceError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, _ = torch.cuda.mem_get_info(self._device)
            raise BudgetError(
                f"{self._device} has {format_size(free)} free and the expert cache needs another "
                f"{format_size(nbytes)}: set a smaller budget, or free memory on the device"
            ) from error
        address = self.address + self.backed_nbytes
        try:
            driver("cuMemMap", address, nbytes, 0, handle.value, 0)
        finally:
            driver("cuMemRelease", handle.value)  # the mapping keeps the memory
        self._pieces.append(nbytes)
        access = _Access(self._location, _READ_WRITE)
        driver("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def _unmap(self) -> None:
        nbytes = self._pieces.pop()
        self._driver("cuMemUnmap", self.address + self.backed_nbytes, nbytes)

    def _properties(self) -> _Properties:
        return _Properties(kind=_PINNED, location=self._location)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity


class _Exported:
    """What torch makes a tensor of without a copy; the tensor keeps it, and with it the range."""

    def __init__(self, memory: DeviceRange, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
