"""Static parts of pytree nodes, and keys of dicts, as data that is the same in every process.

JAX compares static data with `==`, which a file cannot. So a value is described by what it is made of: numbers, texts
and containers as they are; classes and functions by the name under which they are imported; functions inside of others
by their name and by what they have closed over, not by their code, which is in the program; dataclasses and namedtuples
by their fields; other objects by what Python's copy protocol says of them
(https://docs.python.org/3/library/copy.html). No address, no hash and no order of a set is in a description.

A description is JSON: values that JSON has are themselves, others are objects with one telling key. Standard library
only: numpy's arrays are known by what they have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from stagec.core.trees.nodes import imported, name_of

LARGEST_ARRAY = 1024
"""Bytes of an array that a description has whole; of a larger one it has the SHA-256."""
_MOST = 100_000
"""Values in a description: those of the largest model that we know are a tenth."""
_DEEPEST = 60
_WORD = 2**63
"""Integers from there on are texts: readers of JSON differ."""


class Unknown(LookupError):
    """A description of what this process cannot make: a class that it has not imported, or a function with closures."""


def describe(value: object, where: str = "") -> Any:
    """Return what `value` is, as JSON.

    where: its place, for messages. Raises ValueError, which says what in it has no stable description.
    """
    return _Describer().value(value, where)


def canonical(described: object) -> str:
    """Return the one text of a description."""
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


class _Describer:
    """Describes one value; `above` are the containers that it is in."""

    def __init__(self) -> None:
        self._above: list[int] = []
        self._left = _MOST

    def value(self, value: Any, where: str) -> Any:
        self._left -= 1
        if self._left < 0 or len(self._above) > _DEEPEST:
            raise ValueError(f"{where or 'it'} is too large to be described")
        match value:
            case None | bool() | str() if type(value) in (type(None), bool, str):
                return value
            case int() if type(value) is int:
                return value if abs(value) < _WORD else {"int": str(value)}
            case float() if type(value) is float:
                return value if math.isfinite(value) else {"float": str(value)}
            case complex() if type(value) is complex:
                return {"complex": [self.value(value.real, where), self.value(value.imag, where)]}
            case bytes() if type(value) is bytes:
                return {"bytes": value.hex()}
        if isinstance(value, enum.Enum):
            return self._member(value, where)
        if (name := _importable(value)) is not None:
            return {"name": name}
        if id(value) in self._above:
            return {"cycle": len(self._above) - self._above.index(id(value))}
        self._above.append(id(value))
        try:
            return self._compound(value, where)
        finally:
            self._above.pop()

    def _compound(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, where)
        if kind is tuple:
            return {"tuple": self._items(value, where)}
        if kind in (set, frozenset):
            return {kind.__name__: sorted((self.value(item, where) for item in value), key=canonical)}
        if kind is dict:
            return {"dict": self._pairs(value, where)}
        if kind is OrderedDict:
            items = value.items()
            return {"ordered": [[self.value(key, where), self.value(one, f"{where}[{key!r}]")] for key, one in items]}
        if kind.__name__ == "PyTreeDef" and hasattr(value, "node_data"):
            return {"treedef": self._structure(value, where)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._object(value, dict(zip(kind._fields, value, strict=True)), where)
        if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "__array__"):
            return _array(value, where)
        if kind.__module__ in ("numpy", "numpy.dtypes") and hasattr(value, "itemsize") and not value.names:
            return {"dtype": _dtype(value)}
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return {"method": value.__name__, "of": self.value(value.__self__, where)}
        if isinstance(value, functools.partial):
            parts = self.value(value.func, where), self._items(value.args, where), self._pairs(value.keywords, where)
            return dict(zip(("partial", "args", "kwargs"), parts, strict=True))
        if isinstance(value, type) or (callable(value) and hasattr(value, "__wrapped__")):
            # A class inside of a function; what a decorator made of one, as `jax.jit` does.
            within = None if isinstance(value, type) else self.value(value.__wrapped__, where)
            return {"local": name_of(value if isinstance(value, type) else kind), "wraps": within}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if dataclasses.is_dataclass(value):
            found = {field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)}
            return self._object(value, {name: getattr(value, name) for name in sorted(found)}, where)
        return self._reduced(value, where)

    def _items(self, values: Any, where: str) -> list[Any]:
        return [self.value(item, f"{where}[{i}]") for i, item in enumerate(values)]

    def _structure(self, tree: Any, where: str) -> Any:
        data = tree.node_data()
        if data is None or data[0] is type(None):
            return None if data else "*"
        children = [self._structure(child, where) for child in tree.children()]
        return [*(self.value(part, where) for part in data), children]

    def _pairs(self, values: Mapping[Any, Any], where: str) -> list[Any]:
        pairs = [[self.value(key, where), self.value(item, f"{where}[{key!r}]")] for key, item in values.items()]
        return sorted(pairs, key=canonical)

    def _object(self, value: object, fields: Mapping[str, Any], where: str) -> Any:
        described = {name: self.value(item, f"{where}.{name}".removeprefix(".")) for name, item in fields.items()}
        return {"object": name_of(type(value)), "fields": described}

    def _member(self, value: enum.Enum, where: str) -> Any:
        described = {"enum": name_of(type(value)), "name": value.name}
        # Where a member is its value too, one who has no class may use that.
        plain = isinstance(value, int | str | float)
        return {**described, "value": self.value(value.value, where)} if plain else described

    def _function(self, value: types.FunctionType, where: str) -> Any:
        closed = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                closed[name] = self.value(cell.cell_contents, f"{where}.{name}".removeprefix("."))
            except ValueError as error:
                if str(error) == "Cell is empty":
                    continue
                raise
        defaults = self._items(value.__defaults__ or (), where), self._pairs(value.__kwdefaults__ or {}, where)
        return {"function": name_of(value), "closure": closed, "defaults": list(defaults)}

    def _reduced(self, value: Any, where: str) -> Any:
        kind = type(value)
        try:
            found: Any = value.__reduce_ex__(4)
        except Exception as error:  # of a class of whoever
            raise ValueError(f"{where or 'it'} is a {_kind(kind)}, which no two processes have in common") from error
        if isinstance(found, str):
            return {"name": f"{value.__module__}:{found}"}
        made, args, state, items, entries = (*found, *(None,) * (5 - len(found)))[:5]
        described = {"made": self.value(made, where), "args": self._items(args, where)}
        if state is not None:
            described["state"] = self.value(state, where)
        if items is not None:
            described["items"] = self._items(items, where)
        if entries is not None:
            described["entries"] = [[self.value(key, where), self.value(item, where)] for key, item in entries]
        return described


def _importable(value: Any) -> str | None:
    """Return the name under which `value` is found in its module; None for others."""
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return None
    return f"{module}:{name}" if imported(f"{module}:{name}") is value else None


def _array(value: Any, where: str) -> Any:
    try:
        array = value.__array__()
        shape, data = list(array.shape), array.tobytes()
    except Exception as error:  # a tracer, or an array that was deleted
        raise ValueError(f"{where or 'it'} is a {_kind(type(value))} without values") from error
    if array.dtype.hasobject:
        raise ValueError(f"{where or 'it'} is an array of Python objects")
    whole = {"bytes": data.hex()} if len(data) <= LARGEST_ARRAY else {"sha256": hashlib.sha256(data).hexdigest()}
    return {"array": _dtype(array.dtype), "shape": shape, "kind": name_of(type(value)), **whole}


def _dtype(dtype: Any) -> str:
    """Return numpy's text of a dtype; those of ml_dtypes have only a name."""
    return str(dtype.name if dtype.kind == "V" and not dtype.names else dtype.str)


def _kind(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def rebuild(described: Any) -> Any:
    """Return the value of a description: of plain values and containers, of what is imported, and of what has fields.

    Nothing is imported, and nothing of the description's is called but an enum, by the name of its member. Raises
    Unknown for others, ValueError for what is no description.
    """
    match described:
        case None | bool() | int() | float() | str():
            return described
        case list():
            return list(map(rebuild, described))
        case {"tuple": list(items)}:
            return tuple(map(rebuild, items))
        case {"set": list(items)}:
            return set(map(rebuild, items))
        case {"frozenset": list(items)}:
            return frozenset(map(rebuild, items))
        case {"dict": list(pairs)}:
            return {rebuild(key): rebuild(value) for key, value in _of_pairs(pairs)}
        case {"ordered": list(pairs)}:
            return OrderedDict((rebuild(key), rebuild(value)) for key, value in _of_pairs(pairs))
        case {"treedef": structure, **rest} if not rest:
            return _treedef(structure)
        case {"int": str(digits)}:
            return int(digits)
        case {"float": str(name)}:
            return float(name)
        case {"complex": [real, imaginary]}:
            return complex(rebuild(real), rebuild(imaginary))
        case {"bytes": str(data), **rest} if not rest:
            return bytes.fromhex(data)
        case {"name": str(name), **rest} if not rest:
            return _found(name)
        case {"enum": str(name), "name": str(member)}:
            kind = _found(name)
            if isinstance(kind, type) and issubclass(kind, enum.Enum) and member in kind.__members__:
                return kind[member]
            raise Unknown(f"{name}.{member}")
        case {"object": str(name), "fields": dict(fields)}:
            return _of_fields(_found(name), {key: rebuild(value) for key, value in fields.items()})
        case {"array": str(dtype), "shape": list(shape), "kind": "numpy:ndarray", "bytes": str(data)}:
            return _numpy().frombuffer(bytes.fromhex(data), dtype).reshape(shape)
        case {"array": str(dtype), "shape": [], "bytes": str(data), "kind": str(kind)} if kind.startswith("numpy:"):
            return _numpy().frombuffer(bytes.fromhex(data), dtype)[0]
        case {"dtype": str(name)}:
            return _numpy().dtype(name)
        case dict():
            raise Unknown(text(described))
    raise ValueError(f"not a description: {described!r}")


def _treedef(structure: Any) -> Any:
    jax = sys.modules.get("jax.tree_util")
    if jax is None:
        raise Unknown("PyTreeDef")
    match structure:
        case "*" | None:
            return jax.tree_structure(structure)
        case [kind, auxdata, list(children)]:
            data = rebuild(kind), rebuild(auxdata)
            below = list(map(_treedef, children))
            return jax.PyTreeDef.from_node_data_and_children(jax.default_registry, data, below)
    raise ValueError(f"not a description: {structure!r}")


def _found(name: str) -> Any:
    found = imported(name)
    if found is None:
        raise Unknown(name)
    return found


def _of_fields(kind: Any, values: Mapping[str, object]) -> object:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if {field.name for field in dataclasses.fields(kind)} != values.keys():
            raise Unknown(name_of(kind))
        result = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(result, name, value)
        return result
    if isinstance(kind, type) and issubclass(kind, tuple) and {*getattr(kind, "_fields", ())} == values.keys():
        return kind(**values)
    raise Unknown(str(kind))


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise Unknown("numpy")
    return numpy


def _of_pairs(pairs: list[Any]) -> Iterator[tuple[Any, Any]]:
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"not a description: {pair!r}")
        yield pair[0], pair[1]


def text(described: Any) -> str:
    """Write a description for a reader, as Python would: `Color.RED`, `(0, 'a')`."""
    match described:
        case list():
            return f"[{', '.join(map(text, described))}]"
        case {"tuple": list(items)}:
            return f"({', '.join(map(text, items))}{',' if len(items) == 1 else ''})"
        case {"dict": list(pairs)}:
            return "{" + ", ".join(f"{text(key)}: {text(value)}" for key, value in _of_pairs(pairs)) + "}"
        case {"ordered": list(pairs)}:
            return f"OrderedDict({', '.join(f'{text(key)}: {text(value)}' for key, value in _of_pairs(pairs))})"
        case {"treedef": _}:
            return "a PyTreeDef"
        case {"set": list(items)} | {"frozenset": list(items)}:
            return "{" + ", ".join(map(text, items)) + "}"
        case {"int": str(number)} | {"float": str(number)}:
            return number
        case {"bytes": str(data), **rest} if not rest:
            return repr(bytes.fromhex(data))
        case {"enum": str(name), "name": member}:
            return f"{_short(name)}.{member}"
        case {"object": str(name), "fields": dict(fields)}:
            return f"{_short(name)}({', '.join(f'{key}={text(value)}' for key, value in fields.items())})"
        case {"dtype": str(name)}:
            return name
        case {"array": dtype, "shape": shape}:
            return f"an array of {dtype} and shape {tuple(shape)}"
        case {"method": name, "of": owner}:
            return f"{text(owner)}.{name}"
        case {"partial": function}:
            return f"a partial of {text(function)}"
        case {"made": _, "args": [{"name": str(name)}, *_]}:
            return f"a {_short(name)}"
        case {"name": str(name)} | {"function": str(name)} | {"local": str(name)} | {"module": str(name)}:
            return _short(name)
        case {"made": made}:
            return f"an object that {text(made)} makes"
        case dict():
            return canonical(described)
    return repr(described)


def _short(name: str) -> str:
    return name.partition(":")[2] or name


def plain(described: Any) -> Any:
    """Return what stands for a key where its class is not at hand: of an enum's member its value or name."""
    match described:
        case {"tuple": list(items)}:
            return tuple(map(plain, items))
        case {"enum": str(), "name": str(), "value": value}:
            return rebuild(value)
        case {"enum": str(), "name": str(member)}:
            return member
        case {"object": str()}:
            return text(described)
    return rebuild(described)


def difference(was: Any, now: Any, where: str = "") -> str:
    """Say where two descriptions differ first: `tx.learning_rate is 0.1, it was 0.2`. They must differ.

    where: what the values are. One that is only its digest, {"sha256": ...}, is "another one".
    """
    for step, before, after in _parts(was, now):
        if before != after:
            return difference(before, after, f"{where}{step}")
    if any(isinstance(one, dict) and one.keys() == {"sha256"} for one in (was, now)):
        return f"{where.removeprefix('.') or 'it'} is another one than it was"
    return f"{where.removeprefix('.') or 'it'} is {_cut(text(now))}, it was {_cut(text(was))}"


def _parts(was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts that both have; nothing where they have other ones."""
    match was, now:
        case (list(), list()) | ({"tuple": list()}, {"tuple": list()}):
            before, after = (one if isinstance(one, list) else one["tuple"] for one in (was, now))
            if len(before) == len(after):
                yield from ((f"[{i}]", *pair) for i, pair in enumerate(zip(before, after, strict=True)))
        case ({"dict": list(before)}, {"dict": list(after)}) | ({"ordered": list(before)}, {"ordered": list(after)}):
            yield from _of_tables(_by_text(before), _by_text(after), "[{}]")
        case ({"function": first}, {"function": second}) if first == second:
            yield from _of_tables(was["closure"], now["closure"], ".{}")
            yield "", was["defaults"], now["defaults"]
        case ({"object": first}, {"object": second}) if first == second:
            yield from _of_tables(was["fields"], now["fields"], ".{}")
        case ({"method": first}, {"method": second}) if first == second:
            yield "", was["of"], now["of"]
        case ({"local": first}, {"local": second}) if first == second:
            yield "", was["wraps"], now["wraps"]
        case ({"partial": _}, {"partial": _}):
            yield from (("", was[key], now[key]) for key in ("partial", "args", "kwargs"))
        case ({"made": _, "state": {"dict": list(before)}}, {"made": _, "state": {"dict": list(after)}}):
            yield "", [was["made"], was["args"]], [now["made"], now["args"]]
            yield from _of_tables(_of_attributes(before), _of_attributes(after), ".{}")
        case ({"made": _}, {"made": _}) if was.keys() == now.keys():
            yield from (("", was[key], now[key]) for key in was)


def _by_text(pairs: list[Any]) -> Mapping[str, Any]:
    return {text(key): value for key, value in _of_pairs(pairs)}


def _of_attributes(pairs: list[Any]) -> Mapping[str, Any]:
    return {key if isinstance(key, str) else text(key): value for key, value in _of_pairs(pairs)}


def _of_tables(was: Mapping[str, Any], now: Mapping[str, Any], step: str) -> Iterator[tuple[str, Any, Any]]:
    if was.keys() == now.keys():
        yield from ((step.format(key), was[key], now[key]) for key in was)


def _cut(text: str, longest: int = 120) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
