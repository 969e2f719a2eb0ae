"""Checks every byte of a pack against its digests, and names each place that is damaged.

Files are read from end to end in the order of their bytes, past the page cache as far as it can be
told to forget: right after a conversion the cache would only confirm what was written, not what the
disk kept.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import xxhash

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import Pack, as_pack_errors, open_pack
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ_NBYTES = 8 << 20


@attrs.frozen
class Damage:
    """Bytes of a pack that are not what was converted; ``key`` says whose, if an expert's."""

    path: Path
    offset: int
    nbytes: int
    what: str
    fact: str
    key: ExpertKey | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what} ({self.nbytes:,} bytes at {self.offset:,}) {self.fact}"


@attrs.frozen
class VerifyReport:
    """The outcome of a verification: sound if ``damage`` is empty."""

    read_nbytes: int
    damage: tuple[Damage, ...]


async def verify_pack(
    path: Path | str, *, progress: Callable[[PackProgress], None] | None = None
) -> VerifyReport:
    """Every byte of the pack's data files compared with its digest, all damage named.

    Raises ``PackError`` for a pack that does not even open. Cancelling stops within a record.
    """
    return await run_in_thread(partial(_verify, Path(path)), progress)


def _verify(path: Path, reporter: Reporter) -> VerifyReport:
    pack = open_pack(path)
    verification = _Verification(pack, reporter)
    for file_index in range(len(pack.data_files)):
        verification.check_records(file_index)
    for shard_index in range(len(pack.manifest.layout.shards)):
        verification.check_dense(shard_index)
    return VerifyReport(verification.read_nbytes, tuple(verification.damage))


class _Verification:
    """One pass over a pack's data files."""

    def __init__(self, pack: Pack, reporter: Reporter) -> None:
        self.read_nbytes = 0
        self.damage: list[Damage] = []
        self._pack = pack
        self._layout = pack.manifest.layout
        self._reporter = reporter
        self._buffer = memoryview(bytearray(max(pack.spec.slot_nbytes, READ_NBYTES)))

    def check_records(self, file_index: int) -> None:
        """Check one expert file, record by record."""
        placements = self._layout.placements
        layers = [layer for layer in placements if placements[layer].file_index == file_index]
        layers.sort(key=lambda layer: placements[layer].start)
        path = self._pack.data_files[file_index]
        with as_pack_errors(), _opened_cold(path) as fd:
            for layer in layers:
                for expert in range(self._pack.spec.n_experts):
                    self._check_record(fd, path, ExpertKey(layer, expert))

    def check_dense(self, shard_index: int) -> None:
        """Check one shard's dense file, segment by segment."""
        shard = self._layout.shards[shard_index]
        path = self._pack.path / shard.dense_file.name
        offset = 0
        with as_pack_errors(), _opened_cold(path) as fd:
            for segment, digest in zip(
                shard.segments, self._pack.manifest.digests[shard_index], strict=True
            ):
                if segment.slabs is not None:
                    continue
                what = "header" if offset == 0 else "padding"
                if segment.tensor is not None:
                    what = f"tensor {segment.tensor}"
                place = Damage(path, offset, segment.nbytes, what, "does not match its digest")
                self._check_run(fd, place, digest)
                offset += segment.nbytes

    def _check_record(self, fd: int, path: Path, key: ExpertKey) -> None:
        offset, nbytes = self._pack.locate(key)[1:]
        record = self._buffer[:nbytes]
        expert = f"layer {key.layer}, expert {key.expert}"
        if not self._read(fd, Damage(path, offset, nbytes, expert, "", key)):
            return
        layout = self._pack.spec.layouts[key.layer]
        for role, digest in zip(layout.roles, self._pack.digests(key), strict=True):
            if digest_of(record[role.offset : role.offset + role.nbytes]) != digest:
                what, fact = f"{expert}, {role.name}", "does not match its digest"
                self.damage.append(Damage(path, offset + role.offset, role.nbytes, what, fact, key))
        padding = record[layout.payload_nbytes :]
        if padding.tobytes().strip(b"\0"):
            start = offset + layout.payload_nbytes
            what = f"{expert}, padding"
            self.damage.append(Damage(path, start, len(padding), what, "is not zero", key))

    def _check_run(self, fd: int, place: Damage, digest: bytes) -> None:
        hasher = xxhash.xxh3_128()
        end = place.offset + place.nbytes
        for offset in range(place.offset, end, READ_NBYTES):
            part = attrs.evolve(place, offset=offset, nbytes=min(READ_NBYTES, end - offset))
            if not self._read(fd, part):
                return
            hasher.update(self._buffer[: part.nbytes])
        if hasher.digest() != digest:
            self.damage.append(place)

    def _read(self, fd: int, place: Damage) -> bool:
        """Fill the buffer's beginning; bytes that cannot be read are damage like any other."""
        total = self._layout.data_nbytes
        self._reporter.report("verify", done_nbytes=self.read_nbytes, total_nbytes=total)
        self.read_nbytes += place.nbytes
        try:
            read_exactly(fd, self._buffer[: place.nbytes], offset=place.offset, path=place.path)
        except GGUFError as error:
            self.damage.append(attrs.evolve(place, fact=f"cannot be read: {error.fact}"))
            return False
        return True


@contextmanager
def _opened_cold(path: Path) -> Iterator[int]:
    with opened(path) as (fd, _):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield fd
