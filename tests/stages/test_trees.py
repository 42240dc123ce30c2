"""Trees flatten as JAX flattens, and survive JSON.

Modules: `core/trees/tree.py`.
"""

import json
from typing import Any

import jax
import pytest
from hypothesis import example, given, strategies as st

from stagec.core.trees.keyed import Keyed
from stagec.core.trees.node_types import NodeTypes
from stagec.core.trees.tree import LEAF, Tree, TreeMismatch

values = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


def tree_of(value: Any) -> Tree:
    match value:
        case None:
            return Tree("none")
        case dict():
            keys = tuple(sorted(value))
            return Tree("dict", tuple(tree_of(value[key]) for key in keys), keys)
        case list():
            return Tree("list", tuple(map(tree_of, value)))
        case tuple():
            return Tree("tuple", tuple(map(tree_of, value)))
    return LEAF


@given(values)
def test_flatten_as_jax_does(value: Any) -> None:
    tree = tree_of(value)
    leaves, structure = jax.tree.flatten(value)
    assert tree.flatten(value) == leaves
    assert tree.num_leaves == structure.num_leaves
    assert tree.unflatten(leaves) == value
    assert list(tree.paths()) == [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]


@given(values)
def test_json_round_trip(value: Any) -> None:
    tree = tree_of(value)
    assert Tree.from_json(tree.to_json()) == tree


def test_custom_nodes_keep_name_and_data() -> None:
    tree = Tree("custom", (LEAF, LEAF), name="pkg.Point", auxdata=b"\0\1")
    assert Tree.from_json(tree.to_json()) == tree
    assert tree.unflatten([1, 2]) == (1, 2)


described = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["tuple", "dict", "enum", "name", "object", "fields", "int", "float", "bytes", "array"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(described)
@example({"dict": [], "int": None, "enum": None})
def test_other_keys(data: Any) -> None:
    """Whatever a key is said to be, it is one, or refused."""
    try:
        tree = Tree.from_json({"dict": [[data, "*"]]})
    except ValueError:
        return
    assert Tree.from_json(tree.to_json()) == tree
    (key,) = tree.unflatten([1])  # type: ignore[misc]
    assert tree.flatten({key: 1}) == [1]
    assert len(list(tree.paths())) == 1


@given(described, described)
@example(0, {"dict": [None]})
def test_other_static_data(entry: Any, static: Any) -> None:
    """What stagec does not write as a description is an unknown node, or one with plain containers."""
    data = json.dumps({"entries": [entry], "static": {"aux": static}}, sort_keys=True, separators=(",", ":"))
    tree = Tree("custom", (LEAF,), name="nowhere:Class", auxdata=data.encode())
    assert tree.flatten(tree.unflatten([1])) == [1]
    assert NodeTypes().of_results([tree]) == {}
    if tree.keyed is not None:
        assert isinstance(tree.keyed.difference(Keyed(tree.keyed.entries, {"aux": None}).to_bytes()), str)


@pytest.mark.parametrize(
    "data",
    [
        *("leaf", 3, {"tuple": 1}, {"dict": []}, {"tuple": [], "more": 1}, {}),
        *({"dict": [["a", "*"]]}, {"dict": [[1]]}, {"dict": [[1, "*"], [1, "*"]]}, {"dict": [[[1], "*"]]}),
    ],
)
def test_other_json(data: object) -> None:
    with pytest.raises(ValueError, match=r"^not (a tree|a key|the keys of a dict): "):
        Tree.from_json(data)


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        ({"a": 1}, "", "key 'b' is missing"),
        ({"a": 1, "b": (1,), "c": 2}, "", "unexpected key 'c'"),
        ({"a": 1, "b": (1, 2)}, "['b']", "expected 1 elements, not 2"),
        ({"a": 1, "b": [1]}, "['b']", "expected a tuple, not a list of 1"),
        ({"a": None, "b": (1,)}, "['a']", "expected an array, not None"),
        (7, "", "expected a dict, not a value of type int"),
    ],
)
def test_a_value_of_another_structure(value: object, path: str, what: str) -> None:
    with pytest.raises(TreeMismatch) as mismatch:
        tree_of({"a": 1, "b": (2,)}).flatten(value)
    assert (mismatch.value.path, mismatch.value.what) == (path, what)
