"""Describe the types of pytree nodes, so that an artifact can hold them and a loader can do without their code.

JAX serializes tuples, lists, dicts with strings as keys, and None; any other type needs a name and its static data as
bytes (https://docs.jax.dev/en/latest/export/export.html, register_pytree_node_serialization). Types that the user
registered so keep their registration. JAX's knowledge of every node describes the others: namedtuples as JAX itself
does it, and the rest as `core/trees/one_level.py` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util

from stagec.core.messages.errors import Problem, StagecError
from stagec.core.sizes.avals import Aval
from stagec.core.trees.keyed import key_of, with_keys
from stagec.core.trees.node_types import serializer
from stagec.core.trees.nodes import STATIC, Fields, name_of
from stagec.core.trees.one_level import PLACEHOLDERS, OneLevel, StaticLeaf
from stagec.core.trees.tree import DEEPEST, Tree, is_too_deep, of_structure
from stagec.frontends.common import user_code
from stagec.stages.exported import Exported

CHECKS = (
    "an error of checkify has messages and call stacks of the process that traced it:\n"
    "return what it checks as a result instead, such as x.sum() > 0 or jnp.isfinite(x).all()"
)
_NATIVE = (tuple, list, dict, type(None))


def check(file: str, key: str, trees: Mapping[str, Any]) -> None:
    """Check that every type in `trees` ("the result has" -> PyTreeDef) can be described.

    file, key: where the function is, for messages.
    Raises StagecError with every other type, its owner, and the lines to write for each.
    """
    problems: dict[str, Problem] = {}
    for where, tree in trees.items():
        if is_too_deep(tree):
            what = f"{where} containers that are nested deeper than {DEEPEST} levels"
            problems[what] = Problem(file, key, what, "write one list or dict for several levels")
            continue
        for node in _nodes(tree):
            kind, auxdata = node.node_data()
            try:
                if kind is dict:
                    what = f"{where} a dict with a key that"
                    tuple(map(key_of, auxdata))
                elif kind is StaticLeaf:
                    what = f"{where} an object with a field that is not an array ({auxdata!r}), which"
                    describe(node)
                elif kind not in _NATIVE:
                    owner = "your class" if _is_users(kind) else f"a class of {kind.__module__.partition('.')[0]}"
                    what = f"{where} a {kind.__module__}.{kind.__qualname__} ({owner}), which"
                    describe(node)
            except ValueError as error:
                what = f"{what} cannot be described: {error}"
                problems[what] = Problem(file, key, what, _advice(kind))
    if problems:
        raise StagecError(*problems.values())


def serialize(exported: jax.export.Exported, vjp_order: int) -> bytes:
    """Return the bytes of JAX's `Exported`, whatever types are in its trees; `check` has passed them.

    vjp_order: the orders of its vector-Jacobian product to include. Raises JAX's error if it cannot.
    """
    trees = {name: _serializable(getattr(exported, name)) for name in ("in_tree", "out_tree")}
    return bytes(_without_open_shardings(dataclasses.replace(exported, **trees)).serialize(vjp_order=vjp_order))


def _without_open_shardings(exported: jax.export.Exported) -> jax.export.Exported:
    """Return a form that JAX can write: over Explicit and Auto axes, some shardings leave dimensions to XLA.

    Its format has none for those. Without a sharding XLA decides, and the module says what the function does.
    """

    def closed(shardings: Any) -> Any:
        def is_open(sharding: Any) -> bool:
            spec = getattr(sharding, "spec", None)
            # JAX refuses to iterate over a spec with axes that are not reduced yet.
            sizes = () if spec is None else [spec[i] for i in range(len(spec))]
            return any(axes is jax.sharding.PartitionSpec.UNCONSTRAINED for axes in sizes)

        return tuple(None if is_open(sharding) else sharding for sharding in shardings)

    names = ("_in_named_shardings", "_out_named_shardings")
    return dataclasses.replace(exported, **{name: closed(getattr(exported, name)) for name in names})


def ours(exported: jax.export.Exported) -> Exported:
    """Return JAX's `Exported` as ours, without its vector-Jacobian product."""
    # The flat form serializes all types in the trees, registered or not.
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )
    read = Exported.deserialize(_without_open_shardings(flat).serialize())
    return dataclasses.replace(
        read,
        in_tree=to_tree(exported.in_tree),
        in_avals=_weak(read.in_avals, exported.in_avals),
        out_tree=to_tree(exported.out_tree),
        out_avals=_weak(read.out_avals, exported.out_avals),
    )


def _weak(avals: Sequence[Aval], theirs: Sequence[Any]) -> tuple[Aval, ...]:
    """Return avals with JAX's weak types: no file has them."""
    pairs = zip(avals, theirs, strict=True)
    return tuple(Aval(aval.dtype, aval.shape, getattr(theirs, "weak_type", False)) for aval, theirs in pairs)


def describe(node: Any) -> tuple[str, bytes]:
    """Return the name and the static data of one node, of whatever type, as a `Tree` has them.

    Raises ValueError, which says what in it has no stable description.
    """
    kind, auxdata = node.node_data()
    if kind is StaticLeaf:
        return STATIC, StaticLeaf(auxdata).describe()
    registered = serializer(kind)
    if registered:
        name, serialize = registered
        try:
            return name, bytes(serialize(auxdata))
        except Exception as error:  # the user's own function
            raise ValueError(f"what it was registered with raised {type(error).__name__}: {error}") from error
    return name_of(kind), _taken_apart(node).describe()


def to_tree(structure: Any) -> Tree:
    """Describe a PyTreeDef. A type that cannot be described keeps its name."""

    def described(node: Any) -> tuple[str, bytes]:
        try:
            return describe(node)
        except ValueError:
            return name_of(node.node_data()[0]), b""

    return of_structure(structure, described, _key)


def _serializable(structure: Any) -> Any:
    """Return a PyTreeDef that JAX writes as `to_tree` describes `structure`: with nodes that stand in for others."""
    data = structure.node_data()
    if data is None:
        return structure
    kind, auxdata = data
    children = list(map(_serializable, structure.children()))
    if kind is dict and any(type(key) is not str for key in auxdata):
        kind, auxdata = _stand_in(name_of(dict)), with_keys(tuple(map(key_of, auxdata))).to_bytes()
    elif kind not in _NATIVE and not serializer(kind):
        name, auxdata = describe(structure)
        kind = _stand_in(name)
    return structure.from_node_data_and_children(jax.tree_util.default_registry, (kind, auxdata), children)


@functools.cache
def _stand_in(name: str) -> type:
    """Return a type of nodes that JAX writes under this name, with their auxiliary data, which is bytes."""
    # One for each name in a process: JAX refuses a second type that is serialized under it.
    kind = type("StandIn", (), {})
    jax.tree_util.register_pytree_node(kind, lambda _: ((), b""), lambda *_: kind())
    jax.export.register_pytree_node_serialization(
        kind, serialized_name=name, serialize_auxdata=bytes, deserialize_auxdata=Fields.from_bytes
    )
    return kind


def _key(value: Any) -> Any:
    try:
        return key_of(value)
    except ValueError:
        return str(value)


def _nodes(tree: Any) -> list[Any]:
    """Every inner node of a PyTreeDef, parents before children; of checkify's errors only themselves."""
    if tree.node_data() is None:
        return []
    children = [] if _is_of_checkify(tree.node_data()[0]) else tree.children()
    return [tree, *(node for child in children for node in _nodes(child))]


def _taken_apart(node: Any) -> OneLevel:
    """Return a node of a PyTreeDef like its object with placeholders; without key entries if no object can be made."""
    kind, auxdata = node.node_data()
    for placeholder in PLACEHOLDERS:
        with contextlib.suppress(Exception):  # the user's own function
            level = OneLevel.flatten(node.unflatten([placeholder() for _ in range(node.num_leaves)]))
            if level is not None and len(level.children) == len(node.children()):
                return level._replace(auxdata=auxdata)
    return OneLevel(kind, auxdata, node.children(), None, None)


def _is_users(kind: type) -> bool:
    """Whether a class is in the user's own code, and not in an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and user_code.is_users(file))


def _is_of_checkify(kind: type) -> bool:
    return (kind.__module__.rpartition(".")[2], kind.__qualname__) == ("checkify", "Error")


def _advice(kind: type) -> str:
    """The advice for a type that cannot be described."""
    if _is_of_checkify(kind):
        return CHECKS
    if kind is dict:
        return "use numbers, strings, members of enums, dataclasses, or tuples of these as keys"
    if kind is StaticLeaf:
        return "write a function of a module, or keep what it says in the function"
    if serializer(kind):
        return ""
    line = (
        f"jax.export.register_pytree_node_serialization({kind.__qualname__}, serialized_name={name_of(kind)!r},\n"
        "    serialize_auxdata=..., deserialize_auxdata=...)"
    )
    if _is_users(kind):
        return f"register it below its class:\n{line}"
    return f"register it in the module of your function:\nfrom {kind.__module__} import {kind.__qualname__}\n{line}"
