"""Numbers in metadata that would hang, exhaust or break the adapter are refused by name."""

import math
import re

import pytest

from tieredmoe.adapters.deepseek_v4 import DeepSeekV4Config
from tieredmoe.errors import MetadataError
from tieredmoe.gguf import Metadata, open_inventory
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, make_deepseek_v4


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("numbers") / "tiny.gguf"
    shape = DeepSeekV4Shape(num_hidden_layers=4, compress_ratios=(0, 0, 4, 128))
    make_deepseek_v4(path, shape=shape, seed=3)
    return open_inventory(path)


def config(source, *, metadata):
    return DeepSeekV4Config.from_metadata(Metadata({**source.metadata, **metadata}), source.tensors)


def key(name):
    return f"deepseek4.{name}"


@pytest.mark.parametrize("name", ["attention.sliding_window", "hyper_connection.count"])
def test_a_size_that_is_not_positive_is_refused(source, name):
    with pytest.raises(MetadataError, match=rf"{key(name)} is 0, not positive"):
        config(source, metadata={key(name): 0})


@pytest.mark.parametrize(
    "name",
    [
        *("block_count", "vocab_size", "context_length", "embedding_length"),
        *("attention.head_count", "attention.key_length", "attention.q_lora_rank"),
        *("attention.output_group_count", "attention.output_lora_rank", "attention.sliding_window"),
        *("attention.indexer.head_count", "attention.indexer.key_length"),
        *(
            "attention.indexer.top_k",
            "rope.dimension_count",
            "rope.scaling.original_context_length",
        ),
        *("expert_count", "expert_used_count", "expert_feed_forward_length"),
        *("expert_shared_count", "hash_layer_count"),
        *("hyper_connection.count", "hyper_connection.sinkhorn_iterations"),
    ],
)
@pytest.mark.parametrize("count", [2**40, -(2**40)])
def test_a_count_beyond_any_model_is_refused_by_name(source, name, count):
    with pytest.raises(MetadataError, match=rf"{key(name)} is {count}, not "):
        config(source, metadata={key(name): count})


def test_so_many_sinkhorn_iterations_that_a_step_would_hang_are_refused(source):
    name = key("hyper_connection.sinkhorn_iterations")
    with pytest.raises(MetadataError, match=rf"{name} is 1001, not positive and at most 1000"):
        config(source, metadata={name: 1001})


@pytest.mark.parametrize(
    "name",
    [
        *("attention.layer_norm_rms_epsilon", "hyper_connection.epsilon", "expert_weights_scale"),
        *("rope.freq_base", "attention.compress_rope_freq_base", "rope.scaling.factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    ],
)
@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1.0, 1e-300, 1e300])
def test_a_constant_that_arithmetic_cannot_use_is_refused_by_name(source, name, value):
    with pytest.raises(MetadataError, match=rf"{key(name)} is {re.escape(repr(value))}, not "):
        config(source, metadata={key(name): value})


@pytest.mark.parametrize("name", ["rope.freq_base", "attention.compress_rope_freq_base"])
@pytest.mark.parametrize("theta", [1.0, 0.5])
def test_a_rope_base_that_makes_no_frequencies_is_refused_by_name(source, name, theta):
    with pytest.raises(MetadataError, match=rf"{key(name)} is {theta}, not more than 1"):
        config(source, metadata={key(name): theta})
