"""Show a tree to a person: a row for each leaf, and one row for equal subtrees.

`layers[0..11].attention.query` stands for twelve leaves of a list, `block_{1..3}.kernel` for those of three keys,
`{key,query,value}.bias` for three keys with the same below them. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stagec.core.trees.tree import Tree

_MOST_PARTS = 9
"""The most strings and numbers of a step to examine, because a foreign file may have keys of any length."""


class Row(NamedTuple):
    """One line: a short path, and its content."""

    path: str
    what: str


def fold(tree: Tree, leaves: Sequence[str], path: str = "") -> list[Row]:
    """Return the rows of a tree, in an order that its structure alone decides.

    Subtrees share a row if their structures and all of their leaves are equal. Keys of a dict are sorted in natural
    order: `layer_2` before `layer_10`. A value that is not a dict has a row with its kind ("list of
    12"), and so has a dict with other keys than names.
    leaves: the description of each leaf, in the tree's order. path: the start of all paths.
    """
    return list(_rows(_Reader(leaves).node(tree), path))


def what_it_is(tree: Tree) -> str:
    """Describe a node that is not a leaf in a few words: "dict", "list of 12", "pkg.module:Class(unit='m')"."""
    count = len(tree.children)
    match tree.kind:
        case "none":
            return "None"
        case "list" | "tuple":
            return f"{tree.kind} of {count}" if count else {"list": "[]", "tuple": "()"}[tree.kind]
        case "dict":
            return "dict" if count else "{}"
    static = tree.fields.static if tree.fields else {}
    return f"{tree.name}({', '.join(f'{name}={value!r}' for name, value in static.items())})" if static else tree.name


def step(text: str) -> str:
    """Return the short form of a step: `['w']` is `.w`, if the key is a name."""
    match = re.fullmatch(r"\['([^\W\d]\w*)'\]", text)
    return f".{match[1]}" if match else text


class _Node(NamedTuple):
    """A node with its description. number: equal nodes have the same number."""

    number: int
    what: str
    is_dict: bool
    steps: tuple[str, ...]
    children: tuple[_Node, ...]


class _Reader:
    """Numbers nodes while it reads a tree from the leaves up: equal ones get the same number, whatever their size."""

    def __init__(self, leaves: Sequence[str]) -> None:
        self._leaves = iter(leaves)
        self._numbers: dict[object, int] = {}

    def node(self, tree: Tree) -> _Node:
        leaf = tree.kind == "leaf"
        what = next(self._leaves) if leaf else what_it_is(tree)
        children = tuple(map(self.node, tree.children))
        steps = tuple(map(step, tree._steps())) if children else ()
        key = leaf, what, tree.kind, steps, tuple(child.number for child in children)
        return _Node(self._numbers.setdefault(key, len(self._numbers)), what, tree.kind == "dict", steps, children)


def _rows(node: _Node, path: str) -> Iterator[Row]:
    plain = node.is_dict and all(text.startswith(".") for text in node.steps)
    if not (plain and node.children):
        yield Row(path, node.what)
    for below, child in _folded(node):
        yield from _rows(child, path + below if path else below.removeprefix("."))


class _Item(NamedTuple):
    """Some children that are one.

    order: which child was the first of them.
    parts: of their step, strings and numbers by turns; folded parts are already written.
    """

    order: int
    parts: tuple[str, ...]
    child: _Node


def _folded(node: _Node) -> list[tuple[str, _Node]]:
    """Return the children, equal ones once, with one step for each group of equal children."""
    parts = [_parts(text) for text in node.steps]
    # JAX has sorted numbers and all other keys; of strings it puts "layer_10" before "layer_2".
    texts = node.is_dict and all(text.startswith((".", "['")) for text in node.steps)
    order = sorted(range(len(parts)), key=lambda i: _as_people_count(parts[i])) if texts else range(len(parts))
    items = [_Item(position, parts[i], node.children[i]) for position, i in enumerate(order)]
    for position in range(1, max(map(len, parts), default=0), 2):
        items = _merged(items, position)
    return _alike([("".join(item.parts), item.child) for item in items])


def _parts(text: str) -> tuple[str, ...]:
    """Divide a step at its numbers; not one with more numbers than anybody gives a layer."""
    parts = tuple(re.split("([0-9]{1,9})", text))
    return parts if len(parts) <= _MOST_PARTS else (text,)


def _as_people_count(parts: Sequence[str]) -> list[tuple[int, str]]:
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def _merged(items: Sequence[_Item], position: int) -> list[_Item]:
    """Fold items that differ only in the number at `position` into one, at the position of the first."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        key = item.parts[:position], item.parts[position + 1 :], item.child.number
        groups.setdefault(key if position < len(item.parts) else item.order, []).append(item)
    merged = [folded for group in groups.values() for folded in (_one_of(group, position) if len(group) > 1 else group)]
    return sorted(merged, key=lambda item: item.order)


def _one_of(group: Sequence[_Item], position: int) -> Sequence[_Item]:
    """Fold equal items into one; leaves only if their numbers are consecutive, because leaves are short anyway."""
    orders = {item.parts[position]: item.order for item in group}
    if any(number[0] == "0" != number for number in orders) and len({*map(len, orders)}) > 1:
        return group  # 1 and 01 are two names
    numbers = sorted(orders, key=int)
    _, parts, child = group[0]
    before, after = parts[:position], parts[position + 1 :]
    bare = before[-1].endswith("[") and after[0].startswith("]")
    folded = []
    for run in [numbers] if child.children else _runs(numbers):
        text = _ranges(run) if bare or len(run) == 1 else f"{{{_ranges(run)}}}"
        folded.append(_Item(min(orders[number] for number in run), (*before, text, *after), child))
    return folded


def _runs(numbers: Sequence[str]) -> list[list[str]]:
    """Split sorted numbers at gaps."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _ranges(numbers: Sequence[str]) -> str:
    """Write sorted numbers in short: "0..3", "0..10 step 2", or "0,2..4"."""
    values = [int(number) for number in numbers]
    distance = values[1] - values[0] if len(values) > 1 else 1
    if distance > 1 and len(values) > 2 and values == list(range(values[0], values[-1] + 1, distance)):
        return f"{numbers[0]}..{numbers[-1]} step {distance}"
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in _runs(numbers))


def _alike(items: Sequence[tuple[str, _Node]]) -> list[tuple[str, _Node]]:
    """Fold names with equal subtrees into one: `.{mu,nu}`. Leaves keep their own rows, which are as short."""
    groups: dict[object, list[tuple[str, _Node]]] = {}
    for name, child in items:
        named = name.startswith(".") and "{" not in name and child.children
        groups.setdefault(child.number if named else name, []).append((name, child))
    return [
        group[0] if len(group) == 1 else (f".{{{','.join(name[1:] for name, _ in group)}}}", group[0][1])
        for group in groups.values()
    ]
