"""What the key of an index says: of `x[key]`, which slices are taken first, and then which elements along each axis.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from stagec_arrays import binding, dims, dtypes, tracing
from stagec_arrays.dims import Dim
from stagec_arrays.dtypes import BOOL, INTEGRAL, KINDS, UNSIGNED
from stagec_arrays.namespace.promotion import array_of, refuse_masked
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.structural import convert
from stagec_arrays.tracing import Tracer
from stagec_arrays.values import Value, shown

MASK = "write where(mask, x, other), which keeps the shape, or where(mask, value, x) to change elements"
"""The advice of messages instead of a mask."""


def plain(key: Any) -> Any:
    """Return a key in NumPy's form. Raises IndexError for anything but a key."""
    if isinstance(key, tuple):
        return tuple(map(plain, key))
    if isinstance(key, Value | np.ndarray | list):
        refuse_masked(key, "an index")
        known = np.asarray(key)
        if dtypes.KINDS.get(known.dtype) not in dtypes.INTEGRAL | {BOOL} and known.size:
            raise IndexError(f"an array of integers or bools is an index, not one of {known.dtype}")
        return known if known.dtype.kind in "biu" else known.astype(np.int64)
    if isinstance(key, float | str):
        raise IndexError(f"{key!r} is not an index; write integers, slices, ..., None, or arrays of these")
    return key


def expanded(x: Any, entries: tuple[Any, ...]) -> list[Any]:
    """Return a key with `...` written out, and masks as the integers that they stand for.

    Raises IndexError, and TracerError for a mask that is traced.
    """
    result: list[Any] = []
    for entry in (plain(entry) if isinstance(entry, list) else entry for entry in entries):
        if isinstance(entry, bool | np.bool_) or (hasattr(entry, "dtype") and KINDS.get(entry.dtype) == BOOL):
            mask = binding.known(entry)
            if mask is None:
                raise tracing.refuse(entry, "a mask as an index", MASK)
            if mask.ndim == 0:
                raise IndexError(f"a single bool cannot be an index in a trace; {MASK}")
            result += np.nonzero(mask)
        else:
            result.append(entry)
    taken = sum(entry is not None and entry is not Ellipsis for entry in result)
    rank = len(x.shape)
    dots = [i for i, entry in enumerate(result) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one ..., not several")
    if taken > rank:
        raise IndexError(f"{taken} indices are given for an array of {rank} dimensions, of shape {shown(x.shape)}")
    at = dots[0] if dots else len(result)
    return [*result[:at], *[slice(None)] * (rank - taken), *result[at + 1 :]]


def split(x: Any, entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return what is done first, a slice for each axis, and then: for each axis of that an array, None or "new".

    A slice is its start, end and step. Raises IndexError.
    """
    slices: list[Any] = []
    arrays: list[Any] = []
    axis = 0
    for entry in entries:
        if entry is None:
            arrays.append("new")
            continue
        size = x.shape[axis]
        if isinstance(entry, slice):
            slices.append(_bounds(entry, size))
            arrays.append(None)
        elif isinstance(entry, Value | np.ndarray | list):
            index = np.asarray(entry) if isinstance(entry, list) else entry
            if KINDS[index.dtype] not in INTEGRAL:
                raise IndexError(f"an array of integers is an index, not one of {index.dtype}")
            slices.append((0, size, 1))
            arrays.append(wrapped(index, size))
        else:
            slices.append((0, size, 1))
            arrays.append(_number(entry, axis, size))
        axis += 1
    return slices, arrays


def _number(entry: Any, axis: int, size: Any) -> Any:
    """Return an integer index, counted from the front. Raises IndexError."""
    if isinstance(entry, Dim):
        return entry
    if isinstance(entry, float | str | EllipsisType) or not hasattr(entry, "__index__"):
        raise IndexError(f"{entry!r} is not an index; write integers, slices, ..., None, or arrays of these")
    number = int(entry.__index__())
    if type(size) is int and not -size <= number < size:
        raise IndexError(f"index {number} is out of range for axis {axis} of size {size}")
    return number + size if number < 0 else number


def _bounds(entry: slice, size: Any) -> tuple[Any, Any, int]:
    """Return start, end and step of a slice, as `slice.indices` does, for sizes that may be symbolic.

    Where the step is negative the end may be -1. Raises ValueError if the sign of a bound is not decided.
    """
    for part in (entry.start, entry.stop, entry.step):
        if isinstance(part, Tracer):
            raise tracing.refuse(part, "a slice", "write stagec_arrays.lax.dynamic_slice(x, starts, sizes)")
    if type(size) is int and not any(isinstance(bound, Dim) for bound in (entry.start, entry.stop)):
        return entry.indices(size)
    step = 1 if entry.step is None else operator.index(entry.step)
    if step == 0:
        raise ValueError("slice step cannot be zero")
    least, most = (0, size) if step > 0 else (-1, size - 1)
    first, last = (least, most) if step > 0 else (most, least)
    start = first if entry.start is None else _from_front(entry.start, size, least, most)
    stop = last if entry.stop is None else _from_front(entry.stop, size, least, most)
    return start, stop, step


def _from_front(bound: Any, size: Any, least: Any, most: Any) -> Any:
    if not isinstance(bound, Dim):
        bound = operator.index(bound)
    return dims.smaller(most, bound) if bound >= 0 else dims.larger(least, size + bound)


def wrapped(index: Any, size: Any) -> Any:
    """Return indices with negative ones counted from the back."""
    if KINDS[index.dtype] == UNSIGNED and isinstance(index, Tracer):
        return index
    known = binding.known(index)
    if known is None or type(size) is not int:
        wide = dtypes.int64 if known is None and index.dtype == dtypes.int64 else dtypes.int32
        index = convert(index if known is None else binding.constant(known.astype(np.int32)), wide)
        negative = p.less(index, 0)
        length = convert(array_of(size), wide) if isinstance(size, Dim) else np.asarray(size, wide)
        return p.select(negative, p.add(index, length), index)
    known = known.astype(np.int64)
    if known.size and not (-size <= known.min() and known.max() < size):
        raise IndexError(f"indices from {known.min()} to {known.max()} are out of range for a size of {size}")
    result: Any = np.where(known < 0, known + size, known).astype(np.int32 if size < 2**31 else np.int64)
    return result
