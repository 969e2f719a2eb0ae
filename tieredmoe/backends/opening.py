"""Chooses a backend by name and opens files with it.

``auto`` is the fastest backend with direct I/O; it never means the page cache. Where direct I/O
cannot be had it raises, because a silent fallback costs half the bandwidth and evicts the memory
that the tiers count on. A new backend is one more row of the table.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.probe import DataFile, open_buffered, open_direct
from tieredmoe.backends.protocol import BackendInfo, ReadBackend
from tieredmoe.backends.threads import ThreadsBackend
from tieredmoe.errors import ConfigError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WINDOW_NBYTES = 32 << 20
"""Bytes in flight by default: full speed from there on, and the first expert arrives early."""


def open_backend(
    name: str,
    files: Sequence[Path | str],
    *,
    window_nbytes: int = WINDOW_NBYTES,
    kernel: Kernel | None = None,
) -> ReadBackend:
    """Open ``files`` for reading by ``name``: ``auto``, ``threads`` or ``buffered``.

    Call it in the loop that will use the backend. Every file is probed with one read. A file on
    tmpfs counts as memory: it is accepted, ``info.direct`` is False and ``info.reason`` is "tmpfs".
    Raises ``DirectIOUnavailableError`` where direct reads cannot be proven and ``buffered`` was not
    chosen, ``ReadError`` for a file that cannot be read, ``ConfigError`` for a wrong argument; no
    file stays open then.
    """
    opener = _OPENERS.get(name)
    if opener is None:
        raise ConfigError(f"there is no backend {name!r}; there are {', '.join(_OPENERS)}")
    if not files:
        raise ConfigError("a backend needs at least one file to read")
    if window_nbytes < 1:
        raise ConfigError(f"a window of {window_nbytes} bytes lets nothing be read")
    return opener([Path(file) for file in files], window_nbytes, kernel or Kernel())


def _open_threads(paths: Sequence[Path], window_nbytes: int, kernel: Kernel) -> ReadBackend:
    with _all_open(paths, open_direct, kernel) as files:
        direct = all(file.direct for file in files)
        info = BackendInfo("threads", direct, PAGE_NBYTES, window_nbytes, _reason(files))
        return ThreadsBackend(files, info=info, preadv=kernel.preadv)


def _open_buffered(paths: Sequence[Path], window_nbytes: int, kernel: Kernel) -> ReadBackend:
    with _all_open(paths, open_buffered, kernel) as files:
        # Alignment 1: through the page cache any byte range can be read.
        info = BackendInfo("buffered", False, 1, window_nbytes, _reason(files))
        return ThreadsBackend(files, info=info, preadv=kernel.preadv)


_OPENERS = MappingProxyType(
    {"auto": _open_threads, "threads": _open_threads, "buffered": _open_buffered}
)


@contextmanager
def _all_open(
    paths: Sequence[Path], open_file: Callable[[Path, Kernel], DataFile], kernel: Kernel
) -> Iterator[list[DataFile]]:
    """Every file open for the body to hand on; if anything fails, none stays open."""
    with ExitStack() as opened:
        files: list[DataFile] = []
        for path in paths:
            files.append(open_file(path, kernel))
            opened.callback(os.close, files[-1].fd)
        yield files
        opened.pop_all()


def _reason(files: Sequence[DataFile]) -> str:
    """Of several files, the reason of those that keep the whole from being direct, if any."""
    weakest = [file for file in files if not file.direct] or files
    return ", ".join(sorted({file.reason for file in weakest}))
