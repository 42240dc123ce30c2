"""The typed stub of a bundle: the parameters and results of its functions, for editors and type checkers.

Everything is written for numpy's types: arrays by dtype, trees as TypedDict, list and tuple. Shapes are in comments and
docstrings: numpy's types do not have them. A node of the model's own type is a dict of its fields, or any object that
has these.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stagec.bundle.archive import Archive
from stagec.bundle.calls import call_of
from stagec.core.messages.calls import Argument, Call
from stagec.core.messages.errors import printable
from stagec.core.sizes.avals import DTYPES, Aval, physical
from stagec.core.trees.keyed import Keyed
from stagec.core.trees.nodes import STATIC
from stagec.core.trees.tree import Tree

_HEADER = '''"""Types of the bundle {name} {version}. `stagec stub` wrote this file.

    import stagec
    from typing import TYPE_CHECKING, cast

    if TYPE_CHECKING:
        from {module} import {bundle}

    bundle = cast("{bundle}", stagec.load("{name}.aot"))
"""

# By their classes, a bundle has any function and a function takes anything: not these.
# mypy: disable-error-code="override"
# pyright: reportIncompatibleMethodOverride=false

from typing import Any, Literal, NotRequired, Protocol, TypedDict, overload

import numpy as np
from numpy.typing import NDArray
from stagec import Bundle, Function
'''
_RESERVED = ("Any", "Literal", "NotRequired", "Protocol", "TypedDict", "NDArray", "Bundle", "Function")
_WIDEST = 120
_LEFT_OUT = ("NotRequired[Any]", "")
"""Type and comment of an optional value: it has no array."""
_NUMBERS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}
"""The type of a Python number for a scalar, by the first letter of the dtype."""


def stub(archive: Archive, module: str) -> str:
    """Return the stub of a bundle, the content of a .pyi file. module: its name for imports.

    Raises LoadError or ValueError if the bundle is damaged.
    """
    functions: dict[str, list[Call]] = {}
    for artifact, entry in archive.index["functions"].items():
        functions.setdefault(entry["function"], []).append(call_of(archive, artifact))
    types = _Types()
    bundle = types.name(f"{archive.index['name']}_bundle")
    names = {function: types.name(function) for function in functions}
    # Arguments first: the result of one function is often the argument of another, and gets its name.
    taken = {
        function: [types.arguments(names[function], call) for call in calls] for function, calls in functions.items()
    }
    parts = []
    for function, calls in functions.items():
        given = [types.type_of(f"{names[function]}_result", call.out_tree, list(call.out_avals)) for call in calls]
        signatures = list(zip(calls, taken[function], given, strict=True))
        parts.append(
            _function(names[function], [method for row in signatures for method in _methods(*row, len(calls))])
        )
    parts.append(_bundle(bundle, names))
    header = _HEADER.format(name=archive.index["name"], version=archive.index["version"], module=module, bundle=bundle)
    return printable("\n\n".join([header, *types.declared, *parts]))


class _Method(NamedTuple):
    """One way to call a function: its parameters and result in Python's syntax, and a comment."""

    parameters: list[str]
    result: str
    documentation: str


def _methods(call: Call, types: Mapping[str, str], result: str, signatures: int) -> Iterator[_Method]:
    """Yield the ways of calling one signature: without the bound arguments, and with them.

    types: of each argument, by its path. signatures: the number of the function's.
    """
    by_position = [argument for argument in call.arguments if not argument.by_keyword]
    fewer = [argument for argument in by_position if not call.may_be_left_out(argument)]
    by_keyword = [argument for argument in call.arguments if argument.by_keyword]
    named = [
        f"{argument.name}: {types[argument.path]}{' = ...' * call.may_be_left_out(argument)}"
        for argument in by_keyword
        if _is_name(argument.name)
    ]
    named += [
        f"{name}: {_literal(value)}{' = ...' * (signatures == 1)}"
        for name, value in call.static.items()
        if _is_name(name)
    ]
    for positional in [fewer, by_position] if fewer != by_position else [by_position]:
        words = ["self", *(f"{name}: {types[argument.path]}" for name, argument in _named(positional))]
        words += ["/"] if positional else []
        words += ["*", *named] if named else []
        passed = [*(argument.name for argument in by_keyword), *call.static]
        words += [] if all(map(_is_name, passed)) else ["**others: Any"]
        yield _Method(words, result, call.as_text())


def _named(arguments: Sequence[Argument]) -> Iterator[tuple[str, Argument]]:
    """Yield arguments with names that Python accepts, all different."""
    seen = {"self"}
    for argument in arguments:
        name = re.sub(r"\W+", "_", argument.name).strip("_") or "argument"
        name += "_" if keyword.iskeyword(name) or name in seen or name[0].isdigit() else ""
        seen.add(name)
        yield (f"_{name}" if name[0].isdigit() else name), argument


def _function(name: str, methods: Sequence[_Method]) -> str:
    lines = [f"class {name}(Function):"]
    for method in methods:
        lines += ["    @overload"] if len(methods) > 1 else []
        line = f"    def __call__({', '.join(method.parameters)}) -> {method.result}:"
        below = [f"        {parameter}," for parameter in method.parameters]
        lines += [line] if len(line) <= _WIDEST else ["    def __call__(", *below, f"    ) -> {method.result}:"]
        lines += [f"        {line}".rstrip() for line in _docstring(method.documentation)]
    return "\n".join(lines) + "\n"


def _bundle(name: str, functions: Mapping[str, str]) -> str:
    lines = [f"class {name}(Bundle):", *([] if functions else ["    ..."])]
    for function, kind in functions.items():
        lines += ["    @overload"] if len(functions) > 1 else []
        lines.append(f"    def __getitem__(self, name: Literal[{function!r}]) -> {kind}: ...")
    return "\n".join(lines) + "\n"


def _docstring(text: str) -> list[str]:
    escaped = text.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return [*f'"""{escaped}'.splitlines(), '"""']


def _literal(value: Any) -> str:
    return f"Literal[{value!r}]" if isinstance(value, bool | int | str) else type(value).__name__


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _comment(text: str) -> str:
    return f"  # {' '.join(text.split())}"


def _camel(text: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"[\W_]+", text)) or "Type"


class _Types:
    """The types that a stub declares, each structure once."""

    def __init__(self) -> None:
        self.declared: list[str] = []
        self._names = {*_RESERVED}
        self._known: dict[object, str] = {}

    def name(self, text: str) -> str:
        """Return a unique class name made from a string."""
        name = stem = f"_{_camel(text)}" if _camel(text)[0].isdigit() else _camel(text)
        number = 1
        while name in self._names or keyword.iskeyword(name):
            number += 1
            name = f"{stem}{number}"
        self._names.add(name)
        return name

    def arguments(self, function: str, call: Call) -> dict[str, str]:
        """Return the type of each argument of a call, by its path."""
        types_of = {}
        for argument in call.arguments:
            avals = [call.in_avals[leaf] for leaf in argument.leaves]
            scalar = argument.tree.kind == "leaf" and not physical(avals[0]).shape
            types_of[argument.path] = (
                _scalar(avals[0]) if scalar else self.type_of(f"{function}_{argument.name}", argument.tree, avals, True)
            )
        return types_of

    def type_of(self, name: str, tree: Tree, avals: list[Aval], argument: bool = False) -> str:
        """Return the type of a tree with these leaves, and declare it if it has no name yet.

        argument: whether it is passed: objects of the model's own types are taken, by their fields.
        """
        leaves = iter(avals)
        return self._of(name, tree, leaves, argument)[0]

    def _of(self, name: str, tree: Tree, leaves: Iterator[Aval], argument: bool) -> tuple[str, str]:
        """Return a type, and its comment."""
        if tree.kind == "leaf":
            aval = next(leaves)
            return _array(aval), _comment(str(aval))
        steps = tree.child_names()
        children = [
            self._of(f"{name}_{'' if tree.kind in ('list', 'tuple') else step}", child, leaves, argument)
            for step, child in zip(steps, tree.children, strict=True)
        ]
        kinds = [kind for kind, _ in children]
        match tree.kind:
            case "none":
                return "None", ""
            case "tuple":
                return f"tuple[{', '.join(kinds) or '()'}]", _same(children)
            case "list":
                return f"list[{' | '.join(dict.fromkeys(kinds)) or 'Any'}]", _same(children)
            case "dict" if all(isinstance(key, str) for key in tree.keys):
                return self._dict(name, list(zip(tree.keys, map(_entry, tree.children, children), strict=True))), ""
            case "dict":
                return _dict_of(tree.keys, kinds), _same(children)
        if tree.keyed is not None:
            return self._keyed(name, tree, tree.keyed, children, argument), _comment(tree.name)
        if tree.fields is None:
            return "Any", _comment(f"{tree.name}, or a tuple of its children")
        rows = [
            (field, _LEFT_OUT if child.name == STATIC else _entry(child, kind))
            for field, child, kind in zip(tree.fields.names, tree.children, children, strict=True)
        ]
        wanted = [field for field, child in zip(tree.fields.names, tree.children, strict=True) if child.num_leaves]
        fields = self._dict(name, [*rows, *((static, _LEFT_OUT) for static in tree.fields.static)])
        return f"{fields} | {self._object(name, wanted) if argument else 'Any'}", _comment(tree.name)

    def _keyed(self, name: str, tree: Tree, keyed: Keyed, children: Sequence[tuple[str, str]], argument: bool) -> str:
        """Return the type of a node with key entries: of its plain container, or of an object."""
        numbers, container = tree.stand_in(keyed)
        shown = [children[i] for i in numbers]
        kinds = [kind for kind, _ in shown]
        keys = [keyed.keys[i] for i in numbers] if keyed.keys is not None else []
        if container is tuple:
            plain = f"tuple[{', '.join(kinds) or '()'}]"
        elif container is list:
            plain = f"list[{' | '.join(dict.fromkeys(kinds))}]"
        elif all(isinstance(key, str) for key in keys):
            entries = list(map(_entry, tree.children, children))
            rows = [(key, entries[i] if i in numbers else _LEFT_OUT) for i, key in enumerate(keyed.keys or ())]
            plain = self._dict(name, [(key, kind) for key, kind in rows if isinstance(key, str)])
        else:
            plain = _dict_of(keys, kinds)
        has_fields = argument and keys and all(isinstance(entry, str) for entry in keyed.entries or ())
        wanted = [keyed.keys[i] for i in numbers if tree.children[i].num_leaves] if keyed.keys is not None else []
        return f"{plain} | {self._object(name, wanted) if has_fields else 'Any'}"

    def _dict(self, name: str, rows: Sequence[tuple[str, tuple[str, str]]]) -> str:
        """Return the TypedDict of keys with types and comments."""
        key = "dict", tuple(rows)
        if key not in self._known:
            kind = self._known[key] = self.name(name)
            if all(_is_name(field) for field, _ in rows):
                fields = [f"    {field}: {kind_of}{comment}" for field, (kind_of, comment) in rows] or ["    ..."]
                text = "\n".join([f"class {kind}(TypedDict):", *fields])
            else:
                items = [f"        {field!r}: {kind_of},{comment}" for field, (kind_of, comment) in rows]
                text = "\n".join([f"{kind} = TypedDict(", f"    {kind!r},", "    {", *items, "    },", ")"])
            self.declared.append(text + "\n")
        return self._known[key]

    def _object(self, name: str, fields: Sequence[str]) -> str:
        """Return the protocol of objects with these fields; their own class knows the content."""
        named = tuple(field for field in fields if _is_name(field))
        key = "object", named
        if not named:
            return "Any"
        if key not in self._known:
            kind = self._known[key] = self.name(f"{name}_object")
            lines = [f"    @property\n    def {field}(self) -> Any: ..." for field in named]
            self.declared.append("\n".join([f"class {kind}(Protocol):", *lines]) + "\n")
        return self._known[key]


def _entry(child: Tree, typed: tuple[str, str]) -> tuple[str, str]:
    """Return type and comment of a named child; it is optional if it holds no array."""
    kind, comment = typed
    return typed if child.num_leaves else (f"NotRequired[{kind}]", comment)


def _dict_of(keys: Sequence[object], kinds: Sequence[str]) -> str:
    """Return the type of a dict with keys that are not names."""
    of_keys = {type(key).__name__ for key in keys}
    key = of_keys.pop() if len(of_keys) == 1 and of_keys <= {"int", "float", "bytes"} else "Any"
    return f"dict[{key}, {' | '.join(dict.fromkeys(kinds))}]"


def _same(children: Sequence[tuple[str, str]]) -> str:
    """Return the comment of all elements, if they have one."""
    comments = dict.fromkeys(comment.removeprefix("  # ") for _, comment in children if comment)
    return _comment(", ".join(comments)) if comments else ""


def _array(aval: Aval) -> str:
    """Return the type of arrays of an aval. numpy has no type for dtypes of ml_dtypes, such as bfloat16."""
    name = DTYPES[physical(aval).dtype].numpy_name
    known = re.fullmatch(r"(u?int|float|complex)(8|16|32|64|128)", name)
    return f"NDArray[np.{'bool_' if name == 'bool' else name}]" if known or name == "bool" else "NDArray[Any]"


def _scalar(aval: Aval) -> str:
    """Return the type of an argument that is one number: an array without dimensions, numpy's number or Python's."""
    array = _array(aval)
    number = "" if array == "NDArray[Any]" else f" | {array.removeprefix('NDArray[').removesuffix(']')}"
    return f"{array}{number} | {_NUMBERS.get(aval.dtype[0], 'Any') if aval.dtype != 'bf16' else 'float'}"
