"""The chat prompt of Kimi-K3, written as token ids in the model's own mark-up, XTML.

A conversation is a row of messages, each of them text between tags; a tag is a name between two
control tokens (source: Kimi-K3's encoding_k3.py). This is the part without tools and images::

    OPEN message role="user" SEP text CLOSE message SEP END_OF_MSG
    OPEN message role="assistant" SEP
        [OPEN think SEP reasoning CLOSE think SEP]
        OPEN response SEP answer CLOSE response SEP CLOSE message SEP END_OF_MSG

There is no BOS. Rendering a string and encoding that was rejected: it is how a user's spelled-out
OPEN turns into a tag. Here the four control tokens are put in as ids, and all else is encoded as
text. Attributes are constants of the format, no message's text is ever one, so none needs escaping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.adapters.chat import message_problems, require_marks
from tieredmoe.errors import raise_config_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.chat import Message
    from tieredmoe.adapters.tokenizer import Tokenizer

EFFORTS = ("low", "high", "max")
"""How much to reason. The format's own message names "medium" too; its encoder refuses that."""

_EFFORT_DEFAULT = "max"

# The model was trained with exactly these words.
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool = False,
    effort: str | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the ids of a conversation, control tokens nowhere but around its tags.

    Args:
        tokenizer: of a Kimi-K3 file.
        messages: in any order of roles. In thinking mode each of the assistant's has its reasoning,
            or an empty one; otherwise reasoning is left out.
        thinking: let the model reason before it answers.
        effort: how much it shall reason in thinking mode: low, high or max (the default).
        add_generation_prompt: end with the start of the assistant's answer.

    Raises:
        ConfigError: the conversation or a setting is wrong; all problems are listed.
        TokenizerError: the vocabulary lacks a token of this format; all of them are named.
    """
    raise_config_problems(
        "chat prompt",
        message_problems(messages)
        + _setting_problems(
            messages, effort, thinking=thinking, add_generation_prompt=add_generation_prompt
        ),
    )
    writer = _Writer(tokenizer)
    if thinking:
        writer.open('message role="system" type="thinking-effort"')
        writer.text(_EFFORT.format(effort or _EFFORT_DEFAULT))
        writer.close("message")
        writer.end_message()
    for message in messages:
        writer.open(f'message role="{message.role}"')
        if message.role == "assistant":
            if thinking:
                reasoning = message.reasoning or ""
                writer.channel("think", reasoning if reasoning.strip() else "")
            writer.channel("response", message.content)
        else:
            writer.text(message.content)
        writer.close("message")
        writer.end_message()
    if add_generation_prompt:
        writer.open('message role="assistant"')
        writer.open("think" if thinking else "response")
    return writer.ids


def _setting_problems(
    messages: Sequence[Message], effort: object, *, thinking: bool, add_generation_prompt: bool
) -> list[str]:
    problems = []
    if effort is not None and effort not in EFFORTS:
        problems.append(f"effort is {effort!r}, not one of {', '.join(EFFORTS)}")
    elif effort is not None and not thinking:
        problems.append(f"effort is {effort!r}, and the model is not to think; leave it out")
    if add_generation_prompt and messages and messages[-1].role == "assistant":
        problems.append(
            "the last message is the assistant's, there is nothing to answer; add one or set "
            "add_generation_prompt to False"
        )
    return problems


@attrs.frozen
class _Marks:
    """The ids of the control tokens that make tags and end messages."""

    open: int
    close: int
    sep: int
    end_of_message: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Marks:
        """Look them up; a ``TokenizerError`` names all that the vocabulary lacks."""
        names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        found = {name: tokenizer.id_of(name) for name in names}
        return cls(*require_marks(found, model="Kimi-K3"))


class _Writer:
    """Writes ids: control tokens by themselves, everything else as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._marks = _Marks.of(tokenizer)

    def open(self, tag: str) -> None:
        self._between(self._marks.open, tag)

    def close(self, tag: str) -> None:
        self._between(self._marks.close, tag)

    def channel(self, tag: str, text: str) -> None:
        self.open(tag)
        self.text(text)
        self.close(tag)

    def text(self, text: str) -> None:
        self.ids += self._tokenizer.encode(text)

    def end_message(self) -> None:
        self.ids.append(self._marks.end_of_message)

    def _between(self, mark: int, tag: str) -> None:
        self.ids.append(mark)
        self.text(tag)
        self.ids.append(self._marks.sep)
