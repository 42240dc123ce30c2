"""Pytrees of arguments and results: jaxlib's registry of nodes, or JAX's if the process has imported JAX."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxlib import _jax

from stagec.core.trees import node_types, statics
from stagec.core.trees.keyed import Keyed, key_of
from stagec.core.trees.node_types import serializer
from stagec.core.trees.nodes import Fields, PyTreeNode, name_of
from stagec.core.trees.one_level import OneLevel
from stagec.core.trees.tree import Tree, of_structure

PyTreeDef = _jax.pytree.PyTreeDef
T = TypeVar("T")


@functools.cache
def registry() -> Any:
    """Return the registry: tuples, lists, dicts, None, namedtuples, and types registered with JAX."""
    return _jax.pytree.default_registry()


_REGISTERED: dict[type, tuple[Sequence[str], Sequence[str]] | None] = {}
"""Classes that were registered here; of those with fields the names of the children and of the static ones."""


def register_dataclass(
    nodetype: type[T], data_fields: Sequence[str] | None = None, meta_fields: Sequence[str] | None = None
) -> type[T]:
    """Make a class with fields a pytree node, and return it.

    As `jax.tree_util.register_dataclass`, also as a decorator.

    data_fields: the fields with arrays, or trees of them. None means those of a dataclass that are not static
        (`field(metadata={"static": True})`).
    meta_fields: the static fields. Their values need a hash, and are stored in the artifact.

    If the process has imported JAX, the class is registered with JAX too. Raises ValueError for a class that is
    registered, and TypeError for a class that is not a dataclass, if you leave out the fields.

    >>> from dataclasses import dataclass
    >>> @stagec_arrays.register_dataclass
    ... @dataclass
    ... class Scaled:
    ...     w: object
    >>> stagec_arrays.grad(lambda params: params.w * 3)(Scaled(2.0))
    Scaled(w=Array(3., dtype=float32))
    """
    if data_fields is None or meta_fields is None:
        if not dataclasses.is_dataclass(nodetype):
            raise TypeError(f"{name_of(nodetype)} is not a dataclass: give data_fields and meta_fields")
        fields = [field for field in dataclasses.fields(nodetype) if field.init]
        meta_fields = [field.name for field in fields if field.metadata.get("static", False)]
        data_fields = [field.name for field in fields if field.name not in meta_fields]
    if jax := sys.modules.get("jax"):
        jax.tree_util.register_dataclass(nodetype, list(data_fields), list(meta_fields))
    else:
        registry().register_dataclass_node(nodetype, list(data_fields), list(meta_fields))
    _REGISTERED[nodetype] = tuple(data_fields), tuple(meta_fields)
    return nodetype


def register_pytree_node(
    nodetype: type[T],
    flatten_func: Callable[[T], tuple[Sequence[Any], Any]],
    unflatten_func: Callable[[Any, Sequence[Any]], T],
) -> None:
    """Make a class a pytree node. As `jax.tree_util.register_pytree_node`.

    flatten_func: takes an object, and returns its children and its static data, which needs a hash.
    unflatten_func: takes static data and children, and returns an object.

    If the process has imported JAX, the class is registered with JAX too. Raises ValueError for a class that is
    registered.

    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> flatten, unflatten = lambda pair: ((pair.a, pair.b), None), lambda _, children: Pair(*children)
    >>> stagec_arrays.register_pytree_node(Pair, flatten, unflatten)
    >>> float(stagec_arrays.grad(lambda pair: pair.a * pair.b)(Pair(2.0, 3.0)).a)
    3.0
    """
    if jax := sys.modules.get("jax"):
        jax.tree_util.register_pytree_node(nodetype, flatten_func, unflatten_func)
    else:
        registry().register_node(nodetype, flatten_func, unflatten_func)
    _REGISTERED[nodetype] = None

    def take(value: T) -> tuple[Sequence[Any], bytes]:
        children, auxdata = flatten_func(value)
        return children, _describe_own(None, auxdata)

    def make(described: bytes, children: Sequence[Any]) -> T:
        keyed = Keyed.from_bytes(described)
        return unflatten_func(statics.rebuild(keyed.static["aux"]) if keyed else None, children)

    node_types.OWN[name_of(nodetype)] = PyTreeNode(nodetype, take, make)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure."""
    leaves, structure = registry().flatten(tree)
    return list(leaves), structure


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with `function` of each leaf."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(function, leaves))


def spread(prefix: Any, structure: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Return for each leaf of a structure what a tree, a prefix of it, has there or above.

    is_leaf: of the prefix. Raises ValueError if it is not a prefix.
    """
    given, own = registry().flatten(prefix, is_leaf)
    try:
        below = own.flatten_up_to(structure.unflatten(range(structure.num_leaves)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a tree that says something of arrays has other parts than they have: {error}") from None
    pairs = zip(given, below, strict=True)
    return [value for value, part in pairs for _ in registry().flatten(part)[0]]


def to_tree(structure: Any) -> Tree:
    """Return a structure as artifacts write it (`core.trees.tree`). Raises ValueError for nodes without description."""
    return of_structure(structure, _describe, key_of)


def _describe(node: Any) -> tuple[str, bytes]:
    kind, auxdata = node.node_data()
    if registered := serializer(kind):
        return registered[0], bytes(registered[1](auxdata))
    if kind in _REGISTERED:
        return name_of(kind), _describe_own(_REGISTERED[kind], auxdata)
    if hasattr(kind, "_fields") and issubclass(kind, tuple):
        return name_of(kind), json.dumps(kind._fields).encode()  # as JAX's `register_namedtuple_serialization` does
    level = OneLevel.flatten(node.unflatten([object() for _ in range(node.num_leaves)]))
    if level is None:
        raise ValueError(f"{name_of(kind)} has no description")
    return name_of(kind), level.describe()


def _describe_own(fields: tuple[Sequence[str], Sequence[str]] | None, auxdata: Any) -> bytes:
    if fields is None:
        return Keyed(None, {"aux": statics.describe(auxdata)}).to_bytes()
    static = dict(zip(fields[1], auxdata, strict=True))
    try:
        return Fields(tuple(fields[0]), static).to_bytes()
    except ValueError:  # values that JSON does not have
        described = {name: statics.describe(value, name) for name, value in static.items()}
        return Keyed(tuple(fields[0]), {"fields": described}).to_bytes()
