"""Nodes of pytrees of the model's own types: classes described by named fields, and types that functions take apart.

`keyed.py` has the nodes that these do not describe. Standard library only.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Fields(NamedTuple):
    """The facts about a custom node's type in its static data.

    names: the field of each child.
    static: the other fields, with values that JSON has, tuples included.
    """

    names: tuple[str, ...]
    static: Mapping[str, Any] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Return the static data of a node: canonical JSON. Raises ValueError if a value has no exact JSON form."""
        static = {name: _to_plain(name, value) for name, value in self.static.items()}
        return json.dumps({"fields": self.names, "static": static}, sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(auxdata: bytes) -> Fields | None:
        """Read the bytes of `to_bytes`, or JAX's for a namedtuple, which are only names. None for anything else."""
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
        if hasattr(kind, "__dataclass_fields__"):
            import dataclasses  # a process with such a class has imported it

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
    """How to take apart and make objects of a type of the model's own.

    The functions are those of `jax.tree_util.register_pytree_node`
    (https://docs.jax.dev/en/latest/custom_pytrees.html), with static data as bytes, as
    `jax.export.register_pytree_node_serialization` stores them.

    nodetype: the type. Objects of its subclasses do not count.
    flatten_func: object -> (children, static data).
    unflatten_func: (static data, children) -> object.
    """

    nodetype: type
    flatten_func: Callable[[Any], tuple[Iterable[Any], bytes]]
    unflatten_func: Callable[[bytes, Sequence[Any]], Any]


STATIC = "stagec.static"
"""The name of a node that stands for a field that is not an array (`one_level.StaticLeaf`)."""


def name_of(value: Any) -> str:
    """Return the name of a class or function: `module:qualname`."""
    return f"{value.__module__}:{value.__qualname__}"


def imported(name: str) -> object:
    """Return the object `module:qualname` or `module.qualname` if the module is imported already, else None."""
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    value: object = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


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
