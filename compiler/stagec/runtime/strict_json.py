"""JSON that others wrote, read strictly: it has one meaning for every parser, and bounds. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

DEEPEST = 200
"""How many arrays and objects may lie in each other: a tree of 100 levels, and no recursion near Python's own limit."""
_LARGEST = 2**63
"""Whole numbers are below it, and not below its negative: what other readers of JSON (jq, C) hold exactly or refuse."""


def parse(text: bytes | str, most: int) -> Any:
    """Return the value of a JSON text of at most that many bytes.

    Raises ValueError for one that is longer, is not UTF-8, has a key twice in an object, NaN, an infinite number, a
    whole number of more than 64 bits or half of a surrogate pair, or is nested deeper than DEEPEST.
    """
    if len(text) > most:
        raise ValueError(f"{len(text):,} bytes of JSON are over the limit of {most:,}")
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_constant,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    _walk(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return result


def _whole(text: str) -> int:
    # Length first: Python takes its time for a number of thousands of digits.
    if len(text) > 20 or not -_LARGEST <= int(text) < _LARGEST:
        raise ValueError(f"the number {text[:20]}... has more than 64 bits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _constant(text[:20])


def _constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text} is not finite")


def _walk(value: Any) -> None:
    """Check depth and texts, without recursion."""
    rest = [(value, 0)]
    while rest:
        one, depth = rest.pop()
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        if isinstance(one, str):
            _check_text(one)
        elif isinstance(one, dict):
            for name in one:
                _check_text(name)
            rest += [(item, depth + 1) for item in one.values()]
        elif isinstance(one, list):
            rest += [(item, depth + 1) for item in one]


def _check_text(text: str) -> None:
    if not text.isascii():
        text.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
