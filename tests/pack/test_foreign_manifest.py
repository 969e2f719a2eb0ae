"""A manifest beside a foreign pack is not needed, and refused where it contradicts the pack."""

import json

import pytest
from foreign_making import make
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.errors import PackError
from tieredmoe.pack.foreign import open_foreign_pack, sidecar

FORMS = ["v1", "ggml"]

CHECKED = {
    "v1": [
        "format",
        "version",
        "complete",
        "layout",
        "role_order",
        "alignment",
        "pack_size",
        "index_count",
        "index_sha256",
        "data_start",
        "object_stride",
        "transform.id",
    ],
    "ggml": [
        "format",
        "complete",
        "expert_pack.size",
        "expert_pack.magic",
        "expert_pack.index_count",
        "expert_pack.data_start",
        "expert_pack.alignment",
        "expert_pack.index_sha256",
        "expert_pack.physical_role_order",
    ],
}
FIELDS = [(form, field) for form in FORMS for field in CHECKED[form]]


def parent(document, field):
    *path, last = field.split(".")
    for step in path:
        document = document[step]
    return document, last


def altered(made, field, alter):
    document = json.loads(made.manifest.read_bytes())
    alter(*parent(document, field))
    made.manifest.write_text(json.dumps(document))
    return made.path


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value[::-1] + value[:1]


@pytest.mark.parametrize("form", FORMS)
def test_the_pack_and_its_source_are_enough(tmp_path, form):
    made = make(tmp_path, form)
    with_manifest = open_foreign_pack(made.path)
    made.manifest.unlink()
    without = open_foreign_pack(made.path, source=made.model.paths[0])
    assert without.places == with_manifest.places


@pytest.mark.parametrize(("form", "field"), FIELDS)
def test_a_field_that_contradicts_the_pack_is_named(tmp_path, form, field):
    made = make(tmp_path, form)
    path = altered(made, field, lambda at, key: at.update({key: other(at[key])}))
    with pytest.raises(PackError, match=rf"json: manifest field {field} is .*, and the pack has"):
        open_foreign_pack(path)


@pytest.mark.parametrize(("field", "value"), [("complete", 1), ("version", 1.0), ("version", True)])
def test_a_value_of_another_type_is_another_value(tmp_path, field, value):
    made = make(tmp_path, "v1")
    path = altered(made, field, lambda at, key: at.update({key: value}))
    with pytest.raises(PackError, match=f"manifest field {field} is {value}, and the pack has"):
        open_foreign_pack(path)


@pytest.mark.parametrize(("form", "field"), FIELDS)
def test_a_missing_field_is_named(tmp_path, form, field):
    made = make(tmp_path, form)
    path = altered(made, field, lambda at, key: at.pop(key))
    with pytest.raises(PackError, match=f"manifest field {field} is missing"):
        open_foreign_pack(path)


@pytest.mark.parametrize(("form", "field"), [("v1", "source.path"), ("ggml", "source.shards")])
@pytest.mark.parametrize("value", [None, 3, [], "", {"path": 1}])
def test_a_manifest_that_names_no_source_says_which_field_is_wrong(tmp_path, form, field, value):
    made = make(tmp_path, form)
    path = altered(made, field, lambda at, key: at.update({key: value}))
    with pytest.raises(PackError, match=f"manifest field {field}"):
        open_foreign_pack(path)


@pytest.mark.parametrize("value", ["\0", "/nowhere/\ud800", "x" * 5000, "/nowhere/model.gguf"])
def test_a_path_that_no_file_can_have_is_a_source_that_does_not_exist(tmp_path, value):
    made = make(tmp_path, "v1")
    path = altered(made, "source.path", lambda at, key: at.update({key: value}))
    with pytest.raises(PackError, match=r"by its manifest, which does not exist\): name that file"):
        open_foreign_pack(path)


@pytest.mark.parametrize("form", FORMS)
def test_what_else_a_manifest_says_is_passed_over(tmp_path, form):
    made = make(tmp_path, form)
    document = json.loads(made.manifest.read_bytes())
    made.manifest.write_text(json.dumps({**document, "surprise": [1, {}], "tensors": None}))
    open_foreign_pack(made.path)


@pytest.mark.parametrize("form", FORMS)
def test_a_pack_that_was_moved_with_its_manifest_opens(tmp_path, form):
    """The manifest holds the absolute path of the pack, as SGLang checks it; we do not."""
    made = make(tmp_path, form)
    moved = tmp_path / "moved"
    moved.mkdir()
    made.manifest.rename(moved / made.manifest.name)
    open_foreign_pack(made.path.rename(moved / made.path.name))


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"nonsense", b"\xff\xfe", b"[]", b"3"])
def test_a_file_that_is_no_manifest_is_refused(tmp_path, data):
    made = make(tmp_path, "v1")
    made.manifest.write_bytes(data)
    with pytest.raises(PackError) as error:
        open_foreign_pack(made.path)
    assert error.value.path == made.manifest


def test_a_manifest_that_is_named_must_exist(tmp_path):
    made = make(tmp_path, "v1")
    with pytest.raises(PackError, match=r"nothing\.json: cannot be opened"):
        open_foreign_pack(made.path, manifest=tmp_path / "nothing.json")


def test_a_huge_manifest_is_refused_unread(tmp_path, monkeypatch):
    made = make(tmp_path, "v1")
    monkeypatch.setattr(sidecar, "NBYTES_MAX", 1000)
    with pytest.raises(PackError, match="too many for a manifest"):
        open_foreign_pack(made.path)


@pytest.fixture(scope="module", params=FORMS)
def whole(request, tmp_path_factory):
    made = make(tmp_path_factory.mktemp(request.param), request.param)
    return made, json.loads(made.manifest.read_bytes()), CHECKED[request.param]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(data=st.data())
def test_no_checked_field_can_have_another_value(whole, data):
    made, document, checked = whole
    forged = json.loads(json.dumps(document))
    at, key = parent(forged, data.draw(st.sampled_from(checked)))
    old, at[key] = at[key], data.draw(JSON)
    if type(at[key]) is type(old) and at[key] == old:
        return
    made.manifest.write_text(json.dumps(forged))
    with pytest.raises(PackError, match="manifest field"):
        open_foreign_pack(made.path)
