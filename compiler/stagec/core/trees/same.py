"""One meaning of "the same static value": type and value, in all parts.

A program traced for a static value is valid only for that value. Python's `==` is too weak for that: it takes 1, 1.0
and True for equal, members of two IntEnums, and -0.0 and 0.0; and a NaN for another than itself. Standard library only:
it recognizes numpy's scalars by their attributes.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping, Sequence, Set as AbstractSet
from typing import Any, cast

WHOLE = frozenset({bool, int, str, bytes, type(None)})
"""Types whose equal values are the same."""
_BY_PARTS = (tuple.__eq__, list.__eq__, dict.__eq__, set.__eq__, frozenset.__eq__, range.__eq__, slice.__eq__)
"""Comparisons that ask for nothing beside the parts."""


def key(value: Any) -> Hashable:
    """Return a key that is equal for two values if their types and values are equal, in all parts.

    Floats are compared by their bits; containers, slices and dataclasses by their parts, mappings and sets without
    order; numpy's scalars by dtype and bits. Any other object is compared by its type and its own `==`. The key has a
    hash if all parts have one.
    """
    kind = type(value)
    if kind in WHOLE:
        return kind, value
    parts = _parts(value)
    if parts is None:
        return kind, value
    compares: Any = kind.__eq__
    if kind in (float, complex) or compares in _BY_PARTS or hasattr(value, "dtype"):
        return kind, parts
    # A user's class: its own comparison counts as well. A value with a hash must not lose it by its parts.
    return (kind, value) if _has_hash(value) and not _has_hash(parts) else (kind, parts, value)


def same(value: Any, other: Any) -> bool:
    """Whether two static values are the same."""
    return value is other or (type(value) is type(other) and key(value) == key(other))


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _parts(value: Any) -> Hashable | None:
    """Return the keys of a value's parts; None for a value that is compared as a whole."""
    if hasattr(value, "dtype"):  # np.float64 is a float too
        scalar = hasattr(value, "tobytes") and getattr(value, "shape", None) == ()
        return (str(value.dtype), value.tobytes()) if scalar else None
    match value:
        case float():
            return struct.pack("<d", value)
        case complex():
            return struct.pack("<dd", value.real, value.imag)
        case str() | bytes() | int():
            return None
        case Mapping():
            pairs = {key(name): key(part) for name, part in value.items()}
            return frozenset(pairs.items()) if _has_hash((*pairs.values(),)) else cast(Hashable, pairs)
        case AbstractSet():
            return frozenset(map(key, value))
        case range() | slice():
            return key(value.start), key(value.stop), key(value.step)
        case Sequence():
            return tuple(map(key, value))
    if not isinstance(value, type) and getattr(value, "__dataclass_params__", None) and value.__dataclass_params__.eq:
        fields = value.__dataclass_fields__.items()
        return tuple((name, key(getattr(value, name, None))) for name, field in fields if field.compare)
    return None
