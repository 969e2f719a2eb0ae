"""What a set of shards claims of the number of its tensors, and what a wrong claim leads to."""

import logging

import pytest
from gguf import GGMLQuantizationType as Q

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import merge_headers, open_inventory, read_header
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

SHAPE = KimiK3Shape(
    vocab_size=8,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    kda_head_dim=4,
    intermediate_size=8,
    num_experts=4,
    routed_expert_hidden_size=8,
    moe_intermediate_size=8,
)
N_TENSORS = 4 + 2 * 4 + 14 + 9 + 3 + 11


def make(folder, claim=None, **settings):
    types = KimiK3Types.uniform(Q.F32)
    return make_kimi_k3(
        folder / "m.gguf",
        shape=SHAPE,
        types=types,
        tokenizer=None,
        n_shards=3,
        n_tensors_claimed=claim,
        **settings,
    ).paths


@pytest.mark.parametrize("claim", [1, N_TENSORS - 1, 2760])
def test_a_stale_number_is_a_warning_that_names_both_and_the_tensors_are_right(
    tmp_path, caplog, claim
):
    paths = make(tmp_path, claim)
    inventory = open_inventory(paths[1])
    assert len(inventory.tensors) == N_TENSORS
    ((name, level, message),) = caplog.record_tuples
    assert (name, level) == ("tieredmoe.gguf.inventory", logging.WARNING)
    fact = f"{paths[1]}: split.tensors.count is {claim}, but there are {N_TENSORS} tensors"
    assert message.startswith(fact)


def test_a_true_number_is_no_warning(tmp_path, caplog):
    assert len(open_inventory(make(tmp_path)[0]).tensors) == N_TENSORS
    assert caplog.record_tuples == []


def test_headers_of_files_that_were_accepted_are_not_warned_of_again(tmp_path, caplog):
    headers = [read_header(path) for path in make(tmp_path, 2760)]
    assert len(merge_headers(headers)[1]) == N_TENSORS
    assert caplog.record_tuples == []


def test_shards_that_claim_different_numbers_are_of_different_sets(tmp_path):
    fresh, stale = tmp_path / "fresh", tmp_path / "stale"
    for folder, claim in ((fresh, None), (stale, 2760)):
        folder.mkdir()
        make(folder, claim)
    second = "m-00002-of-00003.gguf"
    (stale / second).replace(fresh / second)
    fact = f"{N_TENSORS} in m-00001-of-00003.gguf, 2760 in {second}"
    with pytest.raises(GGUFError, match=f"shards disagree on split.tensors.count: {fact}"):
        open_inventory(fresh)
