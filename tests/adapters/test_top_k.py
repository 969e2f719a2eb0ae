import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.adapters.top_k import top_k

rows = st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=200)


@given(rows, st.data())
def test_the_largest_come_first_and_equal_ones_by_index(row, data):
    k = data.draw(st.integers(1, len(row)))
    want = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert top_k(torch.tensor([row, row]), k).tolist() == [want, want]
