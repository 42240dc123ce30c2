"""How a function is called, as a person writes it: names of parameters, trees by paths. Standard library only."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stagec.core.sizes.avals import Aval, physical
from stagec.core.trees import folding
from stagec.core.trees.folding import Row
from stagec.core.trees.tree import Tree, TreeMismatch, argument_path

_WIDEST = 64
"""Longer paths (in characters) do not widen the column."""


class Argument(NamedTuple):
    """One argument of a call.

    name: of the parameter; `args[0]` if it is not known. path: in `(args, kwargs)`, such as `kwargs['scale']`. tree:
    its structure. leaves: the numbers of its leaves among all.
    """

    name: str
    path: str
    tree: Tree
    leaves: range

    @property
    def by_keyword(self) -> bool:
        """Whether it is passed by keyword, and not by position."""
        return self.path.startswith("kwargs")


class State(NamedTuple):
    """The state that a server keeps between the calls of a sequence.

    taken: the leaves of the arguments that it is passed as. given: those of the result that take its place, as many,
    or none if one of both is not. idle: seconds without a call before the server drops it; None: the server decides.
    """

    taken: tuple[int, ...]
    given: tuple[int, ...]
    idle: float | None


@dataclass(frozen=True)
class Call:
    """The facts that a caller of a function must know.

    name: of the function.
    in_tree: structure of `(args, kwargs)`; out_tree: of the result. in_avals, out_avals: of their leaves.
    parameters: names of the parameters that take positional arguments, and `*name` of one that takes all others. May
        have fewer names than there are arguments.
    static: the static arguments that it was built with.
    donated: for each of `in_avals` whether a call consumes its buffer; empty: of none it is known.
    bound: number of the leaf -> the weight to use if the caller leaves it out. Only whole arguments are bound. filled:
    keyword arguments that the loader makes if the caller leaves them out.
    serve: for servers: "inputs" and "outputs": path of an array -> the name that the manifest gives it;
        "state": as `states` has it; "rows": "independent" if the manifest says so.
    """

    name: str
    in_tree: Tree
    in_avals: Sequence[Aval]
    out_tree: Tree
    out_avals: Sequence[Aval]
    parameters: Sequence[str] = ()
    static: Mapping[str, Any] = field(default_factory=dict)
    donated: Sequence[bool] = ()
    bound: Mapping[int, str] = field(default_factory=dict)
    filled: Sequence[str] = ()
    serve: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments, in the order of their leaves; static ones are not among them."""
        return tuple(self._arguments())

    def may_be_left_out(self, argument: Argument) -> bool:
        """Return whether the bundle has data for it, or it is a keyword argument without arrays."""
        empty = argument.by_keyword and not argument.leaves
        return empty or argument.name in self.filled or any(leaf in self.bound for leaf in argument.leaves)

    @property
    def signature(self) -> str:
        """Write Python's form: `named(x, /, *, shift, power=2) -> f32[3]`; arguments in brackets are optional."""
        positional, by_keyword = [], []
        rest = self._rest
        for argument in self.arguments:
            left_out = self.may_be_left_out(argument)
            if argument.by_keyword:
                by_keyword.append(f"{argument.name}=..." if left_out else argument.name)
            elif not (rest and argument.name.startswith(f"{rest}[")):
                positional.append(f"[{argument.name}]" if left_out else argument.name)
        by_keyword += [f"{name}={value!r}" for name, value in self.static.items()]
        words = [
            *positional,
            *(["/"] if positional else []),
            *([f"*{rest}"] if rest or by_keyword else []),
            *by_keyword,
        ]
        return f"{self.name}({', '.join(words)}) -> {self._result}"

    @property
    def _rest(self) -> str:
        """The name of the parameter that takes all other positional arguments, if there are any; else ""."""
        rest = next((name.removeprefix("*") for name in self.parameters if name.startswith("*")), "")
        return rest if any(argument.name.startswith(f"{rest}[") for argument in self.arguments if rest) else ""

    @property
    def _result(self) -> str:
        if self.out_tree.kind == "leaf":
            return _array(self.out_avals[0])
        return "result" if self.out_avals else folding.what_it_is(self.out_tree)

    def rows(self, which: Sequence[Argument] | None = None) -> list[Row]:
        """Return a row for each leaf of the arguments, folded. which: some of them, None: all."""
        return [row for argument in (self.arguments if which is None else which) for row in self._rows(argument)]

    @property
    def results(self) -> list[Row]:
        """Return a row for each leaf of the result, folded; none for one array, because the signature shows it."""
        if self.out_tree.kind == "leaf" or not self.out_avals:
            return []
        return folding.fold(self.out_tree, list(map(_array, self.out_avals)), "result")

    def as_text(self, indent: str = "") -> str:
        """Return the call and its result, with a newline after each line."""
        lines = [self.signature, *_columns([*self.rows(), *self.results])]
        return "".join(f"{indent}{line}\n" for line in lines)

    def mismatch(self, error: TreeMismatch, named: Iterable[str] = ()) -> str:
        """Return the message for arguments with another structure: the path, the fault, and the right call.

        error: of `in_tree.flatten`. named: the keyword arguments.
        """
        path = argument_path(error.path)
        misplaced = [
            argument.name for argument in self.arguments if not argument.by_keyword and argument.name in {*named}
        ]
        advice = f"; {', '.join(misplaced)}: by position, not by keyword" if misplaced else ""
        return f"{self.path(path) or 'the call'}: {error.what}{advice}{self.after(path)}"

    def after(self, path: str = "", most: int = 40) -> str:
        """Return the lines after a message about a call: how to write the arguments that the message is about.

        path: where in the arguments, such as `args[0]['w']`; "" or anything else: all of them. most: rows at most.
        """
        argument = self._of(path)
        rows = self.rows(None if argument is None else [argument])
        lines = [f"the call is {self.signature}", *_columns(rows[:most])]
        if len(rows) > most:
            lines.append(f"  ... and {len(rows) - most} rows more, which stagec inspect shows")
        return "".join(f"\n  {line}" for line in lines)

    @property
    def input_paths(self) -> dict[int, str]:
        """The path of each array that a caller passes, by the number of its leaf, without those in the bundle."""
        left_out = {leaf for argument in self.arguments if argument.name in self.filled for leaf in argument.leaves}
        return {leaf: path for leaf, path in enumerate(self._paths) if leaf not in left_out | self.bound.keys()}

    @functools.cached_property
    def _paths(self) -> list[str]:
        """The path of each array of the arguments."""
        paths = [argument_path(path) for path in self.in_tree.paths()]
        named = list(map(self.path, paths))
        # A parameter that only has a position may have a keyword's name.
        return named if len({*named}) == len(named) else paths

    @functools.cached_property
    def states(self) -> dict[str, State]:
        """The states that servers keep between calls, by name."""
        return {
            name: State(
                tuple(_below(table.get("argument", ""), self._paths)),
                tuple(_below(table.get("result", ""), self.output_paths)),
                table.get("idle"),
            )
            for name, table in self.serve.get("state", {}).items()
        }

    @property
    def output_paths(self) -> list[str]:
        """The path of each array of the result: `result['probs']`."""
        return list(self.out_tree.paths("result"))

    def path(self, path: str) -> str:
        """Write a path in the arguments with the name of the parameter: `args[0]['w']` is `params['w']`."""
        argument = self._of(path)
        return path if argument is None else argument.name + path[len(argument.path) :]

    def _of(self, path: str) -> Argument | None:
        """Return the argument that a path is in."""
        for argument in self.arguments:
            if path.startswith(argument.path) and path[len(argument.path) :][:1] in ("", "[", "."):
                return argument
        return None

    def leaves_of(self, paths: Iterable[str]) -> list[bool]:
        """Return for each of `in_avals` whether its argument is at one of these paths."""
        wanted = {*paths}
        return [argument.path in wanted for argument in self.arguments for _ in argument.leaves]

    def _arguments(self) -> Iterator[Argument]:
        if [child.kind for child in self.in_tree.children] != ["tuple", "dict"]:
            # An artifact that JAX did not make may have any structure.
            yield Argument("arguments", "arguments", self.in_tree, range(self.in_tree.num_leaves))
            return
        first = 0
        for top, kind in zip(self.in_tree.children, ("args", "kwargs"), strict=True):
            names = _positional(self.parameters, len(top.children)) if kind == "args" else list(map(str, top.keys))
            for i, (name, tree) in enumerate(zip(names, top.children, strict=True)):
                path = f"args[{i}]" if kind == "args" else f"kwargs[{name!r}]"
                leaves = range(first, first + tree.num_leaves)
                yield Argument(name, path, tree, leaves)
                first = leaves.stop

    def _rows(self, argument: Argument) -> list[Row]:
        labels = [_array(self.in_avals[leaf]) for leaf in argument.leaves]
        marks = [self._mark(argument, leaf) for leaf in argument.leaves]
        if len({*marks}) > 1 or argument.tree.kind == "leaf":
            labels = [f"{label}  {mark}".rstrip() for label, mark in zip(labels, marks, strict=True)]
            marks = []
        rows = folding.fold(argument.tree, labels, argument.name)
        if not marks or not marks[0]:
            return rows
        if rows[0].path == argument.name:
            return [Row(argument.name, f"{rows[0].what}  {marks[0]}"), *rows[1:]]
        return [Row(argument.name, f"{folding.what_it_is(argument.tree)}  {marks[0]}"), *rows]

    def _mark(self, argument: Argument, leaf: int) -> str:
        donated = leaf < len(self.donated) and self.donated[leaf]
        words = ["donated"] if donated else []
        if leaf in self.bound:
            words.append(f"bound to {self.bound[leaf].partition(':')[0]}")
        if argument.name in self.filled:
            words.append("made by the loader where you leave it out")
        return ", ".join(words)


def _below(top: str, paths: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of the paths that are `top`, or below it; none for ""."""
    for number, path in enumerate(paths):
        if top and path.startswith(top) and path[len(top) :][:1] in ("", "[", "."):
            yield number


def _positional(parameters: Sequence[str], count: int) -> list[str]:
    """Return a name for each of `count` positional arguments."""
    names = [name for name in parameters if not name.startswith("*")][:count]
    rest = next((name.removeprefix("*") for name in parameters if name.startswith("*")), "")
    known = len(names)
    return names + [f"{rest}[{i - known}]" if rest else f"args[{i}]" for i in range(known, count)]


def _array(aval: Aval) -> str:
    """Write an argument or result for a caller; for a PRNG key, write its words and that they are a key."""
    given = physical(aval)
    return str(aval) if given.dtype == aval.dtype else f"{given} ({aval})"


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row."""
    width = max((len(row.path) for row in rows if len(row.path) <= _WIDEST), default=0)
    return [f"  {row.path:<{width}}  {row.what}" for row in rows]
