"""Device memory that runs out costs cache slots, not the run."""

import asyncio
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch

from tieredmoe import BudgetError
from tieredmoe.adapters.elastic_model import SHRINK_NBYTES_MIN, ElasticModel

SLOT = 64 << 20
TOP_K = 6


class Tiers:
    """A cache of so many slots; a slot given up is room for what a step takes."""

    spec = SimpleNamespace(top_k=TOP_K)

    def __init__(self, n_slots):
        self.n_slots = n_slots
        self.asked = []

    def stats(self):
        return SimpleNamespace(
            cache_capacity_experts=self.n_slots, cache_capacity_bytes=self.n_slots * SLOT
        )

    async def resize(self, n_slots):
        self.asked.append(n_slots)
        await asyncio.sleep(0)
        self.n_slots = n_slots
        return n_slots


class Model:
    """Runs out of memory while the cache has more than ``n_slots_max``."""

    config = "the config"

    def __init__(self, tiers, n_slots_max, error=torch.OutOfMemoryError):
        self.tiers = tiers
        self.n_slots_max = n_slots_max
        self.error = error
        self.n_forwards = 0

    def _take(self):
        if self.tiers.n_slots > self.n_slots_max:
            raise self.error("Tried to allocate 1 GiB")

    def new_state(self, n_context):
        self._take()
        return n_context

    async def forward(self, tokens, state, experts, *, logits):
        self.n_forwards += 1
        self._take()
        return tokens, state, experts, logits


def forward(model):
    return asyncio.run(model.forward("tokens", "state", "experts", logits="last"))


def test_a_step_that_runs_out_of_memory_is_done_again_with_fewer_slots(caplog):
    tiers = Tiers(400)
    model = Model(tiers, 399)
    with caplog.at_level(logging.WARNING):
        assert forward(ElasticModel(model, tiers)) == ("tokens", "state", "experts", "last")
    assert tiers.asked == [350]
    assert model.n_forwards == 2
    (record,) = caplog.records
    assert "gave up 50 of 400 slots (3.12 GiB)" in record.getMessage()
    assert "n_context" in record.getMessage()


def test_a_step_that_has_room_changes_nothing():
    tiers = Tiers(400)
    model = Model(tiers, 400)
    forward(ElasticModel(model, tiers))
    assert (tiers.asked, model.n_forwards) == ([], 1)


def test_a_small_cache_gives_up_enough_memory_to_matter_but_never_a_layers_top_k():
    tiers = Tiers(20)
    forward(ElasticModel(Model(tiers, 19), tiers))
    assert tiers.asked == [20 - SHRINK_NBYTES_MIN // SLOT]
    tiers = Tiers(9)
    forward(ElasticModel(Model(tiers, 8), tiers))
    assert tiers.asked == [TOP_K]


def test_memory_that_runs_out_again_ends_in_one_line_that_says_what_to_do():
    tiers = Tiers(400)
    model = Model(tiers, 10)
    with pytest.raises(BudgetError, match=r"shorter context.*1 GiB") as caught:
        forward(ElasticModel(model, tiers))
    assert "\n" not in str(caught.value)
    assert model.n_forwards == 2


def test_a_cache_with_no_slot_to_give_is_left_alone():
    tiers = Tiers(TOP_K)
    model = Model(tiers, 0)
    with pytest.raises(BudgetError, match="no more to give"):
        forward(ElasticModel(model, tiers))
    assert (tiers.asked, model.n_forwards) == ([], 1)
    with pytest.raises(BudgetError, match="no more to give"):
        ElasticModel(model, tiers).new_state(100)


def test_other_errors_and_the_rest_of_the_model_pass_through():
    tiers = Tiers(400)
    model = ElasticModel(Model(tiers, 0, error=ValueError), tiers)
    with pytest.raises(ValueError, match="1 GiB"):
        forward(model)
    assert tiers.asked == []
    assert model.config == "the config"


def test_the_first_attempt_leaves_nothing_behind_when_the_second_begins():
    """What the failed step had made would take the very room that the cache gave up."""
    tiers, alive = Tiers(400), []

    class Tensor:
        pass

    class Holding(Model):
        async def forward(self, *args, **kwargs):
            held = Tensor()
            alive.append(weakref.ref(held))
            return await super().forward(*args, **kwargs)

    class Watching(Tiers):
        async def resize(self, n_slots):
            assert alive[0]() is None
            return await super().resize(n_slots)

    tiers = Watching(400)
    forward(ElasticModel(Holding(tiers, 399), tiers))
    assert len(alive) == 2
