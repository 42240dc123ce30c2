"""How an array is split over the axes of a mesh: `P(data, None, (x, y))`, the string form of a PartitionSpec.

It is a string because TOML has no null, and an array of TOML would look like a tree of arguments.
One entry for each dimension, in order: the axis that it is split over, several axes in parentheses, or None if it is
whole; dimensions that are left out at the end are whole, and `P()` is on every device in full
(https://docs.jax.dev/en/latest/jax.sharding.html). Standard library only.
"""

import ast
from typing import TypeAlias

from stagec.core.sizes import expressions

UNSPECIFIED = "unspecified"
"""Stands for a sharding that XLA chooses; JAX writes None."""

Partition: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dimension, the axes that it is split over, outermost first; () if it is whole."""

_HOW_TO_WRITE = 'write for example "P(data, None)", "P(None, (x, y))", "P()" or "unspecified"'


class PartitionError(ValueError):
    """A string that is not a PartitionSpec; `what` is the reason, `write` the correction."""

    def __init__(self, what: str, write: str = _HOW_TO_WRITE) -> None:
        super().__init__(what)
        self.what = what
        self.write = write


def parse(text: str) -> Partition | None:
    """Reads the string form of a PartitionSpec; None for "unspecified". Raises PartitionError."""
    if text == UNSPECIFIED:
        return None
    try:
        node = expressions.parse(text)
    except ValueError:
        raise PartitionError(f'"{text}" is not a partition spec') from None
    match node:
        case ast.Call(func=ast.Name(id="P" | "PartitionSpec"), args=entries, keywords=[]):
            partition = tuple(_axes(text, entry) for entry in entries)
        case _:
            raise PartitionError(f'"{text}" is not a partition spec')
    seen: set[str] = set()
    for axis in (axis for axes in partition for axis in axes):
        if axis in seen:
            raise PartitionError(f'"{text}": the axis "{axis}" is used twice', "split one dimension over an axis")
        seen.add(axis)
    return partition


def write(partition: Partition | None) -> str:
    """The one spelling of a partition; `parse` gives back an equal one."""
    if partition is None:
        return UNSPECIFIED
    return f"P({', '.join(map(_entry, partition))})"


def _entry(axes: tuple[str, ...]) -> str:
    match axes:
        case ():
            return "None"
        case (axis,):
            return axis
    return f"({', '.join(axes)})"


def _axes(text: str, node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str() as name) | ast.Name(id=name):
            return (name,)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(axis for element in elements for axis in _axes(text, element))
    raise PartitionError(f'"{text}": {ast.unparse(node)} is not the name of an axis')
