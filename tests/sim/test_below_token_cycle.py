"""A cache smaller than one token's working set: what frequency keeps and recency loses.

W = layers × top-k lookups make a token. Layers run in a circle, so with fewer than W slots the
least recently used expert is always the one whose layer comes next, and plain LRU hits nothing at
all. Kimi-K3 with 5 GiB is such a case: 449 slots, W = 1472.
"""

from functools import cache

import numpy as np
import pytest

from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay

LAYERS = tuple(range(1, 24))
N_EXPERTS = 128
TOP_K = 8
CYCLE = len(LAYERS) * TOP_K
N_TOKENS = 300


@cache
def zipf_trace():
    """Distinct experts drawn with p ∝ 1 / rank (exponent 1), each layer with its own ranking."""
    rng = np.random.default_rng(1)
    log_p = -np.log(np.arange(1, N_EXPERTS + 1))
    ranking = [rng.permutation(N_EXPERTS) for _ in LAYERS]
    steps = []
    for _ in range(N_TOKENS):
        # The k largest of log p + Gumbel noise are k draws without replacement.
        noisy = log_p + rng.gumbel(size=(len(LAYERS), N_EXPERTS))
        chosen = np.argpartition(-noisy, TOP_K, axis=1)[:, :TOP_K]
        steps += [
            Step(layer, of_layer[ranks].tolist())
            for layer, of_layer, ranks in zip(LAYERS, ranking, chosen, strict=True)
        ]
    return steps


def hit_rate(policy, n_slots):
    made = make_policy(policy, n_slots=n_slots, layers=LAYERS, top_k=TOP_K)
    return replay(zipf_trace(), Residency(n_slots, made)).hit_rate


SIZES = (2 * TOP_K, 3 * TOP_K, CYCLE // 4, CYCLE // 2, CYCLE - TOP_K)


@pytest.mark.parametrize("n_slots", SIZES)
def test_lru_hits_nothing_below_the_token_cycle(n_slots):
    assert hit_rate("lru", n_slots) == 0


@pytest.mark.parametrize("n_slots", SIZES)
def test_frequency_hits_a_fair_share_of_what_the_slots_allow(n_slots):
    """No policy can hit more than slots / W; this one gets 0.3 of that, its cold start included."""
    assert hit_rate("lfu_lru", n_slots) >= 0.3 * n_slots / CYCLE
