"""Read backends: positioned reads of whole blocks into the caller's memory."""

from tieredmoe.backends.drives import DrivesBackend, DriveStats, SplitBackend
from tieredmoe.backends.mirror import MirrorBackend
from tieredmoe.backends.opening import open_backend
from tieredmoe.backends.protocol import BackendInfo, Fallback, ReadBackend, ReadOp, ReadStats
from tieredmoe.backends.threads import ThreadsBackend
from tieredmoe.backends.uring import UringBackend

__all__ = [
    "BackendInfo",
    "DriveStats",
    "DrivesBackend",
    "Fallback",
    "MirrorBackend",
    "ReadBackend",
    "ReadOp",
    "ReadStats",
    "SplitBackend",
    "ThreadsBackend",
    "UringBackend",
    "open_backend",
]
