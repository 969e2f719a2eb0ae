"""Choosing the next token from logits.

The order is the usual one: temperature, then top-k, then top-p of what is left, then min-p; one
uniform number picks among the survivors by their cumulative probability. The highest logit is found
where the logits are; drawing happens on the host in float64, so the same seed gives the same tokens
whatever device they come from. ``torch.multinomial`` was rejected: its stream of
random numbers differs between devices.
"""

from __future__ import annotations

import attrs
import torch
from attrs.converters import optional

from tieredmoe.adapters.settings import integer_from, number_from, setting_problems
from tieredmoe.errors import LogitsError, raise_config_problems

_N_RANKED_FIRST = 1024


def sampling_problems(
    *,
    temperature: object,
    top_p: object,
    seed: object,
    top_k: object = None,
    min_p: object = None,
) -> list[str]:
    """One line for each setting of a ``Sampler`` that is of the wrong type or out of range."""
    degrees, share, least = number_from(temperature), number_from(top_p), number_from(min_p)
    n_kept, start = integer_from(top_k), integer_from(seed)
    return setting_problems(
        [
            ("temperature", temperature, "a number from 0", degrees is not None and degrees >= 0),
            (
                "top_p",
                top_p,
                "a number above 0 and at most 1",
                share is not None and 0 < share <= 1,
            ),
            (
                "top_k",
                top_k,
                "an integer, 1 or more; None keeps all",
                top_k is None or (n_kept is not None and n_kept >= 1),
            ),
            (
                "min_p",
                min_p,
                "a number from 0 to 1; None keeps all",
                min_p is None or (least is not None and 0 <= least <= 1),
            ),
            (
                "seed",
                seed,
                "an integer from 0 to 2**64 - 1",
                start is not None and 0 <= start < 2**64,
            ),
        ]
    )


def _as_number(value: float) -> float:
    # What is no number stays as it is, for the message that refuses it.
    number = number_from(value)
    return value if number is None else number


def _as_integer(value: int) -> int:
    integer = integer_from(value)
    return value if integer is None else integer


@attrs.frozen(kw_only=True, eq=False)
class Sampler:
    """Draws ids, the same ones for the same seed and logits; temperature 0 is the most likely id.

    Attributes:
        temperature: logits are divided by it; 0 takes the highest logit, of equal ones the lowest
            id, and the other settings have no effect.
        top_p: keep the fewest ids whose probabilities sum to at least this, in (0, 1].
        top_k: keep this many ids.
        min_p: keep the ids at least this times as probable as the most probable, in [0, 1].
        seed: of the random numbers, in [0, 2**64).

    Raises:
        ConfigError: settings of the wrong type or outside their range; all of them are listed.
    """

    temperature: float = attrs.field(default=0.0, converter=_as_number)
    top_p: float = attrs.field(default=1.0, converter=_as_number)
    top_k: int | None = attrs.field(default=None, converter=optional(_as_integer))
    min_p: float | None = attrs.field(default=None, converter=optional(_as_number))
    seed: int = attrs.field(default=0, converter=_as_integer)
    _generator: torch.Generator = attrs.field(init=False, repr=False, factory=torch.Generator)

    def __attrs_post_init__(self) -> None:
        problems = sampling_problems(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
        )
        raise_config_problems("sampling", problems)
        self._generator.manual_seed(self.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next id for ``logits`` [V], of any floating type and device.

        Raises:
            LogitsError: a logit is NaN or infinite, or the shape is not [V].
        """
        if logits.ndim != 1 or not logits.numel():
            raise LogitsError(f"logits of shape {tuple(logits.shape)}: expected [V], one position")
        # One transfer for what is always needed, and for the greedy no other.
        # x - x is 0, and NaN where x is NaN or infinite: fewer launches than isfinite has.
        wrong = (logits - logits).count_nonzero()
        best, n_wrong = torch.stack((logits.argmax(), wrong)).tolist()
        if n_wrong:
            raise LogitsError(
                f"{n_wrong} of {logits.numel()} logits are NaN or infinite: the weights or a "
                "kernel are broken; verify the model file"
            )
        if self.temperature == 0:
            return int(best)
        return self._draw(logits.detach().to("cpu", torch.float64))

    def _draw(self, logits: torch.Tensor) -> int:
        """Return one id by the settings; uses exactly one random number."""
        # Subtracting the maximum first keeps the quotient finite for the smallest temperatures.
        weights = torch.exp((logits - logits.max()) / self.temperature)
        ids, kept = self._survivors(weights)
        cumulative = kept.cumsum(0)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        place = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        # Rounding may put the product on the last sum itself.
        return int(ids[min(int(place), kept.numel() - 1)])

    def _survivors(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids that top-k, top-p and min-p leave, and their weights.

        Sorting a whole vocabulary takes longer than all the rest, and what survives is nearly
        always among the first thousand: the heaviest are ranked, more of them while all survive.
        """
        n_ids = weights.numel()
        if self.top_k is None and self.top_p == 1 and self.min_p is None:
            return torch.arange(n_ids), weights
        n_ranked = min(self.top_k or _N_RANKED_FIRST, n_ids)
        while True:
            ids, ranked = _heaviest(weights, n_ranked)
            ranked = ranked[: self.top_k]
            kept = self._cut(ranked, total=weights.sum() if self.top_k is None else ranked.sum())
            if self.top_k is not None or kept.numel() < n_ranked or n_ranked == n_ids:
                return ids, kept
            n_ranked = min(n_ranked * 8, n_ids)

    def _cut(self, ranked: torch.Tensor, *, total: torch.Tensor) -> torch.Tensor:
        """Return the head of the falling ``ranked`` that top-p of ``total`` and min-p leave."""
        if self.top_p < 1:
            n_below = int((ranked.cumsum(0) < self.top_p * total).sum())
            ranked = ranked[: n_below + 1]
        if self.min_p is not None:
            ranked = ranked[ranked >= self.min_p * ranked[0]]
        return ranked


def _heaviest(weights: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and weights of the ``n`` heaviest and of all that equal the last of them.

    They fall by weight, and rise by id among equal ones, so that a cut is the same everywhere.
    """
    threshold = torch.topk(weights, n).values[-1]
    ids = torch.nonzero(weights >= threshold).flatten()
    ranked, order = torch.sort(weights[ids], descending=True, stable=True)
    return ids[order], ranked
