"""Cumulative reductions, and the scan of any associative function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagec_arrays import dtypes, tracing
from stagec_arrays.binding import aval, bind
from stagec_arrays.dtypes import KINDS
from stagec_arrays.lowering import IRValue, Rule, constant
from stagec_arrays.primitives import derivatives as d, elementwise
from stagec_arrays.primitives.slicing import along, concatenate, pad, reverse
from stagec_arrays.primitives.windows import OPERATIONS, Window, lower_window
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, shown


def cumulative(x: Any, axis: int, how: str, backward: bool = False) -> Any:
    """Return for each element the reduction of it and all before it along an axis; backward: all behind it.

    how: "add", "multiply", "max", "min", or "logaddexp".
    """
    return bind(CUMULATIVE, x, axis=axis, how=how, backward=backward)


def _cumulative_infer(x: ShapedArray, *, axis: int, how: str, backward: bool) -> ShapedArray:
    if KINDS[x.dtype] not in dtypes.NUMERIC:
        raise TypeError(f"a cumulative reduction is of numbers, not of {x.dtype}")
    return x


def _cumulative_lower(rule: Rule, x: IRValue, *, axis: int, how: str, backward: bool) -> IRValue:
    shape, dtype = rule.out.shape, rule.out.dtype
    size, rank = shape[axis], len(shape)
    if type(size) is int and size == 0:
        return x
    ones = (1,) * rank
    far = (0, size - 1) if backward else (size - 1, 0)
    padding = tuple(far if i == axis else (0, 0) for i in range(rank))
    window = Window(tuple(size if i == axis else 1 for i in range(rank)), ones, padding, ones, ones)
    if how != "logaddexp":
        start = OPERATIONS[how][0](dtype)
        return lower_window(rule, x, constant(np.asarray(start).astype(dtype)), how=how, window=window)[0]
    scalar = ShapedArray((), dtype)
    program = tracing.trace(lambda a, b: [logaddexp(a, b)], [scalar, scalar], apart=True).program
    return lower_window(rule, x, constant(np.full((), -np.inf, dtype)), how=program, window=window)[0]


def logaddexp(x: Any, y: Any) -> Any:
    """Return log(exp(x) + exp(y)), without overflow on the way."""
    large, apart = elementwise.maximum(x, y), elementwise.subtract(x, y)
    below = elementwise.minimum(apart, elementwise.negative(apart))  # half the derivative where they are equal
    size = elementwise.log1p(elementwise.exp(below))
    is_nan = elementwise.not_equal(apart, apart)
    return elementwise.select(is_nan, elementwise.add(x, y), elementwise.add(large, size))


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "multiply": elementwise.multiply,
    "max": elementwise.maximum,
    "min": elementwise.minimum,
    "logaddexp": logaddexp,
}


def _cumulative_vjp(given: Any, *, axis: int, how: str, backward: bool) -> list[Any]:
    if how == "add":
        return [cumulative(given.cotangent, axis, how, not backward)]
    (x,) = given.operands
    if type(x.shape[axis]) is not int:
        what = f"the size of axis {axis} of shape {shown(x.shape)} must be a number"
        raise d.NoDerivative(f"a cumulative reduction by {how} has no derivative: {what}")

    def function(x: Any) -> list[Any]:
        return associative_scan(lambda a, b: [_COMBINE[how](a[0], b[0])], [x], axis, backward)

    _, pull = d.pullback(function, [x])
    return [pull([given.cotangent])[0]]


CUMULATIVE = Primitive("cumulative", _cumulative_infer, _cumulative_lower, _cumulative_vjp)


def associative_scan(
    combine: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    arrays: Sequence[Any],
    axis: int,
    backward: bool = False,
) -> list[Any]:
    """Return for each place of an axis what an associative function makes of all arrays' parts up to there.

    combine: takes and gives parts of all arrays. backward: from there on. It is done as JAX does it: pairs are
    combined first, and what comes out by recursion.
    """
    if backward:
        arrays = [reverse(x, [axis]) for x in arrays]
    result = _scanned(combine, list(arrays), axis)
    return [reverse(x, [axis]) for x in result] if backward else result


def _scanned(combine: Callable[..., Sequence[Any]], arrays: list[Any], axis: int) -> list[Any]:
    count = arrays[0].shape[axis]
    if count < 2:
        return arrays
    pairs_ = combine([along(x, axis, 0, count - 1, 2) for x in arrays], [along(x, axis, 1, count, 2) for x in arrays])
    odd = _scanned(combine, list(pairs_), axis)
    before = [along(x, axis, 0, count // 2 - 1) for x in odd] if count % 2 == 0 else odd
    even = combine(before, [along(x, axis, 2, count, 2) for x in arrays]) if count > 2 else [None] * len(arrays)
    first = [along(x, axis, 0, 1) for x in arrays]
    full = [a if b is None else concatenate([a, b], axis) for a, b in zip(first, even, strict=True)]
    return [_interleaved(a, b, axis) for a, b in zip(full, odd, strict=True)]


def _interleaved(x: Any, y: Any, axis: int) -> Any:
    longer = x.shape[axis] - y.shape[axis]
    zero = Literal(np.zeros((), x.dtype))
    none, between = [0] * len(x.shape), [int(i == axis) for i in range(len(x.shape))]
    of_x = pad(x, zero, none, [(1 - longer) * step for step in between], between)
    of_y = pad(y, zero, between, [longer * step for step in between], between)
    return (elementwise.bitwise_or if aval(x).dtype == dtypes.bool_ else elementwise.add)(of_x, of_y)
