import numpy as np
import pytest
from tokenizer_data import CONTROL, EOS, NORMAL, USER, USER_DEFINED, small_metadata

from tieredmoe.adapters.tokenizer import Tokenizer, require_tokenizer
from tieredmoe.errors import TokenizerError
from tieredmoe.testing.tiny_tokenizer import tiny_vocabulary, tokenizer_metadata


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_metadata(small_metadata())


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_a_file_without_tokenizer_gives_none_and_text_is_refused(model):
    tokenizer = Tokenizer.from_metadata({"tokenizer.ggml.model": model})

    assert tokenizer is None
    with pytest.raises(TokenizerError, match="give token ids"):
        require_tokenizer(tokenizer)


def test_a_tokenizer_that_is_there_is_handed_through(small):
    assert require_tokenizer(small) is small


def test_one_error_names_all_missing_keys():
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_metadata({"tokenizer.ggml.bos_token_id": 0})

    for name in ("model", "pre", "tokens", "token_type", "merges"):
        assert f"tokenizer.ggml.{name} is missing" in str(caught.value)


def test_an_unknown_pre_tokeniser_is_refused_by_name_with_those_supported():
    with pytest.raises(TokenizerError, match=r"pre 'llama-bpe' .*deepseek-v3, joyai-llm"):
        Tokenizer.from_metadata(small_metadata(pre="llama-bpe"))


def test_another_kind_of_tokenizer_is_refused_by_name():
    with pytest.raises(TokenizerError, match=r"model 'llama' is not supported .*gpt2"):
        Tokenizer.from_metadata(small_metadata(model="llama"))


def _with(metadata_key, position, value):
    entries = list(small_metadata()[f"tokenizer.ggml.{metadata_key}"])
    entries[position] = value
    return {metadata_key: entries}


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"eos_token_id": 999}, "eos_token_id is 999, outside the vocabulary of 271"),
        ({"bos_token_id": -1}, "bos_token_id is -1, outside the vocabulary"),
        ({"eot_token_id": [1, 2]}, r"eot_token_id is \[1, 2\], not one integer"),
        ({"token_type": [1, 1, 1]}, "token_type has 3 entries for 271 tokens"),
        (_with("token_type", 7, 9), "token_type has unknown types: id 7: 9"),
        (_with("tokens", 5, "!"), r"tokens has duplicates: '!' \(id 0\)"),
        (_with("tokens", 5, "\ud800"), "tokens has entries that are not valid Unicode text: id 5"),
        (_with("tokens", 5, 3), "tokens has entries that are not valid Unicode text: id 5: 3"),
        (_with("tokens", 65, "zz"), "no token for bytes 0x62, text would be lost"),
        (_with("merges", 0, "h e l"), "merges has entries that are not two tokens: 'h e l'"),
        (_with("merges", 0, 7), "merges has entries that are not two tokens: 7"),
        (_with("merges", 0, "h x"), "merges uses what is no token of text: 'hx'"),
        (_with("merges", 0, "<th ink>"), "merges uses what is no token of text: '<th', 'ink>'"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens is not an array"),
    ],
)
def test_inconsistent_metadata_is_refused_with_the_fact(changes, fact):
    with pytest.raises(TokenizerError, match=fact):
        Tokenizer.from_metadata(small_metadata(**changes))


def test_all_inconsistencies_are_told_at_once():
    changes = {"eos_token_id": 999, "pre": "x", **_with("merges", 0, "h x")}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_metadata(small_metadata(**changes))

    assert all(part in str(caught.value) for part in ("eos_token_id", "pre 'x'", "'hx'"))


def test_long_lists_of_faults_are_cut_short():
    with pytest.raises(TokenizerError, match="and 266 more"):
        Tokenizer.from_metadata(small_metadata(token_type=[0] * 271))


def test_a_merge_that_would_make_a_control_token_is_refused():
    tokens = small_metadata()["tokenizer.ggml.tokens"]
    types = [CONTROL if t == "hello" else NORMAL for t in tokens]

    with pytest.raises(TokenizerError, match="no token of text: 'hello'"):
        Tokenizer.from_metadata(small_metadata(token_type=types))


def _pairs(merges):
    return [tuple(merge.split(" ")) for merge in merges]


@pytest.mark.parametrize(
    ("key", "convert"),
    [
        ("token_type", lambda v: np.array(v, dtype=np.int32)),
        ("token_type", tuple),
        ("tokens", tuple),
        ("tokens", lambda v: np.array(v, dtype=object)),
        ("merges", _pairs),
        ("bos_token_id", np.uint32),
        ("bos_token_id", lambda v: [v]),
        ("bos_token_id", lambda v: np.array([v])),
        ("add_bos_token", np.bool_),
    ],
)
def test_metadata_may_come_in_any_shape_that_readers_give(small, key, convert):
    metadata = small_metadata()
    metadata[f"tokenizer.ggml.{key}"] = convert(metadata[f"tokenizer.ggml.{key}"])

    tokenizer = Tokenizer.from_metadata(metadata)

    assert tokenizer.encode("hello world <think>") == small.encode("hello world <think>")
    assert (tokenizer.bos_id, tokenizer.add_bos) == (small.bos_id, small.add_bos)


def test_ids_that_the_file_does_not_name_are_none():
    tokenizer = Tokenizer.from_metadata(
        small_metadata(bos_token_id=None, eos_token_id=None, padding_token_id=None)
    )

    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.eot_id) == (None,) * 4
    assert tokenizer.stop_ids == frozenset()


def test_end_of_sequence_and_end_of_turn_both_stop_a_generation(small):
    tokenizer = Tokenizer.from_metadata(small_metadata(eot_token_id=small.id_of(USER)))

    assert tokenizer.stop_ids == {small.id_of(EOS), small.id_of(USER)}


@pytest.mark.parametrize("named", ["[EOS]", "<|end_of_msg|>"])
def test_both_ends_of_kimi_stop_a_generation_whichever_the_file_names(named):
    vocabulary = tiny_vocabulary(400, "kimi-k3")
    ends = {vocabulary.id_of("[EOS]"), vocabulary.id_of("<|end_of_msg|>")}
    key = "tokenizer.ggml.eos_token_id"
    metadata = tokenizer_metadata(vocabulary) | {key: vocabulary.id_of(named)}
    assert Tokenizer.from_metadata(metadata).stop_ids == ends


def test_a_token_of_text_that_is_spelled_like_an_end_stops_nothing():
    tokens = [*small_metadata()["tokenizer.ggml.tokens"], "[EOS]"]
    types = [*small_metadata()["tokenizer.ggml.token_type"], NORMAL]
    tokenizer = Tokenizer.from_metadata(small_metadata(tokens=tokens, token_type=types))
    assert tokenizer.stop_ids == {tokenizer.id_of(EOS)}


def test_add_bos_is_what_the_file_says():
    assert Tokenizer.from_metadata(small_metadata(add_bos_token=True)).add_bos is True
    assert Tokenizer.from_metadata(small_metadata(add_bos_token=None)).add_bos is False


@pytest.mark.parametrize("token", [USER, "<|turn|>"])
def test_a_separator_of_turns_is_control_even_if_the_file_calls_it_user_defined(token):
    tokens = [*small_metadata()["tokenizer.ggml.tokens"]]
    tokens[tokens.index(USER)] = token
    types = [USER_DEFINED if t == token else NORMAL for t in tokens]
    tokenizer = Tokenizer.from_metadata(small_metadata(tokens=tokens, token_type=types))

    assert tokenizer.is_special(tokenizer.id_of(token))
    assert tokenizer.id_of(token) not in tokenizer.encode(f"a{token}b")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id"])
def test_a_token_that_bounds_a_turn_is_control_even_if_the_file_calls_it_user_defined(key):
    tokens = [t if t != EOS else "</s>" for t in small_metadata()["tokenizer.ggml.tokens"]]
    types = [USER_DEFINED if t == "</s>" else NORMAL for t in tokens]
    named = {"tokens": tokens, "token_type": types, key: tokens.index("</s>")}
    tokenizer = Tokenizer.from_metadata(small_metadata(**named))

    assert tokenizer.id_of("</s>") not in tokenizer.encode("a</s>b")
