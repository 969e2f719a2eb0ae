# ruff: noqa: RUF001 (the vertical bars in the real tokens are full-width)
"""A small byte-level BPE vocabulary, in the form in which DeepSeek-V4 files carry the real one.

Same order as the real vocabulary: begin, end and padding first, then the 256 bytes (in the alphabet
of GPT-2, by code point), then merged tokens in order of their merges, placeholders, and the chat
markers last. Merges are learned from the few sentences below, so that English text really is
merged; a vocabulary larger than they can fill is filled with placeholders, as the real one is.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import attrs

from tieredmoe.errors import ConfigError

TINY_VOCABULARY_MIN = 270
"""The 256 bytes, the special tokens and at least six merges."""

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Values of ``tokenizer.ggml.token_type``."""

_LEADING = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_TRAILING = (
    ("<｜User｜>", CONTROL),
    ("<｜Assistant｜>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
    ("｜DSML｜", USER_DEFINED),
)

_TEXT = """
The router of a mixture of experts chooses the few experts that a token needs, and only those are
computed. The other experts wait in slower memory until they are wanted. Once upon a time there was
a small model that lived on a large disk, and every token it spoke had to travel from the disk to
the memory and from the memory to the device. When it asked for the same expert again, the answer
was already there; when it asked for another one, somebody had to go and read it. Reading ahead is
better than waiting, but reading what nobody wants is worse than either. What the weather will be
tomorrow is not known, but it is often like the weather today. She said that the quick brown fox
would jump over the lazy dog, and then it did. Numbers such as 10, 12, 100 and 2048 are text, too.
You can ask a question, you can give an answer, and you can be silent: all of them are something.
"""


@attrs.frozen
class TinyVocabulary:
    """Tokens by id with their types, and merges in order of rank, each ``"left right"``."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int = 0
    eos_id: int = 1
    pad_id: int = 2

    def id_of(self, token: str) -> int:
        """The id of a token given as it stands in the vocabulary; ``ValueError`` if absent."""
        return self.tokens.index(token)


def tiny_vocabulary(n_tokens: int) -> TinyVocabulary:
    """A vocabulary of exactly ``n_tokens`` entries, the same on every call.

    Raises ``ConfigError`` below ``TINY_VOCABULARY_MIN``.
    """
    if n_tokens < TINY_VOCABULARY_MIN:
        raise ConfigError(
            f"a tiny vocabulary needs {TINY_VOCABULARY_MIN} tokens or more, not {n_tokens}; "
            "a model without a tokenizer can be smaller"
        )
    alphabet = sorted(byte_alphabet().values())
    n_fill = n_tokens - len(_LEADING) - len(alphabet) - len(_TRAILING)
    merges = _learn_merges(n_fill)
    merged = ["".join(pair) for pair in merges]
    placeholders = [f"<｜place▁holder▁no▁{i}｜>" for i in range(n_fill - len(merged))]
    tokens = [*_LEADING, *alphabet, *merged, *placeholders, *(token for token, _ in _TRAILING)]
    types = [
        *[CONTROL] * len(_LEADING),
        *[NORMAL] * (len(alphabet) + len(merged)),
        *[CONTROL] * len(placeholders),
        *(token_type for _, token_type in _TRAILING),
    ]
    return TinyVocabulary(tuple(tokens), tuple(types), tuple(map(" ".join, merges)))


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: bytes_to_unicode of OpenAI's GPT-2 encoder: printable bytes stand for themselves, the
    others take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def _learn_merges(n_merges: int) -> list[tuple[str, str]]:
    """Up to ``n_merges`` merges by frequency in the sentences above (ties: first by code point)."""
    to_char = byte_alphabet()
    words = Counter(
        tuple(to_char[byte] for byte in word.encode())
        for word in re.findall(r" ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+|\s", _TEXT)
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < n_merges and any(len(word) > 1 for word in words):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n_times in words.items():
            for pair in pairwise(word):
                pairs[pair] += n_times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): n_times for word, n_times in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            merged.append("".join(pair))
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)
