"""JSON that others wrote, read strictly: it has one meaning for every parser, and bounds. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

DEEPEST = 200
"""How many arrays and objects may lie in each other: a tree of 100 levels, and no recursion near Python's own limit."""
_CONTAINERS = (dict, list)
_LARGEST = 2**63
"""The bound of whole numbers, in both directions: other readers of JSON (jq, C) hold these exactly or refuse them."""
_SHOWN = 60
"""Characters of a string from a file that a message shows."""


def parse(text: bytes | str, most: int, most_values: int | None = None) -> Any:
    """Return the value of a JSON string of at most that many bytes. It takes time and memory by its length alone.

    most_values: the most values, counted by commas and brackets, because a small string may be large in memory. None:
        no limit.
    Raises ValueError for one that is longer, is not UTF-8, has a key twice in an object, NaN, an infinite number, a
    whole number of more than 64 bits or half of a surrogate pair, or is nested deeper than DEEPEST.
    """
    if len(text) > most:
        raise ValueError(f"{len(text):,} bytes of JSON are over the limit of {most:,}")
    text = text.encode().decode() if isinstance(text, str) else text.decode("utf-8")
    if most_values is not None and sum(map(text.count, ",[{")) >= most_values:
        raise ValueError(f"it has more than {most_values:,} values")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_constant,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    escapes = "\\u" in text
    if escapes or text.count("[") + text.count("{") > DEEPEST:  # most documents have too few to be too deep
        _check_depth(value, escapes)
    return value


def line(value: Any) -> bytes:
    """Return a value as one line of JSON, without spaces."""
    return (json.dumps(value, separators=(",", ":"), check_circular=False) + "\n").encode()


def check_format(document: Mapping[str, Any], ours: int, write: str) -> None:
    """Raise ValueError if a file of ours has another version of its format than `ours`. write: what to do then."""
    version = document.get("format")
    if type(version) is not int or version != ours:
        raise ValueError(f"its format is {shown(json.dumps(version))}, and this stagec reads {ours}: {write}")


def shown(text: str) -> str:
    """Return a string from a file in the form for a message: a long one is cut off, and it is one line of text.

    A newline is shown as an escape, because the text behind it would look like a line of stagec's own.
    """
    short = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    if short.isprintable():
        return short
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in short)


def difference(first: Any, second: Any, where: str = "") -> str | None:
    """Return the key path of the first difference of two values whose JSON differs; None if it is the same.

    The order of keys counts, and so do 1, 1.0 and true. where: the path of the values; "" for the whole.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(f".{shown(key)}", first[key], second[key]) for key in first if key in second]
        other = next((f".{shown(key)}" for key in [*first, *second] if key not in first or key not in second), None)
        rest = " (the order of its keys)" if other is None and list(first) != list(second) else other
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(f"[{i}]", *pair) for i, pair in enumerate(zip(first, second, strict=True))]
        rest = None
    else:
        pairs, rest = [], None if json.dumps(first) == json.dumps(second) else ""
    inside = (difference(was, is_now, where + step) for step, was, is_now in pairs)
    path = next((inner for inner in inside if inner is not None), None if rest is None else where + rest)
    return path.removeprefix(".") if path is not None and not where else path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {shown(name)!r} appears twice")
            seen.add(name)
    return result


def _whole(text: str) -> int:
    # Length first: Python takes its time for a number of thousands of digits.
    if len(text) > 20 or not -_LARGEST <= (value := int(text)) < _LARGEST:
        raise ValueError(f"the number {text[:20]}... has more than 64 bits")
    return value


def _real(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _constant(text[:20])


def _constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text} is not finite")


def _check_depth(value: Any, escapes: bool = False) -> None:
    """Raise ValueError for a value that is nested deeper than DEEPEST: level by level, and so without recursion.

    escapes: whether strings may have half of a surrogate pair: UTF-8 has none, so it was written as an escape.
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        for member in level if escapes else ():
            if isinstance(member, str | dict):
                "".join(member).encode()  # raises UnicodeEncodeError, a ValueError; of an object, these are its keys
        inner = [member for member in level if type(member) in _CONTAINERS]
        level = [item for member in inner for item in (member.values() if type(member) is dict else member)]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEEPEST} levels")
