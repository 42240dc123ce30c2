"""Shapes of JSON values, to check descriptions and indexes. Standard library only.

A shape checks a value and names the key at fault: `functions.f.executables[0].nr_devices: expected a whole number, not
"1"`. Keys that it does not know are refused: what a reader ignores, another reader may obey.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set as AbstractSet
from typing import Any, NoReturn

from stagec.core.data import paths
from stagec.core.data.strict_json import shown
from stagec.core.sizes.avals import parse_aval
from stagec.core.trees.tree import Tree

_LONGEST = 1000
"""Characters of a message from a reader of avals or trees: it repeats its input."""

Shape = Callable[[Any], None]
"""Takes a value; raises Mismatch for a value of another shape."""


class Mismatch(ValueError):
    """A value does not have the expected shape. what: the sentence about it. where: its key path.

    The path is made on the way out, key by key, so that a valid value (nearly all are) pays nothing for it.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(f"{where.removeprefix('.')}: {what}" if where else what)
        self.what = what
        self.where = where

    def below(self, step: str) -> Mismatch:
        """Return the same of the value that has this one at `step`: `.key` or `[index]`."""
        return Mismatch(self.what, step + self.where)


def text(value: Any) -> None:
    """A string."""
    if type(value) is not str:
        _wanted("a string", value)


def flag(value: Any) -> None:
    """True or false."""
    if type(value) is not bool:
        _wanted("true or false", value)


def count(value: Any) -> None:
    """A whole number that is 0 or more."""
    if type(value) is not int or value < 0:
        _wanted("a whole number", value)


def number(value: Any) -> None:
    """A number."""
    if type(value) not in (int, float):
        _wanted("a number", value)


def anything(value: Any) -> None:
    """Any value: the model's author chose it."""


def matching(pattern: str, what: str) -> Shape:
    """A string that matches the regular expression `pattern`; `what` says so in words."""
    compiled = re.compile(pattern)

    def check(value: Any) -> None:
        if type(value) is not str or not compiled.fullmatch(value):
            _wanted(what, value)

    return check


sha256 = matching("[0-9a-f]{64}", "a SHA-256 in lower-case hex")


def path(value: Any) -> None:
    """The path of a file below a folder."""
    text(value)
    if fault := paths.fault(value):
        raise Mismatch(f"{shown(value)!r} is not a path below the folder: {fault}")


def constant(*values: Any) -> Shape:
    """One of `values`."""

    def check(value: Any) -> None:
        for allowed in values:
            if type(value) is type(allowed) and value == allowed:
                return
        _wanted(" or ".join(map(json.dumps, values)), value)

    return check


def either(what: str, *forms: Any) -> Shape:
    """Return the shape of a value that has one of several forms, the most frequent first. what: the same in words."""
    shapes = [*map(shape, forms)]

    def check(value: Any) -> None:
        for alternative in shapes:
            try:
                return alternative(value)
            except Mismatch:
                continue
        _wanted(what, value)

    return check


def shape(form: Any) -> Shape:
    """Return the shape of values that look like `form`: `{"sig": str, "keyid?": str, ...: object}`.

    A type stands for its values: `str`, `bool`, `int` (0 or more), `float` (any number), `object` (anything). `[form]`
    is an array. An object has the keys of `form`; one that ends in ? may be missing, and `...` is for all other keys,
    which are refused without it. A shape stands for itself; anything else is a constant.
    """
    if isinstance(form, type):
        return _TYPES[form]
    if isinstance(form, list):
        return array(shape(form[0]))
    if not isinstance(form, dict):
        check: Shape = form if callable(form) else constant(form)
        return check
    shapes = {key: shape(value) for key, value in form.items()}
    rest = shapes.pop(..., None)
    wanted = {key for key in shapes if not key.endswith("?")}
    return _record(wanted, {key.removesuffix("?"): check for key, check in shapes.items()}, rest)


_TYPES: Mapping[type, Shape] = {str: text, bool: flag, int: count, float: number, object: anything}


scalar = either("a string, a number, true or false", text, number, flag)


def array(item: Shape) -> Shape:
    """An array of values of one shape."""

    def check(value: Any) -> None:
        if type(value) is not list:
            _wanted("an array", value)
        for index, element in enumerate(value):
            try:
                item(element)
            except Mismatch as error:
                raise error.below(f"[{index}]") from None

    return check


def table(form: Any, key: Shape) -> Shape:
    """An object whose values have one form (`shape`), and its keys another shape."""
    return _record(set(), {}, shape(form), key)


def _record(
    wanted: AbstractSet[str], known: Mapping[str, Shape], rest: Shape | None, name: Shape | None = None
) -> Shape:
    """An object with the keys `wanted`, and the others that are known where it has them.

    rest: shape of the values of other keys; None: others are refused. name: shape of all keys; None: any.
    """

    def check(value: Any) -> None:
        if type(value) is not dict:
            _wanted("an object", value)
        if not wanted <= value.keys():
            raise Mismatch(f"the key {min(wanted - value.keys())!r} is missing")
        for key, element in value.items():
            shape = known.get(key, rest)
            if shape is None:
                raise Mismatch("no such key is known", f".{shown(key)}")
            try:
                if name is not None:
                    name(key)
                shape(element)
            except Mismatch as error:
                raise error.below(f".{shown(key)}") from None

    return check


def tree(value: Any) -> None:
    """The structure of a pytree, as `Tree.to_json` writes it."""
    _read(Tree.from_json, value)


def aval(value: Any) -> None:
    """An aval in canonical spelling."""
    text(value)
    if str(_read(parse_aval, value)) != value:
        _wanted("an aval as stagec writes it", value)


_STATIC = re.compile(r"[^\[\]]*\[[0-9,]*\]")


def static_aval(value: Any) -> None:
    """An aval in canonical spelling, without symbolic dimensions."""
    text(value)
    if not _STATIC.fullmatch(value):  # before it is parsed: expressions take their time
        _wanted("an aval of static shape", value)
    aval(value)


def _read(reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise Mismatch(f"{error}"[:_LONGEST]) from None


def _wanted(what: str, value: Any) -> NoReturn:
    raise Mismatch(f"expected {what}, not {shown(json.dumps(value))}")
