"""Chooses a backend by name and opens files with it.

``auto`` is the fastest backend with direct I/O: ``uring``, else ``threads``. It means the page
cache only where that was allowed, because a silent fallback costs half the bandwidth and evicts the
memory that the tiers count on. Whatever is chosen is chosen here, once: nothing falls back while it
runs. A new backend is one more row of the table.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.file_locks import lock_shared
from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.probe import open_buffered, open_direct
from tieredmoe.backends.protocol import BackendInfo, Fallback, ReadBackend
from tieredmoe.backends.ring import N_ENTRIES
from tieredmoe.backends.ringprobe import open_ring, prove_ring
from tieredmoe.backends.threads import ThreadsBackend
from tieredmoe.backends.uring import UringBackend
from tieredmoe.errors import (
    BackendUnavailableError,
    ConfigError,
    DirectIOUnavailableError,
    GGUFError,
)
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.backends.datafile import DataFile

logger = logging.getLogger(__name__)

WINDOW_NBYTES = 64 << 20
"""Bytes in flight where a device does not say how much its queue takes."""
STEPS = MappingProxyType(
    {"auto": ("uring", "threads"), "uring": ("uring",), "threads": ("threads",), "buffered": ()}
)
"""What each name stands for, best first; the page cache comes after them where it may."""


@attrs.frozen
class _Wish:
    paths: tuple[Path, ...]
    kernel: Kernel
    window_nbytes: int | None
    record_nbytes: int
    read_splits: int
    fallbacks: tuple[Fallback, ...] = ()

    def windows(self, files: Sequence[DataFile]) -> dict[int, int]:
        """The window of each device, in bytes."""
        devices = {file.device for file in files}
        if self.window_nbytes is not None:
            return dict.fromkeys(devices, self.window_nbytes)
        ask = self.kernel.queue_window_nbytes
        return {device: ask(device) or WINDOW_NBYTES for device in devices}

    def info(
        self, name: str, files: Sequence[DataFile], windows: dict[int, int], *, alignment: int
    ) -> BackendInfo:
        """What a backend of that name over ``files`` is."""
        weakest = [file for file in files if not file.direct] or files
        return BackendInfo(
            name=name,
            direct=all(file.direct for file in files),
            alignment=alignment,
            window_nbytes=min(windows.values()),
            reason=", ".join(sorted({file.reason for file in weakest})),
            fallbacks=self.fallbacks,
        )


def open_backend(
    name: str,
    files: Sequence[Path | str],
    *,
    allow_buffered: bool = False,
    strict: bool = False,
    read_splits: int = 1,
    record_nbytes: int = 0,
    window_nbytes: int | None = None,
    kernel: Kernel | None = None,
) -> ReadBackend:
    """Open ``files`` for reading by ``name``: ``auto``, ``uring``, ``threads`` or ``buffered``.

    Call it in the loop that will use the backend. Every file is probed with one read, a ring with
    one more; they block. ``auto`` steps down from ``uring`` to ``threads``, says so once as a
    warning and keeps the reason in ``info.fallbacks``; ``allow_buffered`` lets every name step down
    to the page cache in the end, ``strict`` refuses any step. A file on tmpfs counts as memory: it
    is accepted, ``info.direct`` is False and ``info.reason`` is "tmpfs".

    ``read_splits`` reads each block as so many parallel parts. ``record_nbytes`` is the size of a
    record, of which prefetch may have four in flight (default: of the largest read). At most
    ``window_nbytes`` are in flight per device (default: half of what its queue takes).

    Raises ``BackendUnavailableError`` or ``DirectIOUnavailableError`` for what cannot be had,
    ``GGUFError`` for a model that is being given up for a pack, ``ReadError`` for a file that
    cannot be read, ``ConfigError`` for a wrong argument; no file
    stays open then.
    """
    wish = _Wish(
        # As they are now: a file may have to be opened again later.
        tuple(Path(file).absolute() for file in files),
        kernel or Kernel(),
        window_nbytes,
        record_nbytes,
        read_splits,
    )
    _check(name, wish, allow_buffered=allow_buffered, strict=strict)
    steps = STEPS[name]
    if allow_buffered or name == "buffered":
        steps = (*steps, "buffered")
    if strict:
        steps = steps[:1]
    for step in steps[:-1]:
        try:
            return _OPENERS[step](wish)
        except (BackendUnavailableError, DirectIOUnavailableError) as error:
            fallback = Fallback(step, error.reason, str(error))
            wish = attrs.evolve(wish, fallbacks=(*wish.fallbacks, fallback))
    backend = _OPENERS[steps[-1]](wish)
    if wish.fallbacks:
        reasons = "; ".join(dict.fromkeys(fallback.hint for fallback in wish.fallbacks))
        logger.warning("reading through %r: %s", steps[-1], reasons)
    return backend


def _check(name: str, wish: _Wish, *, allow_buffered: bool, strict: bool) -> None:
    if name not in STEPS:
        raise ConfigError(f"there is no backend {name!r}; there are {', '.join(STEPS)}")
    if not wish.paths:
        raise ConfigError("a backend needs at least one file to read")
    if strict and allow_buffered:
        raise ConfigError("strict refuses what allow_buffered allows; choose one of them")
    if wish.read_splits < 1:
        raise ConfigError(f"a block cannot be read in {wish.read_splits} parts")
    if wish.window_nbytes is not None and wish.window_nbytes < 1:
        raise ConfigError(f"a window of {wish.window_nbytes} bytes lets nothing be read")


def _open_uring(wish: _Wish) -> ReadBackend:
    with ExitStack() as undo:
        files = _opened(wish, open_direct, undo)
        ring = open_ring(wish.kernel)
        undo.callback(ring.close)
        prove_ring(ring, files[0], wish.kernel)
        windows = wish.windows(files)
        try:
            backend = UringBackend(
                files,
                info=wish.info("uring", files, windows, alignment=PAGE_NBYTES),
                ring=ring,
                n_entries=N_ENTRIES,
                read_splits=wish.read_splits,
                record_nbytes=wish.record_nbytes,
                windows=windows,
            )
        except NotImplementedError as error:
            loop = type(asyncio.get_running_loop()).__name__
            hint = f"{loop} cannot watch a descriptor (add_reader); run a loop that can"
            raise BackendUnavailableError("uring", "no_add_reader", hint) from error
        undo.pop_all()
    return backend


def _open_threads(wish: _Wish) -> ReadBackend:
    return _on_threads(wish, "threads", open_direct, alignment=PAGE_NBYTES)


def _open_buffered(wish: _Wish) -> ReadBackend:
    # Alignment 1: through the page cache any byte range can be read.
    return _on_threads(wish, "buffered", open_buffered, alignment=1)


def _on_threads(
    wish: _Wish, name: str, open_file: Callable[[Path, Kernel], DataFile], *, alignment: int
) -> ReadBackend:
    with ExitStack() as undo:
        files = _opened(wish, open_file, undo)
        windows = wish.windows(files)
        backend = ThreadsBackend(
            files,
            info=wish.info(name, files, windows, alignment=alignment),
            preadv=wish.kernel.preadv,
            read_splits=wish.read_splits,
            record_nbytes=wish.record_nbytes,
            windows=windows,
        )
        undo.pop_all()
    return backend


_OPENERS: MappingProxyType[str, Callable[[_Wish], ReadBackend]] = MappingProxyType(
    {"uring": _open_uring, "threads": _open_threads, "buffered": _open_buffered}
)


def _opened(
    wish: _Wish, open_file: Callable[[Path, Kernel], DataFile], undo: ExitStack
) -> list[DataFile]:
    """Every file open, and locked against being given up; ``undo`` closes them."""
    files: list[DataFile] = []
    for path in wish.paths:
        files.append(open_file(path, wish.kernel))
        undo.callback(files[-1].close)
        lock_shared(files[-1].fd, path, GGUFError)
    return files
