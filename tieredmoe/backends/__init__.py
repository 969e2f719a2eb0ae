"""Read backends: positioned reads of whole blocks into the caller's memory."""

from tieredmoe.backends.opening import open_backend
from tieredmoe.backends.protocol import BackendInfo, ReadBackend, ReadOp, ReadStats
from tieredmoe.backends.threads import ThreadsBackend

__all__ = ["BackendInfo", "ReadBackend", "ReadOp", "ReadStats", "ThreadsBackend", "open_backend"]
