"""Primitives that take parts of arrays and put them together: slice, pad, concatenate, reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims
from stagec_arrays.binding import bind
from stagec_arrays.dims import Shape
from stagec_arrays.lowering import IRValue, Rule, integer, integers, tensor_type
from stagec_arrays.primitives.elementwise import subtract
from stagec_arrays.primitives.structural import reduce_sum, reduced, reshape
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, shown


def slice_(x: Any, start: Sequence[Any], limit: Sequence[Any], strides: Sequence[int] | None = None) -> Any:
    """Return the elements from `start` to before `limit` along each axis, in steps of `strides`, 1 or more."""
    steps = tuple(strides) if strides is not None else (1,) * len(x.shape)
    if all(index == 0 for index in start) and tuple(limit) == tuple(x.shape) and set(steps) <= {1}:
        return x
    return bind(SLICE, x, start=tuple(start), limit=tuple(limit), strides=steps)


def along(x: Any, axis: int, start: Any, limit: Any, stride: int = 1) -> Any:
    """Return the elements from `start` to before `limit` along one axis."""
    starts, limits, strides = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    starts[axis], limits[axis], strides[axis] = start, limit, stride
    return slice_(x, starts, limits, strides)


def row(x: Any, number: int) -> Any:
    """Return the part of an array at an index of its first axis."""
    return reshape(along(x, 0, number, number + 1), x.shape[1:])


def _slice_infer(x: ShapedArray, *, start: Shape, limit: Shape, strides: Shape) -> ShapedArray:
    sizes = []
    for first, last, step, size in zip(start, limit, strides, x.shape, strict=True):
        if (
            type(last) is int
            and type(first) is int
            and not (0 <= first <= last and (type(size) is not int or last <= size))
        ):
            raise ValueError(f"slice: {shown(start)} to {shown(limit)} is not in an array of shape {shown(x.shape)}")
        sizes.append(last - first if step == 1 else (last - first + (step - 1)) // step)
    return ShapedArray(tuple(sizes), x.dtype, x.weak_type)


def _slice_lower(rule: Rule, x: IRValue, *, start: Shape, limit: Shape, strides: Shape) -> IRValue:
    if all(map(dims.is_static, (start, limit))):
        return hlo.slice(x, integers(start), integers(limit), integers(strides))
    ends = map(rule.lowering.shape, (start, limit, strides))
    return hlo.real_dynamic_slice(tensor_type(rule.out), x, *ends)


def _slice_vjp(d: Any, *, start: Shape, limit: Shape, strides: Shape) -> list[Any]:
    (x,) = d.operands
    g = d.cotangent
    after = [
        size - (first + ((count - 1) * step + 1 if count != 0 else 0))
        for size, first, count, step in zip(x.shape, start, g.shape, strides, strict=True)
    ]
    return [pad(g, Literal(np.zeros((), g.dtype)), start, after, [step - 1 for step in strides])]


SLICE = Primitive(
    "slice",
    _slice_infer,
    _slice_lower,
    _slice_vjp,
    of_keys=lambda x, *, start, limit, strides: (
        (x,),
        {"start": (*start, 0), "limit": (*limit, 2), "strides": (*strides, 1)},
    ),
)


def pad(x: Any, value: Any, low: Sequence[Any], high: Sequence[Any], interior: Sequence[int] | None = None) -> Any:
    """Return the array with `value`, a scalar, before and after its elements along each axis, and between them.

    A negative number before or after takes elements away.
    """
    between = tuple(interior) if interior is not None else (0,) * len(x.shape)
    if all(count == 0 for count in (*low, *high, *between)):
        return x
    return bind(PAD, x, value, low=tuple(low), high=tuple(high), interior=between)


def _pad_infer(x: ShapedArray, value: ShapedArray, *, low: Shape, high: Shape, interior: Shape) -> ShapedArray:
    sizes = []
    for size, before, after, between in zip(x.shape, low, high, interior, strict=True):
        inner = size if between == 0 or size == 0 else size + (size - 1) * between
        sizes.append(inner + before + after)
        if type(sizes[-1]) is int and sizes[-1] < 0:
            raise ValueError(f"pad: more is taken away than an array of shape {shown(x.shape)} has")
    return ShapedArray(tuple(sizes), x.dtype, x.weak_type)


def _pad_lower(rule: Rule, x: IRValue, value: IRValue, *, low: Shape, high: Shape, interior: Shape) -> IRValue:
    if all(map(dims.is_static, (low, high))):
        return hlo.pad(x, value, integers(low), integers(high), integers(interior))
    return hlo.dynamic_pad(tensor_type(rule.out), x, value, *map(rule.lowering.shape, (low, high, interior)))


def _pad_vjp(d: Any, *, low: Shape, high: Shape, interior: Shape) -> list[Any]:
    x, value = d.operands
    g = d.cotangent
    inner = pad(g, Literal(np.zeros((), g.dtype)), [-n for n in low], [-n for n in high])
    own = slice_(inner, [0] * len(x.shape), inner.shape, [n + 1 for n in interior])
    axes = range(len(x.shape))
    return [own, None if isinstance(value, Literal) else subtract(reduce_sum(g, axes), reduce_sum(own, axes))]


PAD = Primitive("pad", _pad_infer, _pad_lower, _pad_vjp)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """Return arrays of one dtype behind each other along an axis; their other sizes are the same."""
    return arrays[0] if len(arrays) == 1 else bind(CONCATENATE, *arrays, axis=axis)


def _concatenate_infer(*avals: ShapedArray, axis: int) -> ShapedArray:
    first = avals[0]
    for other in avals[1:]:
        if reduced(first, [axis]) != reduced(other, [axis]):
            shapes = ", ".join(shown(aval.shape) for aval in avals)
            raise ValueError(
                f"concat: the arrays have shapes {shapes}; their sizes must be the same except on axis {axis}"
            )
    total: Any = 0
    for aval in avals:
        total = total + aval.shape[axis]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    return ShapedArray(shape, first.dtype, all(aval.weak_type for aval in avals))


def _concatenate_vjp(d: Any, *, axis: int) -> list[Any]:
    result, start = [], [0] * len(d.cotangent.shape)
    limit = list(d.cotangent.shape)
    for x in d.operands:
        limit[axis] = start[axis] + x.shape[axis]
        result.append(slice_(d.cotangent, tuple(start), tuple(limit)))
        start[axis] = limit[axis]
    return result


CONCATENATE = Primitive(
    "concatenate",
    _concatenate_infer,
    lambda rule, *xs, axis: hlo.concatenate(xs, integer(axis)),
    _concatenate_vjp,
    of_keys=lambda *xs, axis: (xs, {"axis": axis}),
)


def reverse(x: Any, axes: Sequence[int]) -> Any:
    """Return the array with its elements in the other order along axes."""
    return bind(REVERSE, x, axes=tuple(axes)) if len(axes) else x


REVERSE = Primitive(
    "reverse",
    lambda x, *, axes: x,
    lambda rule, x, *, axes: hlo.reverse(x, integers(axes)),
    lambda d, *, axes: [reverse(d.cotangent, axes)],
    of_keys=lambda x, *, axes: ((x,), {"axes": axes}),
)
