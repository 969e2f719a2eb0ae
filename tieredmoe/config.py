"""The settings of a hierarchy: frozen, validated, every problem reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from tieredmoe.budget import parse_size
from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

BACKENDS = ("auto", "threads", "buffered")
VERIFY_MODES = ("off", "first_read", "always")


@attrs.frozen(kw_only=True)
class HierarchyConfig:
    """How much memory the tiers may take and how they read.

    Sizes are integers (bytes) or texts in one grammar: ``"24GiB"``, ``"512MiB"``, ``"80%"`` (of the
    memory that is free at open). Raises ``ConfigError`` naming every setting that is wrong.
    """

    vram: int | str = "21GiB"
    """Budget of the top tier. It gets ⌊min(vram, free - reserve) / slot⌋ slots."""
    reserve: int | str = "3GiB"
    """Free memory to leave alone."""
    stage_slots: int = 8
    """Slots of the staging tier between disk and top tier; 0 reads straight into the top tier."""
    policy: str = "lfu_lru"
    """Eviction policy of the top tier."""
    backend: str = "auto"
    """How to read: ``auto`` never means the page cache, ``buffered`` asks for it."""
    verify: str = "off"
    """Which reads to check against the pack's digests: ``off``, ``first_read`` or ``always``."""
    repair_from: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    """The pack's source GGUF, to take experts from whose bytes in the pack fail their digests."""
    stats_path: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    """Where to keep a JSON snapshot of the counters."""
    stats_every: int = 1000
    """Acquires between two snapshots."""

    def __attrs_post_init__(self) -> None:
        raise_config_problems("HierarchyConfig", list(self._problems()))

    def _problems(self) -> list[str]:
        problems: list[str] = []
        for name in ("vram", "reserve"):
            value = getattr(self, name)
            try:
                if value != 0 or name == "vram":
                    parse_size(value, whole_nbytes=2**40)
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        if not isinstance(self.stage_slots, int) or not 0 <= self.stage_slots <= 1024:
            problems.append(f"stage_slots: {self.stage_slots!r} is not a number from 0 to 1024")
        if self.policy not in POLICIES:
            problems.append(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.backend not in BACKENDS:
            problems.append(f"backend: {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.verify not in VERIFY_MODES:
            problems.append(f"verify: {self.verify!r} is not one of {', '.join(VERIFY_MODES)}")
        elif self.repair_from is not None and self.verify == "off":
            problems.append(
                "repair_from: nothing is found to repair with verify='off'; "
                "set verify to 'first_read' or 'always'"
            )
        if not isinstance(self.stats_every, int) or self.stats_every < 1:
            problems.append(f"stats_every: {self.stats_every!r} is not a positive number")
        return problems

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> Self:
        """A configuration from plain data; unknown names are refused along with wrong values."""
        known = [a.name for a in attrs.fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(
                f"HierarchyConfig: unknown settings {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return cls(**settings)  # type: ignore[arg-type]  # types are what the validation checks
