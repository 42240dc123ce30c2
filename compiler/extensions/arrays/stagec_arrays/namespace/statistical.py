"""The standard's functions that make one number of many.

https://data-apis.org/array-api/2024.12/API_specification/statistical_functions.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.dtypes import BOOL, COMPLEX, FLOATING, INTEGRAL, KINDS, SIGNED, UNSIGNED, DType
from stagec_arrays.namespace.promotion import array_of, inexact, named
from stagec_arrays.primitives import elementwise as p, reductions as r
from stagec_arrays.primitives.cumulative import cumulative
from stagec_arrays.primitives.slicing import concatenate
from stagec_arrays.primitives.structural import convert, full, reduce_sum, reshape, size_value
from stagec_arrays.values import Literal, axes_of, one_axis_of, shown

Axis = int | tuple[int, ...] | None


def kept(x: Any, reduced: Any, axes: Sequence[int], keepdims: bool) -> Any:
    """Return a reduction's result, with axes of size 1 where they were if `keepdims`."""
    if not keepdims:
        return reduced
    return reshape(reduced, tuple(1 if axis in axes else size for axis, size in enumerate(x.shape)))


def _summed(dtype: DType, asked: Any) -> DType:
    """Return the dtype of a sum: integers narrower than the default one become that."""
    if asked is not None:
        return dtypes.asked(asked)
    if KINDS[dtype] == BOOL:
        return dtypes.default(SIGNED)
    if KINDS[dtype] in INTEGRAL:
        wide = dtypes.default(UNSIGNED if KINDS[dtype] == UNSIGNED else SIGNED)
        return wide if dtypes.BITS[wide] > dtypes.BITS[dtype] else dtype
    return dtype


def _wide(operation: Callable[..., Any], x: Any, *arguments: Any) -> Any:
    """Compute with f32 what floats of fewer bits would lose, and return the dtype that x has."""
    if KINDS[x.dtype] == FLOATING and dtypes.BITS[x.dtype] < 32:
        return convert(operation(convert(x, dtypes.float32), *arguments), x.dtype)
    return operation(x, *arguments)


def sum(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:  # noqa: A001
    """Return the sum along axes; None: of all elements."""
    x = array_of(x, "sum")
    axes = axes_of(axis, len(x.shape))
    x = convert(x, _summed(x.dtype, dtype))
    return kept(x, _wide(reduce_sum, x, axes), axes, keepdims)


def prod(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """Return the product along axes; None: of all elements."""
    x = array_of(x, "prod")
    axes = axes_of(axis, len(x.shape))
    x = convert(x, _summed(x.dtype, dtype))
    return kept(x, _wide(r.reduce_prod, x, axes), axes, keepdims)


def _count(x: Any, axes: Sequence[int], dtype: DType) -> Any:
    """Return how many elements there are along axes: a number, or a value where sizes are symbolic."""
    number = dims.product([x.shape[axis] for axis in axes])
    return convert(size_value(number), dtype) if isinstance(number, dims.Dim) else Literal(np.asarray(number, dtype))


def mean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return the mean along axes; None: of all elements."""
    x = inexact(x, "mean")
    axes = axes_of(axis, len(x.shape))
    return kept(x, _wide(_mean, x, axes), axes, keepdims)


def _mean(x: Any, axes: Sequence[int]) -> Any:
    return p.divide(reduce_sum(x, axes), _count(x, axes, x.dtype))


def var(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Return the variance along axes; None: of all elements. correction: subtracted from the number of elements."""
    x = inexact(x, "var")
    axes = axes_of(axis, len(x.shape))

    def variance(x: Any) -> Any:
        center = kept(x, _mean(x, axes), axes, keepdims=True)
        apart = p.subtract(x, center)
        if KINDS[x.dtype] == COMPLEX:
            apart = p.absolute(apart)
        squares = reduce_sum(p.square(apart), axes)
        return p.divide(squares, p.maximum(p.subtract(_count(x, axes, squares.dtype), float(correction)), 0.0))

    return kept(x, _wide(variance, x), axes, keepdims)


def std(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Return the standard deviation along axes; parameters are those of `var`."""
    return p.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def _extremum(name: str, operation: Callable[..., Any], any_or_all: Callable[..., Any]) -> Callable[..., Any]:
    def function(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
        x = array_of(x, name)
        axes = axes_of(axis, len(x.shape))
        empty = [axis for axis in axes if type(x.shape[axis]) is int and x.shape[axis] == 0]
        if empty:
            raise ValueError(f"{name} of no elements: axis {empty[0]} of shape {shown(x.shape)} has size 0")
        if KINDS[x.dtype] == COMPLEX:
            raise TypeError(f"{name}: expected real numbers, which have an order, not {x.dtype}")
        reduce = any_or_all if x.dtype == dtypes.bool_ else operation
        return kept(x, reduce(x, axes), axes, keepdims)

    return named(function, name, f"Return the {name} along axes; None: of all elements. NaN where an element is NaN.")


max = _extremum("max", r.reduce_max, r.reduce_or)  # noqa: A001 - the standard's names
min = _extremum("min", r.reduce_min, r.reduce_and)  # noqa: A001


def _of_bools(name: str, operation: Callable[..., Any], what: str) -> Callable[..., Any]:
    def function(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
        x = convert(array_of(x, name), dtypes.bool_)
        axes = axes_of(axis, len(x.shape))
        return kept(x, operation(x, axes), axes, keepdims)

    return named(function, name, f"Return whether {what} true; None: of the whole array.")


all = _of_bools("all", r.reduce_and, "all elements along axes are")  # noqa: A001
any = _of_bools("any", r.reduce_or, "an element along axes is")  # noqa: A001


def count_nonzero(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return how many elements along axes are not 0; None: of the whole array."""
    x = array_of(x, "count_nonzero")
    axes = axes_of(axis, len(x.shape))
    counted = convert(convert(x, dtypes.bool_), dtypes.default(SIGNED))
    return kept(x, reduce_sum(counted, axes), axes, keepdims)


def _cumulative(name: str, operation: Callable[[Any, int], Any], start: int) -> Callable[..., Any]:
    def function(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
        x = array_of(x, name)
        where = one_axis_of(axis, len(x.shape), name)
        x = convert(x, _summed(x.dtype, dtype))
        result = _wide(operation, x, where) if x.shape[where] != 0 else x
        if include_initial:
            shape = (*x.shape[:where], 1, *x.shape[where + 1 :])
            result = concatenate([full(shape, start, x.dtype), result], where)
        return result

    what = "sum" if start == 0 else "product"
    return named(
        function,
        name,
        (
            f"Return for each element the {what} of it and all before it along an axis.\n\n"
            f"    include_initial: whether {start} comes first, the {what} of none."
        ),
    )


cumulative_sum = _cumulative("cumulative_sum", lambda x, axis: cumulative(x, axis, "add"), 0)
cumulative_prod = _cumulative("cumulative_prod", lambda x, axis: cumulative(x, axis, "multiply"), 1)
