"""The chat prompt of DeepSeek-V4, written as token ids.

GGUFs of this model carry no usable template, the checkpoint has a Python encoder instead; this is
its text-only part (source: DeepSeek-V4 encoding/encoding_dsv4.py)::

    BOS [system]  {USER text ASSISTANT </think> answer EOS}  USER text ASSISTANT </think>

The last token is ``<think>`` instead when the model shall reason; a text that sets the effort of
reasoning is nothing but the beginning of the system message. Rendering a string and encoding
that was rejected: it is how a user's spelled-out USER turns into a turn of its own. Here what
separates turns is put in as ids, and what people wrote is encoded as text, ``<think>`` and
``</think>`` in it included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.adapters.chat import Message, message_problems, require_marks
from tieredmoe.errors import raise_config_problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tieredmoe.adapters.tokenizer import Tokenizer

_BAR = "\uff5c"  # full-width, as in every token of this model's format
_USER = f"<{_BAR}User{_BAR}>"
_ASSISTANT = f"<{_BAR}Assistant{_BAR}>"
_THINK = "<think>"
_END_THINK = "</think>"
_TOOL_CALL = f"{_BAR}DSML{_BAR}"
_KEPT_AS_TEXT = frozenset({_USER, _ASSISTANT, _THINK, _END_THINK, _TOOL_CALL})


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the ids of a conversation: one BOS, and control tokens only between the turns.

    Args:
        tokenizer: of a DeepSeek-V4 file.
        messages: at most one system message, which comes first; then users' and the assistant's.
            Users' messages in a row become one turn. Reasoning is left out, but for an assistant's
            message at the very end in thinking mode.
        thinking: let the model reason before it answers.
        add_generation_prompt: end with the start of the assistant's turn.

    Raises:
        ConfigError: the conversation or a setting is wrong; all problems are listed.
        TokenizerError: the vocabulary lacks a token of this format; all of them are named.
    """
    raise_config_problems(
        "chat prompt",
        message_problems(messages)
        + _order_problems(messages, add_generation_prompt=add_generation_prompt),
    )
    marks = _Marks.of(tokenizer)
    system = messages[0].content if messages[0].role == "system" else ""
    ids = [marks.bos, *_encode_text(tokenizer, system)]
    turns = _merge_users(m for m in messages if m.role != "system")
    for turn in turns:
        if turn.role == "user":
            ids += [marks.user, *_encode_text(tokenizer, turn.content)]
            continue
        ids.append(marks.assistant)
        if thinking and turn is turns[-1]:
            ids += [marks.think, *_encode_text(tokenizer, turn.reasoning or "")]
        ids += [marks.end_think, *_encode_text(tokenizer, turn.content), marks.eos]
    if add_generation_prompt:
        ids += [marks.assistant, marks.think if thinking else marks.end_think]
    return ids


def decode_answer(tokenizer: Tokenizer, ids: Sequence[int], *, thinking: bool = False) -> Message:
    """Return the generated ``ids`` as the assistant's message, its reasoning apart.

    ``thinking`` is what the prompt was written with. An answer cut short while the model still
    reasoned has empty content.
    """
    if not thinking:
        return Message("assistant", tokenizer.decode(ids))
    end_think = _Marks.of(tokenizer).end_think
    end = ids.index(end_think) if end_think in ids else len(ids)
    return Message("assistant", tokenizer.decode(ids[end + 1 :]), tokenizer.decode(ids[:end]))


@attrs.frozen
class _Marks:
    """The ids that hold a conversation together."""

    bos: int
    eos: int
    user: int
    assistant: int
    think: int
    end_think: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Marks:
        """Look them up; a ``TokenizerError`` names all that the vocabulary lacks."""
        found = {
            "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
            "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        }
        found |= {text: tokenizer.id_of(text) for text in (_USER, _ASSISTANT, _THINK, _END_THINK)}
        return cls(*require_marks(found, model="DeepSeek-V4"))


def _encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, literal=_KEPT_AS_TEXT)


def _merge_users(messages: Iterable[Message]) -> list[Message]:
    """Join users' messages in a row with an empty line (source: merge_tool_messages)."""
    turns: list[Message] = []
    for message in messages:
        if turns and turns[-1].role == message.role == "user":
            turns[-1] = Message("user", f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return turns


def _order_problems(messages: Sequence[Message], *, add_generation_prompt: bool) -> list[str]:
    """Return in what order of roles the format cannot express."""
    problems = []
    previous = None
    for i, message in enumerate(messages):
        role = message.role
        if role == "system" and i > 0:
            problems.append(f"message {i} is a system message, only the first one may be")
        if role == "assistant" and previous != "user":
            problems.append(f"message {i} is the assistant's but answers no user's message")
        previous = role
    if messages and add_generation_prompt and previous != "user":
        problems.append(
            "the last message is not a user's, there is nothing to answer; add one or set "
            "add_generation_prompt to False"
        )
    return problems
