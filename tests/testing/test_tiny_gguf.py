import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import xxhash

from tieredmoe.errors import ConfigError, GGUFError
from tieredmoe.gguf import find_experts, open_inventory, read_header
from tieredmoe.testing.tiny_blocks import ENCODABLE_TYPES, encode
from tieredmoe.testing.tiny_gguf import (
    DeepSeekV4Shape,
    TypeMix,
    make_deepseek_v4,
    to_transformers,
    transformers_config,
)
from tieredmoe.testing.tiny_tokenizer import tiny_vocabulary

Q = gguf.GGMLQuantizationType
DATA = Path(__file__).parents[1] / "data" / "deepseek_v4"
FIXTURE_SEED = 20260436
FIXTURE_DIGEST = "63e83858deb9200e8351cee0f7667371"
FIXTURE_SHAPE = DeepSeekV4Shape(vocab_size=256)
SMALL = DeepSeekV4Shape(num_hidden_layers=2, hidden_size=64, n_routed_experts=4)
WIDE = DeepSeekV4Shape(
    num_hidden_layers=2, hidden_size=256, moe_intermediate_size=256, n_routed_experts=4
)


def decoded(inventory):
    """What every tensor means to the package, by name."""
    arrays = {}
    for name, info in inventory.tensors.items():
        data = inventory.read(name)
        if info.ggml_type == Q.I32:
            arrays[name] = data.view(np.int32).reshape(info.shape)
        else:
            rows = data.reshape(*info.shape[:-1], -1)
            arrays[name] = gguf.quants.dequantize(rows, Q(info.ggml_type)).reshape(info.shape)
    return arrays


def same(left, right):
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name])
        for name in left
    )


def test_the_f32_model_is_the_reference_fixture_bit_for_bit(tmp_path):
    """Its stored logits serve as an oracle, so neither we nor numpy may draw other weights."""
    make_deepseek_v4(
        tmp_path / "m.gguf",
        shape=FIXTURE_SHAPE,
        types=TypeMix.uniform(Q.F32),
        seed=FIXTURE_SEED,
        tokenizer=None,
    )
    inventory, digest = open_inventory(tmp_path / "m.gguf"), xxhash.xxh3_128()
    for name in inventory.tensors:
        digest.update(name.encode())
        digest.update(inventory.read(name).data)
    assert digest.hexdigest() == FIXTURE_DIGEST


def test_names_types_and_keys_are_those_of_the_reference_fixture(tmp_path):
    make_deepseek_v4(tmp_path / "m.gguf", shape=FIXTURE_SHAPE, tokenizer=None)
    ours, theirs = read_header(tmp_path / "m.gguf"), read_header(DATA / "tiny_mx.gguf")
    facts = [[(t.name, t.ggml_type, t.shape) for t in h.tensors] for h in (ours, theirs)]
    assert facts[0] == facts[1]
    extra = {"general.type", "general.name", "general.quantization_version"}
    assert {k: v for k, v in ours.metadata.items() if k not in extra} == theirs.metadata


@pytest.mark.parametrize("ggml_type", sorted(ENCODABLE_TYPES), ids=lambda t: t.name)
def test_the_returned_weights_are_what_the_bytes_mean(tmp_path, ggml_type):
    shape = DeepSeekV4Shape(
        num_hidden_layers=1,
        hidden_size=256,
        q_lora_rank=256,
        head_dim=128,
        o_lora_rank=128,
        moe_intermediate_size=256,
        n_routed_experts=4,
        num_experts_per_tok=2,
        vocab_size=270,
    )
    made = make_deepseek_v4(tmp_path / "m.gguf", shape=shape, types=TypeMix.uniform(ggml_type))
    inventory = open_inventory(tmp_path / "m.gguf")
    assert same(decoded(inventory), made)
    assert inventory.tensors["blk.0.ffn_down_exps.weight"].ggml_type == ggml_type
    assert inventory.tensors["blk.0.attn_q_b.weight"].ggml_type == ggml_type


@pytest.mark.parametrize("ggml_type", sorted(ENCODABLE_TYPES), ids=lambda t: t.name)
def test_every_type_keeps_the_scale_of_the_weights(ggml_type):
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((64, 512)) / 16).astype(np.float32)
    _, values = encode(weights, ggml_type, rng)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(weights.std(), rel=0.02)
    assert np.abs(values.reshape(-1, 256).mean(axis=1)).mean() < 0.4 * weights.std()
    assert len(np.unique(values)) > 4


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    types = TypeMix(gate=Q.Q2_K, down=Q.IQ4_NL)
    for name in ("a", "b"):
        make_deepseek_v4(tmp_path / name, shape=WIDE, types=types, seed=3)
    make_deepseek_v4(tmp_path / "c", shape=WIDE, types=types, seed=4)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_types_and_shards_do_not_change_the_draw(tmp_path):
    f32 = make_deepseek_v4(tmp_path / "a.gguf", shape=WIDE, types=TypeMix.uniform(Q.F32))
    mixed = make_deepseek_v4(
        tmp_path / "b.gguf", shape=WIDE, types=TypeMix(gate=Q.Q6_K, embed=Q.Q4_K), n_shards=4
    )
    for name in ("blk.1.attn_sinks.weight", "blk.1.ffn_gate_tid2eid.weight"):
        assert np.array_equal(f32[name], mixed[name])
    error = np.abs(f32["output.weight"] - mixed["output.weight"]).max()
    assert 0 < error < 0.01


def test_shards_hold_the_whole_model_and_only_the_first_its_metadata(tmp_path):
    made = make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, n_shards=3)
    assert [path.name for path in made.paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    inventory = open_inventory(made.paths[1])
    assert same(decoded(inventory), made)
    assert "general.architecture" not in read_header(made.paths[2]).metadata
    assert inventory.metadata.architecture == "deepseek4"


def test_an_alignment_is_kept_and_declared(tmp_path):
    made = make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, alignment=4096, n_shards=2)
    inventory = open_inventory(made.paths[0])
    assert [shard.alignment for shard in inventory.shards] == [4096, 4096]
    assert all(info.offset % 4096 == 0 for info in inventory.tensors.values())
    assert same(decoded(inventory), made)


@pytest.mark.parametrize(
    "experts",
    [
        {(1, "down"): Q.Q6_K},
        lambda layer, role: Q.Q6_K if (layer, role) == (1, "down") else None,
    ],
)
def test_single_layers_and_roles_may_have_their_own_type(tmp_path, experts):
    types = TypeMix(down=Q.Q8_0, experts=experts)
    make_deepseek_v4(tmp_path / "m.gguf", shape=WIDE, types=types)
    layouts = find_experts(open_inventory(tmp_path / "m.gguf")).spec.layouts
    downs = [layouts[layer].by_name["down"].ggml_type for layer in (0, 1)]
    assert downs == [Q.Q8_0, Q.Q6_K]


def test_every_row_that_does_not_fit_its_blocks_is_listed(tmp_path):
    types = TypeMix(gate=Q.Q2_K, shared=Q.IQ1_S)
    with pytest.raises(ConfigError) as caught:
        make_deepseek_v4(tmp_path / "m.gguf", types=types)
    message = str(caught.value)
    assert "blk.0.ffn_gate_exps.weight: rows of 128 weights are not whole Q2_K blocks" in message
    assert "blk.5.ffn_down_shexp.weight: type IQ1_S cannot be written" in message
    assert not list(tmp_path.iterdir())


def test_every_contradiction_of_a_shape_is_listed():
    with pytest.raises(ConfigError) as caught:
        DeepSeekV4Shape(
            num_experts_per_tok=9, compress_ratios=(0, 5), o_groups=3, qk_rope_head_dim=15
        )
    for part in ("num_experts_per_tok 9", "has 2 entries", "0, 4 or 128", "o_groups", "even"):
        assert part in str(caught.value)


def test_a_size_must_be_positive():
    with pytest.raises(ConfigError, match="hidden_size must be positive, not 0"):
        DeepSeekV4Shape(hidden_size=0)


def test_more_shards_than_tensors_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be split into 999 shards"):
        make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, n_shards=999)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="300 tokens for a vocab_size of 320"):
        make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, tokenizer=tiny_vocabulary(300))


def test_the_tokenizer_is_in_the_metadata(tmp_path):
    make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL)
    metadata, vocabulary = read_header(tmp_path / "m.gguf").metadata, tiny_vocabulary(320)
    found = {k.split(".", 2)[2]: v for k, v in metadata.items() if k.startswith("tokenizer")}
    assert found == {
        "model": "gpt2",
        "pre": "joyai-llm",
        "tokens": list(vocabulary.tokens),
        "token_type": list(vocabulary.token_types),
        "merges": list(vocabulary.merges),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
        "add_bos_token": False,
    }


def test_keys_and_tensors_can_be_left_out_or_written_in_another_way(tmp_path):
    made = make_deepseek_v4(
        tmp_path / "m.gguf",
        shape=SMALL,
        metadata={"deepseek4.block_count": np.array([2], dtype=np.int64), "x.y": "z", "x.z": -1},
        drop_keys=["deepseek4.expert_count"],
        drop_tensors=["output.weight"],
    )
    found = read_header(tmp_path / "m.gguf")
    assert found.metadata["deepseek4.block_count"] == [2]
    assert (found.metadata["x.y"], found.metadata["x.z"]) == ("z", -1)
    assert "deepseek4.expert_count" not in found.metadata
    assert "output.weight" not in made
    assert "output.weight" not in {info.name for info in found.tensors}


@pytest.mark.parametrize("value", [{1}, None, np.float16(1), np.zeros(2, np.complex64)])
def test_a_value_without_a_gguf_type_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"metadata x: \w+ has no GGUF type"):
        make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, metadata={"x": value})
    assert not list(tmp_path.iterdir())


def test_a_target_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "m-00003-of-00003.gguf").mkdir()
    with pytest.raises(GGUFError, match=r"m-00003-of-00003\.gguf: cannot be written"):
        make_deepseek_v4(tmp_path / "m.gguf", shape=SMALL, n_shards=3)
    assert [path.name for path in tmp_path.iterdir()] == ["m-00003-of-00003.gguf"]


# ---------------------------------------------------------------- the reference implementation


@pytest.fixture(scope="module")
def reference_logits():
    """Logits of transformers' ``DeepseekV4ForCausalLM`` for weights by GGUF names."""
    torch = pytest.importorskip("torch")
    deepseek_v4 = pytest.importorskip("transformers.models.deepseek_v4")

    def logits(weights, shape, token_ids):
        config = deepseek_v4.DeepseekV4Config(**transformers_config(shape))
        config._attn_implementation = config._experts_implementation = "eager"
        model = deepseek_v4.DeepseekV4ForCausalLM(config).float().eval()
        state = {k: torch.from_numpy(v.copy()) for k, v in to_transformers(weights, shape).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert not [name for name in missing if "rotary" not in name]
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(token_ids)[None]).logits[0].numpy()

    return logits


def test_the_reference_model_gives_the_known_logits(reference_logits):
    oracle = np.load(DATA / "oracle_mx.npz")
    weights = decoded(open_inventory(DATA / "tiny_mx.gguf"))
    logits = reference_logits(weights, FIXTURE_SHAPE, oracle["tokens"])
    assert np.abs(logits - oracle["logits"]).max() < 1e-3


def test_the_reference_model_gives_the_known_logits_for_weights_as_made(reference_logits, tmp_path):
    oracle = np.load(DATA / "oracle_f32.npz")
    made = make_deepseek_v4(
        tmp_path / "m.gguf",
        shape=FIXTURE_SHAPE,
        types=TypeMix.uniform(Q.F32),
        seed=FIXTURE_SEED,
        tokenizer=None,
    )
    logits = reference_logits(made, FIXTURE_SHAPE, oracle["tokens"])
    assert np.abs(logits - oracle["logits"]).max() < 1e-3


def test_the_reference_configuration_is_that_of_the_known_logits():
    config = json.loads(str(np.load(DATA / "oracle_f32.npz")["config_json"]))
    del config["rope_parameters"]["rope_theta"]  # transformers put it there when the oracle ran
    ours = transformers_config(FIXTURE_SHAPE)
    assert {key: ours[key] for key in config} == config


def test_a_made_model_of_another_shape_loads_and_runs(reference_logits, tmp_path):
    shape = DeepSeekV4Shape(
        num_hidden_layers=4,
        compress_ratios=(128, 4, 0, 4),
        num_hash_layers=1,
        n_routed_experts=5,
        num_experts_per_tok=2,
        hidden_size=64,
    )
    made = make_deepseek_v4(tmp_path / "m.gguf", shape=shape)
    logits = reference_logits(made, shape, np.arange(140))
    assert logits.shape == (140, shape.vocab_size)
    assert 1 < np.abs(logits).max() < 100
