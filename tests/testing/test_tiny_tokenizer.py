import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tieredmoe.errors import ConfigError
from tieredmoe.testing.tiny_tokenizer import (
    CONTROL,
    NORMAL,
    TINY_VOCABULARY_MIN,
    UNUSED,
    USER_DEFINED,
    byte_alphabet,
    tiny_vocabulary,
)

SIZES = [TINY_VOCABULARY_MIN, 320, 500, 4096]


def byte_level(vocabulary):
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("family", ["deepseek-v4", "kimi-k3"])
@pytest.mark.parametrize("n_tokens", SIZES)
def test_a_vocabulary_has_the_size_that_was_asked_for_and_no_token_twice(n_tokens, family):
    vocabulary = tiny_vocabulary(n_tokens, family)
    assert len(vocabulary.tokens) == len(vocabulary.token_types) == n_tokens
    assert len(set(vocabulary.tokens)) == n_tokens


@pytest.mark.parametrize("n_tokens", [0, TINY_VOCABULARY_MIN - 1])
def test_too_small_a_vocabulary_is_refused(n_tokens):
    with pytest.raises(ConfigError, match="270 tokens or more"):
        tiny_vocabulary(n_tokens)


@pytest.mark.parametrize("n_tokens", SIZES)
def test_the_special_tokens_are_the_real_models(n_tokens):
    vocabulary = tiny_vocabulary(n_tokens)
    assert vocabulary.tokens[:3] == (
        "<｜begin▁of▁sentence｜>",  # noqa: RUF001 (the real token's bars are full-width)
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 (as above)
        "<｜▁pad▁｜>",  # noqa: RUF001 (as above)
    )
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id) == (0, 1, 2)
    types = dict(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    assert types["<｜User｜>"] == types["<｜Assistant｜>"] == CONTROL  # noqa: RUF001 (as above)
    assert types["<think>"] == types["</think>"] == USER_DEFINED
    assert vocabulary.token_types[:3] == (CONTROL,) * 3
    assert types["a"] == types["Ġ"] == NORMAL


@pytest.mark.parametrize("n_tokens", SIZES)
def test_what_is_special_to_kimi_stands_behind_its_base_tokens(n_tokens):
    vocabulary = tiny_vocabulary(n_tokens, "kimi-k3")
    special = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    assert vocabulary.tokens[-8:] == (*special, "[UNK]", "[PAD]")
    assert set(vocabulary.token_types[-8:]) == {CONTROL}
    n_base = 256 + len(vocabulary.merges)
    assert set(vocabulary.token_types[:n_base]) == {NORMAL}
    assert set(vocabulary.token_types[n_base:-8]) <= {UNUSED}
    named = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id)
    assert [vocabulary.tokens[i] for i in named] == ["[BOS]", "<|end_of_msg|>", "[PAD]"]
    assert vocabulary.pre == "kimi-k2"


def test_the_byte_alphabet_is_that_of_byte_level_tokenizers():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[ord("A")]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize("n_tokens", SIZES)
def test_every_merge_makes_a_token_from_earlier_ones(n_tokens):
    vocabulary = tiny_vocabulary(n_tokens)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    for rank, merge in enumerate(vocabulary.merges):
        left, right = merge.split(" ")
        assert max(ids[left], ids[right]) < ids[left + right] == 259 + rank


def test_any_text_survives_encoding_and_decoding():
    tokenizer = byte_level(tiny_vocabulary(500))
    for text in (
        "The experts wait.",
        "  naïve\n\t— 日本語 🦙 \x00",
        "x" * 50,
        "router token memory",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_merged_token_can_be_reached():
    vocabulary = tiny_vocabulary(500)
    tokenizer = byte_level(vocabulary)
    for merge in vocabulary.merges:
        token = merge.replace(" ", "")
        text = tokenizer.decoder.decode([token])
        assert tokenizer.encode(text).tokens == [token]


def test_english_is_really_merged():
    tokenizer = byte_level(tiny_vocabulary(500))
    text = "The router chooses the experts that the token needs."
    assert len(tokenizer.encode(text).ids) < len(text) / 2


def test_the_id_of_a_token_is_its_place():
    vocabulary = tiny_vocabulary(320)
    assert vocabulary.tokens[vocabulary.id_of("<think>")] == "<think>"
    with pytest.raises(ValueError, match="not in tuple"):
        vocabulary.id_of("no such token")
