import math

import pytest

from tieredmoe.errors import MetadataError
from tieredmoe.gguf import Metadata, MetadataReader
from tieredmoe.gguf.metadata import LAYER_MAX


def reader(**values):
    return MetadataReader(Metadata({f"arch.{k}": v for k, v in values.items()}, path="m"), "arch")


def problems(read):
    with pytest.raises(MetadataError) as caught:
        read.finish()
    return str(caught.value)


def test_metadata_is_a_mapping_of_the_raw_values():
    values = {"general.architecture": "kimi-k3", "a": [1, 2]}
    metadata = Metadata(values)
    assert dict(metadata) == values
    assert metadata.architecture == "kimi-k3"


@pytest.mark.parametrize("values", [{}, {"general.architecture": 7}])
def test_a_missing_architecture_is_named(values):
    with pytest.raises(MetadataError, match=r"m\.gguf: .*general\.architecture"):
        _ = Metadata(values, path="m.gguf").architecture


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (6, 6),
        (-1, -1),
        (6.0, 6),
        (True, 1),
        ([6], 6),
        ([6, 6, 6], 6),
        ([6.0, 6], 6),
        (2**64, 2**64),
    ],
)
def test_an_integer_comes_in_many_spellings(raw, value):
    read = reader(k=raw)
    found = read.integer("k")
    read.finish()
    assert (found, type(found)) == (value, int)


@pytest.mark.parametrize("raw", ["6", 6.5, [], [1, 2], [[6]], math.inf, math.nan])
def test_what_is_no_integer_is_reported(raw):
    read = reader(k=raw)
    assert isinstance(read.integer("k"), int)
    assert "arch.k is" in problems(read)
    assert "not an integer" in problems(read)


@pytest.mark.parametrize(
    ("raw", "value"), [(1.5, 1.5), (2, 2.0), ([0.5, 0.5], 0.5), (True, 1.0), (-1e308, -1e308)]
)
def test_a_number_comes_in_many_spellings(raw, value):
    read = reader(k=raw)
    found = read.number("k")
    read.finish()
    assert (found, type(found)) == (value, float)


@pytest.mark.parametrize("raw", ["1.5", math.nan, math.inf, -math.inf, [1.0, 2.0], [], 10**400])
def test_what_is_no_number_is_reported(raw):
    read = reader(k=raw)
    read.number("k")
    assert "not a finite number" in problems(read)


@pytest.mark.parametrize(
    ("raw", "value"), [(True, True), (0, False), (1, True), ([False], False), (1.0, True)]
)
def test_a_flag_comes_in_many_spellings(raw, value):
    read = reader(k=raw)
    assert read.flag("k") is value
    read.finish()


@pytest.mark.parametrize("raw", [2, -1, "true", [0, 1]])
def test_what_is_no_flag_is_reported(raw):
    read = reader(k=raw)
    read.flag("k")
    assert "not a flag" in problems(read)


def test_text_may_come_as_an_array_of_one():
    read = reader(k=["yarn"], n=3)
    assert read.text("k") == "yarn"
    assert read.text("n") == ""
    assert "arch.n is 3, not a string" in problems(read)


@pytest.mark.parametrize(
    ("raw", "length", "value"),
    [
        ([1, 2, 3], None, (1, 2, 3)),
        ([1, 2.0, True], 3, (1, 2, 1)),
        ([0, 4, 128, 0], 3, (0, 4, 128)),
        (7, None, (7,)),
        (7, 3, (7, 7, 7)),
        ([], None, ()),
        ([7], 0, ()),
    ],
)
def test_integers_have_the_length_that_was_asked_for(raw, length, value):
    read = reader(k=raw)
    assert read.integers("k", length=length) == value
    read.finish()


@pytest.mark.parametrize(
    ("raw", "fact"),
    [
        ([1, 2], "arch.k is an array of 2 (int), not 3 integers"),
        ([1, 2, "x"], "arch.k is an array of 3 (int, str), not 3 integers"),
        ([[1], [1], [1]], "arch.k is an array of 3 (list), not 3 integers"),
        ([], "arch.k is an empty array, not 3 integers"),
        ("x" * 50, "arch.k is '" + "x" * 39 + "… (52 characters), not 3 integers"),
    ],
)
def test_what_are_not_enough_integers_is_reported_briefly(raw, fact):
    read = reader(k=raw)
    assert read.integers("k", length=3) == (1, 1, 1)
    assert fact in problems(read)


def test_numbers_and_strings_are_read_like_integers():
    read = reader(f=[1, 2.5], s=["a", "b"], one=10.0)
    assert read.numbers("f") == (1.0, 2.5)
    assert read.numbers("one", length=2) == (10.0, 10.0)
    assert read.strings("s") == ("a", "b")
    read.finish()


@pytest.mark.parametrize("raw", [[1.0, math.inf], [math.nan, 1.0], -math.inf])
def test_numbers_that_are_not_finite_are_reported(raw):
    read = reader(k=raw)
    assert read.numbers("k", length=2) == (1.0, 1.0)
    assert "not 2 finite numbers" in problems(read)


@pytest.mark.parametrize("raw", [1, 6, 6.0])
def test_a_layer_count_is_one_that_the_tensors_can_fill(raw):
    read = reader(block_count=raw)
    assert read.layer_count(n_tensors=6) == raw
    read.finish()


@pytest.mark.parametrize("raw", [7, 0, -1, 2**40, 2**64, "6"])
def test_a_layer_count_beyond_the_tensors_is_reported_and_harmless(raw):
    read = reader(block_count=raw)
    assert read.layer_count(n_tensors=6) == 1
    assert f"arch.block_count is {raw!r}, not a count of 1 to 6 layers" in problems(read)


def test_no_number_of_tensors_makes_a_layer_count_unbounded():
    read = reader(block_count=LAYER_MAX + 1)
    assert read.layer_count(n_tensors=2**40) == 1
    assert f"not a count of 1 to {LAYER_MAX} layers" in problems(read)


def test_the_first_alias_that_is_present_counts():
    read = reader(old=1, new=2)
    assert read.integer("new", "old") == 2
    assert read.integer("newest", "old") == 1
    read.finish()


def test_an_absent_key_gives_its_default_of_any_type():
    read = reader()
    assert read.integer("k", default=None) is None
    assert read.number("k", default=1.5) == 1.5
    assert read.flag("k", default=True) is True
    assert read.text("k", default="x") == "x"
    assert read.integers("k", length=2, default=(9,)) == (9,)
    assert read.numbers("k", default=None) is None
    assert read.strings("k", default=()) == ()
    read.finish()


def test_a_default_does_not_hide_a_value_of_another_type():
    read = reader(k="many")
    read.integer("k", default=3)
    assert "arch.k is 'many', not an integer" in problems(read)


@pytest.mark.parametrize("name", ["general.alignment", "tokenizer.ggml.pre", "split.no"])
def test_names_of_common_namespaces_are_not_prefixed(name):
    read = MetadataReader(Metadata({name: 1}), "arch")
    assert read.integer(name) == 1
    read.finish()


def test_dotted_names_are_prefixed():
    read = MetadataReader(Metadata({"arch.attention.head_count": 4}), "arch")
    assert read.integer("attention.head_count") == 4


def test_every_problem_is_in_one_error():
    read = reader(c="x", d=[1, 2])
    values = (
        read.integer("a"),
        read.number("b", "b2"),
        read.flag("c"),
        read.integers("e", length=2),
    )
    assert values == (1, 1.0, False, (1, 1))
    read.text("d")
    assert problems(read) == (
        "m: missing metadata keys: arch.a, arch.b or arch.b2, arch.e; metadata of another type: "
        "arch.c is 'x', not a flag, arch.d is an array of 2 (int), not a string"
    )
