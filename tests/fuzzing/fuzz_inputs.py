"""Sound documents of every kind that we read, and hypothesis strategies that spoil them.

Half of the mutants are spoilt as bytes; the others as structures whose digests are then right, as a
careful forger would make them, since a digest keeps all other damage from the code behind it.
"""

import copy
import json
import struct

from gguf_bytes import F32, Q8_0, V, entry, header, padded, pair, small_file
from hypothesis import strategies as st

from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.sealed import seal

NUMBERS = (
    0, 1, 2, 3, 31, 32, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62,
    2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip

numbers = st.sampled_from(NUMBERS) | st.integers(0, 2**64 - 1)
_changes = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 2**20), numbers), min_size=1, max_size=4
)


def spoilt_bytes(corpus):
    """One of ``corpus`` with bytes changed, numbers written over, pieces cut, doubled or moved."""
    return st.builds(_spoil_bytes, st.sampled_from(corpus), _changes)


def _spoil_bytes(data, changes):
    data = bytearray(data)
    for kind, place, number in changes:
        at = place % (len(data) + 1)
        n = number % 64
        if kind == 0:
            data[at : at + 1] = bytes([number & 255])
        elif kind == 1:
            data[at : at + 4] = struct.pack("<I", number & 0xFFFFFFFF)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", number)
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + n]
        elif kind == 5:
            data[at:at] = data[at : at + n]
        else:
            data[at:at] = bytes(n)
    return bytes(data)


# --- GGUF headers ---------------------------------------------------------------------------------

E, N = 2, 32


def expert_header(architecture="deepseek4", *, roles=("gate", "up", "down"), pairs=(), more=()):
    """The header of a file of one routed layer, and the size of the file."""
    keys = {"block_count": 1, "expert_count": E, "expert_used_count": 1}
    described = [pair("general.architecture", V.STRING, architecture)]
    described += [pair(f"{architecture}.{key}", V.UINT32, value) for key, value in keys.items()]
    entries, at = [], 0
    for role in roles:
        rows = 2 * N if role == "gate_up" else N
        name = f"blk.0.ffn_{role}_exps.weight"
        entries.append(entry(name, [N, rows, E], ggml_type=Q8_0, offset=at))
        at += -(-E * rows * N // 32 * 34 // 32) * 32
    for name in more:
        entries.append(entry(name, [8], ggml_type=F32, offset=at))
        at += 32
    return padded(header([*described, *pairs], entries)), at


_SOUND = (
    expert_header(),
    expert_header(roles=("gate_up", "down")),
    expert_header("kimi-k3", more=("blk.1.nextn.eh_proj.weight", "output.weight")),
    expert_header(pairs=[pair("general.alignment", V.UINT32, 32)]),
)
HEADERS = [*(data + bytes(nbytes) for data, nbytes in _SOUND), small_file()]

_texts = st.sampled_from(
    [
        "general.architecture", "general.alignment", "deepseek4", "deepseek4.block_count",
        "deepseek4.expert_count", "deepseek4.expert_used_count", "split.no", "split.count",
        "split.tensors.count", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
        "blk.0.ffn_down_exps.weight", "blk.0.ffn_gate_up_exps.weight", "blk.0.nextn.x",
        "blk.999999999.ffn_up_exps.weight", "output.weight", "",
    ]
)  # fmt: skip
_scalars = st.sampled_from(
    [V.UINT8, V.INT8, V.UINT16, V.UINT32, V.INT32, V.UINT64, V.INT64, V.BOOL]
)
_LIMITS = {V.UINT8: 8, V.INT8: 7, V.UINT16: 16, V.UINT32: 32, V.INT32: 31, V.UINT64: 64}


def _number_pair(key, value_type, number):
    return pair(key, value_type, number % 2 ** _LIMITS.get(value_type, 1))


_pairs = st.one_of(
    st.builds(_number_pair, _texts, _scalars, numbers),
    st.builds(lambda key, value: pair(key, V.STRING, value), _texts, _texts),
    st.builds(
        lambda key, n: pair(key, V.ARRAY, (V.UINT32, [n % 2**32] * (n % 5))), _texts, numbers
    ),
)
_entries = st.builds(
    lambda name, ne, ggml_type, offset: entry(name, ne, ggml_type=ggml_type, offset=offset),
    _texts,
    st.lists(st.sampled_from([1, 2, 4, 31, 32, 64, 256, 2**20, 2**32, 2**63]), max_size=4),
    st.sampled_from([0, 1, 2, 8, 10, 16, 30, 39, 41, 200]),
    st.sampled_from([0, 32, 64, 4096, 2**20, 2**40, 2**63]),
)
_made_headers = st.builds(
    lambda pairs, entries: padded(header(pairs, entries)),
    st.lists(_pairs, max_size=6),
    st.lists(_entries, max_size=5),
)
headers = st.tuples(
    spoilt_bytes(HEADERS) | _made_headers,
    # What the file system says of its size: the truth, or a sparse file of terabytes.
    st.sampled_from([0, 0, 0, 1, 4096, 2**30, 2**40, 2**62]),
)


# --- JSON documents -------------------------------------------------------------------------------

_json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*NUMBERS, -1, 0.5, 1e308, "", "..", "a/b", "\ud800", "gate", "gate_up", "0"]),
    st.just([]),
    st.just({}),
    st.just([[[[]]]]),
    st.text(max_size=6),
)
_json_changes = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2**20), _json_values), min_size=1, max_size=3
)


def spoilt_json(corpus):
    """One of ``corpus`` with values replaced, removed, repeated or added, anywhere in it."""
    return st.builds(_spoil_json, st.sampled_from(corpus), _json_changes)


def _spoil_json(document, changes):
    document = copy.deepcopy(document)
    for kind, place, drawn in changes:
        places = list(_places(document))
        if not places:
            break
        parent, key = places[place % len(places)]
        value = copy.deepcopy(drawn)  # of the strategy: the next example gets it, too
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == 2 and isinstance(parent[key], int) and isinstance(value, int):
            parent[key] += value
        elif kind == 3 and isinstance(parent, dict):
            parent[f"x{place % 3}"] = value
        else:
            parent[key] = value
    return document


def _places(value):
    if isinstance(value, dict | list):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(member)


def sealed(corpus):
    """Documents with a digest in their first line: spoilt and sealed anew, or spoilt as bytes."""
    parsed = [json.loads(data) for data in corpus]
    return st.one_of(
        spoilt_bytes(corpus), spoilt_json(parsed).map(_resealed), st.sampled_from(_ODD)
    )


def _resealed(document):
    body = {key: value for key, value in document.items() if key != "digest"}
    return seal(body) if body else b"{}"


_DEEP = b"[" * 100_000
_ODD = [
    b"", b"\0", b"{}", b"null", _DEEP, b'{"digest": "' + b"0" * 32 + b'",\n',
    b'{"digest": "' + digest_of(_DEEP).hex().encode() + b'",\n' + _DEEP,
    b'{"digest": "' + digest_of(b"1" * 5000).hex().encode() + b'",\n' + b"1" * 5000,
]  # fmt: skip


# --- journals -------------------------------------------------------------------------------------


def line(record):
    """A record as a journal holds it."""
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    return digest_of(text).hex().encode("ascii") + b" " + text + b"\n"


def journals(records):
    """A journal of ``records``, spoilt as bytes, or record by record with right digests."""
    whole = b"".join(map(line, records))
    return st.one_of(
        spoilt_bytes([whole]),
        spoilt_json([records]).map(lambda found: b"".join(map(line, found))),
    )
