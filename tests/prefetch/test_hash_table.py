"""What the token decides is known with the token, and nothing else is claimed."""

import numpy as np
import pytest

from tieredmoe.prefetch import HashTable
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.predictor import PredictorContract

TABLE = [[0, 3], [3, 1], [2, 2]]


class TestHashTable(PredictorContract):
    def make_predictor(self, *, layers, n_experts, top_k):
        tokens = np.arange(n_experts)[:, None]
        table = (tokens + np.arange(top_k)) % n_experts
        return HashTable(dict.fromkeys(layers, table), n_experts=n_experts)

    def signal(self, layer, experts):
        return list(experts)


def experts(table, signal, layer=0):
    return [key.expert for key in table.predict(layer, signal)]


def test_a_token_names_its_experts_and_many_their_union():
    table = HashTable({0: TABLE}, n_experts=4)
    assert experts(table, 1) == [3, 1]
    assert experts(table, np.int64(2)) == [2]
    assert experts(table, [0, 1]) == [0, 3, 1]
    assert experts(table, np.array([[0], [1]], np.uint16)) == [0, 3, 1]
    assert table.predict(0, [1])[0] == ExpertKey(0, 3)
    assert table.layers == (0,)


def test_tokens_beyond_the_table_are_ignored():
    table = HashTable({0: TABLE}, n_experts=4)
    assert experts(table, [-1, 3, 10**12, 1]) == [3, 1]
    assert experts(table, [0.5]) == []
    assert experts(table, "no token") == []
    assert experts(table, [[1], [1, 2]]) == []


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        ([[0, 4]], "names experts 0..4, and there are 0..3"),
        ([[-1, 0]], "names experts -1..0"),
        ([0, 1], r"\[vocabulary, k\], not int64 \[2\]"),
        ([[0.0, 1.0]], "not float64"),
    ],
)
def test_a_wrong_table_is_refused_with_its_layer(wrong, fact):
    with pytest.raises(ValueError, match=f"layer 2: .*{fact}"):
        HashTable({2: wrong}, n_experts=4)
