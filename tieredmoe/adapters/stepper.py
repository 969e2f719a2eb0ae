"""A decode step's tokens, segment by segment: what every other way to run them must equal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieredmoe.adapters.decode_step import DecodeStep
    from tieredmoe.adapters.protocol import ExpertProvider


class EagerStepper:
    """A ``Stepper`` that records nothing: each segment runs as Python has it.

    One token at a time, and nobody else runs the model meanwhile.
    """

    def __init__(self, step: DecodeStep[Any], experts: ExpertProvider) -> None:
        self._step = step
        self._experts = experts

    async def __call__(self, token_id: int) -> None:
        """``Stepper``: cancelled at any await, it has given back what the provider lent."""
        step, streamed = self._step, self._step.streamed
        step.enter(token_id)
        for i, layer in enumerate(step.layers):
            streamed.before(layer.layer)
            step.segment(i)
            if i > 0:
                streamed.after(step.layers[i - 1].layer)
            routed, _ = await self._experts.run(
                layer.layer,
                layer.x,
                layer.routing,
                layer.activation,
                meanwhile=partial(step.meanwhile, i),
            )
            layer.out.copy_(routed)
        step.segment(len(step.layers))
        streamed.after(step.layers[-1].layer)
        step.leave()
