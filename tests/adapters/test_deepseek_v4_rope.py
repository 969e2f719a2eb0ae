import math

import pytest
import torch

from tieredmoe.adapters.deepseek_v4.config import RopeConfig
from tieredmoe.adapters.deepseek_v4.rope import Rope

CPU = torch.device("cpu")
FLASH = RopeConfig(
    dim=64,
    theta=10000.0,
    compress_theta=160000.0,
    yarn_factor=16.0,
    yarn_context_length=65536,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
)


def turned(rope, position, dim=64):
    """Angles by which each pair (1, 0) is turned at ``position``."""
    x = torch.tensor([1.0, 0.0]).repeat(dim // 2).unsqueeze(0)
    pairs = rope.at(torch.tensor([position])).rotate_(x).view(-1, 2)
    return torch.atan2(pairs[:, 1], pairs[:, 0])


def test_yarn_slows_the_pairs_of_flash_on_a_ramp_from_15_to_25():
    plain = FLASH.compress_theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    slowed = plain / turned(Rope.compressed(FLASH, CPU), 1).double()
    assert slowed[:16] == pytest.approx([1.0] * 16, rel=1e-5)
    assert slowed[25:] == pytest.approx([16.0] * 7, rel=1e-5)
    ramp = [1 / ((k - 15) / 10 / 16 + 1 - (k - 15) / 10) for k in range(16, 25)]
    assert slowed[16:25] == pytest.approx(ramp, rel=1e-5)


def test_sliding_layers_know_no_yarn():
    want = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert turned(Rope.plain(FLASH, CPU), 1).double() == pytest.approx(want, rel=1e-5)


def test_neighbouring_channels_make_a_pair_and_only_the_last_ones_turn():
    x = torch.tensor([[[7.0, 8.0, 1.0, 0.0, 0.0, 2.0]]])  # one token, one head, four of six turn
    rope = Rope(torch.tensor([math.pi / 2, math.pi]))
    got = rope.at(torch.tensor([1])).rotate_(x.clone())
    torch.testing.assert_close(got, torch.tensor([[[7.0, 8.0, 0.0, 1.0, 0.0, -2.0]]]))


def test_unrotating_undoes_rotating():
    x = torch.randn(5, 3, 96)
    angles = Rope.compressed(FLASH, CPU).at(torch.arange(100, 105))
    got = angles.unrotate_(angles.rotate_(x.clone()))
    torch.testing.assert_close(got, x)


def test_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 64)
    rope = Rope.compressed(FLASH, CPU)

    def product(at_q, at_k):
        turned_q = rope.at(torch.tensor([at_q])).rotate_(q.clone())
        return (turned_q * rope.at(torch.tensor([at_k])).rotate_(k.clone())).sum()

    torch.testing.assert_close(product(1007, 1000), product(7, 0), atol=1e-3, rtol=0)
