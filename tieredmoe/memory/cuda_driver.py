"""Calls of the CUDA driver that torch has loaded and does not expose.

Rejected: the package cuda-bindings (one more dependency, bound to a CUDA version, for a dozen
calls whose signatures are part of the driver's ABI and do not change), and the runtime's calls (an
error of theirs stays behind and is reported by whatever kernel torch launches next).
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import TYPE_CHECKING, Any

import torch

from tieredmoe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARY = "libcuda.so.1"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuGetErrorName": (c_int, c_void_p),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_ulonglong),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemSetAccess": (c_ulonglong, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_ulonglong, c_void_p, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
}


class Driver:
    """The driver's calls on one GPU, by name; one that fails raises ``DeviceError``.

    They are made inside ``context()``, in any thread. By default they drop the interpreter's lock.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the context that torch uses on ``device``."""
        try:
            self._calls = _functions(ctypes.CDLL(_LIBRARY))
            self._brief = _functions(ctypes.PyDLL(_LIBRARY))
        except OSError as error:
            raise DeviceError(_LIBRARY, 0, str(error)) from error
        self.device = indexed(device)
        torch.cuda.mem_get_info(self.device)  # or there might be no context yet
        context = c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device.index)
        self._context = context

    def __call__(self, name: str, *arguments: object) -> None:
        """Make the call; raise what it reports."""
        code = self._calls[name](*arguments)
        if code:
            raise self._error(name, code)

    def brief(self, name: str, *arguments: object) -> None:
        """Make a call that only enqueues, keeping the interpreter's lock.

        Dropping it for two microseconds can cost five milliseconds: what another thread may compute
        before it has to hand the lock back.
        """
        code = self._brief[name](*arguments)
        if code:
            raise self._error(name, code)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make the calls inside go to the device; the thread's own device is back afterwards."""
        self.brief("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.brief("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def new_stream(self) -> torch.cuda.Stream:
        """A stream nobody else has: torch deals its own out again after 32. See ``end_stream``."""
        handle = c_void_p()
        with self.context():
            self("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        return torch.cuda.ExternalStream(handle.value or 0, device=self.device)

    def end_stream(self, stream: torch.cuda.Stream) -> None:
        """Give ``stream`` back; what it was given still ends."""
        with self.context():
            self("cuStreamDestroy_v2", stream.cuda_stream)

    def _error(self, name: str, code: int) -> DeviceError:
        text = ctypes.c_char_p()
        self._brief["cuGetErrorName"](code, ctypes.byref(text))
        return DeviceError(name, code, (text.value or b"unknown error").decode("ascii", "replace"))


def indexed(device: torch.device) -> torch.device:
    """``device`` with its number: plain ``cuda`` is the thread's current one."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _functions(library: ctypes.CDLL) -> dict[str, Any]:
    functions = {}
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = c_int
        functions[name] = function
    return functions
