"""The settings of a hierarchy: frozen, validated, every problem reported at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from tieredmoe.budget import parse_size
from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.policies import POLICY_CHOICES, remembers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BACKENDS = ("auto", "uring", "threads", "buffered")
AUTO = "auto"
READ_SPLITS_MAX = 16
STAGE_SLOTS_MAX = 1024
VERIFY_MODES = ("off", "first_read", "always")
_DEVICE = re.compile(r"host|cuda(:[0-9]{1,3})?")
_NOTHING = re.compile(r"\s*0+(\.0*)?\s*(%|([kmgtp]i?)?b)?\s*", re.IGNORECASE)


def _absolute(path: Any) -> Any:
    """The path as it is now, whatever the working directory becomes; what is none is kept."""
    return Path(path).absolute() if path and isinstance(path, str | Path) else path


@attrs.frozen(kw_only=True)
class HierarchyConfig:
    """How much memory the tiers may take and how they read.

    Sizes are integers (bytes) or texts in one grammar: ``"24GiB"``, ``"512MiB"``, ``"80%"`` (of the
    memory that is free at open). Raises ``ConfigError`` naming every setting that is wrong.
    """

    device: str = "host"
    """Where the top tier is: ``host``, or a GPU: ``cuda`` (the first) or ``cuda:N``."""
    vram: int | str = "21GiB"
    """Budget of the top tier. It gets ⌊min(vram, free - reserve) / slot⌋ slots."""
    reserve: int | str = "3GiB"
    """Free memory to leave alone."""
    ram: int | str | None = None
    """Budget of the RAM tier between disk and top tier, which keeps what the top tier evicts: a
    size, or ``auto``: what the host has free but for ``ram_reserve``. None: no such tier."""
    ram_reserve: int | str = "8GiB"
    """Free host memory that the RAM tier leaves alone."""
    stage_slots: int | None = None
    """Slots of the staging tier between disk and top tier; 0 reads straight into the top tier, as
    does None where that is host memory. Before a GPU there must be some, and None is as many as
    keep the drives busy, 8 at least."""
    prefetch_slots: int | None = None
    """Slots of the top tier that are set apart for prefetch; 0 refuses all of it, None is as many
    as suit the tier: 2 × top-k, a quarter of the slots at most."""
    policy: str = AUTO
    """Eviction policy of the top tier; ``auto`` chooses it by how many slots there are."""
    policy_path: Path | None = attrs.field(default=None, converter=_absolute)
    """Where the policy keeps what it learns of use from run to run, to start warm; not with
    policies that remember nothing (``lru``, ``lfu_lru``, ``s3_fifo``)."""
    backend: str = "auto"
    """How to read: ``auto`` is ``uring``, else ``threads``; ``buffered`` is the page cache."""
    allow_buffered: bool = False
    """Whether the page cache will do where direct reads cannot be had."""
    strict: bool = False
    """Refuse to open with anything less than the best that ``backend`` stands for."""
    read_splits: int = 1
    """In how many parallel parts to read one record."""
    window: int | str | None = None
    """Bytes in flight per drive at most; None: half of what its queue takes."""
    waiting_max: int = 1024
    """Acquires and streams that may wait for slots at once; one more is refused."""
    verify: str = "off"
    """Which reads to check against the pack's digests: ``off``, ``first_read`` or ``always``."""
    repair_from: Path | None = attrs.field(default=None, converter=_absolute)
    """The pack's source GGUF, to take experts from whose bytes in the pack fail their digests."""
    stats_path: Path | None = attrs.field(default=None, converter=_absolute)
    """Where to keep a JSON snapshot of the counters."""
    stats_every: int = 1000
    """Acquires between two snapshots."""
    trace_events: int = 0
    """Events to keep of what happened when (``Hierarchy.trace``); 0 records nothing."""

    def __attrs_post_init__(self) -> None:
        problems = [
            *self._size_problems(),
            *self._limit_problems(),
            *self._choice_problems(),
            *self._switch_problems(),
            *self._path_problems(),
        ]
        raise_config_problems("HierarchyConfig", problems)

    def _size_problems(self) -> Iterator[str]:
        for name in ("vram", "reserve", "ram", "ram_reserve", "window"):
            value = getattr(self, name)
            if (value is None and name in {"ram", "window"}) or (value == AUTO and name == "ram"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | str):
                yield f"{name}: {value!r} is neither an int (bytes) nor a text"
            elif not (name.endswith("reserve") and _is_nothing(value)):
                try:
                    parse_size(value, whole_nbytes=None if name == "window" else 2**40)
                except ConfigError as error:
                    yield f"{name}: {error}"
        if self.stage_slots is not None and (
            not _is_int(self.stage_slots) or not 0 <= self.stage_slots <= STAGE_SLOTS_MAX
        ):
            most = f"an int from 0 to {STAGE_SLOTS_MAX}"
            yield f"stage_slots: {self.stage_slots!r} is neither None nor {most}"
        if not _is_int(self.read_splits) or not 1 <= self.read_splits <= READ_SPLITS_MAX:
            splits = f"an int from 1 to {READ_SPLITS_MAX}"
            yield f"read_splits: {self.read_splits!r} is not {splits}"
        if not _is_int(self.stats_every) or self.stats_every < 1:
            yield f"stats_every: {self.stats_every!r} is not a positive int"

    def _limit_problems(self) -> Iterator[str]:
        for name, least, most in (("waiting_max", 1, 2**20), ("trace_events", 0, 2**24)):
            value = getattr(self, name)
            if not _is_int(value) or not least <= value <= most:
                yield f"{name}: {value!r} is not an int from {least} to {most}"

        slots = self.prefetch_slots
        if slots is not None and (not _is_int(slots) or not 0 <= slots <= STAGE_SLOTS_MAX):
            known = f"an int from 0 to {STAGE_SLOTS_MAX}"
            yield f"prefetch_slots: {slots!r} is neither None nor {known}"

    def _choice_problems(self) -> Iterator[str]:
        choices = {"policy": POLICY_CHOICES, "backend": BACKENDS, "verify": VERIFY_MODES}
        for name, known in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                yield f"{name}: {value!r} is not one of {', '.join(known)}"
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            yield f"device: {self.device!r} is not one of host, cuda, cuda:0, cuda:1 and so on"
        elif self.device != "host" and self.stage_slots == 0:
            yield "stage_slots: a disk cannot read into a GPU's memory; leave it out, or set 8"
        if self.ram is not None and self.stage_slots is not None:
            yield "stage_slots: reads land in the RAM tier; leave out this or ram"
        if self.ram == AUTO and self.device == "host":
            yield "ram: 'auto' is for a GPU's host; here the top tier has it: give a size, or vram"

    def _switch_problems(self) -> Iterator[str]:
        for name in ("allow_buffered", "strict"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                yield f"{name}: {value!r} is neither True nor False"
        if self.strict is True and self.allow_buffered is True:
            yield "strict: it refuses what allow_buffered allows; choose one of them"

    def _path_problems(self) -> Iterator[str]:
        for name in ("repair_from", "stats_path", "policy_path"):
            path = getattr(self, name)
            if path is not None and (not isinstance(path, Path) or "\0" in str(path)):
                yield f"{name}: {path!r} is not a path"
        known = isinstance(self.policy, str) and self.policy in POLICY_CHOICES
        if self.policy_path is not None and known and not remembers(self.policy):
            yield f"policy_path: {self.policy} remembers nothing; use auto, lrfu or next_use"
        if self.repair_from is not None and self.verify == "off":
            yield (
                "repair_from: nothing is found to repair with verify='off'; "
                "set verify to 'first_read' or 'always'"
            )

    @property
    def window_nbytes(self) -> int | None:
        """Bytes in flight per drive at most, None for as many as suit it."""
        return None if self.window is None else parse_size(self.window)

    def reserve_nbytes(self, free_nbytes: int) -> int:
        """Bytes to leave alone of the ``free_nbytes`` there are."""
        return _reserved(self.reserve, free_nbytes)

    def ram_reserve_nbytes(self, free_nbytes: int) -> int:
        """Bytes of the ``free_nbytes`` of the host that the RAM tier leaves alone."""
        return _reserved(self.ram_reserve, free_nbytes)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> Self:
        """A configuration from plain data; unknown names are refused along with wrong values."""
        known = [a.name for a in attrs.fields(cls)]
        problems = [
            f"unknown setting {name!r}, known are {', '.join(known)}"
            for name in settings
            if name not in known
        ]
        try:
            config = cls(**{name: settings[name] for name in known if name in settings})  # type: ignore[arg-type]  # types are what the validation checks
        except ConfigError as error:
            problems.append(str(error).removeprefix("HierarchyConfig: "))
        raise_config_problems("HierarchyConfig", problems)
        return config


def _reserved(reserve: int | str, free_nbytes: int) -> int:
    return 0 if _is_nothing(reserve) else parse_size(reserve, whole_nbytes=free_nbytes)


def _is_nothing(size: int | str) -> bool:
    # The size grammar has no word for it: nothing but a reserve may be of no size.
    return _NOTHING.fullmatch(str(size)) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
