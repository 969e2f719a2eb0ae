"""What the adapter makes of files that differ, lack something or contradict themselves."""

import attrs
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from model_runs import CPU, run

from tieredmoe.adapters.deepseek_v4 import DeepSeekV4Adapter, DeepSeekV4Config
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.errors import MetadataError, UnsupportedModelError
from tieredmoe.gguf import Metadata, open_inventory
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, TypeMix, make_deepseek_v4

SHAPE = DeepSeekV4Shape(
    num_hidden_layers=4, compress_ratios=(0, 0, 4, 128), num_hash_layers=1, index_topk=4
)
TOKENS = torch.arange(5, 45) * 7 % SHAPE.vocab_size


class Edited:
    """A source with other metadata, other names of tensors, or other facts about them."""

    def __init__(self, source, *, metadata=(), drop=(), rename=str, extra=(), change=None):
        values = {**source.metadata, **dict(metadata)}
        self.metadata = Metadata({k: v for k, v in values.items() if k not in drop})
        self._source = source
        self._names = {rename(name): name for name in source.tensors if name not in drop}
        self.tensors = {
            name: attrs.evolve(source.tensors[old], name=name) for name, old in self._names.items()
        }
        for name, fields in dict(change or {}).items():
            self.tensors[name] = attrs.evolve(self.tensors[name], **fields)
        for name in extra:
            self.tensors[name] = attrs.evolve(source.tensors["output_norm.weight"], name=name)
        self.n_read = 0

    def read(self, name):
        self.n_read += 1
        return self._source.read(self._names[name])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("loading") / "tiny.gguf"
    make_deepseek_v4(path, shape=SHAPE, seed=3)
    return open_inventory(path)


def load(source, **options):
    return DeepSeekV4Adapter().load(source, device=CPU, **options)


@pytest.fixture(scope="module")
def logits(source):
    return run(load(source), DenseExperts.load(source), TOKENS)


def config(source, **edits):
    edited = Edited(source, **edits)
    return DeepSeekV4Config.from_metadata(edited.metadata, edited.tensors)


def key(name):
    return f"deepseek4.{name}"


# --- files that differ harmlessly


def test_names_without_their_suffix_are_found(source, logits):
    def bare(name):
        short = ("hc_", "_ape", "sinks", "tid2eid", "exp_probs_b")
        return name.rsplit(".", 1)[0] if any(part in name for part in short) else name

    edited = Edited(source, rename=bare)
    assert "blk.0.hc_attn_fn" in edited.tensors
    assert torch.equal(run(load(edited), DenseExperts.load(edited), TOKENS), logits)


def test_tensors_that_nobody_needs_are_left_alone(source, logits):
    extra = ("blk.1.exp_probs_b_vl.bias", "blk.4.attn_norm.weight", "v.patch_embd.weight")
    edited = Edited(source, extra=extra)
    assert torch.equal(run(load(edited), DenseExperts.load(edited), TOKENS), logits)
    assert edited.n_read == len(source.tensors)  # dense and experts, none of the extra ones


@pytest.mark.parametrize("counted", [True, False])
def test_a_multi_token_prediction_block_is_not_a_layer(source, logits, counted):
    edited = Edited(
        source,
        metadata={key("block_count"): 5 if counted else 4, key("nextn_predict_layers"): 1},
        extra=("blk.4.nextn.eh_proj.weight", "blk.4.attn_q_a.weight"),
    )
    assert load(edited).config.n_layers == 4
    assert torch.equal(run(load(edited), DenseExperts.load(edited), TOKENS), logits)


@pytest.mark.parametrize("dense", [T.F16, T.Q8_0, T.Q4_0, T.Q5_0, T.Q4_1, T.MXFP4, T.F32])
def test_any_matrix_may_be_of_any_type(tmp_path, dense):
    """The types are the file's own: the same floats stored as F32 give the same logits."""
    shape = attrs.evolve(SHAPE, num_hidden_layers=3, compress_ratios=(0, 4, 128))
    path = tmp_path / "types.gguf"
    weights = make_deepseek_v4(path, shape=shape, types=TypeMix.uniform(dense), seed=8)
    inventory = open_inventory(path)
    got = run(load(inventory), DenseExperts.load(inventory), TOKENS[:9])

    class AsFloats(Edited):
        def read(self, name):
            values = np.ascontiguousarray(weights[name])
            return values.view(np.uint8).ravel().copy()

    floats = {
        name: {"ggml_type": T.F32.value, "nbytes": weights[name].nbytes}
        for name in weights
        if weights[name].dtype == np.float32
    }
    plain = AsFloats(inventory, change=floats)
    want = run(load(plain), DenseExperts.load(plain), TOKENS[:9])
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def test_merged_leading_axes_are_the_same_tensor(source, logits):
    name = "blk.2.attn_output_a.weight"
    n_low, n_inputs = source.tensors[name].shape
    edited = Edited(source, change={name: {"shape": (2, n_low // 2, n_inputs)}})
    assert torch.equal(run(load(edited), DenseExperts.load(edited), TOKENS), logits)


def test_progress_ends_at_the_bytes_of_the_dense_weights(source):
    seen = []
    load(source, progress=lambda done, total: seen.append((done, total)))
    dense = sum(info.nbytes for name, info in source.tensors.items() if "_exps" not in name)
    assert seen[-1] == (dense, dense)
    assert seen == sorted(seen)


# --- metadata of other ages


def test_keys_that_older_files_lack_fall_back_to_the_published_values(source):
    old = config(
        source,
        drop=[
            key(name)
            for name in (
                *("attention.compress_ratios", "attention.compress_rope_freq_base"),
                *("expert_gating_func", "expert_weights_scale", "expert_weights_norm"),
                *("expert_shared_count", "hash_layer_count", "vocab_size", "embedding_length_out"),
                *("attention.key_length", "attention.value_length", "attention.head_count_kv"),
                *("swiglu_clamp_exp", "swiglu_clamp_shexp"),
                *("hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon"),
                *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.yarn_beta_fast"),
                *("rope.scaling.yarn_beta_slow", "rope.scaling.original_context_length"),
            )
        ],
    )
    assert old.attention.compress_ratios == (0, 0, 4, 128)
    assert old.attention.head_dim == 512
    assert old.vocab_size == SHAPE.vocab_size  # of the embedding
    assert (old.rope.compress_theta, old.rope.yarn_factor) == (160000.0, 16.0)
    assert (old.rope.yarn_beta_fast, old.rope.yarn_beta_slow) == (32.0, 1.0)
    assert old.rope.yarn_context_length == 65536
    assert old.experts.routed_limits == old.experts.shared_limits == (10.0,) * 4
    assert (old.experts.n_hash_layers, old.experts.routed_scale) == (3, 1.5)
    assert (old.streams.sinkhorn_iterations, old.streams.eps) == (20, 1e-6)


def test_the_published_ratios_are_those_of_flash(source):
    clamps = dict.fromkeys((key("swiglu_clamp_exp"), key("swiglu_clamp_shexp")), 10.0)
    flash = config(
        source,
        drop=[key("attention.compress_ratios")],
        metadata={key("block_count"): 43, **clamps},
    ).attention.compress_ratios
    assert flash[:6] == (0, 0, 4, 128, 4, 128)
    assert (flash.count(0), flash.count(4), flash.count(128)) == (2, 21, 20)


def test_the_older_name_of_the_compressed_rope_base_counts(source):
    drop = [key("attention.compress_rope_freq_base")]
    edits = {"drop": drop, "metadata": {key("rope.freq_base_swa"): 40000.0}}
    assert config(source, **edits).rope.compress_theta == 40000.0


def test_arrays_longer_than_the_layers_and_scalars_for_arrays_are_taken(source):
    edits = {
        key("swiglu_clamp_exp"): [3.0] * 512,
        key("swiglu_clamp_shexp"): 5,
        key("attention.head_count"): [4, 4, 4, 4],
    }
    tolerant = config(source, metadata=edits)
    assert tolerant.experts.routed_limits == (3.0,) * 4
    assert tolerant.experts.shared_limits == (5.0,) * 4
    assert tolerant.attention.n_heads == 4


def test_a_clamp_of_zero_means_none(source):
    edits = {key("swiglu_clamp_exp"): [0.0, 2.0, 0.0, 2.0]}
    assert config(source, metadata=edits).experts.routed_limits == (None, 2.0, None, 2.0)


def test_rope_scaling_none_means_no_yarn(source):
    assert config(source, metadata={key("rope.scaling.type"): "none"}).rope.yarn_factor == 1.0


# --- files that cannot be used


def test_every_missing_key_is_named_in_one_error(source):
    missing = ["embedding_length", "attention.q_lora_rank", "expert_count", "rope.freq_base"]
    with pytest.raises(MetadataError) as caught:
        config(source, drop=[key(name) for name in missing])
    assert all(key(name) in str(caught.value) for name in missing)


def test_every_contradiction_is_named_in_one_error(source):
    edits = {
        key("attention.head_count_kv"): 2,
        key("expert_gating_func"): 2,
        key("expert_weights_norm"): False,
        key("expert_group_count"): 4,
        key("rope.scaling.type"): "longrope",
        key("attention.compress_ratios"): [0, 0, 7, 128],
        key("attention.output_group_count"): 3,
        key("rope.dimension_count"): 66,
        key("expert_used_count"): 9,
        key("hash_layer_count"): 5,
    }
    with pytest.raises(MetadataError) as caught:
        config(source, metadata=edits)
    for fact in (
        "attention.head_count_kv is 2, only 1",
        "expert_gating_func is 2, only 4",
        "expert_weights_norm is 0, only 1",
        "expert_group_count is 4, groups",
        "rope.scaling.type is 'longrope'",
        "compress ratios [7]",
        "4 heads cannot form 3 output groups",
        "rope dimension 66",
        "9 experts used of 8",
        "5 hash-routed layers of 4",
    ):
        assert fact in str(caught.value)


def test_an_embedding_without_axes_is_refused_by_name(source):
    change = {"token_embd.weight": {"shape": ()}}
    with pytest.raises(MetadataError, match=r"token_embd\.weight has shape \(\)"):
        load(Edited(source, change=change))


def test_a_block_number_of_thousands_of_digits_is_no_block(source):
    name = f"blk.{'9' * 5000}.nextn.eh_proj.weight"
    assert config(source, extra=(name,)).n_layers == 4


def test_every_missing_tensor_and_wrong_shape_is_named_before_anything_is_read(source):
    lost = ("output.weight", "blk.2.indexer.proj.weight", "blk.3.ffn_up_exps.weight")
    edited = Edited(
        source,
        drop=lost,
        change={
            "blk.1.attn_kv.weight": {"shape": (32, 128)},
            "blk.3.ffn_gate_exps.weight": {"shape": (8, 32, 128)},
        },
    )
    with pytest.raises(MetadataError) as caught:
        load(edited)
    message = str(caught.value)
    assert all(name in message for name in lost)
    assert "blk.1.attn_kv.weight has shape (32, 128), the metadata imply (64, 128)" in message
    assert "blk.3.ffn_gate_exps.weight has shape (8, 32, 128)" in message
    assert edited.n_read == 0


def test_metadata_that_disagree_with_the_tensors_are_refused(source):
    edits = {key("attention.compress_ratios"): [0, 0, 128, 4]}
    with pytest.raises(MetadataError, match=r"missing tensors: .*blk\.3\.indexer\.proj\.weight"):
        load(Edited(source, metadata=edits))


def test_tensor_types_that_cannot_be_used_are_named_before_anything_is_read(source):
    edited = Edited(
        source,
        change={
            "blk.1.attn_kv.weight": {"ggml_type": T.Q8_1.value},
            "output.weight": {"ggml_type": T.Q8_1.value},
        },
    )
    with pytest.raises(UnsupportedModelError, match="Q8_1") as caught:
        load(edited)
    assert "blk.1.attn_kv.weight" in str(caught.value)
    assert "output.weight" in str(caught.value)
    assert edited.n_read == 0


def test_a_hash_table_of_floats_is_refused(source):
    change = {"blk.0.ffn_gate_tid2eid.weight": {"ggml_type": T.F32.value}}
    with pytest.raises(UnsupportedModelError, match="cannot be of type F32"):
        load(Edited(source, change=change))


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_hash_table_that_names_no_expert_is_refused(source, expert):
    class Damaged(Edited):
        def read(self, name):
            raw = super().read(name)
            if "tid2eid" in name:
                raw.view(np.int32)[17] = expert
            return raw

    with pytest.raises(MetadataError, match=rf"blk\.0\.ffn_gate_tid2eid.*{expert}"):
        load(Damaged(source))


def test_another_architecture_is_refused_by_name_with_those_supported(source):
    assert adapter_for(source.metadata).architecture == "deepseek4"
    with pytest.raises(UnsupportedModelError, match=r"'llama' is not supported; .* deepseek4"):
        adapter_for(Metadata({"general.architecture": "llama"}))
