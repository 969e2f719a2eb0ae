import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.adapters.sampling import Sampler
from tieredmoe.errors import ConfigError, LogitsError


def _logits(*probabilities):
    return torch.log(torch.tensor(probabilities))


def _drawn(logits, n=400, **settings):
    sampler = Sampler(temperature=1.0, **settings)
    return [sampler(logits) for _ in range(n)]


def test_temperature_zero_takes_the_most_likely_id():
    assert Sampler()(torch.tensor([0.1, 3.0, -7.0, 2.9])) == 1


def test_temperature_zero_takes_the_lowest_of_equal_ids():
    assert Sampler(temperature=0.0)(torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0])) == 1


def test_temperature_zero_ignores_the_other_settings():
    assert Sampler(temperature=0.0, top_p=0.1, top_k=1, min_p=1.0)(torch.tensor([1.0, 2.0])) == 1


def test_the_same_seed_draws_the_same_ids():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))

    assert _drawn(logits, seed=7) == _drawn(logits, seed=7)
    assert _drawn(logits, seed=7) != _drawn(logits, seed=8)


def test_samplers_of_one_seed_do_not_disturb_each_other():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    alone = _drawn(logits, n=20, seed=7)
    first, second = (Sampler(temperature=1.0, seed=7) for _ in range(2))

    assert [(first(logits), second(logits)) for _ in range(20)] == [(i, i) for i in alone]


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    _drawn(torch.zeros(5))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_floating_type_are_taken(dtype):
    logits = torch.tensor([1.0, 2.0, 0.5], dtype=dtype)
    assert _drawn(logits) == _drawn(logits.to(torch.float32))


def test_ids_come_as_often_as_they_are_probable():
    drawn = _drawn(_logits(0.5, 0.2, 0.3), n=2000)

    assert [round(drawn.count(i) / 2000, 1) for i in range(3)] == [0.5, 0.2, 0.3]


def test_ids_that_survive_come_as_often_as_they_are_probable_among_themselves():
    drawn = _drawn(_logits(0.1, 0.45, 0.15, 0.3), n=2000, top_k=2)

    assert sorted(set(drawn)) == [1, 3]
    assert drawn.count(1) / 2000 == pytest.approx(0.6, abs=0.04)


def test_a_higher_temperature_evens_out_and_a_lower_one_sharpens():
    logits = _logits(0.8, 0.2)
    share = {}
    for temperature in (0.5, 1.0, 4.0):
        sampler = Sampler(temperature=temperature)
        share[temperature] = sum(sampler(logits) for _ in range(1500)) / 1500

    # softmax(log p / T) of the second id
    expected = {t: 0.2 ** (1 / t) / (0.2 ** (1 / t) + 0.8 ** (1 / t)) for t in share}
    assert share == pytest.approx(expected, abs=0.04)


def test_the_smallest_temperature_is_finite():
    assert Sampler(temperature=1e-300)(torch.tensor([1.0, 1e30, -1e30])) == 1


def test_top_k_keeps_the_lowest_of_equal_ids():
    assert set(_drawn(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]), top_k=3)) == {0, 1, 3}


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    logits = _logits(0.125, 0.5, 0.125, 0.25)

    assert set(_drawn(logits, top_p=0.5)) == {1}
    assert set(_drawn(logits, top_p=0.51)) == {1, 3}
    assert set(_drawn(logits, top_p=0.76)) == {0, 1, 3}
    assert set(_drawn(logits, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left():
    # Of {0.4, 0.3} the first alone has 0.57; of all four it has 0.4 only.
    logits = _logits(0.4, 0.3, 0.2, 0.1)

    assert set(_drawn(logits, top_p=0.5)) == {0, 1}
    assert set(_drawn(logits, top_p=0.5, top_k=2)) == {0}


def test_the_temperature_comes_before_top_p():
    # At temperature 2 the probabilities 0.8 and 0.2 become 2/3 and 1/3.
    sampler = Sampler(temperature=2.0, top_p=0.7)
    assert {sampler(_logits(0.8, 0.2)) for _ in range(200)} == {0, 1}


def test_min_p_keeps_the_ids_near_the_most_probable():
    logits = _logits(0.5, 0.24, 0.26)

    assert set(_drawn(logits, min_p=0.5)) == {0, 2}
    assert set(_drawn(logits, min_p=1.0)) == {0}
    assert set(_drawn(logits, min_p=0.0)) == {0, 1, 2}


def test_a_top_k_beyond_the_vocabulary_keeps_all():
    assert set(_drawn(torch.zeros(3), top_k=99)) == {0, 1, 2}


@given(
    seed=st.integers(0, 10**6),
    top_k=st.none() | st.integers(1, 4000),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.01, 0.3]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    step=st.sampled_from([1e-9, 0.5]),
)
def test_a_draw_is_what_ranking_the_whole_vocabulary_gives(seed, top_k, top_p, min_p, spread, step):
    # A step of 0.5 makes thousands of equal logits; a spread of 0.01 makes nearly all survive.
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=3000) * spread / step) * step
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp(logits[order] - logits.max())
    if top_p < 1:
        below = np.cumsum(weights) < top_p * weights.sum()
        order, weights = order[: below.sum() + 1], weights[: below.sum() + 1]
    if min_p is not None:
        order, weights = order[weights >= min_p], weights[weights >= min_p]

    sampler = Sampler(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    ids, kept = sampler._survivors(torch.exp(torch.tensor(logits - logits.max())))

    if top_k is None and top_p == 1 and min_p is None:
        order, weights = np.arange(3000), np.exp(logits - logits.max())
    assert ids[: kept.numel()].tolist() == order.tolist()
    assert np.allclose(kept.numpy(), weights)
    assert sampler(torch.tensor(logits)) in set(order.tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(temperature, wrong):
    with pytest.raises(LogitsError, match="1 of 3 logits are NaN or infinite"):
        Sampler(temperature=temperature)(torch.tensor([0.0, wrong, 1.0]))


@pytest.mark.parametrize("shape", [(0,), (1, 5), ()])
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(LogitsError, match=r"expected \[V\]"):
        Sampler()(torch.zeros(shape))


def test_a_refused_draw_uses_no_random_number():
    sampler = Sampler(temperature=1.0, seed=3)
    with pytest.raises(LogitsError):
        sampler(torch.tensor([math.nan]))

    assert [sampler(torch.zeros(100)) for _ in range(5)] == _drawn(torch.zeros(100), n=5, seed=3)


def test_all_wrong_settings_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Sampler(temperature=-1, top_p=0, top_k=0, min_p=2, seed=-1)

    for name in ("temperature is -1", "top_p is 0", "top_k is 0", "min_p is 2", "seed is -1"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"seed": 2**64},
        {"temperature": 10**400},
    ],
)
def test_a_setting_outside_its_range_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampler(**settings)


@pytest.mark.parametrize("value", ["1", True, [1], 1j, torch.tensor([1, 1]), torch.tensor(True)])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "seed"])
def test_a_setting_that_is_no_number_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is "):
        Sampler(**{name: value})


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_a_fraction_is_no_integer_setting(name):
    with pytest.raises(ConfigError, match=f"{name} is 1.0"):
        Sampler(**{name: 1.0})


def test_numbers_of_any_library_draw_what_plain_ones_draw():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    plain = Sampler(temperature=0.5, top_p=0.5, top_k=90, min_p=0.0, seed=7)
    other = Sampler(
        temperature=Fraction(1, 2),
        top_p=np.float32(0.5),
        top_k=np.int64(90),
        min_p=0,
        seed=torch.tensor(7),
    )
    assert [other(logits) for _ in range(20)] == [plain(logits) for _ in range(20)]


def test_settings_at_the_ends_of_their_ranges_are_taken():
    Sampler(temperature=0.0, top_p=1.0, top_k=1, min_p=0.0, seed=2**64 - 1)
