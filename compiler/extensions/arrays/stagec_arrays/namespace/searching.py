"""The standard's functions that search, sort and find distinct elements.

https://data-apis.org/array-api/2024.12/API_specification/searching_functions.html
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stagec_arrays import dims, dtypes, execution
from stagec_arrays.dtypes import SIGNED
from stagec_arrays.namespace.indexing import take
from stagec_arrays.namespace.promotion import array_of, named, promoted
from stagec_arrays.namespace.statistical import kept
from stagec_arrays.primitives import elementwise as p, reductions as r, sorting
from stagec_arrays.primitives.slicing import reverse
from stagec_arrays.primitives.structural import convert, full, iota, reshape
from stagec_arrays.tracing import Tracer, refuse
from stagec_arrays.values import axis_of


def _arg(name: str, operation: Any) -> Any:
    def function(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        x = array_of(x, name)
        index = dtypes.default(SIGNED)
        if axis is None:
            result = operation(reshape(x, (x.size,)), 0, index)
            return kept(x, result, range(len(x.shape)), keepdims)
        where = axis_of(axis, len(x.shape))
        return kept(x, operation(x, where, index), [where], keepdims)

    what = "largest" if name == "argmax" else "smallest"
    return named(
        function, name, f"Return where the {what} element along an axis is, the first of equal ones; None: in all of x."
    )


argmax = _arg("argmax", r.argmax)
argmin = _arg("argmin", r.argmin)


def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """Return the elements of x1 where the condition is true, and those of x2 elsewhere."""
    return p.select(convert(array_of(condition, "where"), dtypes.bool_), *promoted(x1, x2, function="where"))


def nonzero(x: Any, /) -> tuple[Any, ...]:
    """Return where elements are not 0, for each axis an array. Not in a trace: the size of the result depends on x."""
    known = _known(x, "nonzero()", "write where(x != 0, ...), which keeps the shape")
    if known.ndim == 0:
        raise ValueError("nonzero: expected an array of 1 dimension or more")
    return tuple(execution.array(places.astype(dtypes.default(SIGNED))) for places in known.nonzero())


def _known(x: Any, function: str, write: str) -> np.ndarray[Any, Any]:
    x = array_of(x, function)
    if isinstance(x, Tracer):
        raise refuse(x, function, write)
    return np.asarray(x)


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Any:
    """Return where elements of x2 belong in the vector x1, which is sorted.

    side: "left" before those that are equal, "right" behind them. sorter: indices that sort x1.
    """
    if side not in ("left", "right"):
        raise ValueError(f'searchsorted: side is "left" or "right", not {side!r}')
    first, second = promoted(x1, x2, function="searchsorted")
    if len(first.shape) != 1:
        raise ValueError(f"searchsorted: expected a vector, not an array of {len(first.shape)} dimensions")
    if sorter is not None:
        first = take(first, sorter, axis=0)
    index = dtypes.default(SIGNED)
    size = first.shape[0]
    low = full(second.shape, 0, index)
    if size == 0:
        return low
    high = full(second.shape, size, index)
    for _ in range(math.ceil(math.log2(size + 1))):
        middle = p.shift_right_arithmetic(p.add(low, high), 1)
        element = take(first, p.minimum(middle, size - 1), axis=0)
        before = p.less(element, second) if side == "left" else p.less_equal(element, second)
        if dtypes.KINDS[first.dtype] == dtypes.FLOATING:  # NaNs are at the end
            nan = p.not_equal(second, second)
            of_nan = p.equal(element, element) if side == "left" else full((), True, dtypes.bool_)
            before = p.select(nan, of_nan, before)
        open_ = p.less(low, high)
        low = p.select(p.bitwise_and(open_, before), p.add(middle, 1), low)
        high = p.select(p.bitwise_and(open_, p.bitwise_not(before)), middle, high)
    return low


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
    """Return whether each element of x1 is in x2; invert: whether it is not."""
    first, second = promoted(x1, x2, function="isin")
    others = reshape(second, (dims.product(second.shape),))
    equal = p.equal(reshape(first, (*first.shape, 1)), others)
    result = r.reduce_or(equal, [len(first.shape)])
    return p.bitwise_not(result) if invert else result


def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Return the elements in order along an axis. NaNs are last; `descending`, first."""
    x = array_of(x, "sort")
    where_ = axis_of(axis, len(x.shape))
    (result,) = sorting.sort([x], where_)
    return reverse(result, [where_]) if descending else result


def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Return the indices that sort an array along an axis; equal elements keep their order."""
    x = array_of(x, "argsort")
    where_ = axis_of(axis, len(x.shape))
    places = iota(dtypes.default(SIGNED), x.shape, where_)
    if descending:  # what is last of equal ones comes first when all is turned over
        x, places = reverse(x, [where_]), reverse(places, [where_])
    result = sorting.sort([x, places], where_)[1]
    return reverse(result, [where_]) if descending else result


class UniqueAll(NamedTuple):
    """Distinct elements; of each, where it is first and how often; of each element, which of them it is."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """Distinct elements, and how often each is there."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """Distinct elements, and of each element which of them it is."""

    values: Any
    inverse_indices: Any


def unique_all(x: Any, /) -> UniqueAll:
    """Return the distinct elements, and all that is known of them. Not in a trace: their number depends on x."""
    known = _known(x, "unique_all()", "give a function outside the trace what it returns")
    values, indices, inverse, counts = np.unique(
        known, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    index = dtypes.default(SIGNED)
    parts = (indices, inverse.reshape(known.shape), counts)
    return UniqueAll(execution.array(values), *(execution.array(part.astype(index)) for part in parts))


def unique_counts(x: Any, /) -> UniqueCounts:
    """Return the distinct elements, and how often each is there. Not in a trace."""
    result = unique_all(x)
    return UniqueCounts(result.values, result.counts)


def unique_inverse(x: Any, /) -> UniqueInverse:
    """Return the distinct elements, and of each element which of them it is. Not in a trace."""
    result = unique_all(x)
    return UniqueInverse(result.values, result.inverse_indices)


def unique_values(x: Any, /) -> Any:
    """Return the distinct elements. Not in a trace."""
    return unique_all(x).values
