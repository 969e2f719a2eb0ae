"""What a token costs at best: bytes over each way that they take, and which way is the narrowest.

Every expert that a token uses is read where it is computed with; one that is in no slot there comes
over the link, and one that is in no host slot either comes from the disk first. The three overlap,
so the time of a token is that of the slowest, not the sum. Arithmetic only: what a cache will hit
depends on the text, so costs are given for hit rates, up to the one that no policy can pass.
"""

from __future__ import annotations

from typing import Literal

import attrs

Way = Literal["disk", "link", "memory"]


@attrs.frozen(kw_only=True)
class TokenBytes:
    """What one token asks for, whatever is cached."""

    experts: int
    """weights of the routed experts it uses"""
    reads: int
    """the same as they are read from disk, in whole pages"""
    dense: int
    """all other weights it multiplies with"""
    streamed: int = 0
    """of these, what crosses the link for every token"""


@attrs.frozen(kw_only=True)
class Rates:
    """Bytes per second; ``link`` is None where the model computes on the host."""

    disk: float
    link: float | None
    memory: float
    """of the memory where it computes"""


@attrs.frozen(kw_only=True)
class TokenCost:
    """One token: of its experts the share ``top_hits`` is where it computes, ``host_hits`` in RAM.

    ``bound`` names the way that takes longest; ``tokens_per_s`` is what that allows.
    """

    top_hits: float
    host_hits: float
    disk_nbytes: int
    link_nbytes: int
    memory_nbytes: int
    disk_s: float
    link_s: float
    memory_s: float

    @property
    def step_s(self) -> float:
        """Seconds that a token takes at least."""
        return max(self.disk_s, self.link_s, self.memory_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second at most."""
        return 1 / self.step_s

    @property
    def bound(self) -> Way:
        """What takes longest."""
        times: dict[Way, float] = {
            "disk": self.disk_s,
            "link": self.link_s,
            "memory": self.memory_s,
        }
        return max(times, key=lambda way: times[way])


def hit_ceiling(n_slots: int, token_experts: int) -> float:
    """The hit rate that no policy can pass: a token cannot find more than there are slots.

    ``token_experts`` is the token cycle, routed layers × top-k. Only a token that uses just what is
    there reaches it.
    """
    return min(1.0, n_slots / token_experts)


def token_cost(
    token: TokenBytes, rates: Rates, *, top_hits: float, host_hits: float = 0.0
) -> TokenCost:
    """The cost of a token of which so large shares are hits; together they are at most 1."""
    assert 0 <= top_hits <= top_hits + host_hits <= 1 + 1e-9
    below = max(0.0, 1 - top_hits)
    disk_nbytes = round(max(0.0, below - host_hits) * token.reads)
    link_nbytes = 0 if rates.link is None else round(below * token.experts) + token.streamed
    memory_nbytes = token.experts + token.dense
    return TokenCost(
        top_hits=top_hits,
        host_hits=host_hits,
        disk_nbytes=disk_nbytes,
        link_nbytes=link_nbytes,
        memory_nbytes=memory_nbytes,
        disk_s=disk_nbytes / rates.disk,
        link_s=0.0 if rates.link is None else link_nbytes / rates.link,
        memory_s=memory_nbytes / rates.memory,
    )
