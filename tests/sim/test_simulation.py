"""Simulated tiers, their bounds and their seconds, against counts and sums made by hand."""

from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest

from tieredmoe.errors import BudgetError, ConfigError
from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.sim.bounds import belady_with_bypass, ceiling, compulsory_misses
from tieredmoe.sim.curves import hit_rate_curves, slots_between
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.laboratory import REPLAYABLE
from tieredmoe.sim.machine import (
    DEVICE,
    DRIVE,
    LINK,
    Machine,
    rates,
    timeline,
    token_seconds,
    waits,
)
from tieredmoe.sim.routing_trace import DECODE, PREFILL, ModelFacts, decoded
from tieredmoe.sim.simulation import simulate

TRACES = Path(__file__).parent.parent / "data" / "traces"
OLMOE = load_trace(TRACES / "olmoe-1b-7b_80_tokens.npz").tokens(slice(0, 30))
QWEN = load_trace(TRACES / "qwen3_4_tokens.route.csv")
MACHINE = Machine(expert_nbytes=2_000_000, drive_gb_per_s=2, link_gb_per_s=8, layer_s=0.01)


def small_trace(phase=None):
    """Two layers of top-2; the second token shares one expert of each layer with the first."""
    experts = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 4]], [[5, 6], [0, 1]]])
    facts = ModelFacts("small", layers=(1, 2), n_experts=8, top_k=2)
    return decoded(facts, experts, phase=phase)


@pytest.mark.parametrize("policy", ["lrfu", "lru", "sieve"])
def test_a_simulation_counts_what_the_replay_does(policy):
    run = simulate(OLMOE, n_slots=200, policy=policy)
    made = {"n_slots": 200, "layers": OLMOE.facts.layers, "top_k": 8}
    if policy != "sieve":
        plain = replay(OLMOE.steps(), Residency(200, make_policy(policy, **made)))
        assert plain.misses == run.misses.sum()
        assert plain.evictions == run.evictions.sum()
        assert plain.hit_rate == pytest.approx(run.hit_rate())
    assert run.lookups.sum() == OLMOE.experts.size
    assert run.evictions.sum() == run.misses.sum() - 200


def test_hits_are_known_by_layer_and_over_time():
    run = simulate(small_trace(), n_slots=16, policy="lru")
    assert run.misses.tolist() == [[2, 2], [1, 1], [2, 2]]
    assert run.hit_rate_by_layer().tolist() == pytest.approx([1 / 6, 1 / 6])
    assert run.hit_rate_over_time(1).tolist() == [0, 0.5, 0]
    assert run.hit_rate_over_time(2).tolist() == [0.25, 0]


def test_a_prompt_warms_the_cache_and_counts_for_itself():
    run = simulate(small_trace(np.array([PREFILL, DECODE, DECODE])), n_slots=16, policy="lru")
    assert run.hit_rate() == 2 / 8
    assert run.hit_rate(phase=PREFILL) == 0
    assert run.hit_rate(phase=None) == 2 / 12


def test_a_union_larger_than_the_cache_is_served_in_waves():
    run = simulate(small_trace(np.full(3, PREFILL)), n_slots=2, policy="lru")
    assert run.lookups.tolist() == [[5, 5]]
    assert run.misses.tolist() == [[5, 5]]
    assert np.isnan(run.hit_rate())


def test_ram_keeps_what_vram_evicts():
    alone = simulate(OLMOE, n_slots=150)
    kept = simulate(OLMOE, n_slots=150, n_ram_slots=200)
    np.testing.assert_array_equal(alone.misses, kept.misses)
    np.testing.assert_array_equal(alone.misses, alone.reads)
    assert kept.reads.sum() < 0.75 * alone.reads.sum()
    assert kept.kept_rate() > kept.hit_rate() == alone.hit_rate()


def test_probabilities_reach_a_policy_that_learns():
    shape = (*OLMOE.experts.shape[:2], 64)
    knowing = np.full(shape, 1e-4, np.float16)
    # What a token's router says is known after its own victims are chosen, so it tells of the next
    # token's victims, and what helps them is the token after.
    following = np.roll(OLMOE.experts, -2, axis=0).astype(int)
    np.put_along_axis(knowing, following, 0.12, axis=2)
    told = attrs.evolve(OLMOE, probabilities=knowing)
    untold = simulate(OLMOE, n_slots=200, policy="next_use").hit_rate()
    assert simulate(told, n_slots=200, policy="next_use").hit_rate() > untold + 0.02


def test_fewer_slots_than_one_layer_needs_are_refused():
    with pytest.raises(BudgetError, match="7 slots cannot hold the 8"):
        simulate(OLMOE, n_slots=7)


@pytest.mark.parametrize("n_slots", [40, 160])
@pytest.mark.parametrize("policy", REPLAYABLE)
def test_no_policy_beats_its_bounds(policy, n_slots):
    run = simulate(OLMOE, n_slots=n_slots, policy=policy)
    bound = simulate(OLMOE, n_slots=n_slots, policy="belady")
    free = sum(belady_with_bypass(list(OLMOE.steps()), n_slots))
    assert run.hit_rate() <= ceiling(OLMOE, n_slots)
    assert run.misses.sum() >= bound.misses.sum() >= free >= compulsory_misses(OLMOE)


def test_bypass_keeps_what_is_used_again():
    steps = [Step(0, (e,)) for e in (0, 1, 2, 0, 3, 0)]
    assert belady_with_bypass(steps, 1) == [1, 1, 1, 0, 1, 0]


def test_the_ceiling_is_slots_over_the_token_cycle():
    assert OLMOE.facts.cycle == 128
    assert ceiling(OLMOE, 32) == 0.25
    assert ceiling(OLMOE, 500) == 1


def test_curves_hold_every_policy_and_the_bounds():
    sizes = slots_between(OLMOE.facts, 3)
    assert OLMOE.facts.cycle in sizes
    assert sizes[-1] == OLMOE.facts.n_records
    curves = hit_rate_curves(OLMOE, ["lru", "lrfu"], sizes)
    assert set(curves.hit_rates) == {"lru", "lrfu"}
    assert curves.hit_rates["lru"][0] == 0
    assert (np.diff(curves.belady) >= 0).all()
    assert curves.hit_rates["lru"][-1] == pytest.approx(curves.belady[-1])


def landing_by_hand(n_reads, n_ram, r, c):
    link = n_ram * c
    for i in range(n_reads):
        link = max(link, (i + 1) * r) + c
    return link


@pytest.mark.parametrize("drive", [0.5, 2, 20])
def test_experts_land_when_drive_and_link_have_passed_them_on_one_by_one(drive):
    machine = attrs.evolve(MACHINE, drive_gb_per_s=drive)
    run = simulate(OLMOE, n_slots=150, n_ram_slots=150)
    by_hand = [
        [
            landing_by_hand(n, m - n, machine.read_s, machine.copy_s)
            for n, m in zip(reads, misses, strict=True)
        ]
        for reads, misses in zip(run.reads, run.misses, strict=True)
    ]
    np.testing.assert_allclose(waits(run, machine), by_hand, atol=1e-12)


def test_rates_are_bytes_over_speeds():
    run = simulate(small_trace(), n_slots=16, policy="lru")
    speed = rates(run, MACHINE)
    assert speed.drive_s == pytest.approx(10 / 3 * 0.001)
    assert speed.link_s == pytest.approx(10 / 3 * 0.00025)
    assert speed.device_s == pytest.approx(0.02)
    assert (speed.bound_by, speed.floor_s) == (DEVICE, speed.device_s)
    assert rates(run, attrs.evolve(MACHINE, layer_s=0)).bound_by == DRIVE
    assert speed.token_s == pytest.approx((6 * 0.01 + 10 * 0.001 + 6 * 0.00025) / 3)


def test_the_timeline_adds_up_and_no_lane_does_two_things_at_once():
    run = simulate(OLMOE, n_slots=150, n_ram_slots=150)
    spans = list(timeline(run, MACHINE))
    assert spans[-1].end_s == pytest.approx(token_seconds(run, MACHINE).sum())
    for lane, counts in ((DRIVE, run.reads), (LINK, run.misses), (DEVICE, run.misses)):
        of_lane = [span for span in spans if span.lane == lane]
        assert sum(span.n_experts for span in of_lane) == counts.sum()
        for span, following in pairwise(of_lane):
            assert span.start_s < span.end_s <= following.start_s + 1e-12


def test_a_machine_that_is_none_is_refused_with_all_that_is_wrong():
    with pytest.raises(ConfigError, match=r"drive's GB/s is 0.*link's GB/s is -1.*layer of nan"):
        Machine(expert_nbytes=1, drive_gb_per_s=0, link_gb_per_s=-1, layer_s=float("nan"))


def test_without_decoded_tokens_there_are_no_rates():
    run = simulate(QWEN.only(PREFILL), n_slots=300)
    assert np.isnan(rates(run, MACHINE).token_s)
