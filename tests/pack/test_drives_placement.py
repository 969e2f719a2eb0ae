"""Every layer is divided among drives by their weights, and every record has one place."""

import random

import numpy as np
import pytest

from tieredmoe.pack.placement import integer_weights, place_experts
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_pack import tiny_spec

CASES = [
    (256, 8, (1, 1)),
    (256, 8, (1, 3)),
    (384, 6, (3200, 7100, 6900)),
    (896, 3, (1,) * 7),
    (8, 20, (5, 3, 7)),
    (5, 9, (1, 1)),
    (3, 40, (2, 1, 1, 1)),
    (7, 1, (1000, 1)),
    (4, 2, (9,)),
]


def spec_of(n_experts, n_layers):
    sizes = [800 + 1600 * (layer % 3) for layer in range(n_layers)]
    return tiny_spec(layers=range(1, n_layers + 1), n_experts=n_experts, role_nbytes=sizes)


def counts(placement, layer, n_drives):
    return np.bincount(placement.drives[layer], minlength=n_drives)


@pytest.mark.parametrize(("n_experts", "n_layers", "weights"), CASES)
def test_each_layer_is_divided_by_weight_to_one_expert(n_experts, n_layers, weights):
    placement = place_experts(spec_of(n_experts, n_layers), weights)
    share = n_experts * np.array(weights) / sum(weights)
    for layer in placement.drives:
        assert np.all(np.abs(counts(placement, layer, len(weights)) - share) <= 1)


@pytest.mark.parametrize(("n_experts", "n_layers", "weights"), CASES)
def test_what_does_not_divide_in_a_layer_evens_out_over_layers(n_experts, n_layers, weights):
    placement = place_experts(spec_of(n_experts, n_layers), weights)
    total = sum(counts(placement, layer, len(weights)) for layer in placement.drives)
    share = n_layers * n_experts * np.array(weights) / sum(weights)
    assert np.all(np.abs(total - share) < 1.5)


@pytest.mark.parametrize(("n_experts", "n_layers", "weights"), CASES)
def test_the_experts_of_a_drive_are_spread_over_the_layer(n_experts, n_layers, weights):
    placement = place_experts(spec_of(n_experts, n_layers), weights)
    for layer, drive_of in placement.drives.items():
        for drive, count in enumerate(counts(placement, layer, len(weights))):
            gaps = np.diff(np.flatnonzero(drive_of == drive), prepend=-1, append=n_experts)
            assert count == 0 or gaps.max() <= n_experts / count + 2


def test_a_top_k_of_neighbours_uses_all_drives_in_proportion():
    placement = place_experts(spec_of(256, 4), (1, 3))
    for drive_of in placement.drives.values():
        for first in range(248):
            on_first = np.count_nonzero(drive_of[first : first + 8] == 0)
            assert on_first == 2


@pytest.mark.parametrize(("n_experts", "n_layers", "weights"), CASES)
def test_records_fill_the_drives_without_gap_or_overlap(n_experts, n_layers, weights):
    spec = spec_of(n_experts, n_layers)
    placement = place_experts(spec, weights)
    extents = sorted(placement.locate(key) for key in spec.keys())
    ends = [0] * len(weights)
    for drive, offset, nbytes in extents:
        assert offset == ends[drive]
        ends[drive] += nbytes
    assert tuple(ends) == placement.file_nbytes
    assert sum(ends) == sum(n_experts * layout.stride for layout in spec.layouts.values())


def test_within_a_drive_records_are_ordered_by_layer_and_expert():
    spec = spec_of(16, 3)
    placement = place_experts(spec, (2, 1))
    for drive in range(2):
        mine = [key for key in spec.keys() if placement.locate(key).file_index == drive]
        assert sorted(mine, key=placement.locate) == mine


def test_the_places_are_those_that_the_format_names():
    """Worked out by hand from FORMAT.md: 5 experts, weights 1:2, two layers of one page."""
    placement = place_experts(tiny_spec(layers=(3, 4), n_experts=5), (1, 2))
    # Layer 3: shares 1 and 3, one expert left; behind by 5/3 - 1 = 2/3 and 10/3 - 3 = 1/3.
    # So 2 and 3: wanted at 1/4, 3/4 and at 1/6, 3/6, 5/6.
    assert placement.drives[3].tolist() == [1, 0, 1, 0, 1]
    # Layer 4: behind by 10/3 - 3 = 1/3 and 20/3 - 6 = 2/3, so 1 and 4: 1/2 and 1/8, 3/8, 5/8, 7/8.
    assert placement.drives[4].tolist() == [1, 1, 0, 1, 1]
    assert placement.offsets[4].tolist() == [3 * 4096, 4 * 4096, 2 * 4096, 5 * 4096, 6 * 4096]


@pytest.mark.parametrize("key", [(0, 0), (1, -1), (1, 16), (99, 0)])
def test_an_expert_that_does_not_exist_has_no_place(key):
    placement = place_experts(spec_of(16, 3), (1, 1))
    with pytest.raises(KeyError):
        placement.locate(ExpertKey(*key))


def test_whole_weights_are_kept_and_measured_ones_are_rounded():
    assert integer_weights([1, 3]) == (1, 3)
    assert integer_weights([3203.7, 6950.1]) == (461, 1000)
    assert integer_weights([1e-9, 5.0]) == (1, 1000)
    assert integer_weights([10**9, 10**9 // 2]) == (1000, 500)


def test_equal_weights_of_any_scale_give_the_same_places():
    spec = spec_of(random.Random(0).randint(20, 40), 5)
    one, other = place_experts(spec, (2, 2, 2)), place_experts(spec, (7, 7, 7))
    assert all(np.array_equal(one.drives[layer], other.drives[layer]) for layer in one.drives)
