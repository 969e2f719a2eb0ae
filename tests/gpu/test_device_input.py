"""A token's way onto a GPU, and recordings that leave nothing behind there."""

import gc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from kernel_experts import random_matrix

from tieredmoe.adapters.device_graphs import Recorder
from tieredmoe.adapters.embedding import Embedding
from tieredmoe.adapters.token_input import TokenInput

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [T.BF16, T.Q8_0, T.Q2_K, T.Q6_K, T.MXFP4], ids=lambda k: k.name)
def test_recorded_rows_are_those_of_the_host_bit_for_bit(kind, cuda):
    raw = random_matrix(kind, 16, 512, np.random.default_rng(1))
    entered = TokenInput(Embedding(raw, kind, (16, 512), device=cuda), device=cuda)
    table = Embedding(raw, kind, (16, 512), device=torch.device("cpu"))
    out = torch.zeros(1, 512, device=cuda)
    recording = Recorder(cuda).recording(lambda: out.copy_(entered.row()))
    for position, token_id in enumerate((3, 15, 0, 7)):
        entered.put(token_id=token_id, position=position)
        recording()
        assert torch.equal(out.cpu(), table.rows(torch.tensor([token_id])))
        assert (entered.token.item(), entered.position.item()) == (token_id, position)


def test_tokens_put_in_a_row_without_waiting_arrive_in_order(cuda):
    """The host is far ahead of the device, and never writes what is still to be copied."""
    raw = random_matrix(T.BF16, 64, 4096, np.random.default_rng(1))
    table = Embedding(raw, T.BF16, (64, 4096), device=cuda)
    entered = TokenInput(table, device=cuda)
    out = torch.zeros(64, 4096, device=cuda)
    busy = torch.zeros(4096, 4096, device=cuda)
    for token_id in range(64):
        busy @ busy
        entered.put(token_id=token_id, position=token_id)
        out[token_id].copy_(entered.row()[0])
    assert torch.equal(out, table.rows(torch.arange(64)))


def test_recorders_made_and_dropped_leave_no_device_memory_taken(cuda):
    """A library's workspace for each of them would be 32 MiB."""

    def used():
        square, out = (torch.ones(256, 256, device=cuda) for _ in range(2))
        recording = Recorder(cuda).recording(lambda: torch.mm(square, square, out=out))
        for _ in range(3):
            recording()
        torch.cuda.synchronize()

    used()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(4):
        used()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(cuda) <= before
