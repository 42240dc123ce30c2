"""The values of a manifest that need more than a type check: avals, trees of them, constraints, sizes.

Each reader here is a pydantic validator. It returns the value in its canonical form, or raises all faults of it through
`refuse`, so that `stagec.manifest.load` can report each fault at its place in the file.
"""

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic_core import PydanticCustomError

from stagec.core.builds.specs import COLLECTIVES
from stagec.core.data import paths
from stagec.core.messages.errors import nearest, show
from stagec.core.sizes.avals import DTYPES, FILES, NOT_EXPORTABLE, AvalError, parse_aval
from stagec.core.sizes.partitions import PartitionError, parse, write
from stagec.core.sizes.size import DimensionError, parse_constraint
from stagec.manifest.toml import Location


class _Source(NamedTuple):
    """A kind of file that a leaf of a tree of avals may name.

    path: a regular expression. of: what has such a path. called: what it is called. examples: of a path and an option.
    """

    path: str
    of: str
    called: str
    examples: tuple[str, str]


def file_pattern(ending: str) -> str:
    """The one rule for files that a manifest names: a path below its folder, by the characters of a bundle's members.

    Bazel labels, words of commands and keys of the index are made of it. ending: a regular expression.
    """
    return rf"^{paths.PLAIN}\.{ending}$"


def no_file(ending: str) -> str:
    """The words of a message about a string that is not a path of this kind."""
    return _no_path(f"a {ending} file")


def _no_path(of: str) -> str:
    rule = "it has letters, digits and / _ . + -, and no part of it begins with . + -"
    return f"not a path of {of} below the manifest's folder: {rule}"


Tree: TypeAlias = "str | dict[str, Tree] | tuple[Tree, ...]"
"""A pytree of avals: each leaf is an aval in canonical spelling, or a `safetensors:FILE` reference."""
Shardings: TypeAlias = "str | dict[str, Shardings] | tuple[Shardings, ...]"
"""A prefix of a pytree: each leaf is a partition spec in canonical spelling, for everything below it."""
Scalar: TypeAlias = bool | int | float | str
"""A single TOML value that JSON writes exactly."""
Static: TypeAlias = "Scalar | tuple[Static, ...]"
"""A value that is fixed when a function is traced: hashable, and with an exact JSON form."""

_LONGEST = 60
_Item = TypeVar("_Item", int, str)


class Refusal(NamedTuple):
    """One thing that is wrong inside a value.

    path: keys and indices from the value to the fault; () is the value itself.
    """

    path: Location
    what: str
    write: str


def refuse(*refusals: Refusal) -> PydanticCustomError:
    """The exception to raise in a validator; pydantic carries the refusals to the place that reports them."""
    return PydanticCustomError("refused", "refused", {"refusals": refusals})


def abbreviate(value: object) -> str:
    """A value in TOML's syntax; a long one is cut short."""
    text = show(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _collect(value: object, check: Callable[[object], object], *, tables: bool = True) -> Any:
    """Applies `check` to every leaf of nested arrays (and tables), and raises all refusals together."""
    refusals: list[Refusal] = []

    def walk(node: object, path: Location) -> object:
        if isinstance(node, dict) and tables:
            return {key: walk(item, (*path, key)) for key, item in node.items()}
        if isinstance(node, list | tuple):
            return tuple(walk(item, (*path, index)) for index, item in enumerate(node))
        try:
            return check(node)
        except PydanticCustomError as error:
            nested: tuple[Refusal, ...] = (error.context or {})["refusals"]
            refusals.extend(refusal._replace(path=(*path, *refusal.path)) for refusal in nested)
            return node

    result = walk(value, ())
    if refusals:
        raise refuse(*refusals)
    return result


def _leaf(value: object) -> str:
    """Reads one leaf of a tree of avals into its canonical spelling."""
    if not isinstance(value, str):
        raise refuse(Refusal((), f"{abbreviate(value)} is not an aval", 'write for example "f32[batch,64]"'))
    if value.startswith(FILES):
        return _file(value)
    try:
        aval = parse_aval(value)
    except AvalError as error:
        raise refuse(Refusal((), error.what, error.write)) from None
    if aval.dtype in NOT_EXPORTABLE:
        instead = NOT_EXPORTABLE[aval.dtype]
        raise refuse(Refusal((), f'"{value}": jax.export has no {aval.dtype} in its format', f"write {instead}"))
    return str(aval)


_SOURCES = {
    "safetensors": _Source(
        *(rf"{paths.PLAIN}\.safetensors", "a .safetensors file", "a safetensors file"),
        ("weights.safetensors", "sep=."),
    ),
    "msgpack": _Source(paths.PLAIN, "a msgpack file", "a msgpack file", ("params.msgpack", "at=params")),
    "orbax": _Source(
        paths.PLAIN, "an orbax checkpoint", "an orbax checkpoint", ("checkpoints/100/default", "at=params")
    ),
}


def _file(value: str) -> str:
    kind, _, rest = value.partition(":")
    source = _SOURCES[kind]
    path, question, option = rest.partition("?")
    example, its_option = source.examples
    name = its_option.partition("=")[0]
    write = f'write for example "{kind}:{example}" or "{kind}:{example}?{its_option}"'
    if not re.fullmatch(source.path, path):
        raise refuse(Refusal((), f"{show(value)}: {show(path)} is {_no_path(source.of)}", write))
    if question and option.removeprefix(f"{name}=") in ("", option):
        raise refuse(Refusal((), f"{show(value)}: the only option of {source.called} is {name}", write))
    return value


def read_tree(value: object) -> Tree:
    """Reads a pytree of avals from nested tables and arrays."""
    tree: Tree = _collect(value, _leaf)
    return tree


def read_args(value: object) -> tuple[Tree, ...]:
    """Reads an array of pytrees of avals."""
    if not isinstance(value, list | tuple):
        raise refuse(Refusal((), f"{abbreviate(value)} is not an array", 'write for example args = ["f32[batch,64]"]'))
    args: tuple[Tree, ...] = _collect(value, _leaf)
    return args


def read_shardings(value: object) -> Shardings:
    """Reads a tree of partition specs from nested tables and arrays."""
    shardings: Shardings = _collect(value, _sharding)
    return shardings


def _sharding(value: object) -> str:
    if not isinstance(value, str):
        raise refuse(Refusal((), f"{abbreviate(value)} is not a partition spec", 'write for example "P(data, None)"'))
    try:
        return write(parse(value))
    except PartitionError as error:
        raise refuse(Refusal((), error.what, error.write)) from None


def read_check(value: str) -> str:
    """Reads the name of a safety check of jax.export."""
    if value == "platform":
        return value
    what, write = f"unknown check {show(value)}", 'write "platform", the only one'
    if value == "shape_assertions":
        what = "JAX has no way to switch shape assertions off any more"
        write = "leave out the constraint that does not hold"
    elif value.startswith("custom_call:"):
        what = f"{show(value)} stands under another key"
        write = f"write allow_custom_calls = [{show(value.removeprefix('custom_call:') or 'my_kernel')}]"
    raise refuse(Refusal((), what, write))


def read_scalar(value: object) -> Scalar:
    """Reads a single value that JSON writes exactly."""
    match value:
        case float() if not math.isfinite(value):
            raise refuse(Refusal((), f"{value} has no JSON form", "write a finite number, or a string"))
        case bool() | int() | float() | str():
            return value
    raise refuse(Refusal((), f"{abbreviate(value)} is not a number, a string or a boolean", "write for example 1.0"))


def read_fill(value: object) -> int | float | bool:
    """Reads the number that padding consists of."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return value
    raise refuse(Refusal((), f"{abbreviate(value)} is not a number", "write for example 0"))


def read_weights(value: object) -> object:
    """Reads the short form of a table of weights: the file alone."""
    return {"file": value} if isinstance(value, str) else value


def read_static(value: object) -> Static:
    """Reads a scalar, or nested arrays of them, which become tuples."""
    static: Static = _collect(value, _static_leaf, tables=False)
    return static


def _static_leaf(value: object) -> Scalar:
    if isinstance(value, dict):
        raise refuse(
            Refusal((), "a table cannot be a static value, because it is not hashable", "write an array, or a string")
        )
    return read_scalar(value)


def read_constraint(value: str) -> str:
    """Reads a constraint on symbolic dimensions into the form that JAX accepts."""
    try:
        return str(parse_constraint(value))
    except DimensionError as error:
        fault = f'"{value}": {error}'
        raise refuse(Refusal((), fault, 'write for example "batch % 8 == 0" or "batch >= 8"')) from None


def read_sizes(value: tuple[int, ...]) -> tuple[int, ...]:
    """Checks the sizes of a symbolic dimension, and sorts them."""
    refusals = []
    seen: set[int] = set()
    for index, size in enumerate(value):
        if size < 1:
            refusals.append(Refusal((index,), f"{size} is not a size", "write an integer of 1 or more"))
        elif size in seen:
            refusals.append(Refusal((index,), f"{size} is written twice", "write each size once"))
        seen.add(size)
    if not value:
        refusals.append(Refusal((), "no sizes", "write for example [1, 8, 64]"))
    if refusals:
        raise refuse(*refusals)
    return tuple(sorted(value))


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SHARE = re.compile(r"\d{1,6}(\.\d{1,6})?%")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?) ?([A-Za-z]*)")


def read_bytes(value: object) -> int:
    """Reads a number of bytes: a number, or a string such as "2GiB", "500MB" or "1.5e12"."""
    return _amount(value, _UNITS, "a size", 'write for example "2GiB", "500MB" or 1500000')


def read_count(value: object) -> int:
    """Reads a number of things: a number, or a string such as "1.5e12"."""
    return _amount(value, {"": 1}, "a number", 'write for example 1500000 or "1.5e12"')


def _amount(value: object, units: Mapping[str, int], kind: str, example: str) -> int:
    match = _AMOUNT.fullmatch(value if isinstance(value, str) else str(value))
    if not match or isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refuse(Refusal((), f"{abbreviate(value)} is not {kind}", example))
    number, unit = match.groups()
    if unit not in units:
        names = [name for name in units if name]
        fault = f"{show(value)}: there is no unit {unit}" if names else f"{show(value)} is {kind} with a unit"
        raise refuse(Refusal((), fault, nearest(unit, names) or example))
    amount = Fraction(number) * units[unit]
    if amount.denominator != 1:
        raise refuse(Refusal((), f"{abbreviate(value)} is not a whole number", example))
    return int(amount)


def read_tolerance(value: object) -> int | str:
    """Reads the allowed growth of a number: a share of it such as "2%", or an amount in the form of `read_bytes`."""
    example = 'write for example "2%", "64KiB" or 10'
    if isinstance(value, str) and value.endswith("%"):
        if not _SHARE.fullmatch(value):
            raise refuse(Refusal((), f"{show(value)} is not a share", example))
        return value
    return _amount(value, _UNITS, "a tolerance", example)


def read_collectives(value: object) -> int | dict[str, int]:
    """Reads a number of instructions that communicate, or a table of numbers by kind."""
    if not isinstance(value, dict):
        return read_count(value)
    result, refusals = {}, []
    for kind, count in value.items():
        if kind not in COLLECTIVES:
            refusals.append(Refusal((kind,), f'there is no collective "{kind}"', nearest(kind, COLLECTIVES)))
            continue
        try:
            result[kind] = read_count(count)
        except PydanticCustomError as error:
            nested: tuple[Refusal, ...] = (error.context or {})["refusals"]
            refusals += [refusal._replace(path=(kind,)) for refusal in nested]
    if refusals:
        raise refuse(*refusals)
    return result


def read_seconds(value: object) -> float:
    """Reads a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise refuse(Refusal((), f"{abbreviate(value)} is not a number of seconds", "write for example 60"))
    return float(value)


def read_distinct(value: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Checks that no item appears twice; the order stays."""
    first: dict[_Item, int] = {}
    refusals = [
        Refusal((index,), f"{show(item)} is written twice", "write it once")
        for index, item in enumerate(value)
        if first.setdefault(item, index) != index
    ]
    if refusals:
        raise refuse(*refusals)
    return value


TREE_REFERENCE: dict[str, Any] = {"tree": True}
"""Stands for a reference to `TREE_SCHEMA`, because pydantic takes references to its own definitions only."""
_DTYPE = "|".join(re.escape(name) for name in sorted(DTYPES.keys() - NOT_EXPORTABLE.keys()))
_FILES = "|".join(
    rf"{kind}:{source.path}(\?{source.examples[1].partition('=')[0]}=.+)?" for kind, source in _SOURCES.items()
)
_LEAF = rf"^(~?({_DTYPE})(\[[^\[\]]*\])?|{_FILES})$"
TREE_SCHEMA: Mapping[str, object] = {
    "title": "Tree of avals",
    "description": 'An aval such as "f32[batch,64]" (dtype[dimensions]; a name is a symbolic dimension, "f32" is a '
    'scalar), a table of trees (a dict), an array of trees (a list), or the arrays of a file: "safetensors:FILE", '
    '"msgpack:FILE" for a checkpoint of flax, "orbax:FOLDER" for one of orbax.',
    "anyOf": [
        {"type": "string", "pattern": _LEAF, "examples": ["f32[batch,64]", "bf16[]", "i32[2*batch]"]},
        {"type": "object", "additionalProperties": TREE_REFERENCE},
        {"type": "array", "items": TREE_REFERENCE},
    ],
}
"""The JSON Schema of `Tree`. It is under `$defs` because it contains itself."""
SHARDINGS_REFERENCE: dict[str, Any] = {"shardings": True}
"""Stands for a reference to `SHARDINGS_SCHEMA`."""
SHARDINGS_SCHEMA: Mapping[str, object] = {
    "title": "Tree of partition specs",
    "description": 'A partition spec such as "P(data, None)" (an entry for each dimension: the axis of the mesh that '
    'it is split over, several as "(x, y)", or None), or "unspecified", or a table or array of such trees. A spec '
    "holds for all arrays below its place in the tree.",
    "anyOf": [
        {"type": "string", "examples": ["P(data)", "P(None, model)", "P((data, model))", "P()", "unspecified"]},
        {"type": "object", "additionalProperties": SHARDINGS_REFERENCE},
        {"type": "array", "items": SHARDINGS_REFERENCE},
    ],
}
"""The JSON Schema of `Shardings`, which contains itself."""
AMOUNT_SCHEMA: dict[str, Any] = {"type": ["integer", "number", "string"], "minimum": 0}
"""The JSON Schema of a number of bytes, or of other things."""
COLLECTIVES_SCHEMA: dict[str, Any] = {
    "type": ["integer", "number", "string", "object"],
    "minimum": 0,
    "propertyNames": {"enum": list(COLLECTIVES)},
    "additionalProperties": AMOUNT_SCHEMA,
}
"""The JSON Schema of a number of collectives, or of one for each kind."""
SCALAR_SCHEMA: dict[str, Any] = {"type": ["boolean", "integer", "number", "string"]}
"""The JSON Schema of `Scalar`."""
STATIC_SCHEMA: dict[str, Any] = {"type": ["boolean", "integer", "number", "string", "array"]}
"""The JSON Schema of `Static`, without the content of its arrays."""
