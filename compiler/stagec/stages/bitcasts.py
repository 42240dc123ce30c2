"""What a bitcast of a device does: the elements in the order of memory, taken for an array of another type.

Layouts and tiles: https://openxla.org/xla/shapes, https://openxla.org/xla/tiled_layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stagec.costs import hlo
from stagec.costs.hlo import Instruction
from stagec.stages.hlo_writer import Array, Refused, Writer, array, listed


def rewrite(instruction: Instruction, writer: Writer) -> str:
    """Write what a bitcast does; return its name. Raises Refused."""
    (operand,) = instruction.operands
    before, after = array(writer.type_of(operand)), array(instruction.type)
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


def _steps(type_: Array) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield for each tile the sizes that are padded to whole tiles, those split into tiles, and the order of these."""
    sizes = type_.physical
    for tile in type_.tiles:
        sizes = (1,) * (len(tile) - len(sizes)) + sizes
        fixed = len(sizes) - len(tile)
        counts = [-(-size // along) for size, along in zip(sizes[fixed:], tile, strict=True)]
        padded = (*sizes[:fixed], *(count * along for count, along in zip(counts, tile, strict=True)))
        split = (*sizes[:fixed], *(size for pair in zip(counts, tile, strict=True) for size in pair))
        order = (*range(fixed), *range(fixed, len(split), 2), *range(fixed + 1, len(split), 2))
        yield padded, split, order
        sizes = tuple(split[axis] for axis in order)


def _length(type_: Array) -> int:
    steps = list(_steps(type_))
    return math.prod(steps[-1][0] if steps else type_.dims)


def _in_memory(type_: Array, writer: Writer, value: str, tiled: bool) -> str:
    """The elements of an array in the order of memory, with the padding of its tiles if `tiled`."""
    order = tuple(reversed(type_.order))
    if order != tuple(range(len(order))):
        value = writer.add(_typed(type_.dtype, type_.physical), "transpose", value, dimensions=listed(order))
    sizes = type_.physical
    for padded, split, order in _steps(type_) if tiled else ():
        sizes = (1,) * (len(padded) - len(sizes)) + sizes
        value = _reshape(writer, type_.dtype, sizes, value)
        if padded != sizes:
            most = "x".join(f"0_{more - size}" for size, more in zip(sizes, padded, strict=True))
            nothing = writer.constant(type_.dtype, "false" if type_.dtype == "pred" else "0")
            value = writer.add(_typed(type_.dtype, padded), "pad", value, nothing, padding=most)
        value = _reshape(writer, type_.dtype, split, value)
        sizes = tuple(split[axis] for axis in order)
        value = writer.add(_typed(type_.dtype, sizes), "transpose", value, dimensions=listed(order))
    return _reshape(writer, type_.dtype, (math.prod(sizes),), value)


def _from_memory(type_: Array, writer: Writer, value: str, tiled: bool) -> str:
    """The array whose elements are in memory in the order of `value`."""
    sizes = type_.physical
    for padded, split, order in reversed(list(_steps(type_))) if tiled else ():
        inverse = [order.index(axis) for axis in range(len(order))]
        value = _reshape(writer, type_.dtype, [split[axis] for axis in order], value)
        value = writer.add(_typed(type_.dtype, split), "transpose", value, dimensions=listed(inverse))
        value = _reshape(writer, type_.dtype, padded, value)
        before = _before(type_, padded)
        if before != padded:
            limits = "{" + ", ".join(f"[0:{size}]" for size in before) + "}"
            value = writer.add(_typed(type_.dtype, before), "slice", value, slice=limits)
    value = _reshape(writer, type_.dtype, sizes, value)
    order = tuple(reversed(type_.order))
    inverse = [order.index(axis) for axis in range(len(order))]
    if inverse == list(range(len(order))):
        return value
    return writer.add(type_.plain, "transpose", value, dimensions=listed(inverse))


def _before(type_: Array, padded: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes that were padded to `padded`."""
    sizes = type_.physical
    for more, split, order in _steps(type_):
        sizes = (1,) * (len(more) - len(sizes)) + sizes
        if more == padded:
            return sizes
        sizes = tuple(split[axis] for axis in order)
    raise AssertionError(padded)


def _typed(dtype: str, sizes: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, sizes))}]"


def _reshape(writer: Writer, dtype: str, sizes: Sequence[int], value: str) -> str:
    type_ = _typed(dtype, sizes)
    return value if writer.types[value] == type_ else writer.add(type_, "reshape", value)
