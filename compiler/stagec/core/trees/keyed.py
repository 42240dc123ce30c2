"""Nodes of pytrees with more than named fields: children by their key entries, static parts by a description.

Key entries are JAX's (https://docs.jax.dev/en/latest/custom_pytrees.html#key-paths); `statics.py` describes what is
compared beside the children. Only trees that have such nodes, or dicts with keys that are not strings, import
this module. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from stagec.core.trees import statics
from stagec.core.trees.nodes import Fields

LONGEST = 2**12
"""Bytes of the description of a class's other fields that an artifact has whole."""
LONGEST_FIELD = 2**7
"""Bytes of a field's description; if all fields together exceed LONGEST, a longer description becomes its SHA-256."""
LONGEST_AUXDATA = 2**9
"""Bytes of the description of JAX's auxiliary data; of a longer one an artifact has the SHA-256. A model of nnx has
hundreds of nodes with a thousand bytes each."""


class Symbol(NamedTuple):
    """A key that is not a plain value: a member of an enum, an object of a class with fields, or a tuple with such.

    described: its description (`statics.describe`), as canonical JSON.
    """

    described: str

    @property
    def plain(self) -> Any:
        """Its replacement if its class is not available."""
        return statics.plain(json.loads(self.described))

    @property
    def live(self) -> Any:
        """The key itself if its class is imported, else `plain`."""
        try:
            return statics.rebuild(json.loads(self.described))
        except (statics.Unknown, ValueError, TypeError):
            return self.plain

    def __repr__(self) -> str:
        return statics.text(json.loads(self.described))


Key: TypeAlias = Any
"""A key of a dict: a value that is equal in every process (str, int, float, bytes, None, tuples), or a Symbol."""


def key_of(value: object) -> Key:
    """Return a dict's key in the form for a tree; numpy's numbers become Python's, which are equal.

    Raises ValueError for a key that differs between processes.
    """
    described = statics.describe(getattr(value, "item", lambda: value)() if hasattr(value, "dtype") else value)
    try:
        _check_key(described)
    except ValueError:
        raise ValueError(f"it is {statics.text(described)}") from None
    return _key(described)


def key_to_json(key: Key) -> Any:
    """Return the JSON form of a key."""
    return json.loads(key.described) if isinstance(key, Symbol) else statics.describe(key)


def key_from_json(described: Any) -> Key:
    """Read what `key_to_json` wrote. Raises ValueError when it is something else."""
    try:
        _check_key(described)
        key = _key(described)
        hash(key)
        repr(key), key.plain if isinstance(key, Symbol) else None
    except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a key: {described!r}") from error
    if key_to_json(key) != described:
        raise ValueError(f"not a key: {described!r}")
    return key


def keys_from_json(pairs: list[Any]) -> tuple[tuple[Key, ...], list[Any]]:
    """Return the keys of pairs of a key and something else in their JSON form, and the others.

    Raises ValueError when they are something else, or all are strings, which have another form.
    """
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"not a tree: {pairs!r}")
    keys = tuple(key_from_json(pair[0]) for pair in pairs)
    if all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise ValueError(f"not the keys of a dict: {keys!r}")
    return keys, [pair[1] for pair in pairs]


def _key(described: Any) -> Key:
    return Symbol(statics.canonical(described)) if _has_class(described) else statics.rebuild(described)


def _has_class(described: Any) -> bool:
    match described:
        case {"tuple": list(items)}:
            return any(map(_has_class, items))
        case dict():
            return "enum" in described or "object" in described
    return False


def _check_key(described: Any) -> None:
    parts: list[Any] = []
    match described:
        case None | bool() | int() | float() | str():
            return
        case {"int": str(), **rest} | {"float": str(), **rest} | {"bytes": str(), **rest} if not rest:
            return
        case {"enum": str(), "name": str(), **rest} if rest.keys() <= {"value"}:
            parts = list(rest.values())
        case {"tuple": list(parts), **rest} | {"complex": list(parts), **rest} if not rest:
            pass
        case {"object": str(), "fields": dict(fields), **rest} if not rest:
            parts = list(fields.values())
        case _:
            raise ValueError(f"not a key: {statics.canonical(described)}")
    for part in parts:
        _check_key(part)


class Item(NamedTuple):
    """The key entry of a child that its node has like a dict: by a key."""

    key: Key


Entry: TypeAlias = "str | int | Item"
"""The key entry of a child: the name of an attribute, an index, or the key of an item."""


class Keyed(NamedTuple):
    """The facts about a custom node and its children in its static data.

    entries: the key entry of each child; None if it was registered without.
    static: the description of its static parts: {"fields": {...}} of a dataclass, {"aux": ...} of JAX's auxiliary
        data; what is too long is {"sha256": ...}.
    """

    entries: tuple[Entry, ...] | None
    static: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return the static data of a node: canonical JSON."""
        entries = None if self.entries is None else list(map(_entry_to_json, self.entries))
        return statics.canonical({"entries": entries, "static": _shortened(self.static)}).encode()

    @staticmethod
    def from_bytes(auxdata: bytes) -> Keyed | None:
        """Read what `to_bytes` wrote; None for anything else."""
        try:
            match json.loads(auxdata):
                case {"entries": None, "static": dict(static), **rest} if not rest:
                    return Keyed(None, static)
                case {"entries": list(entries), "static": dict(static), **rest} if not rest:
                    return Keyed(tuple(map(_entry_from_json, entries)), static)
        except (ValueError, RecursionError):
            pass
        return None

    @property
    def keys(self) -> tuple[Key, ...] | None:
        """The key of each child in a dict that replaces the node; None if entries do not tell children apart."""
        if self.entries is None:
            return None
        keys = tuple(entry.key if isinstance(entry, Item) else entry for entry in self.entries)
        return keys if len(set(keys)) == len(keys) else None

    @property
    def steps(self) -> list[str]:
        """The step to each child, in Python's syntax: `.name`, `[0]`, `['key']`."""
        entries = ((entry.key if isinstance(entry, Item) else entry) for entry in self.entries or ())
        names = (isinstance(entry, str) for entry in self.entries or ())
        return [f".{key}" if named else f"[{key!r}]" for key, named in zip(entries, names, strict=True)]

    def difference(self, auxdata: bytes) -> str:
        """Describe the difference to the static data of another node of this type, for a reader."""
        other = Keyed.from_bytes(auxdata) or _of_fields(Fields.from_bytes(auxdata))
        if other is None or other.entries != self.entries:
            there, here = (", ".join(keyed.steps if keyed else ()) or "none" for keyed in (self, other))
            return f"its children are {here}, they were {there} when the function was built"
        with contextlib.suppress(Exception):  # of what a file says that stagec did not write
            if "aux" in self.static:
                changed = statics.difference(self.static["aux"], other.static["aux"], "its static part")
            else:
                was, now = ({"object": "", "fields": node.static["fields"]} for node in (self, other))
                changed = statics.difference(was, now)
            return f"{changed} when the function was built"
        return "its static part is not what it was when the function was built"


def _of_fields(fields: Fields | None) -> Keyed | None:
    """Describe plain fields in the same form as fields that need a description."""
    if fields is None:
        return None
    described = {name: statics.describe(value, name) for name, value in fields.static.items()}
    return Keyed(fields.names, {"fields": described})


def with_keys(keys: tuple[Key, ...]) -> Keyed:
    """Return the replacement for a dict with these keys, in a format with only strings as keys."""
    return Keyed(tuple(map(Item, keys)), {})


def _shortened(static: Mapping[str, Any]) -> Mapping[str, Any]:
    if "aux" in static:
        return {"aux": _digest(static["aux"], LONGEST_AUXDATA)}
    if len(statics.canonical(static)) <= LONGEST:
        return static
    return {"fields": {name: _digest(field, LONGEST_FIELD) for name, field in static["fields"].items()}}


def _digest(described: Any, longest: int) -> Any:
    text = statics.canonical(described).encode()
    return described if len(text) <= longest else {"sha256": hashlib.sha256(text).hexdigest()}


def _entry_to_json(entry: Entry) -> Any:
    return {"key": key_to_json(entry.key)} if isinstance(entry, Item) else entry


def _entry_from_json(entry: Any) -> Entry:
    match entry:
        case {"key": key, **rest} if not rest:
            return Item(key_from_json(key))
        case str() | int() if type(entry) is not bool:
            return entry
    raise ValueError(f"not a key entry: {entry!r}")
