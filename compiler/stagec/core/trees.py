"""Pytree structures as data: described in JSON, flattened and rebuilt without JAX.

The node kinds and the order of leaves are JAX's (https://docs.jax.dev/en/latest/pytrees.html): dictionaries by sorted
key, None has no leaves, everything that is not a known container is a leaf. Standard library only.

A node of the user's own type is "custom". Where its fields are known (`Fields`) it stands for a dict of them, or for an
object of the type itself, which needs no import here: a caller who has one has its class. Where they are not, a
`PyTreeNode` takes objects apart and makes them; without one, the node is a tuple of its children.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Kind = Literal["leaf", "none", "tuple", "list", "dict", "custom"]


class TreeMismatch(ValueError):
    """A value does not have the structure it should: `path` says where, `what` says how."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.what = what


class Fields(NamedTuple):
    """What a custom node's static data says of its type.

    names: the field of each child.
    static: the other fields, with values that JSON has, tuples included.
    """

    names: tuple[str, ...]
    static: Mapping[str, Any] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Return the static data of a node: canonical JSON. Raises ValueError where a value has no exact JSON form."""
        static = {name: _to_plain(name, value) for name, value in self.static.items()}
        return json.dumps({"fields": self.names, "static": static}, sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(auxdata: bytes) -> Fields | None:
        """Read what `to_bytes` wrote, or what JAX writes for a namedtuple: the names alone. None for anything else."""
        try:
            match json.loads(auxdata):
                case list(names) if all(isinstance(name, str) for name in names):
                    return Fields(tuple(names))
                case {"fields": list(names), "static": dict(static), **rest} if not rest:
                    return Fields(tuple(names), {name: _from_plain(value) for name, value in static.items()})
        except (ValueError, RecursionError):
            pass
        return None

    def fit(self, kind: object) -> bool:
        """Whether `kind` is a class with these fields that `build` can make: namedtuple, dataclass, OrderedDict."""
        if not isinstance(kind, type):
            return False
        if dataclasses.is_dataclass(kind):
            return {*self.names, *self.static} <= {field.name for field in dataclasses.fields(kind)}
        return kind is OrderedDict or getattr(kind, "_fields", None) == self.names

    def build(self, kind: type, children: Sequence[object]) -> object:
        """Return an object of `kind`, which `fit`s, with these children. A dataclass's `__init__` is not called."""
        values = dict(zip(self.names, children, strict=True))
        if kind is OrderedDict:
            return OrderedDict(values)
        if issubclass(kind, tuple):
            return kind(**values)
        result = object.__new__(kind)
        for name, value in {**self.static, **values}.items():
            object.__setattr__(result, name, value)
        return result


class PyTreeNode(NamedTuple):
    """How objects of one type of the model's own are taken apart and made.

    The functions are those of `jax.tree_util.register_pytree_node`
    (https://docs.jax.dev/en/latest/custom_pytrees.html), with static data in bytes, as
    `jax.export.register_pytree_node_serialization` has them stored.

    nodetype: the type; objects of exactly this type are meant.
    flatten_func: object -> (children, static data).
    unflatten_func: (static data, children) -> object.
    """

    nodetype: type
    flatten_func: Callable[[Any], tuple[Iterable[Any], bytes]]
    unflatten_func: Callable[[bytes, Sequence[Any]], Any]


class Tree(NamedTuple):
    """The structure of a pytree, without its leaves.

    kind: what the node is.
    children: the subtrees, in the order in which JAX flattens them.
    keys: of a dict, the key of each child (sorted strings); empty otherwise.
    name: of a custom node, the name it was registered under for serialization (`module:class` where stagec registered
        it); empty otherwise.
    auxdata: of a custom node, its serialized static data; empty otherwise.
    """

    kind: Kind
    children: tuple[Tree, ...] = ()
    keys: tuple[str, ...] = ()
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

    def flatten(self, value: object, path: str = "", types: Mapping[str, type | PyTreeNode] | None = None) -> list[Any]:
        """Return the leaves of `value`, which must have this structure.

        types: what takes objects of a custom node apart, by the node's name; a class with fields needs none.
        Raises TreeMismatch with the path of the first difference, for example
        `params: key 'b' is missing`.
        """
        leaves: list[Any] = []
        self._flatten(value, path, leaves, types or {})
        return leaves

    @property
    def fields(self) -> Fields | None:
        """Of a custom node, what is known of its fields; None when nothing is."""
        fields = _read_fields(self.auxdata) if self.kind == "custom" else None
        return fields if fields is not None and len(fields.names) == len(self.children) else None

    def custom_nodes(self) -> Iterator[Tree]:
        """Yield every custom node of the tree."""
        if self.kind == "custom":
            yield self
        for child in self.children:
            yield from child.custom_nodes()

    def unflatten(self, leaves: Sequence[object], types: Mapping[str, type | PyTreeNode] | None = None) -> object:
        """Build the value of this structure that has `leaves`.

        types: what makes the object of a custom node, by the node's name: a class that its fields fit, or a
            `PyTreeNode`. A custom node of another name becomes a dict of its fields, or a tuple where they are not
            known.
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
            case "dict":
                return {"dict": dict(zip(self.keys, children, strict=True))}
            case "custom":
                return {"custom": self.name, "auxdata": self.auxdata.hex(), "children": children}

    @staticmethod
    def from_json(data: object) -> Tree:
        """Read what `to_json` wrote. Raises ValueError when `data` is not of that form."""
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
                # In the order of the leaves: keys that were no strings (a `Lowered` has them) sort otherwise.
                return Tree("dict", tuple(map(Tree.from_json, items.values())), tuple(items))
            case {"custom": str(name), "auxdata": str(auxdata), "children": list(children), **rest} if not rest:
                return Tree("custom", tuple(map(Tree.from_json, children)), (), name, bytes.fromhex(auxdata))
        raise ValueError(f"not a tree: {data!r}")

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
            return self.keys
        return self.fields.names if self.fields else tuple(map(str, range(len(self.children))))

    def _steps(self) -> Iterator[str]:
        if self.kind == "dict":
            return (f"[{key!r}]" for key in self.keys)
        if fields := self.fields:
            return (f".{name}" for name in fields.names)
        return (f"[{index}]" for index in range(len(self.children)))

    def _flatten(self, value: object, path: str, leaves: list[Any], types: Mapping[str, type | PyTreeNode]) -> None:
        match self.kind:
            case "leaf":
                if value is None or isinstance(value, tuple | list | dict):
                    raise TreeMismatch(path, f"an array is wanted here, not {_kind_of(value)}")
                leaves.append(value)
                return
            case "none":
                if value is not None:
                    raise TreeMismatch(path, f"None is wanted here, not {_kind_of(value)}")
                return
            case "dict":
                if not isinstance(value, dict):
                    raise TreeMismatch(path, f"a dict is wanted here, not {_kind_of(value)}")
                missing = [key for key in self.keys if key not in value]
                extra = [key for key in value if key not in self.keys]
                if missing or extra:
                    faults = [f"key {key!r} is missing" for key in missing]
                    faults += [f"key {key!r} is not wanted" for key in extra]
                    raise TreeMismatch(path, ", ".join(faults))
                values: Sequence[object] = [value[key] for key in self.keys]
            case "list" | "tuple":
                wanted: type = list if self.kind == "list" else tuple
                if not isinstance(value, wanted):
                    raise TreeMismatch(path, f"a {self.kind} is wanted here, not {_kind_of(value)}")
                values = value  # type: ignore[assignment]
            case "custom":
                values = self._children_of(value, path, types.get(self.name))
        if len(values) != len(self.children):
            raise TreeMismatch(path, f"{len(self.children)} elements are wanted here, not {len(values)}")
        for child, item, step in zip(self.children, values, self._steps(), strict=True):
            child._flatten(item, path + step, leaves, types)

    def _children_of(self, value: object, path: str, kind: type | PyTreeNode | None) -> Sequence[object]:
        """Return the children of what stands for this custom node."""
        fields = self.fields
        if isinstance(kind, PyTreeNode) and type(value) is kind.nodetype:
            children, auxdata = kind.flatten_func(value)
            if auxdata == self.auxdata:
                return list(children)
            if fields is None or not _has_fields(value):
                was = f"its static data is {auxdata!r}, it was {self.auxdata!r} when the function was built"
                raise TreeMismatch(path, was)
        if fields is None or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            if not isinstance(value, tuple):
                what = f"a {self.name}, or a tuple of its children, is wanted here, not {_kind_of(value)}"
                raise TreeMismatch(path, what)
            return value
        given = dict(value) if isinstance(value, Mapping) else _attributes(value, (*fields.names, *fields.static))
        missing = [name for name in fields.names if name not in given]
        if missing:
            wanted = f"{self.name}, or a dict of its fields, is wanted here"
            raise TreeMismatch(path, f"{wanted}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        if isinstance(value, Mapping) and (
            extra := [key for key in value if key not in {*fields.names, *fields.static}]
        ):
            raise TreeMismatch(path, ", ".join(f"key {key!r} is not wanted" for key in extra))
        for name, wanted in fields.static.items():
            if name in given and given[name] != wanted:
                raise TreeMismatch(path, f"{name} is {given[name]!r}, it was {wanted!r} when the function was built")
        return [given[name] for name in fields.names]

    def _unflatten(self, leaves: Iterator[object], types: Mapping[str, type | PyTreeNode]) -> object:
        match self.kind:
            case "leaf":
                return next(leaves)
            case "none":
                return None
            case "dict":
                return {
                    key: child._unflatten(leaves, types) for key, child in zip(self.keys, self.children, strict=True)
                }
            case "list":
                return [child._unflatten(leaves, types) for child in self.children]
            case "tuple":
                return tuple(child._unflatten(leaves, types) for child in self.children)
            case "custom":
                children = tuple(child._unflatten(leaves, types) for child in self.children)
                fields, kind = self.fields, types.get(self.name)
                if isinstance(kind, PyTreeNode):
                    return kind.unflatten_func(self.auxdata, children)
                if fields is None:
                    return children
                return fields.build(kind, children) if kind else dict(zip(fields.names, children, strict=True))


LEAF = Tree("leaf")
_read_fields = functools.lru_cache(1024)(Fields.from_bytes)


def _attributes(value: object, names: Sequence[str]) -> dict[str, object]:
    if not _has_fields(value):
        return {}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _has_fields(value: object) -> bool:
    # Of these kinds alone: an array has attributes as well, and one may be called like a field ("mean").
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields") or isinstance(value, Mapping)


def _to_plain(name: str, value: object) -> object:
    """Return the JSON form of a static value: arrays are lists, tuples and dicts are tagged."""
    match value:
        case float() if not math.isfinite(value):
            raise ValueError(f"its field {name} is {value}")
        case None | bool() | int() | float() | str():
            if type(value) in (type(None), bool, int, float, str):
                return value
        case tuple() if type(value) is tuple:
            return {"tuple": [_to_plain(name, item) for item in value]}
        case list() if type(value) is list:
            return [_to_plain(name, item) for item in value]
        case dict() if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {key: _to_plain(name, item) for key, item in value.items()}}
    raise ValueError(f"its field {name} is a {type(value).__name__}")


def _from_plain(value: Any) -> Any:
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(_from_plain, items))
        case {"dict": dict(items), **rest} if not rest:
            return {key: _from_plain(item) for key, item in items.items()}
        case list():
            return list(map(_from_plain, value))
        case dict():
            raise ValueError("not a static value")
    return value


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
