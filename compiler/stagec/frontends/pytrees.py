"""Describe the user's own pytree types, so that an artifact can hold them and a loader can do without their code.

JAX serializes tuples, lists, dicts and None; any other type needs a name and its static data as bytes
(https://docs.jax.dev/en/latest/export/export.html, register_pytree_node_serialization). Types that the user registered
keep what they were registered with. The others are described where their structure says all: namedtuples as JAX
itself does it, and classes with named fields (dataclasses, flax's and equinox's) with `trees.Fields`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util

from stagec.core.errors import Problem, StagecError
from stagec.core.node_types import name_of, serializer
from stagec.core.trees import LEAF, Fields, Tree

_NATIVE = (tuple, list, dict, type(None))


def check(file: str, key: str, trees: Mapping[str, Any]) -> None:
    """Check that every type in `trees` ("the result has" -> PyTreeDef) can be described.

    file, key: where the function is written, for messages.
    Raises StagecError with every type that cannot, and the line to add for each.
    """
    problems: dict[str, Problem] = {}
    for where, tree in trees.items():
        for node in _nodes(tree):
            kind, keys = node.node_data()
            if kind is dict and (other := [name for name in keys if not isinstance(name, str)]):
                what = f"{where} a dict with the key {other[0]!r}, and keys are stored as strings"
                problems[what] = Problem(file, key, what, f"write {str(other[0])!r}, or a list instead of the dict")
            if kind in _NATIVE:
                continue
            try:
                describe(node)
            except ValueError as error:
                what = f"{where} a {kind.__module__}.{kind.__qualname__}, which cannot be described: {error}"
                problems[what] = Problem(file, key, what, "" if serializer(kind) else _line(kind))
    if problems:
        raise StagecError(*problems.values())


def register(trees: Mapping[str, Any]) -> None:
    """Register a serialization with JAX for every type in `trees`, which `check` has passed, that has none."""
    descriptions: dict[type, dict[int, bytes]] = {}
    for tree in trees.values():
        for node in _nodes(tree):
            kind, auxdata = node.node_data()
            if kind in _NATIVE or (kind not in descriptions and serializer(kind)):
                continue
            if _is_namedtuple(kind):
                jax.export.register_namedtuple_serialization(kind, serialized_name=name_of(kind))
                continue
            if kind not in descriptions:
                descriptions[kind] = {}
                _register(kind, descriptions[kind])
            descriptions[kind][id(auxdata)] = describe(node)[1]


def describe(node: Any) -> tuple[str, bytes]:
    """Return the name and the static data of one node, of whatever type, as a `Tree` has them.

    Raises ValueError when its structure does not say all.
    """
    kind, auxdata = node.node_data()
    registered = serializer(kind)
    if registered:
        name, serialize = registered
        try:
            return name, bytes(serialize(auxdata))
        except Exception as error:  # the user's own function
            raise ValueError(f"what it was registered with raised {type(error).__name__}: {error}") from error
    if _is_namedtuple(kind):
        return name_of(kind), json.dumps(kind._fields).encode()
    return name_of(kind), _describe(node).to_bytes()


def to_tree(structure: Any) -> Tree:
    """Describe a PyTreeDef. A type that cannot be described keeps its name."""
    data = structure.node_data()
    if data is None:
        return LEAF
    kind, auxdata = data
    children = tuple(map(to_tree, structure.children()))
    if kind is type(None):
        return Tree("none")
    if kind is dict:
        return Tree("dict", children, tuple(map(str, auxdata)))
    if kind in (tuple, list):
        return Tree(kind.__name__, children)
    try:
        name, described = describe(structure)
    except ValueError:
        name, described = name_of(kind), b""
    return Tree("custom", children, (), name, described)


def _nodes(tree: Any) -> list[Any]:
    """Every inner node of a PyTreeDef, parents before children."""
    if tree.node_data() is None:
        return []
    return [tree, *(node for child in tree.children() for node in _nodes(child))]


def _register(kind: type, descriptions: Mapping[int, bytes]) -> None:
    """Register a type by its fields.

    descriptions: the static data of each of its nodes, by the identity of JAX's own auxiliary data of the node.
    """

    def build(aux_data: Any, children: Sequence[Any]) -> Any:
        return aux_data.build(kind, children)

    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=name_of(kind),
        serialize_auxdata=lambda auxdata: descriptions[id(auxdata)],
        deserialize_auxdata=Fields.from_bytes,
        from_children=build,
    )


def _describe(node: Any) -> Fields:
    """What is known of the fields of one node. Raises ValueError when they do not say all."""
    try:
        value = node.unflatten([object()] * node.num_leaves)
    except Exception as error:  # the user's own function
        raise ValueError(f"to make one of placeholders raised {type(error).__name__}: {error}") from error
    below = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda other: other is not value)[0]
    found = [getattr(steps[0], "name", getattr(steps[0], "key", None)) for steps, _ in below]
    names = tuple(name for name in found if isinstance(name, str))
    if names != tuple(found):
        raise ValueError("its children have no names")
    if isinstance(value, Mapping):
        return Fields(names)
    if not dataclasses.is_dataclass(value):
        raise ValueError("it is no dataclass")
    others = [field.name for field in dataclasses.fields(value) if field.name not in names]
    return Fields(names, {name: getattr(value, name) for name in others if hasattr(value, name)})


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _line(kind: type) -> str:
    """What to write for a type that cannot be described."""
    return (
        "register it below its class:\n"
        f"jax.export.register_pytree_node_serialization({kind.__qualname__}, serialized_name={name_of(kind)!r},\n"
        "    serialize_auxdata=..., deserialize_auxdata=...)"
    )
