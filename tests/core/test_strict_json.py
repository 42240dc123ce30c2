"""JSON is read strictly: one meaning for every parser, and a bound on everything that a file may choose."""

import json

import pytest

from stagec.core.data.strict_json import DEEPEST, difference, parse, shown


@pytest.mark.parametrize(
    "value",
    [None, True, "ü\n", [], {}, 0.5, 2**63 - 1, -(2**63), {"a": [1, {"b": "c"}], "": 1e-300}],
    ids=repr,
)
def test_values_come_back(value: object) -> None:
    text = json.dumps(value)
    assert parse(text, 100) == parse(text.encode(), 100) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' appears twice"),
        ('[{"a": {}, "a": 2}]', "the key 'a' appears twice"),
        ("[NaN]", "the number NaN is not finite"),
        ("-Infinity", "the number -Infinity is not finite"),
        ("1e999", "the number 1e999 is not finite"),
        (str(2**63), "has more than 64 bits"),
        (str(-(2**63) - 1), "has more than 64 bits"),
        ("1" * 5000, "has more than 64 bits"),
        (b'"\xff"', "codec can't decode"),
        ('"\\ud800"', "surrogates not allowed"),
        ('{"\\udfff": 1}', "surrogates not allowed"),
        ('"\ud800"', "surrogates not allowed"),
        ("[1", "Expecting"),
        ("1 2", "Extra data"),
    ],
)
def test_what_has_several_meanings_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text, 10_000)


def test_the_limit_counts_bytes() -> None:
    assert parse(b'"abc"', 5) == "abc"
    with pytest.raises(ValueError, match="6 bytes of JSON are over the limit of 5"):
        parse(b'"abcd"', 5)


def test_values_are_counted() -> None:
    assert parse("[1, 2, 3]", 100, most_values=4) == [1, 2, 3]
    with pytest.raises(ValueError, match="it has more than 3 values"):
        parse("[1, 2, 3]", 100, most_values=3)


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_the_depth_has_a_limit(start: str, end: str) -> None:
    for depth in (1, DEEPEST):
        parse(start * depth + "1" + end * depth, 1_000_000)
    for depth in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST} levels"):
            parse(start * depth + "1" + end * depth, 1_000_000)


def test_a_long_string_is_cut_off_in_a_message() -> None:
    assert shown("a" * 60) == "a" * 60
    assert shown("a" * 61) == "a" * 57 + "..."
    assert shown("é\nok \x1b[2J\u202e") == r"é\nok \x1b[2J\u202e"


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, None),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": 0}]}, "a[1].b"),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, "a (the order of its keys)"),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "b": 1}}, "a.c"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, " (the order of its keys)"),
        ({"a": {}}, {"a": {"b": 1}}, "a.b"),
        ({"a": [1]}, {"a": [1, 2]}, "a"),
        ({"a": {}}, {"a": []}, "a"),
        (1, True, ""),
        (1, 1.0, ""),
        (0.0, -0.0, ""),
    ],
)
def test_where_values_differ(first: object, second: object, where: str | None) -> None:
    assert difference(first, second) == where
    assert (json.dumps(first) == json.dumps(second)) == (where is None)
