"""A manifest that was damaged, edited or forged is refused in one clear error."""

import contextlib
import json
import shutil

import attrs
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tieredmoe.errors import PackError
from tieredmoe.pack import open_pack
from tieredmoe.pack import reader as reader_module
from tieredmoe.pack.document import dump_manifest
from tieredmoe.pack.layout import Segment
from tieredmoe.pack.manifest import Manifest, digest_of


@pytest.fixture(scope="module")
def scratch(small_pack, tmp_path_factory):
    """A copy of the small pack whose manifest every example writes anew."""
    path = tmp_path_factory.mktemp("damage") / "pack"
    shutil.copytree(small_pack[0], path)
    return path


def document(pack):
    return json.loads((pack / "manifest.json").read_bytes())


def seal(document):
    """The manifest file of ``document`` with a right first line: what a careful forger writes."""
    body = json.dumps({k: v for k, v in document.items() if k != "digest"}, indent=1)
    body = body.removeprefix("{\n").encode() + b"\n"
    return b'{"digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n' + body


def at(document, path):
    for step in path:
        document = document[step]
    return document


def paths(value, path=()):
    """Every place in a document."""
    yield path
    if isinstance(value, dict | list):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(member, (*path, key))


def test_resealing_an_unchanged_document_gives_the_same_file(small_pack):
    assert seal(document(small_pack[0])) == (small_pack[0] / "manifest.json").read_bytes()


@given(data=st.data())
def test_any_changed_byte_of_the_manifest_is_noticed(scratch, small_pack, data):
    whole = bytearray((small_pack[0] / "manifest.json").read_bytes())
    index = data.draw(st.integers(0, len(whole) - 1))
    whole[index] ^= data.draw(st.integers(1, 255))
    (scratch / "manifest.json").write_bytes(whole)
    noticed = r"manifest\.json: is (damaged or was edited|no tieredmoe-pack)"
    with pytest.raises(PackError, match=noticed):
        open_pack(scratch)


@given(data=st.data())
def test_a_manifest_cut_short_or_grown_is_noticed(scratch, small_pack, data):
    whole = (small_pack[0] / "manifest.json").read_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    (scratch / "manifest.json").write_bytes(data.draw(st.sampled_from([cut, whole + b"\n"])))
    with pytest.raises(PackError):
        open_pack(scratch)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2**63, 2**64, "gate", "..", "a/b", "manifest.json", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_forged_field_is_refused_or_means_the_same(scratch, small_pack, data):
    forged = document(small_pack[0])
    original = open_pack(small_pack[0]).manifest
    # A source file's name stands nowhere else, so who changes it can only be believed.
    places = [
        p for p in paths(forged) if p and not (len(p) == 3 and p[0] == "shards" and p[2] == "name")
    ]
    *path, last = places[data.draw(st.integers(0, len(places) - 1))]
    parent = at(forged, path)
    kind = data.draw(st.sampled_from(["replace", "delete", "repeat", "nudge", "add"]))
    if kind == "delete":
        del parent[last]
    elif kind == "repeat" and isinstance(parent, list):
        parent.append(parent[last])
    elif kind == "nudge" and isinstance(parent[last], int):
        parent[last] += data.draw(st.sampled_from([1, -1, 4096, -4096]))
    elif kind == "add" and isinstance(parent, dict):
        parent[data.draw(st.text(min_size=1))] = data.draw(ANY_JSON)
    else:
        parent[last] = data.draw(ANY_JSON)
    (scratch / "manifest.json").write_bytes(seal(forged))
    with contextlib.suppress(PackError):
        assert open_pack(scratch).manifest == original


def leaves(value):
    return [p for p in paths(value) if not isinstance(at(value, p), dict | list)]


def test_no_single_value_can_be_forged(scratch, small_pack):
    """Every number one larger, every string with its first letter changed, one at a time."""
    whole = document(small_pack[0])
    accepted = []
    for *path, last in leaves(whole):
        if (*path, last) == ("digest",):
            continue
        forged = document(small_pack[0])
        value = at(forged, path)[last]
        changed = (
            value + 1 if isinstance(value, int) else ("0" if value[0] != "0" else "1") + value[1:]
        )
        at(forged, path)[last] = changed
        (scratch / "manifest.json").write_bytes(seal(forged))
        try:
            open_pack(scratch)
        except PackError:
            continue
        accepted.append((*path, last))
    assert accepted == [("shards", 0, "name"), ("shards", 1, "name")]


FORGERIES = [
    (("version",), 2, "format version 2, and this tieredmoe reads version 1; install a newer"),
    (("version",), "1", "field version must be an integer"),
    (("version",), True, "field version must be an integer"),
    (("format",), "zip", 'must be an object with "format": "tieredmoe-pack"'),
    (("model", "n_experts"), 0, "model.n_experts must be from 1 to"),
    (("model", "top_k"), 5, "model.top_k must be from 1 to 4, not 5"),
    (("model", "top_k"), 3, r"does not fit its headers: .*top_k are \('deepseek4', 3\)"),
    (("model", "architecture"), "kimi", "does not fit its headers: architecture"),
    (("source_digest",), "00" * 16, "source_digest must be [0-9a-f]{32}, by the digests below it"),
    (("source_digest",), "xyz", "source_digest must be 32 lower-case hexadecimal digits"),
    (("layers", 0, "start"), 1, r"layers\[0\].start must be a multiple of 4096"),
    (("layers", 1, "start"), 0, "layers must lie end to end in the expert files; layer 1"),
    (("layers", 1, "layer"), 0, "layers must not name a layer twice"),
    (("layers", 0, "file"), 1, "must lie end to end in the expert files; layer 0"),
    (("layers", 0, "stride"), 8192, r"layers\[0\].stride must be 4096"),
    (("layers", 0, "roles", 0, "name"), "down", "must be the roles gate, up, down, in this order"),
    (("layers", 0, "roles", 1, "offset"), 0, "must lie end to end, the first at offset 0"),
    (("layers", 0, "roles", 0, "ggml_type"), 2, "has another type or shape"),
    (("layers", 0, "roles", 0, "shape"), [64, 32], "has another type or shape"),
    (("layers", 0, "roles", 0, "shape"), [2048], r"shape must be \[rows, columns\]"),
    (("layers", 0, "surprise"), 1, r"layers\[0\] has unknown members: 'surprise'"),
    (("expert_files", 0, "nbytes"), 0, "expert_files must give file 0 the 32768 bytes"),
    (("expert_files", 0, "name"), "../../etc/passwd", "must be a plain file name"),
    (("expert_files", 0, "name"), "manifest.json", "must not name 'manifest.json' twice"),
    (("expert_files", 0, "name"), "gone.bin", "damaged: gone.bin: No such file or directory"),
    (("shards", 0, "name"), "..", r"shards\[0\].name must be a plain file name"),
    (("shards",), [], "shards must be a non-empty array"),
    (("shards", 0, "nbytes"), 5, "must be [0-9]+, the sum of its segments"),
    (("shards", 1, "dense_file", "nbytes"), 5, "must have [0-9]+ bytes, the sum of its segments"),
    (("shards", 0, "segments", 0, "tensor"), "x", "must begin with the shard's header"),
    (("shards", 0, "segments", 1, "tensor"), "x", "tensor 'x' is in only one of them"),
    (("shards", 0, "segments", 1, "layer"), 0, r"segments\[1\] lacks role"),
    (("shards",), {}, "shards must be a non-empty array"),
    (("model",), [], "model must be an object"),
]


@pytest.mark.parametrize(("path", "value", "message"), FORGERIES)
def test_a_forged_field_is_named(pack, path, value, message):
    forged = document(pack)
    at(forged, path[:-1])[path[-1]] = value
    (pack / "manifest.json").write_bytes(seal(forged))
    with pytest.raises(PackError, match=message):
        open_pack(pack)


def test_a_missing_field_is_named(pack):
    forged = document(pack)
    del forged["layers"][1]["roles"][2]["nbytes"]
    (pack / "manifest.json").write_bytes(seal(forged))
    with pytest.raises(PackError, match=r"field layers\[1\]\.roles\[2\] lacks nbytes"):
        open_pack(pack)


def reforged(pack, alter):
    """Write a manifest that agrees with itself in every digest, but not with the headers."""
    manifest = open_pack(pack).manifest
    (shard, *others), (digests, *other_digests) = manifest.layout.shards, manifest.digests
    segments, digests = alter(list(shard.segments), list(digests))
    layout = attrs.evolve(
        manifest.layout, shards=(attrs.evolve(shard, segments=tuple(segments)), *others)
    )
    forged = Manifest(layout, (tuple(digests), *other_digests))
    (pack / "manifest.json").write_bytes(dump_manifest(forged))


def test_a_tensor_said_to_be_elsewhere_is_refused(pack):
    def swap(segments, digests):
        first, second = [
            i for i, each in enumerate(segments) if each.tensor and "attn_norm" in each.tensor
        ]
        for values in (segments, digests):
            values[first], values[second] = values[second], values[first]
        return segments, digests

    reforged(pack, swap)
    with pytest.raises(PackError, match=r"tensor 'blk\.0\.attn_norm\.weight' is elsewhere"):
        open_pack(pack)


def test_a_header_said_to_be_shorter_is_refused(pack):
    header = (pack / "dense-00000.bin").read_bytes()[
        : open_pack(pack).tensors["blk.0.attn_norm.weight"].offset
    ]

    def split(segments, digests):
        parts = header[:-1], header[-1:]
        segments[:1] = [Segment(len(part)) for part in parts]
        digests[:1] = [digest_of(part) for part in parts]
        return segments, digests

    reforged(pack, split)
    with pytest.raises(PackError, match=f" has {len(header)} bytes"):
        open_pack(pack)


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"nonsense", b'"version": 1}', b"\xff}"])
def test_a_sealed_body_that_is_not_a_manifest_is_refused(pack, body):
    line = b'{"digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n'
    (pack / "manifest.json").write_bytes(line + body)
    with pytest.raises(PackError):
        open_pack(pack)


def test_a_huge_manifest_is_refused_unread(pack, monkeypatch):
    monkeypatch.setattr(reader_module, "MANIFEST_NBYTES_MAX", 1000)
    with pytest.raises(PackError, match="too many for a manifest"):
        open_pack(pack)
