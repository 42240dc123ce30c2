"""Forms of JSON, and which key a message names."""

from typing import Any

import pytest

from stagec.core.trees import json_shapes

SHAPE = json_shapes.shape(
    {
        "kind": "index",
        "count": int,
        "names": [str],
        "sizes": {...: float},
        "either": json_shapes.either("a number or nothing", float, None),
        "inner?": {"flag": bool, ...: object},
    }
)
VALUE = {"kind": "index", "count": 0, "names": ["a"], "sizes": {"x": 1.5, "y": 2}, "either": None}


@pytest.mark.parametrize(
    "more", [{}, {"names": []}, {"sizes": {}}, {"either": 2}, {"inner": {"flag": True, "other": [1]}}], ids=str
)
def test_values_of_the_form(more: dict[str, Any]) -> None:
    SHAPE({**VALUE, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "other"}, 'kind: expected "index", not "other"'),
        ({"count": -1}, "count: expected a whole number, not -1"),
        ({"count": True}, "count: expected a whole number, not true"),
        ({"names": ["a", 1]}, "names[1]: expected a string, not 1"),
        ({"names": {}}, "names: expected an array, not {}"),
        ({"sizes": {"x": "1"}}, 'sizes.x: expected a number, not "1"'),
        ({"either": "x"}, 'either: expected a number or nothing, not "x"'),
        ({"inner": {}}, "inner: the key 'flag' is missing"),
        ({"inner": {"flag": 1}}, "inner.flag: expected true or false, not 1"),
        ({"inner?": {"flag": True}}, "inner?: no such key is known"),
        ({"new": 1}, "new: no such key is known"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_their_key(more: dict[str, Any], message: str) -> None:
    with pytest.raises(json_shapes.Mismatch) as error:
        SHAPE({**VALUE, **more})
    assert str(error.value) == message


def test_a_key_that_is_missing() -> None:
    with pytest.raises(json_shapes.Mismatch, match="the key 'count' is missing"):
        SHAPE({key: value for key, value in VALUE.items() if key != "count"})
