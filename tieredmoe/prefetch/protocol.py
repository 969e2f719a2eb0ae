"""Predictors guess, nothing else: what to do with a guess is decided where the disk is known.

A predictor sees layers, experts and what its caller knows beforehand. It never sees slots, bytes or
a clock, so its recall can be measured on a trace, without a model or a disk. Rejected: a predictor
that filters out what is resident (it would have to follow the tiers, and a guess would be another
at every cache size), and asynchronous prediction (a guess that has to be waited for is late).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey


class Predictor(Protocol):
    """Learns from the routing of one series of steps, and guesses what a layer is routed to next.

    Synchronous, of bounded memory whatever is observed, and deterministic: after the same
    observations it gives the same predictions, asked in between or not.
    ``testing.contracts.predictor`` has all that as tests.
    """

    @property
    def width(self) -> int:
        """The most keys that one prediction has."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """``layer`` of the current step was routed to these distinct experts.

        Layers and experts that the model does not have are ignored.
        """

    def predict(self, layer: int, signal: object = None) -> Sequence[ExpertKey]:
        """Experts that ``layer`` will probably be routed to when it runs next, the likeliest first.

        At most ``width`` distinct keys of that layer; none where nothing is known. Changes nothing
        and never raises: a layer that the model does not have and a ``signal`` of another kind than
        this predictor reads (token ids, a hidden state; None always may be) are unknown, no errors.
        """
