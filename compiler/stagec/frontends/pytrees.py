"""Describe the user's own pytree types, so that an artifact can hold them and a loader can do without their code.

JAX serializes tuples, lists, dicts and None; any other type needs a name and its static data as bytes
(https://docs.jax.dev/en/latest/export/export.html, register_pytree_node_serialization). Types that the user registered
keep what they were registered with. The others are registered here where their structure says all: namedtuples as JAX
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

from stagec.errors import Problem, StagecError
from stagec.specs import FunctionSpec
from stagec.trees import Fields

_NATIVE = (tuple, list, dict, type(None))


def register(spec: FunctionSpec, trees: Mapping[str, Any]) -> None:
    """Register a serialization for every type in `trees` (what it is of -> PyTreeDef) that has none.

    Raises StagecError with every type that cannot be described, and the line to add for each.
    """
    problems: dict[str, Problem] = {}
    descriptions: dict[type, dict[int, bytes]] = {}
    for where, tree in trees.items():
        for node in _nodes(tree):
            kind, auxdata = node.node_data()
            if kind not in _NATIVE and kind not in descriptions:
                described: dict[int, bytes] = {}
                if not _register(kind, described):
                    continue  # by the user
                descriptions[kind] = described
            if kind in descriptions and not _is_namedtuple(kind):
                try:
                    descriptions[kind][id(auxdata)] = _describe(node).to_bytes()
                except ValueError as error:
                    what = f"{where} has a {kind.__module__}.{kind.__qualname__}, which cannot be described: {error}"
                    problems[what] = Problem(spec.manifest, spec.key, what, _line(kind))
    if problems:
        raise StagecError(*problems.values())


def describe(node: Any) -> bytes:
    """Return the static data of one node, of whatever type, as a `Tree` has it; empty where it cannot be described."""
    kind = node.node_data()[0]
    if _is_namedtuple(kind):
        return json.dumps(kind._fields).encode()
    try:
        return _describe(node).to_bytes()
    except ValueError:
        return b""


def _nodes(tree: Any) -> list[Any]:
    """Every inner node of a PyTreeDef, parents before children."""
    if tree.node_data() is None:
        return []
    return [tree, *(node for child in tree.children() for node in _nodes(child))]


def _register(kind: type, descriptions: Mapping[int, bytes]) -> bool:
    """Register `kind` for serialization; return False when it is already.

    descriptions: the static data of each of its nodes, by the identity of JAX's own auxiliary data of the node.
    """

    def build(aux_data: Any, children: Sequence[Any]) -> Any:
        return aux_data.build(kind, children)

    try:
        if _is_namedtuple(kind):
            jax.export.register_namedtuple_serialization(kind, serialized_name=_name(kind))
        else:
            jax.export.register_pytree_node_serialization(
                kind,
                serialized_name=_name(kind),
                serialize_auxdata=lambda auxdata: descriptions[id(auxdata)],
                deserialize_auxdata=Fields.from_bytes,
                from_children=build,
            )
    except ValueError as error:
        if "for type" in str(error):
            return False
        raise
    return True


def _describe(node: Any) -> Fields:
    """What is known of the fields of one node. Raises ValueError when they do not say all."""
    value = node.unflatten([object()] * node.num_leaves)
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


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _line(kind: type) -> str:
    """What to write for a type that cannot be described."""
    return (
        "register it below its class:\n"
        f"jax.export.register_pytree_node_serialization({kind.__qualname__}, serialized_name={_name(kind)!r},\n"
        "    serialize_auxdata=..., deserialize_auxdata=...)"
    )
