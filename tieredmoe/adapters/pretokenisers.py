"""How text is cut into words before byte pairs are merged, by the name a GGUF gives the method.

A GGUF holds no pattern, only a name (``tokenizer.ggml.pre``), so the patterns live here: one entry
of ``PRE_TOKENISERS`` per name. A name that is not in the table is refused, because a wrong pattern
gives ids that look right and make the model worse; guessing a default was rejected for that reason.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenizers import Regex, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping

# Source: the pre_tokenizer of the published DeepSeek tokenizer.json; llama.cpp uses the same three
# for both names.
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    ),
)

# Source: pat_str of Moonshot's tokenization_kimi.py, the same for Kimi-K2 and Kimi-K3.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KIMI_K2 = (
    (
        r"[\p{Han}]+"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        r"|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    ),
)

PRE_TOKENISERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"deepseek-v3": _DEEPSEEK_V3, "joyai-llm": _DEEPSEEK_V3, "kimi-k2": _KIMI_K2}
)
"""Patterns by name. Each pattern in turn cuts the pieces that the one before it left; both what it
matches and what lies between become pieces."""


def build_pre_tokeniser(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokeniser ``name`` of ``PRE_TOKENISERS``, bytes mapped to characters."""
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in PRE_TOKENISERS[name]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])
