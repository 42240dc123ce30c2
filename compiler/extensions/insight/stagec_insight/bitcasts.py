"""Write a device's bitcast for CPUs: take the elements in the order of memory as an array of another type.

Layouts and tiles: https://openxla.org/xla/shapes, https://openxla.org/xla/tiled_layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stagec.costs import hlo
from stagec.costs.array_types import Array, array
from stagec_insight.hlo_writer import Refused, Writer, listed


def rewrite(writer: Writer) -> str:
    """Write the instructions of a bitcast; return the name of the result. Raises Refused."""
    (operand,) = writer.instruction.operands
    before, after = array(writer.type_of(operand)), array(writer.instruction.type)
    value = writer.values[operand]
    tiled = before.tiles != after.tiles or before.physical[-2:] != after.physical[-2:]
    flat = _in_memory(before, writer, value, tiled)
    if before.dtype != after.dtype:
        flat = _other_dtype(flat, after.dtype, writer)
    (length,) = array(writer.types[flat]).dims
    if tiled and length != _length(after):
        raise Refused(f"{before} has another size in memory than {after}")
    return _from_memory(after, writer, flat, tiled)


def _other_dtype(value: str, dtype: str, writer: Writer) -> str:
    """A flat array as one of another dtype: as many bytes."""
    type_ = array(writer.types[value])
    narrow, wide = hlo.size(f"{type_.dtype}[]"), hlo.size(f"{dtype}[]")
    (length,) = type_.dims
    if narrow < wide:
        ratio = wide // narrow
        value = writer.add(f"{type_.dtype}[{length // ratio},{ratio}]", "reshape", value)
        return writer.add(f"{dtype}[{length // ratio}]", "bitcast-convert", value)
    if narrow == wide:
        return writer.add(f"{dtype}[{length}]", "bitcast-convert", value)
    ratio = narrow // wide
    value = writer.add(f"{dtype}[{length},{ratio}]", "bitcast-convert", value)
    return writer.add(f"{dtype}[{length * ratio}]", "reshape", value)


class _Step(NamedTuple):
    """One level of tiles: pad sizes to whole tiles, split them into tiles, and put these in order."""

    sizes: tuple[int, ...]
    padded: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def moved(self) -> tuple[int, ...]:
        return tuple(self.split[axis] for axis in self.order)


def _steps(type_: Array) -> Iterator[_Step]:
    """Yield each level of tiles, the outer one first."""
    sizes = type_.physical
    for tile in type_.tiles:
        sizes = (1,) * (len(tile) - len(sizes)) + sizes
        fixed = len(sizes) - len(tile)
        counts = [-(-size // along) for size, along in zip(sizes[fixed:], tile, strict=True)]
        padded = (*sizes[:fixed], *(count * along for count, along in zip(counts, tile, strict=True)))
        split = (*sizes[:fixed], *(size for pair in zip(counts, tile, strict=True) for size in pair))
        order = (*range(fixed), *range(fixed, len(split), 2), *range(fixed + 1, len(split), 2))
        step = _Step(sizes, padded, split, order)
        yield step
        sizes = step.moved


def _length(type_: Array) -> int:
    steps = list(_steps(type_))
    return math.prod(steps[-1].padded if steps else type_.dims)


def _in_memory(type_: Array, writer: Writer, value: str, tiled: bool) -> str:
    """The elements of an array in the order of memory, with the padding of its tiles if `tiled`."""
    order = tuple(reversed(type_.order))
    if order != tuple(range(len(order))):
        value = writer.add(_typed(type_.dtype, type_.physical), "transpose", value, dimensions=listed(order))
    sizes = type_.physical
    for step in _steps(type_) if tiled else ():
        value = _reshape(writer, type_.dtype, step.sizes, value)
        if step.padded != step.sizes:
            most = "x".join(f"0_{more - size}" for size, more in zip(step.sizes, step.padded, strict=True))
            nothing = writer.constant(type_.dtype, "false" if type_.dtype == "pred" else "0")
            value = writer.add(_typed(type_.dtype, step.padded), "pad", value, nothing, padding=most)
        value = _reshape(writer, type_.dtype, step.split, value)
        sizes = step.moved
        value = writer.add(_typed(type_.dtype, sizes), "transpose", value, dimensions=listed(step.order))
    return _reshape(writer, type_.dtype, (math.prod(sizes),), value)


def _from_memory(type_: Array, writer: Writer, value: str, tiled: bool) -> str:
    """The array with elements in memory in the order of `value`."""
    sizes = type_.physical
    for step in reversed(list(_steps(type_))) if tiled else ():
        inverse = [step.order.index(axis) for axis in range(len(step.order))]
        value = _reshape(writer, type_.dtype, step.moved, value)
        value = writer.add(_typed(type_.dtype, step.split), "transpose", value, dimensions=listed(inverse))
        value = _reshape(writer, type_.dtype, step.padded, value)
        if step.sizes != step.padded:
            limits = "{" + ", ".join(f"[0:{size}]" for size in step.sizes) + "}"
            value = writer.add(_typed(type_.dtype, step.sizes), "slice", value, slice=limits)
    value = _reshape(writer, type_.dtype, sizes, value)
    order = tuple(reversed(type_.order))
    inverse = [order.index(axis) for axis in range(len(order))]
    if inverse == list(range(len(order))):
        return value
    return writer.add(type_.plain, "transpose", value, dimensions=listed(inverse))


def _typed(dtype: str, sizes: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, sizes))}]"


def _reshape(writer: Writer, dtype: str, sizes: Sequence[int], value: str) -> str:
    type_ = _typed(dtype, sizes)
    return value if writer.types[value] == type_ else writer.add(type_, "reshape", value)
