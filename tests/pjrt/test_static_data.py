"""Static data of the nodes of a structure is compared by type and value (pjrt/static_data.py)."""

import contextlib
import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from stagec.core.trees.same import key, same
from stagec.pjrt.static_data import StaticData


class Name(enum.StrEnum):
    A = "a"


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: Any
    kind: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Module:
    def __init__(self, x: Any, kind: Any) -> None:
        self.x, self.kind = x, kind

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.x,), self.kind

    @classmethod
    def tree_unflatten(cls, kind: Any, children: tuple[Any]) -> "Module":
        return cls(*children, kind)


structure = jax.tree.structure


def test_what_a_structure_has() -> None:
    assert StaticData.of(structure(([1, {}, Pair(3)], None))).nodes == []
    data = StaticData.of(structure({1: 2, 3: {2.0: 1}, 4: Module(State(1, "a"), "b"), 5: [{"c": 6}]}))
    assert data.parts == [2.0, "a", "b", "c", 1, 3, 4, 5]
    assert data.nodes == [2, 4, 5, 7, 9]


ONES = [1, 1.0, True, 1 + 0j, Level.LOW, np.int32(1), np.float64(1), (1,), (True,), ((1,),), ((1.0,),), [1], [True]]
ONES += [{"a": 1}, {"a": True}, {1: "a"}, {True: "a"}, "a", Name.A, np.str_("a"), Pair(1), Pair(1.0), None, (None,), ()]


@pytest.mark.parametrize("make", [State, Module], ids=lambda make: make.__name__)
def test_what_is_equal_is_told_apart(make: Callable[[Any, Any], Any]) -> None:
    known = [structure((make(0, kind), {"a": 1})) for kind in ONES]
    for i, one in enumerate(known):
        for j, kind in enumerate(ONES):
            other = structure((make(0, copy.deepcopy(kind)), {"a": 1}))
            assert same_data(one, other) == (i == j), (ONES[i], kind)


def same_data(one: Any, other: Any) -> bool:
    """Whether two structures have the same static data: jaxlib is asked first, as by a table of structures."""
    with contextlib.suppress(ValueError):  # a NumPy array is not equal and not unequal
        if one != other:
            return False
    return StaticData.of(one).same(other)


def test_keys_of_dicts() -> None:
    keys = [1, 1.0, True, Level.LOW, "a", Name.A]
    known = [structure({key: 0}) for key in keys]
    for i, one in enumerate(known):
        assert [same_data(one, other) for other in known] == [i == j for j in range(len(keys))]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=1)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map(tuple), st.lists(parts, max_size=2), st.builds(Pair, parts)
    ),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_drawn_values(one: Any, other: Any) -> None:
    first, second, again = (structure(Module(0, value)) for value in (one, other, copy.deepcopy(one)))
    assert same_data(first, again) == (first == again)  # a NaN is another, and is traced again, as in JAX
    assert same_data(first, second) == (first == second and same(one, other))
    assert same(one, other) == (key(one) == key(other))
