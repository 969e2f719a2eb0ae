"""A token's way into a decode step: what lands is what the table and the caller said."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from model_runs import CPU

from tieredmoe.adapters.embedding import Embedding
from tieredmoe.adapters.token_input import TokenInput
from tieredmoe.moe.dequant import row_nbytes

N_ROWS, N_COLUMNS = 7, 512


def embedding(kind):
    nbytes = N_ROWS * row_nbytes(kind, N_COLUMNS)
    raw = np.random.default_rng(3).integers(0, 60, nbytes, dtype=np.uint8)
    return Embedding(torch.from_numpy(raw), kind, (N_ROWS, N_COLUMNS), device=CPU)


@pytest.mark.parametrize(
    "kind",
    [T.F32, T.BF16, T.F16, T.Q8_0, T.Q4_0, T.Q2_K, T.Q3_K, T.Q6_K, T.MXFP4, T.Q4_1],
    ids=lambda kind: kind.name,
)
def test_a_token_lands_with_the_row_that_the_functional_forward_looks_up(kind):
    table = embedding(kind)
    entered = TokenInput(table, device=CPU)
    places = entered.token.data_ptr(), entered.position.data_ptr()
    for token_id, position in ((6, 0), (0, 1), (3, 2**40)):
        entered.put(token_id=token_id, position=position)
        wanted = table.rows(torch.tensor([token_id]))
        assert torch.equal(entered.row().view(torch.int32), wanted.view(torch.int32))
        assert entered.token.tolist() == [token_id]
        assert entered.position.tolist() == [position]
    assert (entered.token.data_ptr(), entered.position.data_ptr()) == places
    assert not any(place % 16 for place in places)


def test_types_that_only_the_host_unpacks_go_as_floats():
    assert embedding(T.Q4_1).row_type == T.F32
    assert embedding(T.Q4_1).row_nbytes == 4 * N_COLUMNS
    assert embedding(T.Q8_0).row_nbytes == N_COLUMNS // 32 * 34
