"""The types of custom pytree nodes that this process has: given by the caller, registered with JAX, or imported.

The loader imports no module of a model and no JAX. Where the process has imported JAX already, what the model
registered with it (`jax.export.register_pytree_node_serialization`) takes objects apart and makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stagec.core.trees import Fields, PyTreeNode, Tree, TreeMismatch

Types = Iterable[type] | Mapping[str, type | PyTreeNode]
"""What a caller gives: classes, or what stands for a node of a name."""


class NodeTypes:
    """The types of a process; a lookup sees what has been imported by then.

    given: None: those that the process has imported or registered. A type that is not among the given ones is
        replaced in results; in arguments JAX's registry counts as well.
    """

    def __init__(self, given: Types | None = None) -> None:
        self._all = given is None
        if not isinstance(given, Mapping):
            given = {name_of(kind): kind for kind in given or ()}
        self._given: Mapping[str, type | PyTreeNode] = dict(given)

    def of_arguments(self, nodes: Iterable[Tree]) -> Mapping[str, type | PyTreeNode]:
        """Return what takes objects apart, by the name of the node; the fields of a class need none."""
        found = {}
        for node in nodes:
            kind = self._given.get(node.name)
            known = kind if isinstance(kind, PyTreeNode) else registered(node.name)
            if known is not None:
                found[node.name] = known
        return found

    def of_results(self, nodes: Iterable[Tree]) -> Mapping[str, type | PyTreeNode]:
        """Return what makes objects, by the name of the node; a node without one becomes a plain container."""
        found = {}
        for node in nodes:
            kind = self._kind(node.name)
            fits = isinstance(kind, type) and node.fields is not None and node.fields.fit(kind)
            if isinstance(kind, PyTreeNode) or fits:
                found[node.name] = kind
        return found

    def _kind(self, name: str) -> Any:
        known = registered(name)
        if self._all:
            return known or _imported(name)
        if known is not None and any(kind is known.nodetype for kind in self._given.values()):
            return known
        return self._given.get(name)


def name_of(kind: type) -> str:
    """Return the name under which stagec describes a type that has no other."""
    return f"{kind.__module__}:{kind.__qualname__}"


def registered(name: str) -> PyTreeNode | None:
    """Return what this process has registered with JAX for serialization under `name`; None without JAX.

    A type that stagec itself registered, by its fields, is not among them.
    """
    match _registry("deserialization_registry").get(name):
        case (type() as kind, deserialize, from_children) if found := serializer(kind):
            return _through_jax(kind, found[1], deserialize, from_children)
    return None


def serializer(kind: type) -> tuple[str, Callable[[Any], bytes]] | None:
    """Return the name of a type that the user registered with JAX for serialization, and what writes its static data.

    None for the others, and without JAX.
    """
    match _registry("serialization_registry").get(kind):
        case (str() as name, serialize) if callable(serialize):
            match _registry("deserialization_registry").get(name):
                case (_, deserialize, _) if deserialize is not Fields.from_bytes:
                    return name, serialize
    return None


def children_by_jax(value: object) -> tuple[list[Any], Any] | None:
    """Return the children of an object and JAX's PyTreeDef above them; None without JAX, and for a leaf."""
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "tree_util"):
        return None
    children, structure = jax.tree_util.tree_flatten(value, is_leaf=lambda other: other is not value)
    return None if structure.node_data() is None else (children, structure)


def _registry(name: str) -> Mapping[Any, Any]:
    # No public interface of JAX says what is registered. Where it is not found, there is nothing registered for us.
    found = getattr(sys.modules.get("jax._src.export._export"), name, None)
    return found if isinstance(found, dict) else {}


def _through_jax(
    kind: type,
    serialize: Callable[[Any], bytes],
    deserialize: Callable[[bytes], Any],
    from_children: Callable[..., Any],
) -> PyTreeNode:
    def flatten(value: object) -> tuple[Sequence[Any], bytes]:
        children, structure = _structure(value)
        return children, bytes(serialize(structure.node_data()[1]))

    def unflatten(auxdata: bytes, children: Sequence[Any]) -> object:
        # JAX takes no more than the structure from what `from_children` returns.
        found, structure = _structure(from_children(deserialize(auxdata), children))
        if len(found) != len(children):
            has = f"{len(found)} {'child' if len(found) == 1 else 'children'}"
            what = f"{kind.__qualname__} has {has} here, it had {len(children)} when the function was built"
            raise TreeMismatch("", what)
        return structure.unflatten(children)

    return PyTreeNode(kind, flatten, unflatten)


def _structure(value: object) -> tuple[list[Any], Any]:
    found = children_by_jax(value)
    if found is None:
        raise TreeMismatch("", f"{type(value).__qualname__} is no pytree node for JAX here: register it")
    return found


def _imported(name: str) -> object:
    """Return what `module:class` or `module.class` names where the module is imported already, else None."""
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    value: object = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
