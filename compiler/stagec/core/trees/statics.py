"""Static parts of pytree nodes, and keys of dicts, as data that is the same in every process.

JAX compares static data with `==`, and a file cannot. So a value is described by its parts:

- numbers, strings and containers: as they are;
- classes and functions: by the name to import;
- functions inside others: by their name and the values that they close over. Their code is in the program;
- dataclasses and namedtuples: by their fields;
- other objects: by Python's copy protocol (https://docs.python.org/3/library/copy.html).

A description has no address, no hash and no order of a set.

A description is JSON: values that JSON has are themselves, others are objects with telling keys. `_KINDS` has a row for
each kind of value. Standard library only: numpy's arrays are known by their attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from stagec.core.trees.nodes import Fields, imported, name_of

LARGEST_ARRAY = 1024
"""Bytes of an array that a description has whole; of a larger one it has the SHA-256."""
_MOST = 100_000
"""Values in a description: those of the largest model that we know are a tenth."""
_DEEPEST = 60
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]\w*(\[\w+\])?", re.ASCII)
_WORD = 2**63
"""Integers from there on are strings: readers of JSON differ."""


class Unknown(LookupError):
    """A description of an object that this process cannot make: its class is not imported, or it has closures."""


def describe(value: object, where: str = "") -> Any:
    """Describe `value` as JSON.

    where: its path, for messages. Raises ValueError, which says what in it has no stable description.
    """
    return _Describer().value(value, where)


def canonical(described: object) -> str:
    """Return the one string of a description."""
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def rebuild(described: Any) -> Any:
    """Return the value of a description: plain values and containers, imported objects, and objects with fields.

    It imports nothing, and calls nothing that the description names but an enum, by the name of its member. Raises
    Unknown for others, ValueError or TypeError for anything but a description.
    """
    if not isinstance(described, dict):
        return list(map(rebuild, described)) if isinstance(described, list) else described
    kind, parts = _kind_of(described)
    if kind.rebuild is None:
        raise Unknown(text(described))
    return kind.rebuild(*map(_rebuild_part, parts, kind.shape.values()))


def _rebuild_part(part: Any, of: object) -> Any:
    return {name: rebuild(value) for name, value in part.items()} if of is dict else rebuild(part)


def text(described: Any) -> str:
    """Write a description for a reader, as Python would: `Color.RED`, `(0, 'a')`."""
    kind, parts = _kind_of(described)
    if kind.text:
        with contextlib.suppress(ValueError, TypeError):  # it only looks like a description
            return kind.text(*parts)
    return canonical(described)


def plain(described: Any) -> Any:
    """Return the replacement for a key if its class is not available: for an enum's member its value or name."""
    match described:
        case {"tuple": list(items)}:
            return tuple(map(plain, items))
        case {"enum": str(), "name": str(member)}:
            return rebuild(described["value"]) if "value" in described else member
        case {"object": str()}:
            return text(described)
    return rebuild(described)


def difference(was: Any, now: Any, where: str = "") -> str:
    """Describe the first difference of two descriptions: `tx.learning_rate is 0.1, it was 0.2`. They must differ.

    where: the name of the values. A digest, {"sha256": ...}, is only "not what it was".
    """
    (kind, before), (kind_now, after) = _kind_of(was), _kind_of(now)
    names = [i for i, of in enumerate(kind.shape.values()) if of is str]
    if kind is kind_now and all(before[i] == after[i] for i in names):
        for old, new in zip(_parts_of(kind, before), _parts_of(kind, after), strict=False):
            for step in (step for step in old if old.keys() == new.keys() and old[step] != new[step]):
                return difference(old[step], new[step], where + (step if step.startswith((".", "[")) else ""))
    if any(isinstance(side, dict) and side.keys() == {"sha256"} for side in (was, now)):
        return f"{where.removeprefix('.') or 'it'} is not what it was"
    return f"{where.removeprefix('.') or 'it'} is {_cut(text(now))}, it was {_cut(text(was))}"


def _parts_of(kind: _Kind, parts: list[Any]) -> _Parts:
    if kind.parts:
        with contextlib.suppress(ValueError, TypeError):  # as in `text`
            return kind.parts(*parts)
    return ()


def _cut(written: str, longest: int = 120) -> str:
    return written if len(written) <= longest else written[: longest - 3] + "..."


class _Describer:
    """Describes one value; `_above` are the values that it is in."""

    def __init__(self) -> None:
        self._above: list[int] = []
        self._left = _MOST

    def value(self, value: Any, where: str) -> Any:
        self._left -= 1
        if self._left < 0 or len(self._above) > _DEEPEST:
            raise ValueError(f"{where or 'it'} is too large to be described")
        kind = _OF_TYPE.get(type(value)) or next(kind for kind in _OTHERS if kind.values(value))
        if id(value) in self._above:
            return {"cycle": len(self._above) - self._above.index(id(value))}
        self._above.append(id(value))
        try:
            return kind.describe(self, value, where)
        finally:
            self._above.pop()

    def items(self, values: Any, where: str) -> list[Any]:
        return [self.value(item, f"{where}[{i}]") for i, item in enumerate(values)]

    def unordered(self, values: Any, where: str) -> list[Any]:
        # A set has the order of its hashes, and those of strings differ from process to process.
        return sorted((self.value(item, where) for item in values), key=canonical)

    def pairs(self, values: Mapping[Any, Any], where: str) -> list[Any]:
        return [[self.value(key, where), self.value(item, f"{where}[{key!r}]")] for key, item in values.items()]

    def sorted_pairs(self, values: Mapping[Any, Any], where: str) -> list[Any]:
        return sorted(self.pairs(values, where), key=canonical)

    def fields(self, values: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
        return {name: self.value(item, f"{where}.{name}".removeprefix(".")) for name, item in values}


def _float(_: _Describer, value: float, where: str) -> Any:
    return value if math.isfinite(value) else {"float": str(value)}


def _complex(real: float, imag: float) -> complex:
    return complex(real, imag)


def _member(describer: _Describer, value: enum.Enum, where: str) -> Any:
    described = {"enum": name_of(type(value)), "name": value.name}
    # If a member is also its value, as in an IntEnum, a process without the class uses the value.
    is_plain = isinstance(value, int | str | float)
    return {**described, "value": describer.value(value.value, where)} if is_plain else described


def _rebuild_member(kind_name: str, member: str, _: object) -> Any:
    kind = _here(kind_name)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and member in kind.__members__:
        return kind[member]
    raise Unknown(f"{kind_name}.{member}")


def _importable(value: Any) -> bool:
    """Whether `value` is found in its module under its name."""
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    return isinstance(name, str) and isinstance(module, str) and imported(f"{module}:{name}") is value


def _here(name: str) -> Any:
    """Return the object imported under a name."""
    value = imported(name)
    if value is None:
        raise Unknown(name)
    return value


def _treedef(describer: _Describer, value: Any, where: str) -> Any:
    def structure(tree: Any) -> Any:
        data = tree.node_data()
        if data is None or data[0] is type(None):
            return None if data else "*"
        children = list(map(structure, tree.children()))
        return [*(describer.value(part, where) for part in data), children]

    return {"treedef": structure(value)}


def _rebuild_treedef(structure: Any) -> Any:
    jax = _here("jax:tree_util")
    if structure in ("*", None):
        return jax.tree_structure(structure)
    kind, auxdata, children = structure
    below = list(map(_rebuild_treedef, children))
    return jax.PyTreeDef.from_node_data_and_children(jax.default_registry, (kind, auxdata), below)


def _namedtuple(describer: _Describer, value: Any, where: str) -> Any:
    return {"object": name_of(type(value)), "fields": describer.fields(zip(value._fields, value, strict=True), where)}


def _dataclass(describer: _Describer, value: Any, where: str) -> Any:
    # What `==` passes over makes no other value, for JAX neither.
    names = {field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)}
    fields = ((name, getattr(value, name)) for name in sorted(names))
    return {"object": name_of(type(value)), "fields": describer.fields(fields, where)}


def _rebuild_object(name: str, values: Mapping[str, Any]) -> Any:
    kind = _here(name)
    is_dataclass = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)] if is_dataclass else getattr(kind, "_fields", ())
    if not isinstance(kind, type) or {*names} != values.keys() or not (is_dataclass or issubclass(kind, tuple)):
        raise Unknown(name)
    return Fields(tuple(names)).build(kind, [values[name] for name in names])


def _text_of_object(name: str, fields: Mapping[str, Any]) -> str:
    return f"{_short(name)}({', '.join(f'{field}={text(value)}' for field, value in fields.items())})"


def _is_array(value: Any) -> bool:
    """Whether elements and dtype are all that it is. Classes of others may add a mask or a unit: `_made` has those."""
    library, _, below = type(value).__module__.partition(".")
    known = library in ("numpy", "ml_dtypes", "jax", "jaxlib", "stagec") and not below.startswith("ma")
    return known and all(hasattr(value, name) for name in ("dtype", "shape", "__array__"))


def _array(_: _Describer, value: Any, where: str) -> Any:
    try:
        array = value.__array__()
        shape, data = list(array.shape), array.tobytes()
    except Exception as error:  # a tracer, or an array that was deleted
        raise ValueError(f"{where or 'it'} is a {_name(type(value))} without values") from error
    if array.dtype.hasobject:
        raise ValueError(f"{where or 'it'} is an array of Python objects")
    whole = {"bytes": data.hex()} if len(data) <= LARGEST_ARRAY else {"sha256": hashlib.sha256(data).hexdigest()}
    return {"array": _dtype(array.dtype), "shape": shape, "kind": name_of(type(value)), **whole}


def _rebuild_array(dtype: str, shape: list[int], kind: str, data: str | None, _: str | None) -> Any:
    if data is None or not (kind == "numpy:ndarray" or (kind.startswith("numpy:") and not shape)):
        raise Unknown(kind)
    array = _here("numpy:frombuffer")(bytes.fromhex(data), _rebuild_dtype(dtype))
    return array.reshape(shape) if kind == "numpy:ndarray" else array[0]


def _dtype(dtype: Any) -> str:
    """Return how numpy writes a dtype; those of ml_dtypes have only a name."""
    return str(dtype.name if dtype.kind == "V" and not dtype.names else dtype.str)


def _rebuild_dtype(name: str) -> Any:
    if not _DTYPE.fullmatch(name):  # numpy reads others as Python's literals
        raise ValueError(f"not the name of a dtype: {_cut(repr(name))}")
    return _here("numpy:dtype")(name)


def _function(describer: _Describer, value: types.FunctionType, where: str) -> Any:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closed = ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())  # that one is empty
    described = {"function": name_of(value), "closure": describer.fields(closed, where)}
    positional, by_keyword = value.__defaults__ or (), value.__kwdefaults__ or {}
    return {**described, "defaults": [describer.items(positional, where), describer.sorted_pairs(by_keyword, where)]}


def _partial(describer: _Describer, value: Any, where: str) -> Any:
    of, args = describer.value(value.func, where), describer.items(value.args, where)
    return {"partial": of, "args": args, "kwargs": describer.sorted_pairs(value.keywords, where)}


def _local(describer: _Describer, value: Any, where: str) -> Any:
    """Describe a class inside a function, or the result of a decorator such as `jax.jit`."""
    if isinstance(value, type):
        return {"local": name_of(value), "wraps": None}
    return {"local": name_of(type(value)), "wraps": describer.value(value.__wrapped__, where)}


def _made(describer: _Describer, value: Any, where: str) -> Any:
    try:
        reduced: Any = value.__reduce_ex__(4)
    except Exception as error:  # of a user's class
        kind = _name(type(value))
        raise ValueError(f"{where or 'it'} is a {kind}, which means nothing in another process") from error
    if isinstance(reduced, str):
        # As pickle: a constant of C, such as Ellipsis, is in the module of its type.
        return {"name": f"{getattr(value, '__module__', None) or type(value).__module__}:{reduced}"}
    made, args, state, items, entries = (*reduced, *(None,) * (5 - len(reduced)))[:5]
    described = {"made": describer.value(made, where), "args": describer.items(args, where)}
    if state is not None:
        described["state"] = describer.value(state, where)
    if items is not None:
        described["items"] = describer.items(items, where)
    if entries is not None:
        described["entries"] = [[describer.value(key, where), describer.value(item, where)] for key, item in entries]
    return described


def _text_of_made(made: Any, args: list[Any], *_: object) -> str:
    match args:
        case [{"name": str(name)}, *_]:
            return f"a {_short(name)}"
    return f"an object that {text(made)} makes"


def _parts_of_made(made: Any, args: Any, entries: Any, items: Any, state: Any) -> _Parts:
    match state:
        case {"dict": list(pairs)}:
            values = {key if isinstance(key, str) else text(key): value for key, value in pairs}
            return {"made": [made, args]}, _attributes(values)
    return _without_steps(args, entries, items, made, state)


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(name: str, *_: object) -> str:
    return name.partition(":")[2] or name


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(text, items))


def _text_of_set(items: list[Any]) -> str:
    return f"{{{_listed(items)}}}"


def _text_of_dict(pairs: list[Any]) -> str:
    return f"{{{', '.join(f'{text(key)}: {text(value)}' for key, value in pairs)}}}"


_Parts: TypeAlias = tuple[Mapping[str, Any], ...]
"""Groups of parts by the step that leads there, or by another name if a reader needs no step.

A group is compared where both descriptions have the same steps in it.
"""


def _items(items: list[Any]) -> _Parts:
    return ({f"[{i}]": item for i, item in enumerate(items)},)


def _entries(pairs: list[Any]) -> _Parts:
    return ({f"[{text(key)}]": value for key, value in pairs},)


def _without_steps(*parts: Any) -> _Parts:
    return ({str(i): part for i, part in enumerate(parts) if part is not None},)


def _attributes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {f".{name}": value for name, value in values.items()}


class _Kind(NamedTuple):
    """A kind of values: how to describe one, and how to use the description.

    The last three get the description's value for each key of the shape; None if it lacks one.

    values: the values of this kind: those of a type, or those for which a function is true.
    shape: the keys of a description, and the types of their values; the first key tells the kind.
    describe: describer, value, path -> description.
    rebuild: takes the parts rebuilt, and returns the value; None: nobody can make it.
    text: returns a string for a reader; None: the JSON.
    parts: returns the parts to compare, to find the difference of two descriptions with the same names.
    """

    values: type | Callable[[Any], object]
    shape: Mapping[str, Any]
    describe: Callable[[_Describer, Any, str], Any]
    rebuild: Callable[..., Any] | None = None
    text: Callable[..., str] | None = None
    parts: Callable[..., _Parts] | None = None


# fmt: off
_KINDS = (
    _Kind(int, {"int": str}, lambda d, v, w: v if abs(v) < _WORD else {"int": str(v)}, int, str),
    _Kind(float, {"float": str}, _float, float, str),
    _Kind(complex, {"complex": list}, lambda d, v, w: {"complex": [_float(d, v.real, w), _float(d, v.imag, w)]},
          lambda parts: _complex(*parts)),
    _Kind(bytes, {"bytes": str}, lambda d, v, w: {"bytes": v.hex()}, bytes.fromhex, lambda b: repr(bytes.fromhex(b))),
    _Kind(tuple, {"tuple": list}, lambda d, v, w: {"tuple": d.items(v, w)},
          tuple, lambda items: f"({_listed(items)}{',' * (len(items) == 1)})", _items),
    _Kind(set, {"set": list}, lambda d, v, w: {"set": d.unordered(v, w)}, set, _text_of_set),
    _Kind(frozenset, {"frozenset": list}, lambda d, v, w: {"frozenset": d.unordered(v, w)}, frozenset, _text_of_set),
    _Kind(dict, {"dict": list}, lambda d, v, w: {"dict": d.sorted_pairs(v, w)}, dict, _text_of_dict, _entries),
    _Kind(OrderedDict, {"ordered": list}, lambda d, v, w: {"ordered": d.pairs(v, w)},
          OrderedDict, lambda pairs: f"OrderedDict({_text_of_dict(pairs)[1:-1]})", _entries),
    _Kind(slice, {"slice": list}, lambda d, v, w: {"slice": d.items((v.start, v.stop, v.step), w)},
          lambda parts: slice(*parts), lambda parts: f"slice({_listed(parts)})", _items),
    _Kind(range, {"range": list}, lambda d, v, w: {"range": d.items((v.start, v.stop, v.step), w)},
          lambda parts: range(*parts), lambda parts: f"range({_listed(parts)})", _items),
    _Kind(types.ModuleType, {"module": str}, lambda d, v, w: {"module": v.__name__}, None, _short),
    _Kind(lambda v: isinstance(v, enum.Enum), {"enum": str, "name": str, "value": object}, _member,
          _rebuild_member, lambda kind, name, _: f"{_short(kind)}.{name}"),
    _Kind(_importable, {"name": str}, lambda d, v, w: {"name": name_of(v)}, _here, _short),
    _Kind(lambda v: type(v).__name__ == "PyTreeDef" and hasattr(v, "node_data"), {"treedef": object}, _treedef,
          _rebuild_treedef, lambda _: "a PyTreeDef"),
    _Kind(lambda v: isinstance(v, tuple) and hasattr(type(v), "_fields"), {"object": str, "fields": dict}, _namedtuple,
          _rebuild_object, _text_of_object, lambda _, fields: (_attributes(fields),)),
    _Kind(_is_array,
          {"array": str, "shape": list, "kind": str, "bytes": str | None, "sha256": str | None}, _array,
          _rebuild_array, lambda dtype, shape, *_: f"an array of {dtype} and shape {tuple(shape)}"),
    _Kind(lambda v: type(v).__module__ in ("numpy", "numpy.dtypes") and hasattr(v, "itemsize") and not v.names,
          {"dtype": str}, lambda d, v, w: {"dtype": _dtype(v)}, _rebuild_dtype, str),
    _Kind(lambda v: isinstance(v, types.FunctionType), {"function": str, "closure": dict, "defaults": list}, _function,
          None, _short, lambda _, closure, defaults: (_attributes(closure), {"defaults": defaults})),
    _Kind(lambda v: isinstance(v, types.MethodType), {"method": str, "of": object},
          lambda d, v, w: {"method": v.__name__, "of": d.value(v.__self__, w)},
          None, lambda name, of: f"{text(of)}.{name}", lambda _, of: ({"of": of},)),
    _Kind(lambda v: isinstance(v, functools.partial), {"partial": object, "args": list, "kwargs": list}, _partial,
          None, lambda of, *_: f"a partial of {text(of)}", _without_steps),
    _Kind(lambda v: isinstance(v, type) or (callable(v) and hasattr(v, "__wrapped__")),
          {"local": str, "wraps": object}, _local, None, _short, lambda _, wraps: ({"wraps": wraps},)),
    _Kind(dataclasses.is_dataclass, {}, _dataclass),
    _Kind(lambda v: True, {"made": object, "args": list, "entries": list | None, "items": list | None, "state": object},
          _made, None, _text_of_made, _parts_of_made),
)
# fmt: on
"""The kinds in order: a value belongs to the first match. Kinds of a type come before the others."""
_PLAIN = _Kind(str, {"": object}, lambda d, v, w: v, None, repr)
_LIST = _Kind(list, {"": object}, _Describer.items, None, lambda items: f"[{_listed(items)}]", _items)
_OTHER = _Kind(dict, {"": object}, lambda d, v, w: v)
_OF_TYPE = {kind.values: kind for kind in (_LIST, *_KINDS) if isinstance(kind.values, type)}
_OF_TYPE |= dict.fromkeys((str, bool, type(None)), _PLAIN)
_OF_KEY = {next(iter(kind.shape)): kind for kind in _KINDS if kind.shape}
_OTHERS = [kind for kind in _KINDS if not isinstance(kind.values, type)]


def _kind_of(described: Any) -> tuple[_Kind, list[Any]]:
    """Return the kind of a description, and its value for each key of the shape."""
    if not isinstance(described, dict):
        return _LIST if isinstance(described, list) else _PLAIN, [described]
    kind = next((_OF_KEY[key] for key in described if key in _OF_KEY), _OTHER)
    parts = list(map(described.get, kind.shape))
    fits = described.keys() <= kind.shape.keys() and all(map(isinstance, parts, kind.shape.values()))
    return (kind, parts) if fits else (_OTHER, [described])
