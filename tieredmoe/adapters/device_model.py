"""A model on a device: prompts through its functional forward, tokens through its decode step.

It is a ``Model`` itself, so generations, prompt caches and tests do not know it from the model on
the host. Sequences take turns, since what computes shares buffers: activations, scratch memory and
the layers that stream.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from tieredmoe.adapters.decode_seat import DecodeSeat
from tieredmoe.adapters.decode_state import LayerState
from tieredmoe.adapters.tokens import require_step_tokens
from tieredmoe.errors import ClosedError

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.decode_state import DecodeState
    from tieredmoe.adapters.decode_step import DecodeStep, StepModel, Stepper
    from tieredmoe.adapters.protocol import ExpertProvider, LogitRows, ModelConfig

L = TypeVar("L", bound=LayerState)


class DeviceModel(Generic[L]):
    """``model``, one forward at a time in first-come, first-served order.

    ``in_steps`` runs single tokens through the model's decode step; without, everything is
    functional (where something in the model cannot be recorded). The step is kept with all that was
    recorded of it as long as forwards have the same ``ExpertProvider``. Once closed, it raises
    ``ClosedError``.
    """

    def __init__(self, model: StepModel[L], *, in_steps: bool = True) -> None:
        self._model: StepModel[L] | None = model
        self._config = model.config
        self._turn = asyncio.Lock()
        self._seat = DecodeSeat(self._new_step) if in_steps else None
        self._stepper: tuple[DecodeStep[L], ExpertProvider, Stepper] | None = None

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self._config

    def new_state(self, n_context: int) -> DecodeState[L]:
        """The state of an empty sequence that may grow to ``n_context`` tokens; see ``Model``."""
        return self._open().new_state(n_context)

    async def forward(
        self,
        tokens: torch.Tensor,
        state: DecodeState[L],
        experts: ExpertProvider,
        *,
        logits: LogitRows,
    ) -> torch.Tensor:
        """``Model.forward``; cancelled while it waits for its turn, it has done nothing."""
        async with self._turn:
            model = self._open()
            if self._seat is None or tokens.shape[0] > 1:
                return await model.forward(tokens, state, experts, logits=logits)
            (token_id,) = require_step_tokens(tokens, self._config.vocab_size)
            state.check_room(1)
            start = state.n_tokens
            step = self._seat.seat(state)
            await self._stepper_of(step, experts)(token_id)
            state.commit_seated(start=start)
            rows = step.logits[:0] if logits == "none" else step.logits
            return rows.clone()

    async def close(self) -> None:
        """Let go of the model and all that was made of it, once it is its turn. Idempotent.

        Sequences stay what they are. Cancelled while it waits, it has done nothing.
        """
        async with self._turn:
            if self._seat is not None:
                self._seat.close()
            # The seat knows this object: nothing is to wait for the garbage collector.
            self._model = self._seat = self._stepper = None

    def _open(self) -> StepModel[L]:
        if self._model is None:
            raise ClosedError("the model was closed")
        return self._model

    def _new_step(self, n_capacity: int) -> DecodeStep[L]:
        # What was recorded of the old one goes first, or its memory would not be free.
        self._stepper = None
        return self._open().new_decode_step(n_capacity)

    def _stepper_of(self, step: DecodeStep[L], experts: ExpertProvider) -> Stepper:
        if self._stepper is None or self._stepper[:2] != (step, experts):
            self._stepper = None
            self._stepper = (step, experts, experts.stepper(step))
        return self._stepper[2]

    def __repr__(self) -> str:
        return f"<DeviceModel of {self._model!r}, {self._seat!r}>"
