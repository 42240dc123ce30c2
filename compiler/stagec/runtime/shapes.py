"""Shapes of JSON values: what a description or an index must look like. Standard library only.

A shape checks a value and names the key at fault: `functions.f.executables[0].nr_devices: a whole number is wanted, not
"1"`. Keys that it does not know are refused: what a reader ignores, another reader may obey.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from stagec.avals import Aval, parse_aval
from stagec.trees import Tree

Shape = Callable[[str, Any], None]
"""Takes the key path of a value ("" for the whole) and the value; raises ValueError where another one is wanted."""


def text(where: str, value: Any) -> None:
    """A text."""
    if type(value) is not str:
        _wanted(where, "a text", value)


def flag(where: str, value: Any) -> None:
    """True or false."""
    if type(value) is not bool:
        _wanted(where, "true or false", value)


def count(where: str, value: Any) -> None:
    """A whole number that is 0 or more."""
    if type(value) is not int or value < 0:
        _wanted(where, "a whole number", value)


def number(where: str, value: Any) -> None:
    """A number."""
    if type(value) not in (int, float):
        _wanted(where, "a number", value)


def anything(where: str, value: Any) -> None:
    """Any value: what the model's author wrote."""


def matching(pattern: str, what: str) -> Shape:
    """A text that is wholly of the regular expression `pattern`; `what` says so in words."""
    compiled = re.compile(pattern)

    def check(where: str, value: Any) -> None:
        if type(value) is not str or not compiled.fullmatch(value):
            _wanted(where, what, value)

    return check


sha256 = matching("[0-9a-f]{64}", "a SHA-256 in lower-case hex")


def constant(*values: Any) -> Shape:
    """One of `values`."""

    def check(where: str, value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            _wanted(where, " or ".join(map(json.dumps, values)), value)

    return check


def either(what: str, *shapes: Shape) -> Shape:
    """What one of `shapes` takes; `what` says so in words."""

    def check(where: str, value: Any) -> None:
        for shape in shapes:
            with contextlib.suppress(ValueError):
                shape(where, value)
                return
        _wanted(where, what, value)

    return check


scalar = either("a text, a number, true or false", text, number, flag)


def array(item: Shape) -> Shape:
    """An array of values of one shape."""

    def check(where: str, value: Any) -> None:
        if type(value) is not list:
            _wanted(where, "an array", value)
        for index, one in enumerate(value):
            item(f"{where}[{index}]", one)

    return check


def table(item: Shape, name: Shape = text) -> Shape:
    """An object with any keys that `name` takes, whose values have one shape."""

    def check(where: str, value: Any) -> None:
        if type(value) is not dict:
            _wanted(where, "an object", value)
        for key, one in value.items():
            path = f"{where}.{key}" if where else key
            name(path, key)
            item(path, one)

    return check


def record(
    fields: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, rest: Shape | None = None
) -> Shape:
    """An object with these keys, and those of `optional` where it has them.

    rest: shape of the values of other keys; None: others are refused.
    """
    known = {**fields, **(optional or {})}

    def check(where: str, value: Any) -> None:
        if type(value) is not dict:
            _wanted(where, "an object", value)
        missing = sorted(fields.keys() - value.keys())
        if missing:
            raise ValueError(f"{where}{': ' if where else ''}the key {missing[0]!r} is missing")
        for key, one in value.items():
            path = f"{where}.{key}" if where else key
            shape = known.get(key, rest)
            if shape is None:
                raise ValueError(f"{path}: no such key is known")
            shape(path, one)

    return check


def tree(where: str, value: Any) -> None:
    """The structure of a pytree, as `Tree.to_json` writes it."""
    _read(where, Tree.from_json, value)


def aval(where: str, value: Any) -> None:
    """An aval in canonical spelling."""
    text(where, value)
    if str(_read(where, parse_aval, value)) != value:
        _wanted(where, "an aval as stagec writes it", value)


def static_aval(where: str, value: Any) -> None:
    """An aval in canonical spelling, without symbolic dimensions."""
    aval(where, value)
    found: Aval = parse_aval(value)
    if not all(isinstance(size, int) for size in found.shape):
        _wanted(where, "an aval of static shape", value)


def _read(where: str, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _wanted(where: str, what: str, value: Any) -> NoReturn:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise ValueError(f"{where}{': ' if where else ''}{what} is wanted, not {shown}")
