# ruff: noqa: RUF001 (the vertical bars in the real tokens are full-width)
"""Small byte-level BPE vocabularies, in the form in which real models' files carry theirs.

Same order as in the real vocabulary. DeepSeek-V4: begin, end and padding first, then the 256 bytes
(in the alphabet of GPT-2, by code point), merged tokens in order of their merges, placeholders, and
the chat markers last. Kimi-K3: the bytes first and all that is special last. Merges are learned
from the few sentences below, so that English text really is merged; a vocabulary larger than they
can fill is filled with placeholders, as the real ones are.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import attrs
import numpy as np

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

TINY_VOCABULARY_MIN = 270
"""The 256 bytes, the special tokens and at least six merges."""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Values of ``tokenizer.ggml.token_type``."""

Family = Literal["deepseek-v4", "kimi-k3"]
"""Whose real vocabulary a tiny one is like."""


class _Special(NamedTuple):
    """What a family adds to bytes and merges; ``{}`` in a placeholder is its number."""

    pre: str
    leading: tuple[tuple[str, int], ...]
    trailing: tuple[tuple[str, int], ...]
    placeholder: tuple[str, int]
    bos: str
    eos: str
    pad: str


_SPECIAL: Mapping[Family, _Special] = MappingProxyType(
    {
        "deepseek-v4": _Special(
            pre="joyai-llm",
            leading=(
                ("<｜begin▁of▁sentence｜>", CONTROL),
                ("<｜end▁of▁sentence｜>", CONTROL),
                ("<｜▁pad▁｜>", CONTROL),
            ),
            trailing=(
                ("<｜User｜>", CONTROL),
                ("<｜Assistant｜>", CONTROL),
                ("<think>", USER_DEFINED),
                ("</think>", USER_DEFINED),
                ("｜DSML｜", USER_DEFINED),
            ),
            placeholder=("<｜place▁holder▁no▁{}｜>", CONTROL),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            pad="<｜▁pad▁｜>",
        ),
        "kimi-k3": _Special(
            pre="kimi-k2",
            leading=(),
            trailing=tuple(
                (text, CONTROL)
                for text in (
                    "[BOS]",
                    "[EOS]",
                    "<|end_of_msg|>",
                    "<|open|>",
                    "<|close|>",
                    "<|sep|>",
                    "[UNK]",
                    "[PAD]",
                )
            ),
            placeholder=("[PAD{}]", UNUSED),
            bos="[BOS]",
            eos="<|end_of_msg|>",
            pad="[PAD]",
        ),
    }
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
    pre: str = "joyai-llm"
    """The pre-tokeniser's name."""

    def id_of(self, token: str) -> int:
        """The id of a token given as it stands in the vocabulary; ``ValueError`` if absent."""
        return self.tokens.index(token)


def tiny_vocabulary(n_tokens: int, family: Family = "deepseek-v4") -> TinyVocabulary:
    """A vocabulary of exactly ``n_tokens`` entries, the same on every call.

    Raises ``ConfigError`` below ``TINY_VOCABULARY_MIN``.
    """
    if n_tokens < TINY_VOCABULARY_MIN:
        raise ConfigError(
            f"a tiny vocabulary needs {TINY_VOCABULARY_MIN} tokens or more, not {n_tokens}; "
            "a model without a tokenizer can be smaller"
        )
    special = _SPECIAL[family]
    alphabet = sorted(byte_alphabet().values())
    n_fill = n_tokens - len(special.leading) - len(alphabet) - len(special.trailing)
    merges = _learn_merges(n_fill)
    placeholder, placeholder_type = special.placeholder
    entries = [
        *special.leading,
        *((character, NORMAL) for character in alphabet),
        *(("".join(pair), NORMAL) for pair in merges),
        *((placeholder.format(i), placeholder_type) for i in range(n_fill - len(merges))),
        *special.trailing,
    ]
    tokens, types = zip(*entries, strict=True)
    return TinyVocabulary(
        tokens,
        types,
        tuple(map(" ".join, merges)),
        bos_id=tokens.index(special.bos),
        eos_id=tokens.index(special.eos),
        pad_id=tokens.index(special.pad),
        pre=special.pre,
    )


def tokenizer_metadata(vocabulary: TinyVocabulary | None) -> dict[str, object]:
    """What a GGUF says of the vocabulary; None is the tokenizer model "none"."""
    if vocabulary is None:
        return {"tokenizer.ggml.model": "none"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": np.array(vocabulary.token_types, dtype=np.int32),
        "tokenizer.ggml.merges": list(vocabulary.merges),
        "tokenizer.ggml.bos_token_id": vocabulary.bos_id,
        "tokenizer.ggml.eos_token_id": vocabulary.eos_id,
        "tokenizer.ggml.padding_token_id": vocabulary.pad_id,
        "tokenizer.ggml.add_bos_token": False,  # the chat prompt brings its own, if any
    }


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
