"""Which policy, where that is left to the library: by slots over W, the lookups of one token."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from tieredmoe.policies.registry import POLICIES, make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.policies.protocol import EvictionPolicy

logger = logging.getLogger(__name__)

AUTO = "auto"
POLICY_CHOICES = (AUTO, *POLICIES)


@attrs.frozen
class Choice:
    """A policy by name, and in one line why it is that one."""

    name: str
    reason: str
    policy: EvictionPolicy


def choose_policy(
    name: str, *, n_slots: int, layers: Sequence[int], top_k: int, n_experts: int
) -> Choice:
    """The policy called ``name``; for ``auto``, the one that suits ``n_slots``.

    The model routes each token to ``top_k`` of ``n_experts`` in each of ``layers``, which makes
    W = layers × top-k lookups a token. Raises ``ConfigError`` for a name that is not known.
    """
    reason = "it was asked for"
    if name == AUTO:
        name, reason = _suiting(n_slots, len(layers), top_k, n_experts)
    logger.info("eviction policy %s: %s", name, reason)
    return Choice(name, reason, make_policy(name, n_slots=n_slots, layers=layers, top_k=top_k))


def remembers(name: str) -> bool:
    """Whether the policy called ``name``, or what may be chosen for it, is a remembering one."""
    return name == AUTO or hasattr(POLICIES[name], "use_counts")


def _suiting(n_slots: int, n_layers: int, top_k: int, n_experts: int) -> tuple[str, str]:
    if n_slots >= n_layers * n_experts:
        return "lru", f"all {n_layers * n_experts} experts fit, so none is evicted"
    cycle = n_layers * top_k
    size = f"{n_slots} slots are {n_slots / cycle:.2f} × the {cycle} lookups of a token"
    if n_slots < cycle:
        return "lrfu", f"{size}: recency would hit nothing, decayed frequency over all layers does"
    return "lrfu", f"{size}: decayed frequency, a share for each of {n_layers} layers"
