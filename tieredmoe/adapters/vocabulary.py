"""The vocabulary in a GGUF's metadata, read and checked before anything is built from it.

Why apart from the tokenizer: everything that can be wrong with a file is found here, in one pass,
and told in one error that lists it all; the tokenizer then works on data it can trust.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any

import attrs
import numpy as np

from tieredmoe.adapters.pretokenisers import PRE_TOKENISERS
from tieredmoe.errors import TokenizerError
from tieredmoe.gguf.metadata import integral

PREFIX = "tokenizer.ggml."
NO_TOKENIZER = ("none", "no_vocab")
"""Values of ``tokenizer.ggml.model`` that say that the file has no tokenizer."""


_END_TOKENS = ("<|end_of_msg|>", "[EOS]")
"""Control tokens that end a generation whether or not the file names them as end of sequence: of
Kimi's two, early files name the one that ends no message."""


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``; source: ``gguf.TokenType``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@attrs.frozen
class Vocabulary:
    """Tokens by id with their types, merges by rank and the ids with a meaning; all consistent.

    A user-defined token that looks like a separator of turns, ``<|…|>`` with ASCII or full-width
    bars, counts as a control token, and so does one that begins or ends a sequence or a turn.
    Converters decide so too (source: llama.cpp's ``does_token_look_special``), because checkpoints
    do not mark DeepSeek's user and assistant tokens as special; a file of a converter that did not
    is thus as safe as the others.
    """

    pre: str
    tokens: tuple[str, ...] = attrs.field(repr=False)
    types: tuple[int, ...] = attrs.field(repr=False)
    merges: list[tuple[str, str]] = attrs.field(repr=False)
    ids: dict[str, int] = attrs.field(repr=False)
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    eot_id: int | None
    stop_ids: frozenset[int]
    add_bos: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary | None:
        """Return the vocabulary, or None where the file says that it has no tokenizer.

        Raises:
            TokenizerError: listing every missing key, every unsupported name and every
                inconsistency.
        """

        def get(name: str) -> Any:
            return metadata.get(PREFIX + name)

        if isinstance(get("model"), str) and get("model") in NO_TOKENIZER:
            return None
        problems = _missing_or_unsupported(get)
        tokens = _read_tokens(_read_array(get, "tokens", problems), problems)
        bos, eos, pad, eot = (
            _read_id(get, name, len(tokens), problems) for name in ("bos", "eos", "padding", "eot")
        )
        types = _read_types(_read_array(get, "token_type", problems), len(tokens), problems)
        types = _promote_separators(types, tokens, (bos, eos, eot))
        merges = _read_merges(_read_array(get, "merges", problems), problems)
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            twice = (f"{t!r} (id {i})" for i, t in enumerate(tokens) if ids[t] != i)
            problems.append(f"{PREFIX}tokens has duplicates: {_some(twice)}")
        if tokens and types:
            problems += _check_text_tokens(tokens, types, merges)
        if problems:
            where = getattr(metadata, "path", None) or "tokenizer metadata"
            raise TokenizerError(f"{where}: {'; '.join(problems)}")
        add_bos = bool(integral(_plain(get("add_bos_token"))))
        ends = {eos, eot}
        ends |= {ids[t] for t in _END_TOKENS if t in ids and types[ids[t]] == TokenType.CONTROL}
        stops = frozenset(i for i in ends if i is not None)
        return cls(get("pre"), tokens, types, merges, ids, bos, eos, pad, eot, stops, add_bos)


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable Latin-1 stands for itself, the others for U+0100 onwards in order of their value
    (source: GPT-2's encoder.py, ``bytes_to_unicode``).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


def _missing_or_unsupported(get: Callable[[str], Any]) -> list[str]:
    """Return the keys that must be there and are not, and the names that nobody here knows."""
    required = ("model", "pre", "tokens", "token_type", "merges")
    problems = [f"{PREFIX}{name} is missing" for name in required if get(name) is None]
    for name, supported in (("model", ("gpt2", *NO_TOKENIZER)), ("pre", tuple(PRE_TOKENISERS))):
        value = get(name)
        if value is not None and not (isinstance(value, str) and value in supported):
            problems.append(
                f"{PREFIX}{name} {value!r} is not supported (supported: {', '.join(supported)})"
            )
    return problems


def _read_array(get: Callable[[str], Any], name: str, problems: list[str]) -> list[Any] | None:
    """Return the array under ``name``, None if there is none."""
    value = _plain(get(name))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    if value is not None:
        problems.append(f"{PREFIX}{name} is not an array")
    return None


def _read_tokens(tokens: list[Any] | None, problems: list[str]) -> tuple[str, ...]:
    """Return the tokens by id; the empty tuple if they cannot be used."""
    if tokens is None:
        return ()
    if not tokens:
        problems.append(f"{PREFIX}tokens is empty")
    surrogate = re.compile("[\ud800-\udfff]").search  # no UTF-8 can hold one
    if found := _some(
        f"id {i}: {t!r}" for i, t in enumerate(tokens) if not isinstance(t, str) or surrogate(t)
    ):
        problems.append(f"{PREFIX}tokens has entries that are not valid Unicode text: {found}")
        return ()
    return tuple(tokens)


def _read_types(types: list[Any] | None, n_tokens: int, problems: list[str]) -> tuple[int, ...]:
    """Return the types by id; the empty tuple if they cannot be used."""
    if types is None:
        return ()
    if n_tokens and len(types) != n_tokens:
        problems.append(f"{PREFIX}token_type has {len(types)} entries for {n_tokens} tokens")
        return ()
    known = frozenset(TokenType)
    if found := _some(f"id {i}: {t!r}" for i, t in enumerate(types) if t not in known):
        problems.append(f"{PREFIX}token_type has unknown types: {found}")
        return ()
    return tuple(types)


def _promote_separators(
    types: Sequence[int], tokens: Sequence[str], boundary_ids: Collection[int | None]
) -> tuple[int, ...]:
    """Return the types with control for those user-defined tokens that separate turns."""
    separates = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL).fullmatch
    return tuple(
        TokenType.CONTROL
        if kind == TokenType.USER_DEFINED and (i in boundary_ids or separates(token))
        else kind
        for i, (kind, token) in enumerate(zip(types, tokens, strict=False))
    )


def _read_merges(raw: list[Any] | None, problems: list[str]) -> list[tuple[str, str]]:
    """Return merges as pairs; a file has them as "left right", with that one space only."""
    merges = []
    wrong = []
    for merge in raw or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, (list, tuple)) and len(parts) == 2:
            merges.append((parts[0], parts[1]))
        else:
            wrong.append(repr(merge))
    if wrong:
        problems.append(f"{PREFIX}merges has entries that are not two tokens: {_some(wrong)}")
    return merges


def _check_text_tokens(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]
) -> list[str]:
    """Return what stops text from being encoded without loss, or lets it reach a control token."""
    problems = []
    hidden = (TokenType.UNKNOWN, TokenType.CONTROL)
    text = {t for t, kind in zip(tokens, types, strict=True) if kind not in hidden}
    unknown = {
        part: None
        for left, right in merges
        for part in (left, right, left + right)
        if part not in text
    }
    if unknown:
        problems.append(
            f"{PREFIX}merges uses what is no token of text: {_some(map(repr, unknown))}"
        )
    # These bytes never occur in UTF-8; any other one without a token would be lost silently.
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    table = byte_characters().items()
    if found := _some(f"0x{b:02X}" for c, b in table if b not in never and c not in text):
        problems.append(f"{PREFIX}tokens has no token for bytes {found}, text would be lost")
    return problems


def _read_id(
    get: Callable[[str], Any], name: str, n_tokens: int, problems: list[str]
) -> int | None:
    """Return the id under ``<name>_token_id``, None if the file has none."""
    key = f"{name}_token_id"
    value = _plain(get(key))
    if value is None:
        return None
    token_id = integral(value)
    if token_id is None:
        problems.append(f"{PREFIX}{key} is {value!r}, not one integer")
    elif n_tokens and not 0 <= token_id < n_tokens:
        problems.append(f"{PREFIX}{key} is {token_id}, outside the vocabulary of {n_tokens}")
    return token_id


def _plain(value: Any) -> Any:
    """Return plain Python for what numpy made."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _some(items: Iterable[str], n_shown: int = 5) -> str:
    """Join the first few of ``items``; the empty string if there are none."""
    iterator = iter(items)
    shown = list(islice(iterator, n_shown))
    rest = sum(1 for _ in iterator)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
