"""The kimi-k2 splitter against the published alternatives in an engine of its own."""
# ruff: noqa: RUF001 (letters that look like others are the point)

import random
import unicodedata

import pytest
from tokenizer_data import corpus
from tokenizers import Regex, pre_tokenizers

from tieredmoe.adapters.pretokenisers import PRE_TOKENISERS, build_pre_tokeniser
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.testing.tiny_tokenizer import byte_alphabet, tiny_vocabulary, tokenizer_metadata

UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]"
LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]"
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
ALTERNATIVES = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
ATOMS = [
    *"aAbBsStTmMdDlLzZ0123456789''''\"!.,;:-_/()<>|[]{}",
    *" \t\n\r\v\f\x00\x1c\x85\xa0\u2028\u3000\u200b\u200d\ufeff",
    *("'s", "'S", "'LL", "'Ve", "'re", "'t", "'D", "'ſ", "’s", "\r\n", "  ", "\n\n"),
    *("漢", "字", "\u3005", "\u3007", "\u3021", "𠀀", "かな", "カ", "ー", "한", "ﾞ", "〱"),
    *("\u0301", "\u0308", "\u093e", "\u0e49", "\ufe0f", "漢\u0301", "e\u0301"),
    *("ß", "ẞ", "Ǆ", "ǅ", "ǆ", "ʰ", "ª", "ﬆ", "İ", "ı", "K", "Ω", "Жж", "א", "ت", "क्", "ก็"),
    *("٣", "½", "²", "Ⅷ", "ⅷ", "𝐀", "𝟙", "😀", "👍🏽", "\U000e0100", "…", "％", "，"),
]


@pytest.fixture(scope="module")
def published():
    """The pieces of a text by the published alternatives."""
    regex = pytest.importorskip("regex")
    pattern = regex.compile("|".join(ALTERNATIVES), regex.VERSION1)
    return lambda text: [match[0] for match in pattern.finditer(text)]


@pytest.fixture(scope="module")
def ours():
    (pattern,) = PRE_TOKENISERS["kimi-k2"]
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return lambda text: [piece for piece, _ in split.pre_tokenize_str(text)]


def test_any_mix_of_awkward_characters_is_cut_as_published(ours, published):
    rng = random.Random(20261130)
    texts = ["".join(rng.choices(ATOMS, k=rng.randint(1, 24))) for _ in range(20_000)]
    assert [text for text in texts if ours(text) != published(text)] == []


def test_text_of_every_script_is_cut_as_published(ours, published):
    texts = [t for t in corpus(3000, seed=7) if _assigned(t)]
    assert len(texts) > 2000
    assert [text for text in texts if ours(text) != published(text)] == []


def test_every_seventh_character_there_is_is_of_the_published_class(ours, published):
    points = (chr(i) for i in range(3, 0x110000, 7) if not 0xD800 <= i < 0xE000)
    texts = [f"A{c}b{c}'s {c}1\n漢{c}" for c in points if _assigned(c)]
    assert len(texts) > 30_000
    assert [text for text in texts if ours(text) != published(text)] == []


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("HelloWorld don't", ["Hello", "World", " don't"]),
        ("ABCdef DON'T", ["ABCdef", " DON'T"]),
        ("1234567", ["123", "456", "7"]),
        ("日本語のテスト", ["日本語", "のテスト"]),
        ("x漢字y", ["x", "漢字", "y"]),
        ("x  y\r\n\r\n z", ["x", " ", " y", "\r\n\r\n", " z"]),
        ("a, b!!\n", ["a", ",", " b", "!!\n"]),
        ("end   ", ["end", "   "]),
        ("#tag", ["#tag"]),
        ("a\u0301漢", ["a\u0301", "漢"]),
    ],
)
def test_the_pieces_of_some_words(ours, text, pieces):
    assert ours(text) == pieces


def test_pieces_are_mapped_to_byte_characters():
    alphabet = byte_alphabet()
    pieces = [piece for piece, _ in build_pre_tokeniser("kimi-k2").pre_tokenize_str("ä 漢")]
    assert pieces == ["".join(alphabet[b] for b in word.encode()) for word in ("ä", " ", "漢")]


@pytest.mark.parametrize("atom", ["A", "a", " ", "漢", "\u0301", "か", "'S", "\n "])
def test_long_runs_are_cut_without_deep_recursion(ours, atom):
    text = atom * 50_000
    assert "".join(ours(text)) == text


def test_any_text_survives_encoding_and_decoding():
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata(tiny_vocabulary(512, "kimi-k3")))
    for text in corpus(400, seed=3):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.stream_decoder()
        assert "".join([*map(decoder.push, ids), decoder.finish()]) == text


def _assigned(text):
    """Whether this Python knows all characters: engines follow Unicode at their own pace."""
    return all(unicodedata.category(c) != "Cn" for c in text)
