"""What may be given as a prompt, and how it is told apart.

Everything is checked before anything runs. Iterators were rejected as prompts: one that never ends
would hang the call, and one that was used up would look like an empty prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from tieredmoe.adapters.chat import Message
from tieredmoe.adapters.settings import brief, integer_from, plain_from
from tieredmoe.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from typing import NoReturn


class Array(Protocol):
    """A one-dimensional tensor or array of integers, of any library."""

    def tolist(self) -> Any:
        """Its elements."""


Prompt = (
    str
    | Message
    | Mapping[str, Any]
    | Sequence[Message]
    | Sequence[Mapping[str, Any]]
    | Sequence[SupportsIndex]
    | Array
)
"""A user's text, a conversation (``Message`` or {"role", "content"} mappings), or token ids."""

_REQUIRED = ("role", "content")
_KEYS = (*_REQUIRED, "reasoning")
_ACCEPTED = (
    "accepted: text, a Message, a sequence of Messages (or of mappings with role and content), "
    "or token ids (a sequence or 1-D array of integers)"
)


def split_prompt(prompt: object) -> tuple[list[Message], list[int]]:
    """The messages and the token ids of ``prompt``: one of the two lists is empty.

    Raises ``ConfigError`` that names the first thing that is neither, and what is accepted.
    """
    if isinstance(prompt, str):
        return [Message("user", prompt)], []
    if isinstance(prompt, Message | Mapping):
        return [_message(prompt)], []
    items = None if isinstance(prompt, bytes | bytearray | memoryview) else plain_from(prompt)
    if not isinstance(items, Sequence):
        _refuse(f"got {type(prompt).__name__}")
    messages: list[Message] = []
    ids: list[int] = []
    for index, item in enumerate(items):
        if isinstance(item, Message | Mapping):
            messages.append(_message(item))
        elif (token_id := integer_from(item)) is not None:
            ids.append(token_id)
        else:
            _refuse(f"item {index} is {_named(item)}")
        if messages and ids:
            others = "token ids" if isinstance(item, Message | Mapping) else "messages"
            _refuse(f"item {index} is {_named(item)} among {others}, not both")
    return messages, ids


def require_in_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``TokenizerError`` that names the first of ``ids`` that the model does not have."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the model's vocabulary of {vocab_size}"
            )


def _message(item: Message | Mapping[Any, Any]) -> Message:
    if isinstance(item, Mapping):
        problems = [f"a message has no {brief(key)}" for key in item if key not in _KEYS]
        problems += [f"there is no {key!r}" for key in _REQUIRED if key not in item]
        if problems:
            _refuse(
                f"got {type(item).__name__} with keys {brief(list(item))}: {', '.join(problems)}"
            )
        item = Message(**item)
    for key in _KEYS:
        value = getattr(item, key)
        if not isinstance(value, str) and (key in _REQUIRED or value is not None):
            _refuse(f"a message's {key} is {_named(value)}, not text")
    return item


def _named(value: object) -> str:
    return f"{type(value).__name__} {brief(value)}"


def _refuse(fact: str) -> NoReturn:
    raise ConfigError(f"prompt: {fact}; {_ACCEPTED}")
