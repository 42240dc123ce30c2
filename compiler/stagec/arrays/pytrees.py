"""Pytrees of arguments and results: jaxlib's registry of nodes, which is JAX's where the process has imported JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib import _jax

from stagec.core.keyed import key_of
from stagec.core.node_types import serializer
from stagec.core.nodes import Fields, name_of
from stagec.core.one_level import OneLevel
from stagec.core.trees import Tree, of_structure

PyTreeDef = _jax.pytree.PyTreeDef


@functools.cache
def registry() -> Any:
    """Return the registry: tuples, lists, dicts, None, namedtuples, and what was registered with JAX."""
    return _jax.pytree.default_registry()


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure."""
    leaves, structure = registry().flatten(tree)
    return list(leaves), structure


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with `function` of each leaf."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(function, leaves))


def to_tree(structure: Any) -> Tree:
    """Return a structure as artifacts have it (`core.trees`). Raises ValueError for a node that has no description."""
    return of_structure(structure, _describe, key_of)


def _describe(node: Any) -> tuple[str, bytes]:
    kind, auxdata = node.node_data()
    if registered := serializer(kind):
        return registered[0], bytes(registered[1](auxdata))
    if hasattr(kind, "_fields") and issubclass(kind, tuple):
        return name_of(kind), Fields(kind._fields).to_bytes()
    level = OneLevel.of(node.unflatten([object() for _ in range(node.num_leaves)]))
    if level is None:
        raise ValueError(f"{name_of(kind)} has no description")
    return name_of(kind), level.describe()


def names(structure: Any, parameters: Sequence[str]) -> list[str]:
    """Return the name of each leaf of `(args, kwargs)`, as a caller writes it: `params['w']`."""
    found = []
    for path in to_tree(structure).paths():
        where, _, rest = path[1:].partition("]")
        first, _, below = rest[1:].partition("]")
        if where == "1":
            found.append(first.strip("'") + below)
        else:
            number = int(first)
            named = number < len(parameters) and not parameters[number].startswith("*")
            found.append((parameters[number] if named else f"args[{number}]") + below)
    return found
