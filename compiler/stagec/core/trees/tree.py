"""Pytree structures as data: described in JSON, flattened and rebuilt without JAX.

The node kinds and the order of leaves are JAX's (https://docs.jax.dev/en/latest/pytrees.html): dictionaries by sorted
key, None has no leaves, everything that is not a known container is a leaf. Standard library only.

A node of the model's own type is "custom". Where its fields are known (`Fields`) it stands for a dict of them, or for
an object of the type itself, which needs no import here: a caller who has one has its class. Where the key entries of
its children are known (`Keyed`) it stands for a dict of these, or a list. Where nothing is, it stands for a tuple of
its children. Callers give the functions that take objects of a type apart and make them (`node_types.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from stagec.core.trees.nodes import STATIC, Fields
from stagec.core.trees.same import same

if TYPE_CHECKING:
    from stagec.core.trees.keyed import Key, Keyed

Kind = Literal["leaf", "none", "tuple", "list", "dict", "custom"]


DEEPEST = 100
"""Levels of a tree in an artifact: readers take it apart by recursion."""


class TreeMismatch(ValueError):
    """A value has the wrong structure: `path` is where, `what` the fault."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.what = what


Taker: TypeAlias = Callable[[Any], tuple[Sequence[Any], bytes] | None]
"""Takes an object of a custom node apart: children and static data; None for another object."""
Takers: TypeAlias = Mapping[str, Taker]
"""By the name of a custom node."""
Maker: TypeAlias = Callable[[Sequence[Any]], Any]
"""Makes an object of a custom node with these children."""
Makers: TypeAlias = Mapping[tuple[str, bytes], Maker]
"""By name and static data of a custom node."""


class Tree(NamedTuple):
    """The structure of a pytree, without its leaves.

    kind: the kind of the node.
    children: the subtrees, in the order in which JAX flattens them.
    keys: of a dict, the key of each child in JAX's order: strings, or other keys (`keyed.Key`); empty otherwise.
    name: of a custom node, the name it was registered under for serialization (`module:class` where stagec describes
        it); empty otherwise.
    auxdata: of a custom node, its serialized static data; empty otherwise.
    """

    kind: Kind
    children: tuple[Tree, ...] = ()
    keys: tuple[Key, ...] = ()
    name: str = ""
    auxdata: bytes = b""

    @property
    def num_leaves(self) -> int:
        """How many leaves a value of this structure has."""
        return 1 if self.kind == "leaf" else sum(child.num_leaves for child in self.children)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Yield the path of each leaf in flattening order, written as Python writes it: `[0]['w']`."""
        if self.kind == "leaf":
            yield prefix
        for step, child in zip(self._steps(), self.children, strict=True):
            yield from child.paths(prefix + step)

    def flatten(self, value: object, path: str = "", types: Takers | None = None) -> list[Any]:
        """Return the leaves of `value`, which must have this structure.

        types: the functions that take objects of custom nodes apart; a class with `Fields` needs none.
        Raises TreeMismatch with the path of the first difference, for example
        `params: key 'b' is missing`.
        """
        leaves: list[Any] = []
        self._flatten(value, path, leaves, types or {})
        return leaves

    @property
    def fields(self) -> Fields | None:
        """For a custom node, its known fields; None if none are known."""
        fields = _read_fields(self.auxdata) if self.kind == "custom" else None
        return fields if fields is not None and len(fields.names) == len(self.children) else None

    @property
    def keyed(self) -> Keyed | None:
        """For a custom node, its children's key entries and its static parts, if known; None for others."""
        if self.kind != "custom" or not self.auxdata.startswith(_KEYED):
            return None
        keyed = _read_keyed(self.auxdata)
        known = keyed is not None and (keyed.entries is None or len(keyed.entries) == len(self.children))
        return keyed if known else None

    @property
    def is_static(self) -> bool:
        """Whether it is a custom node that holds no array: a static part of the node that it is in."""
        return self.kind == "custom" and not self._has_leaf()

    def _has_leaf(self) -> bool:
        return self.kind == "leaf" or any(child._has_leaf() for child in self.children)

    def custom_nodes(self) -> Iterator[Tree]:
        """Yield every custom node of the tree."""
        if self.kind == "custom":
            yield self
        for child in self.children:
            yield from child.custom_nodes()

    def unflatten(self, leaves: Sequence[object], types: Makers | None = None) -> object:
        """Build the value of this structure that has `leaves`.

        types: the functions that make the objects of custom nodes. Another custom node becomes a dict of its fields or
            key entries, a list where these are indices, or a tuple where they are not known. Of a node with key
            entries, children that hold no array are left out.
        Raises ValueError when the number of leaves is another.
        """
        if len(leaves) != self.num_leaves:
            raise ValueError(f"{len(leaves)} leaves for a tree of {self.num_leaves}")
        return self._unflatten(iter(leaves), types or {})

    def to_json(self) -> object:
        """Return the JSON form: "*" a leaf, null None, a list a list, objects with one telling key for the rest."""
        children = [child.to_json() for child in self.children]
        match self.kind:
            case "leaf":
                return "*"
            case "none":
                return None
            case "list":
                return children
            case "tuple":
                return {"tuple": children}
            case "dict" if all(type(key) is str for key in self.keys):
                return {"dict": dict(zip(self.keys, children, strict=True))}
            case "dict":
                from stagec.core.trees.keyed import key_to_json

                return {"dict": [[key_to_json(key), child] for key, child in zip(self.keys, children, strict=True)]}
            case "custom":
                return {"custom": self.name, "auxdata": self.auxdata.hex(), "children": children}

    @staticmethod
    def from_json(data: object) -> Tree:
        """Read the form of `to_json`. Raises ValueError when `data` has another form."""
        match data:
            case "*":
                return LEAF
            case None:
                return Tree("none")
            case list():
                return Tree("list", tuple(map(Tree.from_json, data)))
            case {"tuple": list(children), **rest} if not rest:
                return Tree("tuple", tuple(map(Tree.from_json, children)))
            case {"dict": dict(items), **rest} if not rest:
                return Tree("dict", tuple(map(Tree.from_json, items.values())), tuple(items))
            case {"dict": list(pairs), **rest} if not rest and pairs:
                from stagec.core.trees.keyed import keys_from_json

                keys, children = keys_from_json(pairs)
                return Tree("dict", tuple(map(Tree.from_json, children)), keys)
            case {"custom": str(name), "auxdata": str(auxdata), "children": list(children), **rest} if not rest:
                return Tree("custom", tuple(map(Tree.from_json, children)), (), name, bytes.fromhex(auxdata))
        raise ValueError(f"not a tree: {data!r}")

    def static_parts(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield the path of each custom node with key entries, and its static data as a string."""
        if self.keyed is not None:
            yield prefix, self.auxdata.decode()
        for step, child in zip(self._steps(), self.children, strict=True):
            yield from child.static_parts(prefix + step)

    def names(self) -> Iterator[tuple[str, ...]]:
        """Yield the keys, fields and indices that lead to each leaf in flattening order."""
        if self.kind == "leaf":
            yield ()
        for name, child in zip(self.child_names(), self.children, strict=True):
            for rest in child.names():
                yield (name, *rest)

    def child_names(self) -> tuple[str, ...]:
        """Return the key, field or index of each child."""
        if self.kind == "dict":
            return tuple(map(_shown, self.keys))
        if (keyed := self.keyed) and keyed.keys is not None:
            return tuple(map(_shown, keyed.keys))
        return self.fields.names if self.fields else tuple(map(str, range(len(self.children))))

    def _steps(self) -> Iterator[str]:
        if self.kind == "dict":
            return (f"[{key!r}]" for key in self.keys)
        if fields := self.fields:
            return (f".{name}" for name in fields.names)
        if (keyed := self.keyed) and keyed.keys is not None:
            return iter(keyed.steps)
        return (f"[{index}]" for index in range(len(self.children)))

    def _flatten(self, value: object, path: str, leaves: list[Any], types: Takers) -> None:
        match self.kind:
            case "leaf":
                if value is None or isinstance(value, tuple | list | dict):
                    raise TreeMismatch(path, f"expected an array, not {_kind_of(value)}")
                leaves.append(value)
                return
            case "none":
                if value is not None:
                    raise TreeMismatch(path, f"expected None, not {_kind_of(value)}")
                return
            case "dict":
                if not isinstance(value, dict):
                    raise TreeMismatch(path, f"expected a dict, not {_kind_of(value)}")
                values: Sequence[object] = _items(value, self.keys, self.children, path)
            case "list" | "tuple":
                wanted: type = list if self.kind == "list" else tuple
                if not isinstance(value, wanted):
                    raise TreeMismatch(path, f"expected a {self.kind}, not {_kind_of(value)}")
                values = value  # type: ignore[assignment]
            case "custom":
                values = self._children_of(value, path, types)
        if len(values) != len(self.children):
            raise TreeMismatch(path, f"expected {len(self.children)} elements, not {len(values)}")
        for child, item, step in zip(self.children, values, self._steps(), strict=True):
            if item is not _LEFT_OUT:
                child._flatten(item, path + step, leaves, types)

    def _children_of(self, value: object, path: str, types: Takers) -> Sequence[object]:
        """Return the children of the container that replaces this custom node."""
        fields, keyed = self.fields, self.keyed
        take = types.get(self.name)
        if take is not None and (taken := take(value)) is not None:
            children, auxdata = taken
            if auxdata == self.auxdata:
                return list(children)
            if keyed is not None:
                raise TreeMismatch(path, keyed.difference(auxdata))
            if fields is None or not _has_fields(value):
                was = f"its static data is {auxdata!r}, it was {self.auxdata!r} when the function was built"
                raise TreeMismatch(path, was)
        if keyed is not None:
            return self._children_by_entries(keyed, value, path)
        if fields is None or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            if not isinstance(value, tuple):
                what = f"expected a {self.name}, or a tuple of its children, not {_kind_of(value)}"
                raise TreeMismatch(path, what)
            return self._at(value, range(len(self.children)))
        given = dict(value) if isinstance(value, Mapping) else _attributes(value, (*fields.names, *fields.static))
        optional = {name for name, child in zip(fields.names, self.children, strict=True) if not child._has_leaf()}
        missing = [name for name in fields.names if name not in given and name not in optional]
        if missing:
            wanted = f"expected {self.name}, or a dict of its fields"
            raise TreeMismatch(path, f"{wanted}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        if isinstance(value, Mapping) and (
            extra := [key for key in value if key not in {*fields.names, *fields.static}]
        ):
            raise TreeMismatch(path, ", ".join(f"unexpected key {key!r}" for key in extra))
        for name, wanted in fields.static.items():
            if name in given and not same(given[name], wanted):
                raise TreeMismatch(path, f"{name} is {given[name]!r}, it was {wanted!r} when the function was built")
        return [given.get(name, _LEFT_OUT) for name in fields.names]

    def _children_by_entries(self, keyed: Keyed, value: object, path: str) -> Sequence[object]:
        """Return the children that plain containers have for this node; those without arrays may be left out."""
        positions, kind = self.stand_in(keyed)
        if not self._has_leaf() and (value is None or (isinstance(value, tuple | list | dict) and not value)):
            return [_LEFT_OUT] * len(self.children)
        if isinstance(value, Mapping) and keyed.keys is not None:
            return _items(dict(value), keyed.keys, self.children, path)
        if isinstance(value, tuple | list) and kind is not dict:
            items = self._at(value, positions)
            if len(items) != len(self.children):
                raise TreeMismatch(path, f"expected {len(positions)} elements, not {len(items)}")
            return items
        instead = f"a {kind.__name__} of its children" if positions else "{}"
        raise TreeMismatch(path, f"expected a {self.name}, or {instead}, not {_kind_of(value)}")

    def _at(self, items: Sequence[object], positions: Sequence[int]) -> Sequence[object]:
        """Return all children if `items` belong to these positions, or to all positions with arrays; else the items."""
        if len(items) != len(positions):
            positions = [i for i, child in enumerate(self.children) if child._has_leaf()]
        if len(items) != len(positions):
            return items
        given = dict(zip(positions, items, strict=True))
        return [given.get(i, _LEFT_OUT) for i in range(len(self.children))]

    def stand_in(self, keyed: Keyed) -> tuple[Sequence[int], type]:
        """Return the children of a plain container for this node (all that may hold arrays), and its type."""
        positions = [i for i, child in enumerate(self.children) if not child.is_static]
        if keyed.keys is None:
            return positions, tuple
        return positions, list if positions and [keyed.keys[i] for i in positions] == [*range(len(positions))] else dict

    def _unflatten(self, leaves: Iterator[object], types: Makers) -> object:
        match self.kind:
            case "leaf":
                return next(leaves)
            case "none":
                return None
        children = tuple(child._unflatten(leaves, types) for child in self.children)
        match self.kind:
            case "dict":
                return dict(zip(map(_live, self.keys), children, strict=True))
            case "list":
                return list(children)
            case "custom":
                make = types.get((self.name, self.auxdata))
                return self._plain(children) if make is None else make(children)
        return children

    def _plain(self, children: tuple[object, ...]) -> object:
        """Return the plain container that stands for this custom node."""
        if (keyed := self.keyed) is not None:
            positions, kind = self.stand_in(keyed)
            shown = [children[i] for i in positions]
            if keyed.keys is None or kind is not dict:
                return kind(shown)
            return {_live(keyed.keys[i]): child for i, child in zip(positions, shown, strict=True)}
        if (fields := self.fields) is None:
            return children
        named = zip(fields.names, self.children, children, strict=True)
        return {name: child for name, tree, child in named if tree.name != STATIC}


LEAF = Tree("leaf")
_LEFT_OUT = object()
"""Stands for a child without arrays that the caller leaves out."""
_KEYED = b'{"entries":'
"""How the static data starts that `Keyed` writes."""
_read_fields = functools.lru_cache(1024)(Fields.from_bytes)


def is_too_deep(structure: Any) -> bool:
    """Whether a leaf of jaxlib's PyTreeDef is below more than DEEPEST nodes; without recursion."""
    level = [structure]
    for _ in range(DEEPEST + 1):
        level = [child for node in level for child in node.children()]
    return bool(level)


def of_structure(structure: Any, describe: Callable[[Any], tuple[str, bytes]], key: Callable[[Any], Key]) -> Tree:
    """Return jaxlib's PyTreeDef as a Tree.

    describe: name and static data of a node whose type JAX does not serialize. key: a dict's key as a tree has it.
    """
    data = structure.node_data()
    if data is None:
        return LEAF
    kind, auxdata = data
    children = tuple(of_structure(child, describe, key) for child in structure.children())
    if kind is type(None):
        return Tree("none")
    if kind in (tuple, list):
        return Tree(kind.__name__, children)
    if kind is dict:
        return Tree("dict", children, tuple(map(key, auxdata)))
    return Tree("custom", children, (), *describe(structure))


def _read_keyed(auxdata: bytes) -> Keyed | None:
    from stagec.core.trees.keyed import Keyed

    return Keyed.from_bytes(auxdata)


def _live(key: Key) -> Any:
    """Return a dict's original key, or its replacement if its class is not available."""
    return getattr(key, "live", key)


def _shown(key: Key) -> str:
    return key if type(key) is str else repr(key)


def _items(given: Mapping[Any, object], keys: Sequence[Key], children: Sequence[Tree], path: str) -> list[object]:
    """Return the value of each key; there must be no other keys, and values without arrays are optional."""
    values, missing, left = [], [], dict(given)
    for key, child in zip(keys, children, strict=True):
        names = [name for name in (_live(key), getattr(key, "plain", key)) if name in left]
        if names:
            values.append(left.pop(names[0]))
        elif child._has_leaf():
            missing.append(key)
        else:
            values.append(_LEFT_OUT)
    if missing or left:
        faults = [f"key {key!r} is missing" for key in missing] + [f"unexpected key {key!r}" for key in left]
        raise TreeMismatch(path, ", ".join(faults))
    return values


def _attributes(value: object, names: Sequence[str]) -> dict[str, object]:
    if not _has_fields(value):
        return {}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _has_fields(value: object) -> bool:
    # Of these kinds alone: an array has attributes as well, and one may be called like a field ("mean").
    is_dataclass = hasattr(value, "__dataclass_fields__")  # as `dataclasses` asks, which most processes do without
    return is_dataclass or hasattr(value, "_fields") or isinstance(value, Mapping)


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "None"
        case tuple() | list() | dict():
            return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


def argument_path(path: str) -> str:
    """Write the path of a leaf of `(args, kwargs)` as the caller knows it: `[0][1]['w']` -> `args[1]['w']`."""
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)
