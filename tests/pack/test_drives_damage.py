"""An index or a drive's manifest that was damaged or forged is refused in one clear error."""

import contextlib
import json
import shutil

import pytest
import xxhash
from drive_stage import make_pack, mirror, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_moe import UNIFORM
from test_manifest_damage import ANY_JSON, at, leaves, paths

from tieredmoe.errors import PackError
from tieredmoe.pack.drives import open_drives

DOCUMENTS = {
    "index": "pack/drives.json",
    "mirror index": "mirrored/drives.json",
    "drive": "b/manifest.json",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A split pack and a mirrored one; nobody may change them but in the document of the test."""
    directory = tmp_path_factory.mktemp("documents")
    made, _ = make_pack(directory, types=(UNIFORM,), n_experts=4)
    mirrored = shutil.copytree(made, directory / "mirrored")
    made.rename(directory / "pack")
    split(directory / "pack", directory / "pack", directory / "b", weights=[1, 3])
    mirror(mirrored, mirrored / "second")
    return directory


@pytest.fixture(params=DOCUMENTS)
def place(request, made):
    """One of the documents, put back as it was at the end, and the pack that needs it."""
    path = made / DOCUMENTS[request.param]
    whole = path.read_bytes()
    yield path, made / ("mirrored" if "mirror" in request.param else "pack")
    path.write_bytes(whole)


def seal(document):
    body = json.dumps({k: v for k, v in document.items() if k != "digest"}, indent=1)
    body = body.removeprefix("{\n").encode() + b"\n"
    return b'{"digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n' + body


def test_resealing_an_unchanged_document_gives_the_same_file(place):
    path, _ = place
    assert seal(json.loads(path.read_bytes())) == path.read_bytes()


def test_any_changed_byte_is_noticed(place):
    path, pack = place
    whole = path.read_bytes()
    for i in [*range(50), *range(50, len(whole), 23)]:
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x04]) + whole[i + 1 :])
        with pytest.raises(PackError, match=f"{path}: is (damaged or was edited|no tieredmoe)"):
            open_drives(pack)


def test_a_document_cut_short_is_noticed(place):
    path, pack = place
    whole = path.read_bytes()
    for length in (0, 1, 30, 46, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(PackError, match=str(path)):
            open_drives(pack)


def test_no_single_value_can_be_forged(place):
    """Every number one larger, every string with its first letter changed, one at a time."""
    path, pack = place
    document = json.loads(path.read_bytes())
    for *parents, last in leaves(document):
        if (*parents, last) == ("digest",):
            continue
        forged = json.loads(path.read_bytes())
        value = at(forged, parents)[last]
        changed = (
            value + 1 if isinstance(value, int) else ("0" if value[0] != "0" else "1") + value[1:]
        )
        at(forged, parents)[last] = changed
        whole = path.read_bytes()
        path.write_bytes(seal(forged))
        if path.parent.name == "mirrored" and last == "directory":
            assert len(open_drives(pack).drives) == 1, "a copy that is not there is left out"
        else:
            with pytest.raises(PackError, match=f"{path}|drive"):
                open_drives(pack)
        path.write_bytes(whole)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=40)
@given(data=st.data())
def test_any_forged_field_is_refused_or_means_the_same(place, data):
    path, pack = place
    whole = path.read_bytes()
    original = open_drives(pack)
    forged = json.loads(whole)
    places = [p for p in paths(forged) if p]
    *parents, last = places[data.draw(st.integers(0, len(places) - 1))]
    parent = at(forged, parents)
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
    path.write_bytes(seal(forged))
    try:
        with contextlib.suppress(PackError):
            found = open_drives(pack)
            # A mirror's index may name fewer copies, or some that are not there.
            assert found.left_out or set(found.drives) <= set(original.drives)
            assert original.placement is None or found.drives == original.drives
    finally:
        path.write_bytes(whole)


FORGERIES = [
    ("index", ("version",), 2, "format version 2, and this tieredmoe reads version 1; install a n"),
    ("index", ("format",), "zip", 'must be an object with "format": "tieredmoe-drives"'),
    ("index", ("kind",), "raid", "kind must be split or mirror, not 'raid'"),
    ("index", ("kind",), "mirror", r"drives\[0\] has unknown members: 'file', 'weight'"),
    ("index", ("pack",), "00" * 16, "pack must be [0-9a-f]{32}, .* it is the index of another"),
    ("index", ("drives",), [], "drives must be a non-empty array"),
    ("index", ("drives", 0, "weight"), 0, r"drives\[0\].weight must be from 1 to 1000000, not 0"),
    ("index", ("drives", 0, "weight"), 2, r"drives\[0\].file.nbytes must be [0-9]+, by the weigh"),
    ("index", ("drives", 1, "file", "nbytes"), 1, r"drives\[1\].file.nbytes must be [0-9]+"),
    ("index", ("drives", 1, "file", "name"), "../x", r"drives\[1\].file.name must be a plain"),
    ("index", ("drives", 1, "file", "name"), "x", r"file.name must be experts-00000.bin"),
    ("index", ("drives", 1, "directory"), "drive-00000", "must not name a directory twice"),
    ("index", ("drives", 1, "directory"), "a\0b", r"drives\[1\].directory must be a path that"),
    ("index", ("drives", 1, "directory"), "\ud800", r"drives\[1\].directory must be a path that"),
    (
        "index",
        ("drives", 1, "directory"),
        "/nowhere",
        "drive 1 is not there: no directory /nowhere",
    ),
    ("mirror index", ("kind",), "split", r"drives\[0\] lacks weight, file"),
    ("mirror index", ("drives", 1, "directory"), ".", "must not name a directory twice"),
    ("drive", ("drive",), 0, "is not drive 1 of a split by 1:3 .*: it is drive 0"),
    ("drive", ("drive",), 2, "field drive must be from 0 to 1, not 2"),
    ("drive", ("weights",), [1, 2], "is not drive 1 of a split by 1:3 .*: it is drive 1 .* 1:2"),
    ("drive", ("weights",), [1] * 65, "weights must be at most 64"),
    ("drive", ("pack",), "00" * 16, "it is drive 1 of a split by 1:3 of pack 00000000"),
    ("drive", ("format",), "tieredmoe-pack", 'an object with "format": "tieredmoe-drive"'),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), FORGERIES)
def test_a_forged_field_is_named(made, name, place, value, message):
    path = made / DOCUMENTS[name]
    whole = path.read_bytes()
    forged = json.loads(whole)
    at(forged, place[:-1])[place[-1]] = value
    path.write_bytes(seal(forged))
    try:
        with pytest.raises(PackError, match=message):
            open_drives(made / ("mirrored" if "mirror" in name else "pack"))
    finally:
        path.write_bytes(whole)


def test_too_many_drives_are_refused(made):
    path = made / DOCUMENTS["mirror index"]
    whole = path.read_bytes()
    forged = json.loads(whole)
    forged["drives"] = [{"directory": f"/{i}"} for i in range(65)]
    path.write_bytes(seal(forged))
    try:
        with pytest.raises(PackError, match="drives must be at most 64, not 65"):
            open_drives(made / "mirrored")
    finally:
        path.write_bytes(whole)


def test_a_huge_document_is_refused_unread(made):
    path = made / DOCUMENTS["index"]
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    try:
        with pytest.raises(PackError, match="1,073,741,824 bytes, too many for what it is"):
            open_drives(made / "pack")
    finally:
        path.write_bytes(whole)
