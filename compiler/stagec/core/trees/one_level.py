"""Objects as JAX takes them apart, one level: described in bytes, and made again with other children.

JAX's registry of pytree nodes is that of the process, where it has imported JAX; nothing is imported here. Standard
library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagec.core.trees import statics
from stagec.core.trees.keyed import Entry, Item, Keyed, key_of
from stagec.core.trees.nodes import Fields

PLACEHOLDERS = (object, float)
"""Makers of leaves for objects that only show their structure: JAX's, and numbers for a class that computes."""


class OneLevel(NamedTuple):
    """An object that JAX has taken apart.

    kind: its type. auxdata: the data that JAX compares beside the children.
    children: objects, or placeholders. entries: JAX's key entry of each; None if they are not known.
    value: the object; None if none could be made.
    """

    kind: type
    auxdata: Any
    children: Sequence[Any]
    entries: Sequence[Any] | None
    value: Any

    @staticmethod
    def flatten(value: object) -> OneLevel | None:
        """Take an object apart; None without JAX, and for an object that is not a node for JAX."""
        jax = _tree_util()
        taken_apart = None if jax is None else jax.default_registry.flatten_one_level_with_keys(value)
        if taken_apart is None:
            return None
        pairs, auxdata = taken_apart
        children, entries = [child for _, child in pairs], [entry for entry, _ in pairs]
        return OneLevel(type(value), auxdata, children, entries, value)

    def make(self, children: Sequence[object]) -> Any:
        """Return an object of this type, with this auxiliary data and other children. Raises as its class does."""
        jax = _tree_util()
        if hasattr(self.kind, "_fields") and not self._is_namedtuple():
            # JAX takes a class with _fields for a namedtuple here, even if it was registered.
            return jax.tree_structure(self.value, is_leaf=lambda other: other is not self.value).unflatten(children)
        leaves = [jax.tree_structure(0)] * len(children)
        node = jax.PyTreeDef.from_node_data_and_children(jax.default_registry, (self.kind, self.auxdata), leaves)
        return node.unflatten(children)

    def describe(self) -> bytes:
        """Return the static data of the node: `Fields` if these are enough, else `Keyed`.

        Raises ValueError, which says what in it has no stable description.
        """
        if self._is_namedtuple():
            return json.dumps(self.kind._fields).encode()  # type: ignore[attr-defined]
        fields = self._named_fields()
        try:
            if fields is not None:
                return fields.to_bytes()
        except ValueError:  # values that JSON has not
            pass
        entries = self._key_entries()
        if fields is None:
            return Keyed(entries, {"aux": statics.describe(self.auxdata)}).to_bytes()
        try:
            described = {name: statics.describe(value, name) for name, value in fields.static.items()}
            return Keyed(entries, {"fields": described}).to_bytes()
        except ValueError as error:
            with contextlib.suppress(ValueError):  # JAX may compare less than a class declares
                return Keyed(entries, {"aux": statics.describe(self.auxdata)}).to_bytes()
            raise error

    def _is_namedtuple(self) -> bool:
        """Whether it is a namedtuple to JAX: one that was registered has auxiliary data and children of its own."""
        fields = getattr(self.kind, "_fields", None) if issubclass(self.kind, tuple) else None
        own = self.auxdata is not None and self.auxdata is not self.kind
        return fields is not None and not own and len(fields) == len(self.children)

    def _named_fields(self) -> Fields | None:
        """Return the named fields, if they include everything that JAX compares."""
        attributes = [getattr(entry, "name", getattr(entry, "key", None)) for entry in self.entries or ()]
        names = tuple(name for name in attributes if isinstance(name, str))
        if self.entries is None or names != tuple(attributes):
            return None
        if isinstance(self.value, Mapping):
            return Fields(names) if self.auxdata == names else None
        if not dataclasses.is_dataclass(self.value):
            return None
        declared = [field.name for field in dataclasses.fields(self.value)]
        others = [name for name in declared if name not in names and hasattr(self.value, name)]
        return Fields(names, {name: getattr(self.value, name) for name in others}) if {*names} <= {*declared} else None

    def _key_entries(self) -> tuple[Entry, ...] | None:
        """Return the key entries of the children; None if the type was registered without."""
        key_entries: list[Entry] = []
        for entry in self.entries or ():
            if isinstance(name := getattr(entry, "name", None), str):
                key_entries.append(name)
            elif isinstance(index := getattr(entry, "idx", None), int):
                key_entries.append(index)
            elif hasattr(entry, "key") and type(entry).__name__ != "FlattenedIndexKey":
                key_entries.append(Item(key_of(entry.key)))
            else:
                return None
        return None if self.entries is None else tuple(key_entries)


class StaticLeaf(NamedTuple):
    """A field of an object that is not an array, as `eqx.filter_jit` has it: a node without children (`nodes.STATIC`).

    value: the field's value.
    """

    value: Any

    @staticmethod
    def from_auxdata(auxdata: bytes) -> StaticLeaf | None:
        """Return the object that the static data of this node describes; None if this process cannot make it."""
        keyed = Keyed.from_bytes(auxdata)
        with contextlib.suppress(Exception):  # code of other people
            return StaticLeaf(statics.rebuild(keyed.static["aux"])) if keyed else None
        return None

    def make(self, _: Sequence[object]) -> Any:
        """Return the value."""
        return self.value

    def describe(self) -> bytes:
        """Return the static data of the node. Raises ValueError, which says what in it has no stable description."""
        return Keyed((), {"aux": statics.describe(self.value)}).to_bytes()


def _tree_util() -> Any:
    """Return `jax.tree_util` if this process has imported JAX; the import may still be running."""
    module = getattr(sys.modules.get("jax"), "tree_util", None)
    return module if hasattr(module, "default_registry") else None
