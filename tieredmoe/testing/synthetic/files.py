"""Writes the files of a synthetic model: in parallel, past the page cache, whole or not at all.

A file is cut into chunks at page boundaries, whatever tensors lie there; a chunk's bytes depend on
its place alone, so any number of threads makes the same file. Each thread has one buffer: that, the
pool of noise and the tensors drawn by value are all the memory it takes. Rejected: writing tensor
by tensor through the ``gguf`` package's writer, which wants each of them in memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf.gguf_writer import GGUFWriter

from tieredmoe.budget import format_size
from tieredmoe.errors import GGUFError
from tieredmoe.testing.synthetic.blocks import SCALED_TYPES, BlockScales
from tieredmoe.testing.synthetic.noise import Noise
from tieredmoe.testing.tiny_container import ALIGNMENT_NBYTES, add_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tieredmoe.testing.synthetic.tensors import SyntheticTensor

_PAGE = mmap.PAGESIZE
_CHUNK_NBYTES = 8 << 20
_THREADS_MAX = 8


class _Part(NamedTuple):
    """What lies in a file from ``begin`` to ``end``: bytes, or noise in blocks to be scaled."""

    begin: int
    end: int
    content: NDArray[np.uint8] | BlockScales


class PlannedFile(NamedTuple):
    """A file to be: its header, and its tensors with the places of their first bytes."""

    path: Path
    shard_index: int
    header: bytes
    tensors: tuple[tuple[SyntheticTensor, int], ...]
    nbytes: int


def plan_files(
    paths: Sequence[Path],
    shards: Sequence[Sequence[SyntheticTensor]],
    pairs: Sequence[Mapping[str, object]],
) -> tuple[PlannedFile, ...]:
    """Lay out one file for each of ``paths``; ``pairs`` are the metadata of each.

    Raises ``GGUFError`` if no header can be written there.
    """
    planned = []
    for index, (path, tensors, metadata) in enumerate(zip(paths, shards, pairs, strict=True)):
        header = _header(path, tensors, metadata)
        end, places = len(header), []
        for tensor in tensors:
            begin = -(-end // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            places.append((tensor, begin))
            end = begin + tensor.nbytes
        planned.append(PlannedFile(path, index, header, tuple(places), end))
    return tuple(planned)


def require_room(directory: Path, nbytes: int) -> None:
    """Raise ``GGUFError`` with the numbers if ``directory`` has no room for ``nbytes``."""
    free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise GGUFError(
            directory,
            f"has room for {format_size(free)}, and the model takes {format_size(nbytes)}; "
            "make fewer layers or fewer experts, or free some",
        )


def write_files(files: Sequence[PlannedFile], *, seed: int, report: Callable[[int], None]) -> None:
    """Write all of ``files``; raises ``GGUFError`` if one cannot be, and then none is left.

    ``report`` is called, from any of the writing threads, with the bytes just written. Interrupted
    (``KeyboardInterrupt``), it stops its threads and leaves nothing either.
    """
    noise = Noise(seed)
    scales: dict[tuple[object, float], BlockScales] = {}
    begun: list[Path] = []
    path = files[0].path
    try:
        for file in files:
            path = file.path
            begun.append(path.with_name(f"{path.name}.partial"))
            _FileWriter(file, noise, _parts(file, seed, scales), report).write(begun[-1])
        for i, file in enumerate(files):
            path = file.path
            begun[i].replace(path)
            begun[i] = path
    except BaseException as error:
        for leftover in begun:
            leftover.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise GGUFError(path, f"cannot be written: {error.strerror}") from error
        raise


def _header(
    path: Path, tensors: Sequence[SyntheticTensor], metadata: Mapping[str, object]
) -> bytes:
    """Everything before the tensors' bytes, which begin at the next multiple of the alignment."""
    partial = path.with_name(f"{path.name}.partial")
    writer = GGUFWriter(partial, arch="")  # writes none: in a later shard there must be none
    for key, value in metadata.items():
        add_pair(writer, key, value)
    for tensor in tensors:
        shape, nbytes = tensor.size, tensor.nbytes
        row_nbytes = nbytes * shape[-1] // int(np.prod(shape))
        of_bytes = (*shape[:-1], row_nbytes)
        kind = np.dtype(np.uint8)
        writer.add_tensor_info(tensor.name, of_bytes, kind, nbytes, raw_dtype=tensor.ggml_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = partial.read_bytes()
    except OSError as error:
        raise GGUFError(path, f"cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return header + bytes(-len(header) % ALIGNMENT_NBYTES)


def _parts(
    file: PlannedFile, seed: int, scales: dict[tuple[object, float], BlockScales]
) -> list[_Part]:
    """The file's parts in their order; tensors of one type and deviation share their scales."""
    parts = [_Part(0, len(file.header), np.frombuffer(file.header, np.uint8))]
    for number, (tensor, begin) in enumerate(file.tensors):
        rng = np.random.default_rng([seed, 2, file.shard_index, number])
        content: NDArray[np.uint8] | BlockScales
        if tensor.ggml_type in SCALED_TYPES:
            # Rounded, so that deviations measured on samples of one distribution are one.
            std = float(f"{tensor.std(np.random.default_rng(0)):.2g}")
            key = (tensor.ggml_type, std)
            if key not in scales:
                scales[key] = BlockScales(tensor.ggml_type, std, rng)
            content = scales[key]
        else:
            content = tensor.encoded(rng)
        parts.append(_Part(begin, begin + tensor.nbytes, content))
    return parts


class _FileWriter:
    """Writes one file in chunks, each thread every n-th of them."""

    def __init__(
        self,
        file: PlannedFile,
        noise: Noise,
        parts: Sequence[_Part],
        report: Callable[[int], None],
    ) -> None:
        self._file = file
        self._noise = noise
        self._parts = parts
        self._ends = np.array([part.end for part in parts])
        self._report = report
        self._stop = threading.Event()
        self._direct = True

    def write(self, path: Path) -> None:
        """Write the file to ``path``; raises ``OSError``, and leaves what it has begun."""
        nbytes, n_chunks = self._file.nbytes, -(-self._file.nbytes // _CHUNK_NBYTES)
        n_threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)), n_chunks)
        with self._open(path) as fd, ThreadPoolExecutor(n_threads) as threads:
            # In one piece on the drive, and a full drive is known of before hours are spent.
            os.posix_fallocate(fd, 0, nbytes)
            try:
                numbers = [range(i, n_chunks, n_threads) for i in range(n_threads)]
                for _ in threads.map(lambda own: self._chunks(fd, own), numbers):
                    pass
            finally:
                self._stop.set()
            os.ftruncate(fd, nbytes)
            os.fsync(fd)

    @contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False  # this file system has no direct writes
            fd = os.open(path, flags, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)

    def _chunks(self, fd: int, numbers: range) -> None:
        memory = mmap.mmap(-1, _CHUNK_NBYTES + 2 * _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(memory, np.uint8)
        try:
            for number in numbers:
                if self._stop.is_set():
                    return
                self._chunk(fd, number, data)
        except BaseException:
            self._stop.set()
            raise

    def _chunk(self, fd: int, number: int, data: NDArray[np.uint8]) -> None:
        begin = number * _CHUNK_NBYTES
        end = min(begin + _CHUNK_NBYTES, self._file.nbytes)
        n_whole = -(-(end - begin) // _PAGE) * _PAGE
        body = data[_PAGE : _PAGE + n_whole]
        self._noise.fill(body.view(np.uint64), self._file.shard_index, number)
        written = begin
        at = int(np.searchsorted(self._ends, begin, side="right"))
        for part in self._parts[at:]:
            if part.begin >= end:
                break
            body[max(0, written - begin) : max(0, part.begin - begin)] = 0  # alignment
            lo, hi = max(part.begin, begin), min(part.end, end)
            if isinstance(part.content, BlockScales):
                at_buffer = _PAGE + part.begin - begin
                part.content.put(data, at_buffer, begin=lo - part.begin, end=hi - part.begin)
            else:
                body[lo - begin : hi - begin] = part.content[lo - part.begin : hi - part.begin]
            written = hi
        body[written - begin :] = 0
        self._put(fd, body, begin)
        self._report(end - begin)

    def _put(self, fd: int, body: NDArray[np.uint8], offset: int) -> None:
        rest = body.data
        while rest:
            n_done = os.pwrite(fd, rest, offset)
            rest, offset = rest[n_done:], offset + n_done
        if not self._direct:
            os.fdatasync(fd)
            os.posix_fadvise(fd, offset - len(body), len(body), os.POSIX_FADV_DONTNEED)
