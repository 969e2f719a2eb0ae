import attrs
import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.errors import ConfigError
from tieredmoe.gguf import find_experts, open_inventory, read_header
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3
from tieredmoe.testing.tiny_kimi_tensors import planned_tensors
from tieredmoe.testing.tiny_tokenizer import tiny_vocabulary

Q = gguf.GGMLQuantizationType
F32 = KimiK3Types.uniform(Q.F32)
SMALL = KimiK3Shape(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=3,
    kda_num_heads=5,
    kda_head_dim=16,
    q_lora_rank=48,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=28,
    intermediate_size=96,
    num_experts=6,
    num_experts_per_token=2,
    routed_expert_hidden_size=32,
    moe_intermediate_size=80,
    attn_res_block_size=2,
)
REAL = KimiK3Shape(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_head_dim=128,
    intermediate_size=33792,
    num_experts=896,
    num_experts_per_token=16,
    routed_expert_hidden_size=3584,
    moe_intermediate_size=3072,
    attn_res_block_size=12,
    max_position_embeddings=1048576,
)


def written(path, **settings):
    """The weights as made, and the ne of every tensor as the package's reader sees it."""
    made = make_kimi_k3(path, **settings)
    tensors = [t for file in made.paths for t in gguf.GGUFReader(file).tensors]
    return made, {t.name: [int(n) for n in t.shape] for t in tensors}


def of_layer(layer, ne):
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): n for name, n in ne.items() if name.startswith(prefix)}


# ---------------------------------------------------------------- what a file has


def test_the_real_models_sizes_give_the_real_models_tensors_and_bytes():
    planned = list(planned_tensors(REAL, KimiK3Types()))
    sizes = [np.prod(tensor.size, dtype=object) for tensor in planned]
    nbytes = [
        size // GGML_QUANT_SIZES[tensor.ggml_type][0] * GGML_QUANT_SIZES[tensor.ggml_type][1]
        for tensor, size in zip(planned, sizes, strict=True)
    ]
    assert len(planned) == 2573
    assert round(sum(sizes) / 1e9, 2) == 2779.48
    assert round(sum(nbytes) / 1e9, 2) == 1008.94
    assert REAL.full_attn_layers == (*range(4, 93, 4), 93)


def test_a_kda_layer_and_the_dense_first_one_have_these_tensors(tmp_path):
    _, ne = written(tmp_path / "m.gguf", shape=SMALL, types=F32)
    assert of_layer(0, ne) == {
        "attn_norm.weight": [64],
        "ffn_norm.weight": [64],
        "attn_res_score.weight": [64],
        "ffn_res_score.weight": [64],
        "attn_q.weight": [64, 80],
        "attn_k.weight": [64, 80],
        "attn_v.weight": [64, 80],
        "ssm_conv1d_q.weight": [4, 1, 80, 1],
        "ssm_conv1d_k.weight": [4, 1, 80, 1],
        "ssm_conv1d_v.weight": [4, 1, 80, 1],
        "ssm_f_a.weight": [64, 16],
        "ssm_f_b.weight": [16, 80],
        "ssm_beta.weight": [64, 5],
        "ssm_a": [5],
        "ssm_dt.bias": [80],
        "ssm_g.weight": [64, 80],
        "ssm_norm.weight": [16],
        "attn_output.weight": [80, 64],
        "ffn_gate.weight": [64, 96],
        "ffn_up.weight": [64, 96],
        "ffn_down.weight": [96, 64],
    }
    rest = {name: n for name, n in ne.items() if not name.startswith("blk.")}
    assert rest == {
        "token_embd.weight": [64, 300],
        "output.weight": [64, 300],
        "output_norm.weight": [64],
        "output_res_score.weight": [64],
    }


def test_an_mla_layer_and_a_routed_one_have_these_tensors(tmp_path):
    _, ne = written(tmp_path / "m.gguf", shape=SMALL, types=F32)
    assert of_layer(3, ne) == {
        "attn_norm.weight": [64],
        "ffn_norm.weight": [64],
        "attn_res_score.weight": [64],
        "ffn_res_score.weight": [64],
        "attn_q_a.weight": [64, 48],
        "attn_q_a_norm.weight": [48],
        "attn_q_b.weight": [48, 96],
        "attn_kv_a_mqa.weight": [64, 48],
        "attn_kv_a_norm.weight": [40],
        "attn_k_b.weight": [24, 40, 3],
        "attn_v_b.weight": [40, 28, 3],
        "attn_gate.weight": [64, 84],
        "attn_output.weight": [84, 64],
        "ffn_gate_inp.weight": [64, 6],
        "exp_probs_b.bias": [6],
        "ffn_gate_exps.weight": [32, 80, 6],
        "ffn_up_exps.weight": [32, 80, 6],
        "ffn_down_exps.weight": [80, 32, 6],
        "ffn_routed_down.weight": [64, 32],
        "ffn_routed_up.weight": [32, 64],
        "ffn_routed_norm.weight": [32],
        "ffn_gate_shexp.weight": [64, 160],
        "ffn_up_shexp.weight": [64, 160],
        "ffn_down_shexp.weight": [160, 64],
    }


def test_the_metadata_says_every_size(tmp_path):
    make_kimi_k3(tmp_path / "m.gguf", shape=SMALL, types=F32)
    found = read_header(tmp_path / "m.gguf").metadata
    own = {key.removeprefix("kimi-k3."): v for key, v in found.items() if key[:8] == "kimi-k3."}
    assert found["general.architecture"] == "kimi-k3"
    assert {key: pytest.approx(value) for key, value in own.items()} == {
        "block_count": 5,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 3,
        "attention.head_count_kv": [0, 0, 0, 1, 1],
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "attention.key_length": 48,
        "attention.value_length": 40,
        "vocab_size": 300,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 16,
        "kda.gate_lower_bound": -5.0,
        "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 40,
        "rope.dimension_count": 8,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 28,
        "expert_feed_forward_length": 80,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_latent_length": 32,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "attn_res.block_size": 2,
    }


def test_the_decays_have_their_exponential_taken_and_their_sign_turned(tmp_path):
    made = make_kimi_k3(tmp_path / "m.gguf", shape=SMALL, types=F32)
    decays = np.concatenate([made[f"blk.{layer}.ssm_a"] for layer in (0, 1, 2)])
    assert (decays < -1).all()
    assert (decays > -16).all()


def test_the_tokenizer_is_one_that_can_chat(tmp_path):
    make_kimi_k3(tmp_path / "m.gguf", shape=SMALL, types=F32)
    tokenizer = Tokenizer.from_metadata(read_header(tmp_path / "m.gguf").metadata)
    vocabulary = tiny_vocabulary(300, "kimi-k3")
    assert repr(tokenizer) == "<Tokenizer kimi-k2: 300 tokens, 8 of them control>"
    ids = [vocabulary.id_of(t) for t in ("[BOS]", "<|end_of_msg|>", "[PAD]")]
    assert [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id] == ids
    assert vocabulary.tokens[-8] == "[BOS]"


# ---------------------------------------------------------------- what the maker promises


def test_the_returned_weights_are_what_the_bytes_mean(tmp_path):
    made = make_kimi_k3(tmp_path / "m.gguf", shape=KimiK3Shape(num_hidden_layers=4), n_shards=3)
    inventory = open_inventory(made.paths[2])
    assert list(inventory.tensors) == list(made)
    for name, info in inventory.tensors.items():
        rows = inventory.read(name).reshape(*info.shape[:-1], -1)
        values = gguf.quants.dequantize(rows, Q(info.ggml_type)).reshape(info.shape)
        assert np.array_equal(values, made[name])


def test_the_default_types_are_those_of_the_real_q2_k_file(tmp_path):
    made = make_kimi_k3(tmp_path / "m.gguf", shape=KimiK3Shape(num_hidden_layers=4))
    inventory = open_inventory(made.paths[0])
    types = {name: Q(info.ggml_type).name for name, info in inventory.tensors.items()}
    expected = {
        "token_embd.weight": "Q2_K",
        "output.weight": "Q6_K",
        "blk.0.attn_q.weight": "Q2_K",
        "blk.0.attn_v.weight": "Q3_K",
        "blk.0.attn_output.weight": "Q3_K",
        "blk.0.ssm_f_b.weight": "Q4_0",
        "blk.0.ffn_down.weight": "Q3_K",
        "blk.3.attn_k_b.weight": "Q4_0",
        "blk.3.attn_v_b.weight": "Q2_K",
        "blk.3.ffn_gate_inp.weight": "F32",
        "blk.3.ffn_gate_exps.weight": "Q2_K",
        "blk.3.ffn_down_exps.weight": "Q3_K",
        "blk.3.ffn_routed_up.weight": "Q2_K",
        "blk.3.ffn_down_shexp.weight": "Q3_K",
    }
    assert {name: types[name] for name in expected} == expected
    assert list(find_experts(inventory).spec.layers) == [1, 2, 3]


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_kimi_k3(tmp_path / name, shape=SMALL, types=F32, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_types_shards_and_the_form_of_the_metadata_do_not_change_the_draw(tmp_path):
    floats = make_kimi_k3(tmp_path / "a.gguf", shape=SMALL, types=F32)
    types = KimiK3Types.uniform(Q.F16)
    mixed = make_kimi_k3(
        tmp_path / "b.gguf", shape=SMALL, types=types, n_shards=38, early=True, conv_axes=3
    )
    assert len(mixed.paths) == 38
    for name in ("blk.4.attn_norm.weight", "blk.1.ssm_a", "blk.3.ffn_gate_inp.weight"):
        assert np.array_equal(floats[name], mixed[name])
    error = np.abs(floats["blk.4.ffn_down_shexp.weight"] - mixed["blk.4.ffn_down_shexp.weight"])
    assert 0 < error.max() < 1e-3


@pytest.mark.parametrize(
    "tensors",
    [
        {"blk.2.ffn_up_exps.weight": Q.F16},
        lambda name: Q.F16 if name == "blk.2.ffn_up_exps.weight" else None,
    ],
)
def test_single_tensors_may_have_their_own_type(tmp_path, tensors):
    types = attrs.evolve(F32, tensors=tensors)
    made = make_kimi_k3(tmp_path / "m.gguf", shape=SMALL, types=types)
    infos = open_inventory(made.paths[0]).tensors
    assert infos["blk.2.ffn_up_exps.weight"].ggml_type == Q.F16
    assert infos["blk.3.ffn_up_exps.weight"].ggml_type == Q.F32


def test_early_files_have_flat_names_no_lengths_and_another_end(tmp_path):
    make_kimi_k3(tmp_path / "m.gguf", shape=SMALL, types=F32, early=True)
    found = read_header(tmp_path / "m.gguf").metadata
    flat = ("attn_res_block_size", "situ_beta", "situ_linear_beta", "gate_lower_bound")
    assert [found[f"kimi-k3.{key}"] for key in flat] == [2, 4.0, 25.0, -5.0]
    gone = (
        "attn_res.block_size",
        "activation.situ_beta",
        "activation.situ_linear_beta",
        "kda.gate_lower_bound",
        "attention.key_length",
        "attention.value_length",
    )
    assert not [key for key in gone if f"kimi-k3.{key}" in found]
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens[found["tokenizer.ggml.eos_token_id"]] == "[EOS]"


def test_convolutions_may_have_three_axes(tmp_path):
    made, ne = written(tmp_path / "m.gguf", shape=SMALL, types=F32, conv_axes=3)
    assert ne["blk.1.ssm_conv1d_k.weight"] == [4, 1, 80]
    assert made["blk.1.ssm_conv1d_k.weight"].shape == (80, 1, 4)


def test_shards_may_claim_a_number_of_tensors_that_is_not_theirs(tmp_path):
    made = make_kimi_k3(
        tmp_path / "m.gguf", shape=SMALL, types=F32, n_shards=3, n_tensors_claimed=2760
    )
    claims = [read_header(path).metadata["split.tensors.count"] for path in made.paths]
    assert claims == [2760] * 3


def test_keys_and_tensors_can_be_left_out_or_written_in_another_way(tmp_path):
    made = make_kimi_k3(
        tmp_path / "m.gguf",
        shape=SMALL,
        types=F32,
        tokenizer=None,
        metadata={"kimi-k3.expert_feed_forward_length": np.full(5, 80, dtype=np.int32)},
        drop_keys=["kimi-k3.kda.head_dim"],
        drop_tensors=["blk.2.ffn_routed_norm.weight"],
    )
    found = read_header(tmp_path / "m.gguf")
    assert found.metadata["kimi-k3.expert_feed_forward_length"] == [80] * 5
    assert found.metadata["tokenizer.ggml.model"] == "none"
    assert "kimi-k3.kda.head_dim" not in found.metadata
    assert "blk.2.ffn_routed_norm.weight" not in {*made, *(t.name for t in found.tensors)}


def test_every_row_that_does_not_fit_its_blocks_is_listed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make_kimi_k3(tmp_path / "m.gguf", shape=SMALL)
    message = str(caught.value)
    assert "blk.0.ssm_f_b.weight: rows of 16 weights are not whole Q4_0 blocks" in message
    assert "blk.4.ffn_down_exps.weight: rows of 80 weights are not whole Q3_K" in message
    assert not list(tmp_path.iterdir())


def test_every_contradiction_of_a_shape_is_listed():
    with pytest.raises(ConfigError) as caught:
        KimiK3Shape(
            num_hidden_layers=4,
            full_attn_layers=(0, 4),
            num_experts_per_token=9,
            first_k_dense_replace=4,
            gate_lower_bound=1.0,
            vocab_size=0,
        )
    for part in (
        "vocab_size must be positive, not 0",
        "full_attn_layers has 0, of 4 layers counted from 1",
        "num_experts_per_token 9 exceeds num_experts 8",
        "first_k_dense_replace 4 leaves no routed layer of 4",
        "gate_lower_bound must be negative, not 1.0",
    ):
        assert part in str(caught.value)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="300 tokens for a vocab_size of 512"):
        make_kimi_k3(tmp_path / "m.gguf", tokenizer=tiny_vocabulary(300, "kimi-k3"))
