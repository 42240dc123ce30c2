"""Read what `.bzl` files declare, without Bazel: Starlark's syntax is Python's, so `ast` parses it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call such as `rule(...)` or `attr.label(...)`, with the arguments that could be evaluated."""

    function: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Function:
    """A function: its name, what it takes (name -> source text of the default, None without one), and its docstring."""

    name: str
    parameters: Mapping[str, str | None]
    doc: str


@dataclass
class File:
    """The global names of a `.bzl` file, evaluated when they are asked for; names that it loads are those of others.

    root: the folder of the repository, in which labels of other files are found.
    """

    root: Path
    path: str
    text: str = ""
    _globals: dict[str, ast.AST] = field(default_factory=dict)
    _loaded: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Parse it."""
        tree = ast.parse(self.text or (self.root / self.path).read_text("utf-8"))
        self.doc = (ast.get_docstring(tree, clean=False) or "").strip()
        for node in tree.body:
            match node:
                case ast.FunctionDef():
                    self._globals[node.name] = node
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self._globals[name] = node.value
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Name(id="load"), args=[ast.Constant(value=str(label)), *names], keywords=keywords
                    )
                ):
                    path = label.removeprefix("//").replace(":", "/")
                    same = {name.value: name.value for name in names if isinstance(name, ast.Constant)}
                    renamed = {word.arg: ast.literal_eval(word.value) for word in keywords}
                    self._loaded |= {str(here): (path, str(there)) for here, there in (same | renamed).items()}

    def public(self) -> dict[str, Any]:
        """Return what others may load, by name."""
        return {name: self.value(name) for name in self._globals if not name.startswith("_")}

    def value(self, name: str) -> Any:
        """Return what a global name is: a Function, a Call, a value of plain Starlark, or None for anything else."""
        if name in self._loaded:
            path, other = self._loaded[name]
            return File(self.root, path).value(other)
        return self._evaluate(self._globals.get(name))

    def _evaluate(self, node: ast.AST | None) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._loaded or name in self._globals:
                return self.value(name)
            case ast.List(elts=items):
                return [self._evaluate(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = self._evaluate(left), self._evaluate(right)
                return None if None in sides else sides[0] + sides[1]
            case ast.Dict(keys=keys, values=values):
                return {self._evaluate(key): self._evaluate(value) for key, value in zip(keys, values, strict=True)}
            case ast.Call(func=ast.Name(id="dict"), args=args, keywords=keywords):
                first = [self._evaluate(argument) for argument in args]
                return {**(first[0] if first else {}), **self._keywords(keywords)}
            case ast.Call(func=function, keywords=keywords):
                positional = {"": self._evaluate(node.args[0])} if node.args else {}
                return Call(ast.unparse(function), positional | self._keywords(keywords))
            case ast.FunctionDef(name=name, args=args):
                rest = [f"**{args.kwarg.arg}"] if args.kwarg else []
                known = [None] * (len(args.args) - len(args.defaults)) + [ast.unparse(value) for value in args.defaults]
                parameters = dict(zip([word.arg for word in args.args], known, strict=True)) | dict.fromkeys(rest)
                return Function(name, parameters, ast.get_docstring(node) or "")
        return None

    def _keywords(self, keywords: list[ast.keyword]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for word in keywords:
            value = self._evaluate(word.value)
            values |= {word.arg: value} if word.arg else value or {}
        return values
