"""Primitives that make one number of many, along axes: maximum, product, any, argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import BOOL, COMPLEX, KINDS, DType
from stagec_arrays.lowering import IRValue, Rule, compare, constant, integers, tensor_type
from stagec_arrays.primitives.elementwise import divide, equal, multiply
from stagec_arrays.primitives.slicing import pad, reverse
from stagec_arrays.primitives.structural import (
    broadcast,
    convert,
    reduce_lower,
    reduce_sum,
    reduced,
    reshape,
    transpose,
)
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, shown


def least(dtype: DType) -> Any:
    """Return the number that is not more than any other: the start of an empty maximum."""
    return dtypes.limits(dtype)[0]


def most(dtype: DType) -> Any:
    """Return the number that is not less than any other."""
    return dtypes.limits(dtype)[1]


def _reduction(
    name: str, start: Callable[[DType], Any], combine: Any, vjp: Callable[..., Any] | None = None
) -> Callable[[Any, Sequence[int]], Any]:
    def infer(x: ShapedArray, *, axes: tuple[int, ...]) -> ShapedArray:
        return ShapedArray(reduced(x, axes), x.dtype, x.weak_type)

    def lower(rule: Rule, x: IRValue, *, axes: tuple[int, ...]) -> IRValue:
        return reduce_lower(rule, x, axes, start(rule.out.dtype), combine)

    def derive(d: Any, *, axes: tuple[int, ...]) -> list[Any]:
        assert vjp is not None
        return [vjp(d.cotangent, d.operands[0], d.results[0], axes)]

    primitive = Primitive(name, infer, lower, None if vjp is None else derive)

    def reduce(x: Any, axes: Sequence[int]) -> Any:
        return bind(primitive, x, axes=tuple(axes)) if len(axes) else x

    return reduce


def _of_extremum(g: Any, x: Any, y: Any, axes: Sequence[int]) -> Any:
    """Each element that is the extremum has an equal part."""
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    result = convert(equal(x, broadcast(y, x.shape, kept)), g.dtype)
    share = divide(g, reduce_sum(result, axes))
    return multiply(result, broadcast(share, x.shape, kept))


def _of_product(g: Any, x: Any, y: Any, axes: Sequence[int]) -> Any:
    """The product of all others; with zeros, no division gives it."""
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = [*kept, *axes]
    moved = transpose(x, order)
    flat = reshape(moved, (*(x.shape[axis] for axis in kept), dims.product([x.shape[axis] for axis in axes])))
    axis = len(kept)
    others = multiply(_exclusive(flat, axis), reverse(_exclusive(reverse(flat, [axis]), axis), [axis]))
    whole = multiply(others, broadcast(g, flat.shape, range(axis)))
    return transpose(reshape(whole, moved.shape), np.argsort(order).tolist())


def _exclusive(x: Any, axis: int) -> Any:
    """Return the products of all elements before each."""
    unit = Literal(np.ones((), x.dtype))
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    before[axis], after[axis] = 1, -1
    return cumulative(pad(x, unit, before, after), axis, multiply, 1)


reduce_max = _reduction("reduce_max", least, hlo.maximum, _of_extremum)
reduce_min = _reduction("reduce_min", most, hlo.minimum, _of_extremum)
reduce_prod = _reduction("reduce_prod", lambda dtype: 1, hlo.multiply, _of_product)
reduce_and = _reduction("reduce_and", lambda dtype: True, hlo.and_)
reduce_or = _reduction("reduce_or", lambda dtype: False, hlo.or_)


def cumulative(x: Any, axis: int, combine: Callable[[Any, Any], Any], start: Any) -> Any:
    """Return for each element what `combine`, which is associative, makes of it and all before it along an axis.

    start: a number that changes nothing. The size of the axis is a number. Each step goes twice as far as the last.
    """
    unit, far = Literal(np.asarray(start).astype(x.dtype)), 1
    while far < x.shape[axis]:
        before, after = [0] * len(x.shape), [0] * len(x.shape)
        before[axis], after[axis] = far, -far
        x = combine(pad(x, unit, before, after), x)
        far *= 2
    return x


def argmax(x: Any, axis: int, dtype: DType) -> Any:
    """Return where the largest element along an axis is, the first of equal ones, and a NaN if there is one."""
    return bind(ARGMAX, x, axis=axis, dtype=dtype)


def argmin(x: Any, axis: int, dtype: DType) -> Any:
    """Return where the smallest element along an axis is, as `argmax` does."""
    return bind(ARGMIN, x, axis=axis, dtype=dtype)


def _arg_infer(x: ShapedArray, *, axis: int, dtype: DType) -> ShapedArray:
    if KINDS[x.dtype] == COMPLEX:
        raise TypeError("argmax and argmin take real numbers, which have an order")
    if x.shape[axis] == 0:
        raise ValueError(f"argmax and argmin of no elements: axis {axis} of shape {shown(x.shape)} has size 0")
    return ShapedArray(reduced(x, [axis]), dtype)


def _arg_lower(direction: str, start: Callable[[DType], Any]) -> Any:
    def lower(rule: Rule, x: IRValue, *, axis: int, dtype: DType) -> IRValue:
        aval, out = rule.inputs[0], rule.out
        value, index = ShapedArray((), aval.dtype), ShapedArray((), dtype)
        places = rule.iota(ShapedArray(aval.shape, dtype), axis)
        starts = [constant(np.asarray(start(aval.dtype)).astype(aval.dtype)), constant(np.zeros((), dtype))]
        kinds = [tensor_type(ShapedArray(out.shape, aval.dtype)), tensor_type(out)]
        operation = hlo.ReduceOp(kinds, [x, places], starts, integers([axis]))
        block = rule.block(operation, 0, [value, index, value, index])
        with ir.InsertionPoint(block):
            first, at, second, other = block.arguments
            better = compare(first, second, direction, aval.dtype)
            if KINDS[aval.dtype] not in (BOOL, *dtypes.INTEGRAL):  # NaN is unequal to itself
                better = hlo.or_(better, compare(first, first, "NE", aval.dtype))
            equal_ = compare(first, second, "EQ", aval.dtype)
            earlier = hlo.and_(equal_, compare(at, other, "LT", dtype))
            hlo.return_([hlo.select(better, first, second), hlo.select(hlo.or_(better, earlier), at, other)])
        return operation.results[1]

    return lower


ARGMAX = Primitive("argmax", _arg_infer, _arg_lower("GT", least))
ARGMIN = Primitive("argmin", _arg_infer, _arg_lower("LT", most))
