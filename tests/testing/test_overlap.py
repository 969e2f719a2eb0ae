"""In virtual time: a step takes little more than its slowest stage, and prefetch never harms."""

import pytest

from tieredmoe.testing.decoding import Decoding, decode

SHORT = {"n_layers": 12, "n_hot": 16, "n_warm": 8, "n_tokens": 4}
"""A fourth of DeepSeek-V4-Flash: its computing time is scaled with its layers."""


def decoding(gpu_ms, **options):
    return Decoding(gpu_s=gpu_ms * 1e-3 * SHORT["n_layers"] / 43, **SHORT, **options)


@pytest.mark.parametrize("gpu_ms", [12, 40, 100, 340])
def test_a_step_is_close_to_the_slowest_of_its_stages(gpu_ms):
    timing = decode(decoding(gpu_ms), "prefetching")
    apart = max(timing.gpu_s / timing.ssd_s, timing.ssd_s / timing.gpu_s)
    assert timing.step_s <= (1.15 if apart > 4 else 1.45) * timing.floor_s


@pytest.mark.parametrize("ssd_gb_s", [5, 12])
@pytest.mark.parametrize("gpu_ms", [5, 12, 40, 100])
def test_prefetch_is_never_slower_than_none(gpu_ms, ssd_gb_s):
    model = decoding(gpu_ms, ssd_nbytes_per_s=ssd_gb_s * 1e9)
    assert decode(model, "prefetching").step_s <= 1.01 * decode(model, "overlapped").step_s


def test_a_look_ahead_that_is_always_wrong_is_given_up():
    model = decoding(12, recall=0.0)
    wrong, none = decode(model, "prefetching"), decode(model, "overlapped")
    assert wrong.step_s <= 1.01 * none.step_s
    assert wrong.stats.prefetch.issued < 0.1 * none.stats.cache_misses


def test_the_published_flow_is_the_sum_of_its_stages():
    timing = decode(decoding(100), "serial")
    assert timing.step_s > timing.ssd_s + timing.gpu_s


def test_the_same_decoding_takes_the_same_time():
    assert decode(decoding(40), "prefetching") == decode(decoding(40), "prefetching")
