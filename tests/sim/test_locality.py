"""Statistics of traces against those published for them, and the generator against both."""

from pathlib import Path

import numpy as np
import pytest

from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.generator import CALIBRATION_LAGS, calibration, synthetic_trace
from tieredmoe.sim.locality import (
    experts_touched,
    lag_overlap,
    reuse_in_slots,
    reuse_in_tokens,
    top_share,
    use_counts,
)
from tieredmoe.sim.routing_trace import ModelFacts, decoded

TRACES = Path(__file__).parent.parent / "data" / "traces"
OLMOE = load_trace(TRACES / "olmoe-1b-7b_80_tokens.npz")
KIMI = ModelFacts("kimi-like", layers=tuple(range(8)), n_experts=256, top_k=8)

# Of the whole published trace of Kimi-Linear-48B, 300 tokens.
PUBLISHED = {1: 0.336, 2: 0.266, 4: 0.227, 8: 0.178, 16: 0.173, 32: 0.146}
PUBLISHED_TOUCHED = 195.5
PUBLISHED_SHARE = 0.431


def small():
    facts = ModelFacts("small", layers=(1,), n_experts=32, top_k=2)
    return decoded(facts, np.array([[[0, 1]], [[0, 2]], [[3, 4]], [[0, 1]]]))


def test_small_counts_by_hand():
    trace = small()
    assert lag_overlap(trace, [1, 2, 3]).tolist() == pytest.approx([1 / 6, 1 / 4, 1])
    assert np.isnan(lag_overlap(trace, [9])[0])
    assert use_counts(trace)[0, :5].tolist() == [3, 2, 1, 1, 1]
    assert experts_touched(trace).tolist() == [5]
    assert top_share(trace) == 5 / 8
    assert sorted(reuse_in_tokens(trace).tolist()) == [1, 2, 3]
    assert reuse_in_slots(trace).tolist() == [2, 4, 5]


@pytest.mark.parametrize("n_slots", [100, 128, 200, 500])
def test_what_fits_by_reuse_is_what_lru_hits(n_slots):
    lookups = [Step(layer, (e,)) for layer, experts in OLMOE.steps() for e in experts]
    lru = make_policy("lru", n_slots=n_slots, layers=OLMOE.facts.layers, top_k=8)
    hits = replay(lookups, Residency(n_slots, lru)).hits
    assert np.count_nonzero(reuse_in_slots(OLMOE) <= n_slots) == hits


def test_generated_routing_is_as_local_and_as_skewed_as_the_published_one():
    traces = [synthetic_trace(KIMI, n_tokens=300, seed=seed) for seed in range(3)]
    numbers = [calibration(trace) for trace in traces]
    mean = {name: np.mean([of[name] for of in numbers]) for name in numbers[0]}
    for lag in CALIBRATION_LAGS:
        assert mean[f"overlap {lag}"] == pytest.approx(PUBLISHED[lag], abs=0.03)
    assert mean["experts touched"] == pytest.approx(PUBLISHED_TOUCHED, abs=20)
    assert mean["top 1/16 share"] == pytest.approx(PUBLISHED_SHARE, abs=0.05)


def test_a_seed_says_it_all():
    one, same, other = (synthetic_trace(KIMI, n_tokens=20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.experts, same.experts)
    assert (one.experts != other.experts).any()


def test_hash_layers_go_by_the_token_and_others_do_not():
    trace = synthetic_trace(KIMI, n_tokens=300, n_hash_layers=1, seed=3)
    distinct = [len({tuple(sorted(row)) for row in trace.experts[:, i]}) for i in (0, 1)]
    assert distinct[0] < 0.8 * distinct[1]


def test_the_router_chose_what_it_thought_best():
    trace = synthetic_trace(KIMI, n_tokens=20, probabilities=True)
    p = trace.probabilities.astype(float)
    np.testing.assert_allclose(p.sum(axis=2), 1, atol=5e-3)
    chosen = np.take_along_axis(p, trace.experts.astype(int), axis=2)
    np.put_along_axis(p, trace.experts.astype(int), 0, axis=2)
    assert (chosen.min(axis=2) >= p.max(axis=2)).all()
    np.testing.assert_allclose(trace.weights.sum(axis=2, dtype=float), 1, atol=5e-3)
