"""The forward pass against stored runs of the reference: transformers' DeepseekV4ForCausalLM."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from model_runs import Recorder, cut_at, load, run

from tieredmoe.adapters.deepseek_v4 import attention
from tieredmoe.adapters.deepseek_v4.indexer import Indexer
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, TypeMix, make_deepseek_v4

DATA = Path(__file__).parents[1] / "data" / "deepseek_v4"
N_TOKENS, N_LAYERS = 300, 6
CSA_LAYERS = (2, 4)

CHUNKS = {
    "at once": None,
    "token by token": [1] * N_TOKENS,
    "cut at 1, 31, 32, 33, 127, 128, 129": cut_at(N_TOKENS, 1, 31, 32, 33, 127, 128, 129),
    "chunk, tokens, chunk": [150] + [1] * 20 + [130],
}


SEED = 20260436  # of the stored F32 run; its file is made anew, the other one is stored


@pytest.fixture(scope="module", params=["f32", "mx"])
def oracle(request, tmp_path_factory):
    """Model, experts, tokens and the reference's results: all F32, or the real files' types."""
    path = DATA / "tiny_mx.gguf"
    if request.param == "f32":
        path = tmp_path_factory.mktemp("oracle") / "tiny_f32.gguf"
        floats = TypeMix.uniform(GGMLQuantizationType.F32)
        shape = DeepSeekV4Shape(vocab_size=256)
        make_deepseek_v4(path, shape=shape, types=floats, seed=SEED, tokenizer=None)
    model, experts = load(path)
    with np.load(DATA / f"oracle_{request.param}.npz") as stored:
        want = {
            name: torch.from_numpy(stored[name]) for name in stored.files if name != "config_json"
        }
    return model, experts, want["tokens"].long(), want


@pytest.mark.parametrize("how", CHUNKS)
def test_logits_and_routing_equal_the_reference(oracle, how):
    model, experts, tokens, want = oracle
    recorder = Recorder(experts)
    logits = run(model, recorder, tokens, CHUNKS[how])
    assert (logits - want["logits"]).abs().max() < 1e-3
    for layer in range(N_LAYERS):
        ids, weights = recorder.routing(layer)
        assert torch.equal(ids, want[f"router_idx.{layer}"].long())
        # Rounding adds up differently token by token; the largest error seen there is 1.3e-5.
        bound = 3e-5 if how == "token by token" else 1e-5
        assert (weights - want[f"router_w.{layer}"]).abs().max() < bound


@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257])
def test_a_prompt_of_any_length_ends_in_the_same_logits(oracle, n):
    model, experts, tokens, want = oracle
    logits = run(model, experts, tokens[:n])
    assert (logits[-1] - want["logits"][n - 1]).abs().max() < 1e-3


def test_the_indexer_picks_the_rows_that_the_reference_picks(oracle, monkeypatch):
    model, experts, tokens, want = oracle
    picked = []
    pick = Indexer.pick

    def watched(self, *args):
        picks = pick(self, *args)
        picked.append((self, picks))
        return picks

    monkeypatch.setattr(Indexer, "pick", watched)
    run(model, experts, tokens)
    indexers = list(dict.fromkeys(indexer for indexer, _ in picked))
    assert len(indexers) == len(CSA_LAYERS)
    for indexer, layer in zip(indexers, CSA_LAYERS, strict=True):
        got = torch.cat([picks for who, picks in picked if who is indexer])
        reference = want[f"indexer.{layer}"].long()[-len(got) :]
        full = (reference >= 0).all(1)  # where the reference also had more rows than picks
        assert full.sum() > 200
        got = got.sort(dim=1, descending=True).values
        assert torch.equal(got[full], reference[full])


def test_scratch_is_bounded_and_the_length_of_query_blocks_does_not_matter(oracle, monkeypatch):
    model, experts, tokens, want = oracle
    n_scores = []
    attend = attention._softmax_with_sinks

    def watched(q, seen, sinks):
        n_scores.append(q.shape[0] * q.shape[1] * sum(keys.shape[-2] for keys, _ in seen))
        return attend(q, seen, sinks)

    monkeypatch.setattr(attention, "_SCRATCH_FLOATS", 5000)
    monkeypatch.setattr(attention, "_softmax_with_sinks", watched)
    logits = run(model, experts, tokens)
    assert (logits - want["logits"]).abs().max() < 1e-3
    assert 2000 < max(n_scores) <= 5000
