"""How often experts were used, beyond a run: what a policy remembers, and a warm start."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.spec import ExpertKey

TOKENS_MAX = 16384
"""What counts are worth at most when they are recalled, so that what is new is not drowned."""


def _frozen(uses: Mapping[ExpertKey, float]) -> Mapping[ExpertKey, float]:
    return MappingProxyType(dict(uses))


@attrs.frozen
class UseCounts:
    """Uses of each expert over ``n_tokens``; experts left out were not used."""

    n_tokens: float
    uses: Mapping[ExpertKey, float] = attrs.field(converter=_frozen)

    def by_heat(self) -> list[ExpertKey]:
        """Every expert that was used, the one used most first."""
        return sorted(self.uses, key=lambda key: (-self.uses[key], key))

    def faded(self) -> UseCounts:
        """The same rates, of ``TOKENS_MAX`` tokens if there were more."""
        share = min(1, TOKENS_MAX / self.n_tokens) if self.n_tokens else 1
        uses = {key: uses * share for key, uses in self.uses.items()}
        return UseCounts(self.n_tokens * share, uses)
