"""One meaning of "the same static value" (core/trees/same.py)."""

import copy
import dataclasses
import enum
import math
import struct
from collections import OrderedDict, deque
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stagec.core.trees.same import key, same


class Color(enum.IntEnum):
    RED = 1


class Size(enum.IntEnum):
    SMALL = 1


class Pair(NamedTuple):
    first: Any


class Mine(tuple[Any, ...]):
    """A tuple that compares itself."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = tuple.__hash__


@dataclasses.dataclass(frozen=True)
class Options:
    rate: Any
    name: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(eq=False)
class Table:
    rows: Any


@dataclasses.dataclass
class Changing:
    rate: Any


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A class with a hash, whose parts have none."""

    rate: list[Any]

    def __hash__(self) -> int:
        return len(self.rate)


DIFFERENT = [
    *(1, 1.0, True, 1 + 0j, Color.RED, Size.SMALL, np.int32(1), np.int64(1), np.float64(1), np.bool_(True)),
    *(0.0, -0.0, 0, False, complex(0.0, -0.0), np.float32(0.0), np.float32(-0.0), "1", b"1", np.str_("1"), None),
    *((1,), (1.0,), [1], {1}, frozenset({1}), frozenset({True}), {1: 1}, {1: 1.0}, {True: 1}, Pair(1), Pair(1.0)),
    *(Options(1), Options(1.0), Options((1,)), Options((True,)), range(0, 3, 2), range(0, 4, 2), slice(1), slice(1.0)),
    *(
        int,
        float,
        np.dtype("f4"),
        np.dtype("f8"),
        math.nan,
        struct.unpack("<d", b"\1" + struct.pack("<d", math.nan)[1:])[0],
    ),
    *(Table([1]), Table([1]), Mine((1,)), Mine((1,))),
    # Without a hash: of these, only the comparison tells.
    *(Changing(1), Changing(1.0), Changing([1]), Changing([True]), Options([1]), Options([1.0])),
    *({1: [1]}, {1: [1.0]}, OrderedDict(a=[1]), OrderedDict(a=[1.0]), OrderedDict(a=1), bytearray(b"1")),
    *(deque([1]), deque([1.0]), MappingProxyType({1: 1}), MappingProxyType({1: 1.0}), Hashed([1]), Hashed([2])),
]


def test_a_key_has_a_hash_where_the_value_has_one() -> None:
    for value in (Hashed([1]), Options((1,)), {1: (2,)}, [1], OrderedDict(a=1).keys().isdisjoint):
        assert isinstance(hash(key(value)), int)


def test_what_is_not_the_same() -> None:
    for i, one in enumerate(DIFFERENT):
        for j, other in enumerate(DIFFERENT):
            assert same(one, other) == (i == j), (one, other)
            assert (key(one) == key(other)) == (i == j), (one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (float("nan"), float("nan")),
        ((float("nan"),), (float("nan"),)),
        (Pair(float("nan")), Pair(float("nan"))),
        (np.float32("nan"), np.float32("nan")),
        ({"a": 1, "b": (2.0,)}, {"b": (2.0,), "a": 1}),
        (Options(2, "a"), Options(2, "b")),
    ],
    ids=str,
)
def test_what_is_the_same(one: object, other: object) -> None:
    assert same(one, other)
    assert hash(key(one)) == hash(key(other))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=2), st.binary(max_size=2)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("ab"), parts),
        st.builds(Pair, parts),
    ),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_drawn_values(one: Any, other: Any) -> None:
    assert same(one, copy.deepcopy(one))
    assert same(one, other) == (key(one) == key(other)) == same(other, one)
    if same(one, other):
        assert type(one) is type(other)
        assert repr(one) == repr(other) or isinstance(one, dict) or "nan" in repr(one) or "{" in repr(one)
