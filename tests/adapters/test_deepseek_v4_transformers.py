"""Other shapes and seeds than the stored ones, against transformers' own DeepSeek-V4.

A random net is chaotic where two experts, or two compressed rows, score almost alike: there the
reference disagrees with itself from one chunking to another. So the reference's smallest gap at
each position is measured, and positions are compared up to the first gap below ``LEAST_GAP``:
attention is causal, so a near-tie says nothing about the positions before it. Seeds are tried until
one leaves as many positions to compare as the case demands; finding none is a failure.
"""

import importlib

import attrs
import pytest
import torch
from gguf import GGMLQuantizationType
from model_runs import Recorder, cut_at, load, run

from tieredmoe.testing.tiny_gguf import (
    DeepSeekV4Shape,
    TypeMix,
    make_deepseek_v4,
    to_transformers,
    transformers_config,
)

pytest.importorskip("transformers")
# Where transformers is installed, a model that moved is a failure, not a skip.
modeling = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")

LEAST_GAP = 1e-4
N_SEEDS = 6


class Gaps:
    """The smallest gap between a choice and its first runner-up, by position, over all layers."""

    def __init__(self, model, n_tokens):
        self.smallest = torch.full((n_tokens,), torch.inf)
        self.ids = {}
        for name, module in model.named_modules():
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            if isinstance(module, modeling.DeepseekV4TopKRouter):
                module.register_forward_hook(self._router(layer))
            elif isinstance(module, modeling.DeepseekV4HashRouter):
                module.register_forward_hook(self._hash_router(layer))
            elif isinstance(module, modeling.DeepseekV4Indexer):
                module.scorer.register_forward_hook(self._scorer(module))

    def _note(self, sorted_scores, k):
        if sorted_scores.shape[1] > k:
            gaps = sorted_scores[:, k - 1] - sorted_scores[:, k]
            self.smallest = torch.minimum(self.smallest, gaps.nan_to_num(nan=torch.inf))

    def _router(self, layer):
        def hook(module, _, output):
            logits, _, ids = output
            self.ids[layer] = ids.sort(dim=1).values
            scores = module.score_fn(logits) + module.e_score_correction_bias
            self._note(scores.sort(dim=1, descending=True).values, ids.shape[1])

        return hook

    def _hash_router(self, layer):
        def hook(module, _, output):
            self.ids[layer] = output[2].sort(dim=1).values

        return hook

    def _scorer(self, indexer):
        def hook(module, _, scores):
            scores = scores[0]
            visible = torch.arange(1, len(scores) + 1).unsqueeze(1) // indexer.compress_rate
            hidden = torch.arange(scores.shape[1]) >= visible
            # Hidden rows come last; -inf minus -inf, and a pick minus -inf, are no near-ties.
            scores = scores.masked_fill(hidden, -torch.inf)
            self._note(scores.sort(dim=1, descending=True).values, indexer.index_topk)

        return hook


def reference(weights, tokens):
    """Logits, choices and smallest gaps of transformers' model."""
    shape = weights.shape
    config = modeling.DeepseekV4Config(**transformers_config(shape))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = modeling.DeepseekV4ForCausalLM(config).float().eval()
    state = {name: torch.from_numpy(a) for name, a in to_transformers(weights, shape).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    gaps = Gaps(model, len(tokens))
    with torch.no_grad():
        logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
    return logits, gaps


def small(*ratios, **sizes):
    """One layer per ratio; no hash-routed layers unless asked for."""
    return DeepSeekV4Shape(
        num_hidden_layers=len(ratios), compress_ratios=ratios, **{"num_hash_layers": 0, **sizes}
    )


FLOATS = TypeMix.uniform(GGMLQuantizationType.F32)


@attrs.frozen
class Case:
    shape: DeepSeekV4Shape
    n_tokens: int
    n_compared: int
    """positions to compare at least"""
    cuts: tuple[int, ...] = (1, 127, 128, 129, 130)
    types: TypeMix = FLOATS


CASES = {
    "every kind of layer, the real files' types": Case(
        DeepSeekV4Shape(), 260, 258, (127, 128, 129, 130, 255, 256, 257), TypeMix()
    ),
    "top-1, one output group": Case(
        small(0, 4, 128, num_experts_per_tok=1, o_groups=1, sliding_window=16), 140, 131
    ),
    "all CSA, fewer picks than rows": Case(
        small(4, 4, 4, index_topk=5, sliding_window=8), 140, 131, (3, 4, 5, 9, 100)
    ),
    "all CSA, more picks than rows": Case(small(4, 4, 4, index_topk=64), 140, 131),
    "all HCA, a window longer than a row's": Case(
        small(128, 128, 128, sliding_window=200), 260, 258, (127, 128, 129, 255, 256, 257)
    ),
    "all sliding, all hash-routed, two streams": Case(
        small(0, 0, 0, num_hash_layers=3, sliding_window=5, hc_mult=2), 60, 60, (4, 5, 6)
    ),
    "every expert chosen, one head, rope over all of it": Case(
        small(
            *(128, 4),
            num_experts_per_tok=8,
            num_attention_heads=1,
            o_groups=1,
            qk_rope_head_dim=64,
        ),
        140,
        131,
    ),
    "other constants": Case(
        small(
            *(0, 128, 4, 4),
            routed_scaling_factor=2.5,
            swiglu_limit=0.5,
            hc_sinkhorn_iters=3,
            rope_theta=500.0,
            compress_rope_theta=40000.0,
            rope_factor=128.0,
            rope_original_positions=512,
            index_n_heads=32,
            num_hash_layers=1,
        ),
        140,
        131,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_routing_equal_those_of_transformers(name, tmp_path):
    case = CASES[name]
    for seed in range(N_SEEDS):
        path = tmp_path / f"{seed}.gguf"
        weights = make_deepseek_v4(path, shape=case.shape, types=case.types, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, case.shape.vocab_size, (case.n_tokens,), generator=generator)
        want, gaps = reference(weights, tokens)
        near_ties = (gaps.smallest < LEAST_GAP).nonzero().flatten().tolist()
        n_compared = min([*near_ties, case.n_tokens])
        if n_compared >= case.n_compared:
            break
    else:
        pytest.fail(f"no seed leaves {case.n_compared} positions to compare")

    model, experts = load(path)
    for lengths in (None, cut_at(case.n_tokens, *case.cuts)):
        recorder = Recorder(experts)
        logits = run(model, recorder, tokens, lengths)
        assert (logits - want)[:n_compared].abs().max() < 1e-3
        for layer, ids in gaps.ids.items():
            assert torch.equal(recorder.routing(layer)[0][:n_compared], ids[:n_compared])
