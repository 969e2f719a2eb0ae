"""What the adapter makes of files that differ, lack something or contradict themselves."""

import numpy as np
import pytest
import torch
from kimi_k3_published import PublishedSource
from kimi_k3_reference import K3Shape, random_weights
from kimi_k3_source import PREFIX, as_f32, metadata, source_of
from model_runs import CPU, load_source, run

from tieredmoe.adapters.kimi_k3 import KimiK3Adapter, KimiK3Config
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.errors import ConfigError, MetadataError, UnsupportedModelError
from tieredmoe.gguf import find_experts

SHAPE = K3Shape(n_layers=3, mla_layers=(2,), block=2, hidden=64, vocab=80)
TOKENS = torch.arange(5, 35) * 7 % SHAPE.vocab
UNUSED = ("rope.freq_base", "expert_group_used_count", "attention.key_length")
NEEDED = [
    key
    for key in metadata(SHAPE)
    if key.startswith(PREFIX)
    and key.removeprefix(PREFIX) not in (*UNUSED, "attention.value_length", "vocab_size")
]
FLAT = {
    "attn_res.block_size": "attn_res_block_size",
    "activation.situ_beta": "situ_beta",
    "activation.situ_linear_beta": "situ_linear_beta",
    "kda.gate_lower_bound": "gate_lower_bound",
}


@pytest.fixture(scope="module")
def source():
    return source_of(SHAPE, random_weights(SHAPE, 3))


def config(source, **changes):
    changed = source.changed(**changes)
    return KimiK3Config.from_metadata(changed.metadata, changed.tensors)


def refused(source, kind=MetadataError, **changes):
    """The message with which ``check`` and ``load`` refuse the changed source, nothing read."""
    changed = source.changed(**changes)
    with pytest.raises(kind) as checked:
        KimiK3Adapter().check(changed)
    with pytest.raises(kind) as loaded:
        KimiK3Adapter().load(changed, device=CPU)
    assert str(checked.value) == str(loaded.value)
    assert changed.n_read == 0
    return str(loaded.value)


# --- files that differ harmlessly


def test_the_adapter_is_found_by_its_architecture(source):
    assert isinstance(adapter_for(source.metadata), KimiK3Adapter)


def test_the_flat_names_of_early_files_count(source):
    old = {PREFIX + name: source.metadata[PREFIX + key] for key, name in FLAT.items()}
    drop = [PREFIX + key for key in FLAT]
    assert config(source, metadata=old, drop=drop) == config(source)


def test_keys_that_nobody_needs_may_be_missing(source):
    unused = [PREFIX + name for name in (*UNUSED, "attention.value_length")]
    assert config(source, drop=unused) == config(source)


def test_the_size_of_the_vocabulary_may_be_left_to_the_embedding(source):
    assert config(source, drop=[PREFIX + "vocab_size"]).vocab_size == SHAPE.vocab


def test_widths_may_be_given_for_each_layer(source):
    edits = {
        PREFIX + "expert_feed_forward_length": [0, SHAPE.width, SHAPE.width],
        PREFIX + "feed_forward_length": [SHAPE.dense_width, 0, 0],
    }
    assert config(source, metadata=edits) == config(source)


def test_t4_full_attention_is_where_a_layer_has_key_heads_whatever_the_pattern(source):
    counts = {PREFIX + "attention.head_count_kv": [1, 1, 0]}
    assert config(source).is_kda == (True, True, False)
    assert config(source, metadata=counts).is_kda == (False, False, True)


def test_linear_attention_has_the_heads_that_its_tensors_say(source):
    read = config(source)
    assert (read.kda.n_heads, read.mla.n_heads) == (5, 4)


def test_tensors_are_found_without_their_suffix_and_others_are_left_alone(source):
    bare = ("blk.0.ssm_dt.bias", "blk.1.exp_probs_b.bias", "output_res_score.weight")
    stored = {name.rsplit(".", 1)[0]: source.stored[name] for name in bare}
    stored["blk.3.attn_norm.weight"] = as_f32(np.ones(7))
    changed = source.changed(stored=stored, drop=bare)
    got = run(*load_source(changed), TOKENS)
    assert torch.equal(got, run(*load_source(source), TOKENS))
    assert changed.n_read == len(source.tensors)


def test_progress_ends_at_the_bytes_of_the_dense_weights(source):
    seen = []
    KimiK3Adapter().load(source, device=CPU, progress=lambda *done: seen.append(done))
    dense = sum(info.nbytes for name, info in source.tensors.items() if "_exps" not in name)
    assert seen[-1] == (dense, dense)
    assert seen == sorted(seen)


# --- files that cannot be used


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_refused_by_its_name(source, key):
    assert key in refused(source, drop=[key])


def test_every_missing_key_is_named_in_one_error(source):
    message = refused(source, drop=NEEDED[1:])
    assert all(key in message for key in NEEDED[1:])


def test_a_missing_bound_is_refused_with_both_its_names(source):
    message = refused(source, drop=[PREFIX + "kda.gate_lower_bound"])
    assert "kimi-k3.kda.gate_lower_bound or kimi-k3.gate_lower_bound" in message


def test_every_contradiction_is_named_in_one_error(source):
    edits = {
        "expert_gating_func": 1,
        "expert_weights_norm": False,
        "expert_group_count": 8,
        "attention.head_count_kv": [0, -1, 1],
        "rope.dimension_count": 40,
        "expert_used_count": 17,
        "leading_dense_block_count": 3,
        "kda.gate_lower_bound": 5.0,
        "expert_feed_forward_length": [80, 80, 96],
    }
    message = refused(source, metadata={PREFIX + key: value for key, value in edits.items()})
    for fact in (
        "expert_gating_func is 1, only 2",
        "expert_weights_norm is false, only true",
        "expert_group_count is 8, groups",
        "attention.head_count_kv has -1",
        "a key of 40 channels cannot share 40",
        "17 experts used of 16",
        "3 dense layers of 3",
        "kda.gate_lower_bound is 5.0, not -80.0 to -1e-30",
    ):
        assert fact in message


def test_experts_that_differ_in_width_between_layers_are_refused(source):
    widths = {PREFIX + "expert_feed_forward_length": [80, 80, 96]}
    assert "expert_feed_forward_length differs between layers: [80, 96]" in refused(
        source, metadata=widths
    )


@pytest.mark.parametrize("value", [0, -1, 2**40])
@pytest.mark.parametrize(
    "key",
    [
        key
        for key, value in metadata(SHAPE).items()
        if key in NEEDED and type(value) is int and not key.endswith(("func", "block_count"))
    ],
)
def test_a_size_that_no_model_has_is_refused_by_its_name(source, key, value):
    assert f"{key} is {value}, not positive" in refused(source, metadata={key: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-300, 1e300])
@pytest.mark.parametrize(
    "key", [key for key, value in metadata(SHAPE).items() if key in NEEDED and type(value) is float]
)
def test_a_constant_that_arithmetic_cannot_use_is_refused_by_its_name(source, key, value):
    assert f"{key} is {value}, not " in refused(source, metadata={key: value})


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-320, -1e-31, -80.1, -1e300])
def test_a_bound_of_decays_that_arithmetic_cannot_use_is_refused(source, value):
    key = PREFIX + "kda.gate_lower_bound"
    message = refused(source, metadata={key: value})
    assert message.endswith(f"{key} is {value}, not -80.0 to -1e-30")


def test_every_missing_tensor_and_wrong_shape_is_named_before_anything_is_read(source):
    """Those that an older reader would do without among them: the norm, the gate, the score."""
    lost = ("blk.1.ffn_routed_norm.weight", "blk.2.attn_gate.weight", "output_res_score.weight")
    message = refused(
        source,
        drop=lost,
        stored={
            "blk.0.ssm_a": as_f32(np.zeros(128)),  # as many as the checkpoint stores, not uses
            "blk.2.attn_k_b.weight": as_f32(np.zeros((4, 24, 32))),  # not transposed
            "blk.1.ffn_up_exps.weight": as_f32(np.zeros((16, 64, 80))),
        },
    )
    assert all(name in message for name in lost)
    assert "blk.0.ssm_a has shape (128,), the metadata imply (5,)" in message
    assert "blk.2.attn_k_b.weight has shape (4, 24, 32), the metadata imply (128, 24)" in message
    assert "blk.1.ffn_up_exps.weight has shape (16, 64, 80)" in message


@pytest.mark.parametrize("shape", [(), (3, 64)])
def test_linear_heads_that_fit_no_other_tensor_are_refused(source, shape):
    message = refused(source, stored={"blk.0.ssm_beta.weight": as_f32(np.zeros(shape))})
    assert "blk.0.ssm_beta.weight" in message or "blk.0.ssm_a" in message


def test_metadata_that_disagree_with_the_tensors_are_refused(source):
    counts = {PREFIX + "attention.head_count_kv": [0, 1, 0]}
    message = refused(source, metadata=counts)
    assert "blk.1.attn_q_a.weight" in message
    assert "blk.2.ssm_a" in message


def test_tensor_types_that_cannot_be_used_are_named_before_anything_is_read(source):
    raw, _, shape = source.stored["output.weight"]
    stored = {"output.weight": (raw, 9, shape)}  # Q8_1
    message = refused(source, UnsupportedModelError, stored=stored)
    assert "Q8_1" in message
    assert "output.weight" in message


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_an_epsilon_of_latents_that_is_none_is_refused(eps):
    with pytest.raises(ConfigError, match="KimiK3Adapter: latent_eps is"):
        KimiK3Adapter(latent_eps=eps)


# --- the published model


def test_the_published_models_headers_pass_and_no_weight_is_read():
    published = PublishedSource()
    assert len(published.tensors) == 2573
    KimiK3Adapter().check(published)
    spec = find_experts(published).spec
    assert spec.layers == tuple(range(1, 93))
    assert spec.layouts[1].payload_nbytes == spec.slot_nbytes == 11_956_224


def test_the_published_models_state_takes_465_mb_and_55_kb_for_each_token():
    published = PublishedSource()
    read = KimiK3Config.from_metadata(published.metadata, published.tensors)
    n_kda = sum(read.is_kda)
    assert (n_kda, read.n_layers - n_kda) == (69, 24)
    assert n_kda * read.kda.state_nbytes == 464_633_856
    assert 4 * read.mla.row_width * (read.n_layers - n_kda) == 55_296


def test_a_state_takes_what_the_configuration_says(source):
    model, _ = load_source(source)
    for layer in model.new_state(30).layers[:2]:
        assert layer.memory.nbytes + layer.window.nbytes == model.config.kda.state_nbytes
