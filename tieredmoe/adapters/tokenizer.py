"""Text to token ids and back, from nothing but a GGUF's metadata.

The merging of byte pairs is done by the ``tokenizers`` package; this module decides what is text.
``transformers`` was rejected as too heavy for that, and adding the special tokens to the package's
own tokenizer too: there it is a switch on a shared object whether text may turn into a control
token, here it is an argument of the call, and the default is no.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as BPETokenizer
from tokenizers.models import BPE

from tieredmoe.adapters.pretokenisers import build_pre_tokeniser
from tieredmoe.adapters.vocabulary import TokenType, Vocabulary, byte_characters
from tieredmoe.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_HIDDEN = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})
_VERBATIM = _HIDDEN | {TokenType.USER_DEFINED}
_BYTE_OF = byte_characters()


class Tokenizer:
    """Gives exactly the ids of the model's own tokenizer, but no control token that text spells.

    Tokens are of three kinds. *Control* tokens (``Vocabulary`` says which) separate turns:
    ``encode`` treats their spelling as plain text unless told otherwise. *User-defined* tokens
    (DeepSeek has ``<think>`` and a few of mark-up) are whole wherever the text has them, as in the
    model's own tokenizer and in llama.cpp. All others come out of byte-pair merges. Instances are
    immutable and may be shared by threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.pad_id = vocabulary.pad_id
        self.eot_id = vocabulary.eot_id
        self.stop_ids = vocabulary.stop_ids
        """The ids that end a generation: end of sequence, and of a turn where there is such one."""
        self.add_bos = vocabulary.add_bos
        """What the file says of BOS; ``encode`` adds none, whoever writes the prompt does."""
        self._pre = vocabulary.pre
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._ids = vocabulary.ids
        self._bpe = BPETokenizer(BPE(vocab=self._ids, merges=vocabulary.merges))
        self._bpe.pre_tokenizer = build_pre_tokeniser(vocabulary.pre)
        self._user_defined = self._pattern_of({TokenType.USER_DEFINED})
        self._user_defined_and_control = self._pattern_of(_VERBATIM)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer | None:
        """Build the tokenizer of a GGUF; None where the file says that it has none.

        A caller who was given text then calls ``require_tokenizer``.

        Raises:
            TokenizerError: naming all that is missing, unsupported or inconsistent.
        """
        vocabulary = Vocabulary.from_metadata(metadata)
        return None if vocabulary is None else cls(vocabulary)

    def __repr__(self) -> str:
        n_control = sum(t == TokenType.CONTROL for t in self._types)
        return f"<Tokenizer {self._pre}: {self.n_vocab} tokens, {n_control} of them control>"

    @property
    def n_vocab(self) -> int:
        """Tokens in all; every id is below."""
        return len(self._tokens)

    def encode(
        self, text: str, *, allow_special: bool = False, literal: Collection[str] = ()
    ) -> list[int]:
        """Return the ids of ``text``: no control token among them, none added, nothing lost.

        Args:
            text: any Unicode text.
            allow_special: let spelled-out control tokens become control tokens, as the model's own
                tokenizer does. Never for text that a user typed.
            literal: user-defined tokens that shall stay text as well.

        Raises:
            TokenizerError: the text has a lone surrogate, which no UTF-8 can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has a lone surrogate at character {error.start}, it was not valid "
                "UTF-8; decode its bytes with errors='replace' to go on without it"
            ) from error
        pattern = self._user_defined_and_control if allow_special else self._user_defined
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(text):
            if match[0] in literal:
                continue
            ids += self._merge(text[start : match.start()])
            ids.append(self._ids[match[0]])
            start = match.end()
        return ids + self._merge(text[start:])

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: any ids of the vocabulary.
            skip_special: leave control tokens out, otherwise they are spelled out.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        raw = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        return raw.decode("utf-8", errors="replace")

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        """Return a decoder of one token at a time, for one text."""
        return StreamDecoder(self, skip_special=skip_special)

    def id_of(self, token: str) -> int | None:
        """Return the id of the token spelled exactly so, control tokens included; None if none."""
        return self._ids.get(token)

    def is_special(self, token_id: int) -> bool:
        """Whether ``encode`` never gives this id for text, and ``decode`` leaves it out."""
        return self._types[self._checked(token_id)] in _HIDDEN

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token, which may end in the middle of a character."""
        token = self._tokens[self._checked(token_id)]
        kind = self._types[token_id]
        if kind in _HIDDEN and skip_special:
            return b""
        if kind not in _VERBATIM:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # not a byte-level token, a padding entry such as "[PAD 7]": itself
                pass
        return token.encode()

    def _merge(self, text: str) -> list[int]:
        """Return the ids of ``text`` by byte-pair merges alone."""
        return self._bpe.encode(text, add_special_tokens=False).ids if text else []

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        return token_id

    def _pattern_of(self, kinds: Collection[int]) -> re.Pattern[str]:
        """Return a pattern of the tokens of these kinds: the leftmost, and of those the longest."""
        found = (
            t for t, kind in zip(self._tokens, self._types, strict=True) if t and kind in kinds
        )
        spellings = sorted(found, key=len, reverse=True)
        # An empty alternation would match everywhere; "(?!)" matches nowhere.
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")


class StreamDecoder:
    """Gives whole characters only; all it gave, joined, is what ``decode`` gives for the same ids.

    A character whose bytes are spread over tokens comes out with the last of them. Time per token
    does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the characters that ``token_id`` completes, often none.

        Raises:
            TokenizerError: an id outside the vocabulary; what came before is kept.
        """
        raw = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        return str(self._utf8.decode(raw))

    def finish(self) -> str:
        """Return what is left, U+FFFD for a character cut short; then a new text may begin."""
        return str(self._utf8.decode(b"", final=True))


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer that text needs.

    Raises:
        TokenizerError: there is none; the message says to give token ids.
    """
    if tokenizer is None:
        raise TokenizerError(
            "this model file has no tokenizer (tokenizer.ggml.model is none), so it cannot take "
            "text; give token ids"
        )
    return tokenizer
