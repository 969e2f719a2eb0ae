"""Which sequence is in a model's decode step.

A decode step has fixed buffers and captured graphs, which cost seconds to make; sequences come and
go. So one step serves them all: whoever decodes next is loaded into it, and whoever was there takes
its layers along if anybody still holds it. Rejected: a step for each sequence (graphs captured
anew for every answer), and states that live in the buffers for good (a snapshot, a prompt in
chunks and a second sequence would each need a way round).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from tieredmoe.adapters.decode_state import LayerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.adapters.decode_state import DecodeState
    from tieredmoe.adapters.decode_step import DecodeStep

L = TypeVar("L", bound=LayerState)

CAPACITY_LEAST = 4096
"""Tokens that the first step of a model has room for."""


def step_capacity(n_tokens: int) -> int:
    """Tokens of the step in which ``n_tokens`` have room: a power of two.

    Steps read or mask what their capacity allows, so one for a whole context of a million tokens
    would make the first hundred slow; growing by doubling makes graphs anew a few times at most.
    """
    return max(CAPACITY_LEAST, 1 << (n_tokens - 1).bit_length())


class DecodeSeat(Generic[L]):
    """At most one step of a model, made by ``new_step`` for a capacity in tokens, and who is in it.

    Not safe for two tasks at a time: the step is not either.
    """

    def __init__(self, new_step: Callable[[int], DecodeStep[L]]) -> None:
        self._new_step = new_step
        self._step: DecodeStep[L] | None = None
        self._sitting: weakref.ref[DecodeState[L]] | None = None

    def seat(self, state: DecodeState[L]) -> DecodeStep[L]:
        """The step with ``state`` in it and room for one more token; another object after growth.

        When it raises (memory for a larger step), no state is lost and the call may be repeated.
        """
        step = self._step
        if step is not None and self._sits(state) and state.n_tokens < step.n_capacity:
            return step
        layers = state.layers
        self.vacate()
        if step is None or state.n_tokens >= step.n_capacity:
            # The old buffers first, which are then free for the new ones.
            step = self._step = None
            step = self._step = self._new_step(step_capacity(state.n_tokens + 1))
        step.load(layers, n_tokens=state.n_tokens)
        state.sit(step)
        self._sitting = weakref.ref(state)
        return step

    def vacate(self) -> None:
        """Give the one who is in the step its layers, if anybody still holds it."""
        state = None if self._sitting is None else self._sitting()
        self._sitting = None
        if state is not None and self._step is not None and state.sits_in(self._step):
            state.stand()

    def close(self) -> None:
        """Free the step, once nobody is in it."""
        self.vacate()
        self._step = None

    def _sits(self, state: DecodeState[L]) -> bool:
        return (
            self._sitting is not None
            and self._sitting() is state
            and self._step is not None
            and state.sits_in(self._step)
        )

    def __repr__(self) -> str:
        return f"<DecodeSeat of {self._step!r}>"
