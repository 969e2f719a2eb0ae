"""What a conversion's journal says: which source, which settings, and how far each unit has come.

Units go from nothing to *written* (on stable storage, with these digests), and if the source is
given up to *giving* (found right on the disk; from now on its source bytes may be gone) and
*given*. *returned* is nothing again: its bytes are back in the source, or it was not found right.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tieredmoe.errors import PackError
from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from tieredmoe.gguf import GGUFInventory
    from tieredmoe.pack.layout import PackLayout
    from tieredmoe.pack.source_files import SourceFiles
    from tieredmoe.pack.units import SegmentKey, Unit

WORK = "conversion"


@attrs.define
class ConversionState:
    """States of units by their number, and the digests of what was written.

    ``gone`` has the units whose bytes were gone from the source at some time.
    """

    units: dict[int, str] = attrs.field(factory=dict)
    digests: dict[int, tuple[bytes, ...]] = attrs.field(factory=dict)
    gone: set[int] = attrs.field(factory=set)

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> ConversionState:
        """The state after all ``records`` of a journal; of other work's, that of none.

        Raises ``PackError`` for records that no release of ours has written.
        """
        state = cls()
        if not records or records[0].get("work") != WORK:
            return state
        try:
            for record in records[1:]:
                state.apply(record)
        except (KeyError, TypeError, ValueError) as error:
            raise PackError(JOURNAL_NAME, f"holds a record that is none: {error!r}") from error
        return state

    def apply(self, record: Mapping[str, Any]) -> None:
        """Count one more record."""
        index = record["unit"]
        if record["state"] == "returned":
            self.units.pop(index, None)
            self.digests.pop(index, None)
            return
        self.units[index] = record["state"]
        if record["state"] == "giving":
            self.gone.add(index)
        if "digests" in record:
            self.digests[index] = tuple(bytes.fromhex(each) for each in record["digests"])

    @property
    def touched(self) -> bool:
        """Whether the source may be marked."""
        return bool(self.gone)

    @property
    def given(self) -> list[int]:
        """Numbers of units whose bytes may be gone from the source."""
        return [index for index, state in self.units.items() if state in {"giving", "given"}]

    def doubtful(self) -> list[int]:
        """Units that may be elsewhere than it says, if the journal lost a record at its end.

        The last that was given may have been returned, and the next that is written may be being
        given: units are given in the order of their numbers, and returned in the other.
        """
        given = [index for index, state in self.units.items() if state == "given"]
        written = sorted(index for index, state in self.units.items() if state == "written")
        return [*given[-1:], *written[:1]]

    def manifest(self, layout: PackLayout, units: Sequence[Unit]) -> Manifest:
        """The manifest of the pack, when all units are written."""
        by_segment: dict[SegmentKey, bytes] = {}
        for index, unit in enumerate(units):
            by_segment |= dict(zip(unit.segments, self.digests[index], strict=True))
        return Manifest(
            layout,
            tuple(
                tuple(by_segment[shard_index, i] for i in range(len(shard.segments)))  # type: ignore[index]  # a SegmentKey is this
                for shard_index, shard in enumerate(layout.shards)
            ),
        )


def written_record(index: int, digests: Sequence[bytes]) -> dict[str, Any]:
    """The record of a unit that is on stable storage; digests per segment."""
    return {"unit": index, "state": "written", "digests": [each.hex() for each in digests]}


def state_record(index: int, state: str) -> dict[str, Any]:
    """The record of another step of a unit."""
    return {"unit": index, "state": state}


def conversion_head(
    inventory: GGUFInventory, source: SourceFiles, plan_digest: bytes, file_nbytes_max: int | None
) -> dict[str, Any]:
    """What a conversion is of, and how it is laid out; ``check_head`` compares two of these."""
    return {
        "work": WORK,
        "plan": plan_digest.hex(),
        "file_nbytes_max": file_nbytes_max,
        "shards": [
            {
                "path": str(shard.path.absolute()),
                "nbytes": shard.file_nbytes,
                "mtime_ns": shard.mtime_ns,
                "header": source.header_digest(index).hex(),
            }
            for index, shard in enumerate(inventory.shards)
        ],
    }


def check_head(
    began: Mapping[str, Any], now: Mapping[str, Any], partial: Path, *, touched: Container[int]
) -> None:
    """Raise ``PackError`` unless work that began as ``began`` can go on as ``now``.

    Times of change do not count of the files ``touched``: giving them up changes these.
    """
    problems = []
    if began.get("work") != now["work"]:
        problems.append(f"it is a {began.get('work')}")
    elif len(began["shards"]) != len(now["shards"]):
        problems.append(f"its source had {len(began['shards'])} files, now {len(now['shards'])}")
    else:
        for index, (then, shard) in enumerate(zip(began["shards"], now["shards"], strict=True)):
            problems += _changes(then, shard, is_touched=index in touched)
        if began["file_nbytes_max"] != now["file_nbytes_max"]:
            then, wish = began["file_nbytes_max"], now["file_nbytes_max"]
            problems.append(f"file_nbytes_max was {then}, now it is {wish}")
        if not problems and began["plan"] != now["plan"]:
            problems.append("it was laid out otherwise, by another release")
    if problems:
        raise PackError(
            partial,
            f"holds a conversion that cannot go on so: {'; '.join(problems)}. Go on as it began, "
            "or drop it by `tieredmoe pack rollback`",
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], *, is_touched: bool) -> list[str]:
    path = now["path"]
    if then["nbytes"] != now["nbytes"]:
        return [f"{path} had {then['nbytes']:,} bytes, now {now['nbytes']:,}"]
    if then["header"] != now["header"]:
        return [f"{path} has another header than {then['path']} had"]
    name, was = Path(path).name, Path(then["path"]).name
    if name != was:
        return [f"{path} was named {was}, and a pack keeps the names"]
    if then["mtime_ns"] != now["mtime_ns"] and not is_touched:
        return [f"{path} was changed since"]
    return []
