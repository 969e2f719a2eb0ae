"""What a long piece of work has done so far, in a file that only grows: the work goes on after it.

A record is one line: the digest of its JSON, then the JSON. ``append`` returns when the line is on
stable storage, so whatever a record claims must be there before it is written. A kill or a power
loss can tear the last line only; it is dropped, and who goes on is told, since a line that was once
whole and has been spoilt by the disk looks the same. A bad line before a good one is damage, and
refused by its place. Rejected: rewriting a checkpoint of everything per layer (quadratic, and the
moment of the rename is one more state), SQLite (a second journal under this one).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Self

from tieredmoe.errors import PackError
from tieredmoe.pack.manifest import DIGEST_NBYTES, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

JOURNAL_NAME = "conversion.journal"
JOURNAL_FORMAT = "tieredmoe-journal"
JOURNAL_VERSION = 1
JOURNAL_NBYTES_MAX = 256 << 20
"""A longer one is refused unread; that of a model of a terabyte has 8 MB."""


class Journal:
    """The records of one piece of work; ``head`` says which. Whoever has it calls ``close``.

    ``lost_its_end`` says that there was more, which cannot be read, until the next ``append``.
    """

    def __init__(self, path: Path, fd: int, records: list[dict[str, Any]], nbytes: int) -> None:
        self.path = path
        self.records = records
        self.lost_its_end = os.fstat(fd).st_size > nbytes
        self._fd = fd
        self._nbytes = nbytes

    @property
    def head(self) -> dict[str, Any]:
        """The first record."""
        return self.records[0]

    @classmethod
    def create(cls, path: Path, head: Mapping[str, Any]) -> Self:
        """A new journal, durable but for its directory's entry; raises ``OSError``."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        journal = cls(path, fd, [], 0)
        try:
            journal.append({"format": JOURNAL_FORMAT, "version": JOURNAL_VERSION, **head})
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """The journal at ``path``, to be gone on with; None if there is none or it has no head.

        All its records are on stable storage, even if the run that wrote the last one could not
        tell. Raises ``PackError`` for one that is damaged or of a newer version, and ``OSError``.
        """
        records, nbytes = read_journal(path)
        if not records:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # A write that has failed is forgotten by the kernel, but not made: so it is made again.
            data = os.pread(fd, nbytes, 0)
            last = data.rfind(b"\n", 0, len(data) - 1) + 1
            _write(fd, data[last:], last)
            os.fdatasync(fd)
            return cls(path, fd, records, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record and return when it is durable. Raises ``OSError``; then it may be or not."""
        line = _line(record)
        _write(self._fd, line, self._nbytes)
        if self.lost_its_end:
            os.ftruncate(self._fd, self._nbytes + len(line))
        os.fdatasync(self._fd)
        self.lost_its_end = False
        self._nbytes += len(line)
        self.records.append(dict(record))

    def clear(self) -> None:
        """Drop all records but the head, durably; takes no space. Raises ``OSError``."""
        os.ftruncate(self._fd, os.pread(self._fd, self._nbytes, 0).index(b"\n") + 1)
        self._nbytes = os.fstat(self._fd).st_size
        os.fdatasync(self._fd)
        del self.records[1:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole records, and their bytes; none of a file that is not there or is empty.

    Raises ``PackError`` for a journal that is damaged or of a newer version, and ``OSError``.
    """
    try:
        if path.stat().st_size > JOURNAL_NBYTES_MAX:
            raise PackError(path, "is too long for a journal")
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    records, nbytes = _parse(data, lambda fact: PackError(path, fact))
    if records:
        head = records[0]
        version = head.get("version")
        if head.get("format") != JOURNAL_FORMAT or not isinstance(version, int):
            raise PackError(path, "is not a journal of ours; move it away")
        if version != JOURNAL_VERSION:
            raise PackError(
                path,
                f"has journal version {version}, and this tieredmoe goes on from version "
                f"{JOURNAL_VERSION}; finish with the tieredmoe that began, or install a newer one",
            )
    return records, nbytes


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    return digest_of(text).hex().encode("ascii") + b" " + text + b"\n"


def _write(fd: int, line: bytes, offset: int) -> None:
    done = 0
    while done < len(line):
        done += os.pwrite(fd, memoryview(line)[done:], offset + done)


def _parse(data: bytes, error: Callable[[str], PackError]) -> tuple[list[dict[str, Any]], int]:
    records: list[dict[str, Any]] = []
    good_nbytes, begin, bad_at = 0, 0, None
    while begin < len(data):
        end = data.find(b"\n", begin) + 1
        record = _record(data[begin : end - 1]) if end else None
        if record is None:
            bad_at = begin if bad_at is None else bad_at
        elif bad_at is not None:
            raise error(
                f"is damaged at byte {bad_at}: whole records follow, so no crash tore it; the "
                "disk did not keep what was written"
            )
        else:
            records.append(record)
            good_nbytes = end
        begin = end or len(data)
    return records, good_nbytes


def _record(line: bytes) -> dict[str, Any] | None:
    stated, _, text = line.partition(b" ")
    if len(stated) != 2 * DIGEST_NBYTES or digest_of(text).hex().encode("ascii") != stated:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
