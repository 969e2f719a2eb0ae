"""Reads what Kimi-K3 says: its answer comes in the mark-up of the prompt, which no reader wants.

The tokenizer's own stream decoder leaves control tokens out, but the names between them would stay:
an answer would end in "responsemessage".
"""

from __future__ import annotations

import codecs
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tieredmoe.adapters.chat import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieredmoe.adapters.tokenizer import Tokenizer

END_OF_REASONING = "</think>"
"""How the end of the reasoning is shown: as models spell it whose mark-up is not hidden."""

_BEGIN_THINK = b"<|open|>think<|sep|>"
_SHOWN: Mapping[bytes, bytes] = MappingProxyType(
    {
        _BEGIN_THINK: b"",
        b"<|close|>think<|sep|>": END_OF_REASONING.encode(),
        b"<|open|>response<|sep|>": b"",
        b"<|close|>response<|sep|>": b"",
        b"<|close|>message<|sep|>": b"",
    }
)
"""What becomes of the tags of an answer. Any other, a tool call's, is shown as it is spelled."""


class AnswerDecoder:
    """Gives whole characters of the answer only, without its tags; no text of it is lost.

    Reasoning comes first and ends with ``END_OF_REASONING``. Used for one answer; the time per
    token does not grow with it. ``thinking`` is what the prompt was written with. A vocabulary
    without the tokens of the format has no tags, its text is shown as it is.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self.reasoning = thinking
        """Whether what comes next is reasoning."""
        self._tokenizer = tokenizer
        self._tag_starts = (tokenizer.id_of("<|open|>"), tokenizer.id_of("<|close|>"))
        self._sep = tokenizer.id_of("<|sep|>")
        self._tag = b""  # what there is of a tag that may have to be hidden
        self._in_shown_tag = False
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the characters that ``token_id`` completes, often none.

        Raises:
            TokenizerError: an id outside the vocabulary; what came before is kept.
        """
        return str(self._utf8.decode(self._next_bytes(token_id)))

    def finish(self) -> str:
        """Return what is left, U+FFFD for a character cut short; a tag cut short is left out."""
        return str(self._utf8.decode(b"", final=True))

    def _next_bytes(self, token_id: int) -> bytes:
        spelled = self._tokenizer.token_bytes(token_id, skip_special=False)
        if token_id in self._tag_starts:
            cut_short, self._tag = self._tag, spelled
            self._in_shown_tag = False
            return cut_short
        if self._tag:
            self._tag += spelled
            if token_id == self._sep and self._tag in _SHOWN:
                return self._end_of_tag()
            if any(tag.startswith(self._tag) for tag in _SHOWN):
                return b""
            unknown, self._tag = self._tag, b""
            self._in_shown_tag = token_id != self._sep
            return unknown
        if self._in_shown_tag:
            self._in_shown_tag = token_id != self._sep
            return spelled
        return self._tokenizer.token_bytes(token_id)

    def _end_of_tag(self) -> bytes:
        tag, self._tag = self._tag, b""
        self.reasoning = tag == _BEGIN_THINK
        return _SHOWN[tag]


def decode_answer(tokenizer: Tokenizer, ids: Iterable[int], *, thinking: bool = False) -> Message:
    """Return the generated ``ids`` as the assistant's message, its reasoning apart.

    ``thinking`` is what the prompt was written with. A stop token ends the message, as it ended the
    generation. An answer cut short while the model still reasoned has empty content.
    """
    decoder = AnswerDecoder(tokenizer, thinking=thinking)
    reasoning = content = ""
    for token_id in takewhile(lambda token_id: token_id not in tokenizer.stop_ids, ids):
        if decoder.reasoning:
            reasoning += decoder.push(token_id)
        else:
            content += decoder.push(token_id)
    rest = decoder.finish()
    if decoder.reasoning:
        reasoning += rest
    else:
        content += rest
        reasoning = reasoning.removesuffix(END_OF_REASONING)
    return Message("assistant", content, reasoning if thinking or reasoning else None)
