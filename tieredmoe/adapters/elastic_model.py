"""A model that gives up cache slots rather than end a run for want of device memory.

What a step allocates can be foreseen (``memory_plan``), not promised: contexts grow past the plan,
other processes take memory. A slot less costs some reads, a failed step costs the answer. So the
first failure of a step shrinks the expert cache, and the step, which has changed nothing, is done
again. Rejected: a reserve large enough for everything (it would lie idle in every other run).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredmoe.budget import format_size
from tieredmoe.errors import BudgetError

if TYPE_CHECKING:
    from tieredmoe.adapters.protocol import ExpertProvider, LogitRows, Model, ModelConfig, State
    from tieredmoe.spec import MoESpec
    from tieredmoe.stats import Stats

_log = logging.getLogger(__name__)

SHRINK_SHARE = 8
"""One in so many slots goes at a failure, but no less memory than ``SHRINK_NBYTES_MIN``."""

SHRINK_NBYTES_MIN = 512 << 20


class ResizableTiers(Protocol):
    """Tiers whose top one can shrink: a ``Hierarchy``, or one on a thread of its own."""

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""

    def stats(self) -> Stats:
        """Counters, the slots among them."""

    async def resize(self, n_slots: int) -> int:
        """Have ``n_slots`` slots; how many there are once the others' memory is free."""


class ElasticModel:
    """``model`` over ``tiers``: a forward that runs out of device memory is done once more."""

    def __init__(self, model: Model[Any], tiers: ResizableTiers) -> None:
        self._model = model
        self._tiers = tiers

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self._model.config

    def new_state(self, n_context: int) -> State:
        """``Model.new_state``; ``BudgetError`` if there is no memory for it."""
        try:
            state: State = self._model.new_state(n_context)
        except torch.OutOfMemoryError as error:
            raise _no_room(error) from error
        return state

    async def forward(
        self, tokens: torch.Tensor, state: State, experts: ExpertProvider, *, logits: LogitRows
    ) -> torch.Tensor:
        """``Model.forward``, tried again with a smaller expert cache if memory runs out.

        Raises ``BudgetError`` if it runs out again, or the cache has no slot to give.
        """
        try:
            return await self._model.forward(tokens, state, experts, logits=logits)
        except torch.OutOfMemoryError as error:
            fact = str(error)
        # Not in the handler: the error keeps the frames that it came through, and their tensors.
        await self._shrink(fact)
        try:
            return await self._model.forward(tokens, state, experts, logits=logits)
        except torch.OutOfMemoryError as error:
            raise _no_room(error) from error

    async def _shrink(self, fact: str) -> None:
        stats = self._tiers.stats()
        n_slots = stats.cache_capacity_experts
        slot_nbytes = stats.cache_capacity_bytes // n_slots
        n_less = max(-(-n_slots // SHRINK_SHARE), -(-SHRINK_NBYTES_MIN // slot_nbytes))
        n_wanted = max(self._tiers.spec.top_k, n_slots - n_less)
        if n_wanted == n_slots:
            raise _no_room(fact)
        n_left = await self._tiers.resize(n_wanted)
        _log.warning(
            "device memory ran out: the expert cache gave up %d of %d slots (%s); open the model "
            "with a smaller vram, or with the n_context that it is used with",
            n_slots - n_left,
            n_slots,
            format_size((n_slots - n_left) * slot_nbytes),
        )

    def __repr__(self) -> str:
        return repr(self._model)


def _no_room(fact: object) -> BudgetError:
    line = " ".join(str(fact).split())
    return BudgetError(
        "device memory ran out, and the expert cache has no more to give; use a shorter context or "
        f"smaller chunks, or free memory on the device ({line})"
    )
