"""The types of custom pytree nodes that this process has: given by the caller, registered with JAX, or imported.

The loader imports no module of a model and no JAX. Where the process has imported JAX already, what the model
registered with it takes objects apart and makes them: for serialization
(`jax.export.register_pytree_node_serialization`), or as a pytree node alone (`one_level.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from stagec.core.trees.nodes import STATIC, Fields, PyTreeNode, imported, name_of
from stagec.core.trees.tree import Maker, Makers, Taker, Takers, Tree, TreeMismatch

if TYPE_CHECKING:
    from stagec.core.trees.one_level import OneLevel, StaticLeaf

Types = Iterable[object] | Mapping[str, type | PyTreeNode]
"""What a caller gives: classes, objects whose types and static parts results get, or a type by the name of a node."""

Seen: TypeAlias = "Mapping[tuple[str, bytes], OneLevel | StaticLeaf]"
"""Objects by the name and the static data of their nodes."""


class NodeTypes:
    """The types of a process; a lookup sees what has been imported by then.

    given: None: those that the process has imported or registered. A type that is not among the given ones is
        replaced in results; in arguments JAX's registry counts as well.

    Static parts that no description can make (functions with closures, as in flax's `TrainState`) a result has from
    an object with the same description: an argument of this call or of an earlier one, or a given object.
    """

    def __init__(self, given: Types | None = None) -> None:
        self._all = given is None
        self._seen: dict[tuple[str, bytes], OneLevel | StaticLeaf] = {}
        self._used: Seen = {}
        self._made: dict[tuple[str, bytes], OneLevel | None] = {}
        self._given: dict[str, type | PyTreeNode] = {}
        if isinstance(given, Mapping):
            self._given.update(given)
        else:
            kinds = [
                kind
                for kind_or_names in given or ()
                for kind in ([kind_or_names] if isinstance(kind_or_names, type) else self._learn(kind_or_names))
            ]
            self._given.update({name_of(kind): kind for kind in kinds})

    def of_arguments(self, nodes: Iterable[Tree]) -> Takers:
        """Return the functions that take objects apart, by the name of the node; classes with `Fields` need none."""
        takers: dict[str, Taker] = {}
        for node in nodes:
            kind = self._given.get(node.name)
            known = kind if isinstance(kind, PyTreeNode) else registered(node.name)
            if node.name == STATIC:
                takers[STATIC] = self._of_leaf
            elif known is not None:
                takers[node.name] = _of_type(known)
            elif node.keyed is not None:
                takers[node.name] = self._of_name(node.name, object)
            elif node.fields is not None and not node.fields.static:
                # A mapping may return another object for a key than its child: nnx.State wraps dicts.
                takers[node.name] = self._of_name(node.name, Mapping)
        return takers

    def of_results(self, nodes: Iterable[Tree]) -> Makers:
        """Return the functions that make objects, by name and static data; other nodes become plain containers."""
        makers = ((node, self._maker(node)) for node in nodes)
        return {(node.name, node.auxdata): make for node, make in makers if make is not None}

    def seen(self, nodes: Iterable[Tree]) -> Seen:
        """Return the objects that these nodes of the last arguments were, for `use` in another call with their like."""
        which = ((node.name, node.auxdata) for node in nodes)
        return {key: self._seen[key] for key in which if key in self._seen}

    def use(self, seen: Seen) -> None:
        """Give results the static parts of these objects from now on."""
        if seen is not self._used:
            self._seen.update(seen)
            self._used = seen

    def _of_leaf(self, value: Any) -> tuple[Sequence[Any], bytes] | None:
        if value is None or (isinstance(value, dict) and not value):
            return None  # what plain containers have there
        from stagec.core.trees.one_level import StaticLeaf

        try:
            auxdata = StaticLeaf(value).describe()
        except ValueError as error:
            raise TreeMismatch("", str(error)) from error
        self._seen[STATIC, auxdata], self._used = StaticLeaf(value), {}
        return (), auxdata

    def _of_name(self, name: str, base: type) -> Taker:
        def take(value: Any) -> tuple[Sequence[Any], bytes] | None:
            from stagec.core.trees.one_level import OneLevel

            level = OneLevel.flatten(value) if isinstance(value, base) and name_of(type(value)) == name else None
            if level is None:
                return None
            try:
                auxdata = level.describe()
            except ValueError as error:
                raise TreeMismatch("", f"{type(value).__qualname__}: {error}") from error
            self._seen[name, auxdata], self._used = level, {}
            return level.children, auxdata

        return take

    def _learn(self, example: object) -> Iterator[type]:
        """Yield the types of the nodes of an object, and remember their static parts."""
        from stagec.core.trees.one_level import OneLevel

        level = OneLevel.flatten(example)
        if level is None:
            if not hasattr(example, "dtype"):
                with contextlib.suppress(ValueError):
                    self._of_leaf(example)
            return
        if level.kind not in (dict, list, tuple, type(None)):
            self._seen[name_of(level.kind), level.describe()] = level
            yield level.kind
        for child in level.children:
            yield from self._learn(child)

    def _maker_of_leaf(self, node: Tree) -> Maker | None:
        from stagec.core.trees.one_level import StaticLeaf

        if not self._all and not self._given:
            return None
        leaf = self._seen.get((node.name, node.auxdata)) or StaticLeaf.from_auxdata(node.auxdata)
        return None if leaf is None else leaf.make

    def _maker(self, node: Tree) -> Maker | None:
        if node.name == STATIC:
            return self._maker_of_leaf(node)
        if any(self._maker(leaf) is None for leaf in _static_leaves(node)):
            return None
        kind, which = self._kind(node.name), (node.name, node.auxdata)
        if isinstance(kind, PyTreeNode):
            return functools.partial(kind.unflatten_func, node.auxdata)
        fields = node.fields
        if isinstance(kind, type) and fields is not None and fields.fit(kind):
            return functools.partial(fields.build, kind)
        if which in self._seen and (self._all or isinstance(kind, type)):
            return self._seen[which].make
        if not isinstance(kind, type):
            return None
        if which not in self._made:
            self._made[which] = _described(kind, node)
        level = self._made[which]
        return None if level is None else level.make

    def _kind(self, name: str) -> Any:
        known = registered(name)
        if self._all:
            return known or imported(name)
        if known is not None and any(kind is known.nodetype for kind in self._given.values()):
            return known
        return self._given.get(name)


def _static_leaves(node: Tree) -> Iterator[Tree]:
    """Yield the placeholders in a node for leaves that are not arrays, down to the next node of a model's type."""
    for child in node.children:
        if child.name == STATIC:
            yield child
        elif child.kind != "custom":
            yield from _static_leaves(child)


def _of_type(node: PyTreeNode) -> Taker:
    def take(value: Any) -> tuple[Sequence[Any], bytes] | None:
        if type(value) is not node.nodetype:
            return None
        children, auxdata = node.flatten_func(value)
        return list(children), auxdata

    return take


def _described(kind: type, node: Tree) -> OneLevel | None:
    """Return a maker of objects of `kind`, with the static parts of a node; None if the node says too little.

    It has made one of placeholders, and its description is that of the node.
    """
    from stagec.core.trees import statics
    from stagec.core.trees.one_level import PLACEHOLDERS, OneLevel

    fields, keyed = node.fields, node.keyed
    for placeholder in PLACEHOLDERS:
        children = [placeholder() for _ in node.children]
        with contextlib.suppress(Exception):  # code of other people
            if keyed is not None and "fields" in keyed.static and keyed.keys is not None:
                static = {name: statics.rebuild(described) for name, described in keyed.static["fields"].items()}
                level = OneLevel.flatten(Fields(keyed.keys, static).build(kind, children))
            else:
                auxdata = statics.rebuild(keyed.static["aux"]) if keyed else fields and fields.names
                level = OneLevel.flatten(OneLevel(kind, auxdata, children, None, None).make(children))
            if level is not None and level.describe() == node.auxdata:
                return level
    return None


OWN: dict[str, PyTreeNode] = {}
"""The types that this process has registered with `stagec_arrays.register_pytree_node`, by name."""


def registered(name: str) -> PyTreeNode | None:
    """Return the type registered under `name` with stagec, or with JAX for serialization, in this process; else None.

    A type that stagec itself registered, by its fields, is not among them.
    """
    match _registry("deserialization_registry").get(name):
        case (type() as kind, deserialize, from_children) if functions := serializer(kind):
            return _through_jax(kind, functions[1], deserialize, from_children)
    return OWN.get(name)


def serializer(kind: type) -> tuple[str, Callable[[Any], bytes]] | None:
    """Return the name of a type that the user registered with JAX for serialization, and its serializer.

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
    # JAX has no public interface to its registry. If this finds none, nothing is registered.
    entries = getattr(sys.modules.get("jax._src.export._export"), name, None)
    return entries if isinstance(entries, dict) else {}


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
        # JAX takes only the structure from the result of `from_children`.
        parts, structure = _structure(from_children(deserialize(auxdata), children))
        if len(parts) != len(children):
            has = f"{len(parts)} {'child' if len(parts) == 1 else 'children'}"
            what = f"{kind.__qualname__} has {has} here, it had {len(children)} when the function was built"
            raise TreeMismatch("", what)
        return structure.unflatten(children)

    return PyTreeNode(kind, flatten, unflatten)


def _structure(value: object) -> tuple[list[Any], Any]:
    children = children_by_jax(value)
    if children is None:
        raise TreeMismatch("", f"{type(value).__qualname__} is not a pytree node for JAX here: register it")
    return children
