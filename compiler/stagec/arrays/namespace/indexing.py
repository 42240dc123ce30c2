"""Reading elements: `x[key]`, `take`.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec.arrays import binding, dtypes, execution, tracing
from stagec.arrays.dims import Dim, Shape
from stagec.arrays.dtypes import INTEGRAL, KINDS
from stagec.arrays.namespace.index_keys import expanded, plain, split, wrapped
from stagec.arrays.namespace.promotion import array_of
from stagec.arrays.primitives import elementwise as p
from stagec.arrays.primitives.indexing import GatherNumbers, are_inside, gather
from stagec.arrays.primitives.slicing import concatenate, reverse, slice_
from stagec.arrays.primitives.structural import broadcast, convert, reshape, transpose
from stagec.arrays.tracing import Tracer
from stagec.arrays.values import Value, axis_of, broadcast_shapes


def getitem(x: Any, key: Any) -> Any:
    """Return the elements that a key names: integers, slices, `...`, None, arrays of integers, and known masks.

    Raises IndexError for what is outside of the array, TracerError for a mask that is traced.
    """
    entries = key if isinstance(key, tuple) else (key,)
    if isinstance(x, execution.Array) and tracing.current() is None and not any(isinstance(e, Tracer) for e in entries):
        if x.dtype is dtypes.KEY:
            whole = [plain(key), slice(None)] if not isinstance(key, tuple) else [*plain(key), slice(None)]
            dots = any(entry is Ellipsis for entry in entries)
            return execution.array(x.words().numpy()[tuple(whole[: None if dots else -1])]).as_keys()
        return execution.array(x.numpy()[plain(key)], shared=True)
    x = x.same()
    basic, arrays = split(x, expanded(x, entries))
    return gathered(sliced(x, basic), arrays)


def sliced(x: Any, slices: Sequence[tuple[Any, Any, int]]) -> Any:
    """Return the elements in slices, for each axis start, end and step, which `index_keys.split` gives."""
    start, limit, steps, turned = [], [], [], []
    for axis, (first, last, step) in enumerate(slices):
        if step > 0:
            start.append(first)
            limit.append(last if isinstance(last, Dim) or isinstance(first, Dim) else max(first, last))
            steps.append(step)
            continue
        # From the last that is taken to the first, and turned around.
        size = x.shape[axis]
        if isinstance(size, Dim):
            count = (size - 1) // -step + 1 if step != -1 else size
            lowest = size - 1 + (count - 1) * step
            start.append(lowest)
            limit.append(size)
        else:
            count = max(0, -((first - last) // step))
            start.append(first + (count - 1) * step if count else 0)
            limit.append(first + 1 if count else 0)
        steps.append(-step)
        turned.append(axis)
    return reverse(slice_(x, start, limit, steps), turned)


def gathered(x: Any, entries: Sequence[Any], outside: Any = None) -> Any:
    """Return the elements at indices along axes; entries: for each axis an array, an int or None, and "new" axes.

    outside: what stands for an element that is not in the array; None: the nearest that is.
    """
    axes = [entry for entry in entries if not _is_new(entry)]
    if not any(isinstance(entry, Value | np.ndarray) for entry in axes):
        return _without_arrays(x, entries)
    indexed = [axis for axis, entry in enumerate(axes) if entry is not None]
    places = [i for i, entry in enumerate(entries) if entry is not None and not _is_new(entry)]
    together = places == list(range(places[0], places[-1] + 1))
    indices = [_index_array(axes[axis]) for axis in indexed]
    shape = broadcast_shapes(*(index.shape for index in indices))
    rank, before = len(shape), (sum(1 for axis in range(indexed[0]) if axis not in indexed) if together else 0)
    wide = dtypes.int64 if any(index.dtype == dtypes.int64 for index in indices) else dtypes.int32
    columns = [reshape(broadcast(convert(value_of(i), wide), shape), (*shape, 1)) for i in indices]
    kept = len(x.shape) - len(indexed)
    offset = (*range(before), *range(before + rank, kept + rank))
    sizes = [1 if axis in indexed else size for axis, size in enumerate(x.shape)]
    numbers = GatherNumbers(offset, tuple(indexed), tuple(indexed))
    index = concatenate(columns, rank)
    found = gather(x, index, numbers, sizes)
    if outside is not None:
        batch = range(before, before + rank)
        found = p.select(broadcast(are_inside(x, index, numbers, sizes), found.shape, batch), found, outside)
    return _with_new_axes(found, entries, together, before, rank)


def _with_new_axes(found: Any, entries: Sequence[Any], together: bool, before: int, rank: int) -> Any:
    if not any(map(_is_new, entries)):
        return found
    shape, sizes, placed = [], list(found.shape), False
    if not together:
        shape, sizes, placed = sizes[:rank], sizes[rank:], True
    for entry in entries:
        if _is_new(entry):
            shape.append(1)
        elif entry is None:
            shape.append(sizes.pop(0))
        elif not placed:
            shape, sizes, placed = [*shape, *sizes[:rank]], sizes[rank:], True
    return reshape(found, shape)


def _is_new(entry: Any) -> bool:
    return isinstance(entry, str)


def value_of(index: Any) -> Any:
    """Return indices that may be NumPy's as a value of ours."""
    return binding.constant(index) if isinstance(index, np.ndarray) else index


def _index_array(entry: Any) -> Any:
    return np.asarray(entry, np.int32) if type(entry) is int else array_of(entry)


def _without_arrays(x: Any, entries: Sequence[Any]) -> Any:
    axes = [entry for entry in entries if not _is_new(entry)]
    start = [0 if entry is None else entry for entry in axes]
    limit = [size if entry is None else entry + 1 for size, entry in zip(x.shape, axes, strict=True)]
    x = slice_(x, start, limit)
    sizes = iter(x.shape)
    shape = []
    for entry in entries:
        size = 1 if _is_new(entry) else next(sizes)
        if _is_new(entry) or entry is None:
            shape.append(size)
    return reshape(x, shape)


def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    """Return the parts of an array at indices along an axis, which a vector needs no name for."""
    x = array_of(x, "take")
    if axis is None:
        if len(x.shape) != 1:
            raise ValueError(f"take: an array of {len(x.shape)} dimensions needs an axis")
        axis = 0
    where = axis_of(axis, len(x.shape))
    index = array_of(indices, "take")
    if KINDS[index.dtype] not in INTEGRAL:
        raise TypeError(f"take: indices are integers, not {index.dtype}")
    key = (*[slice(None)] * where, index)
    return getitem(x, key)


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """Return elements at indices along an axis, which are of as many dimensions as x; the others broadcast."""
    x, index = array_of(x, "take_along_axis"), array_of(indices, "take_along_axis")
    where = axis_of(axis, len(x.shape))
    if len(index.shape) != len(x.shape):
        raise ValueError(f"take_along_axis: indices of {len(x.shape)} dimensions are wanted, not of {len(index.shape)}")
    others = [i for i in range(len(x.shape)) if i != where]
    shape: Shape = broadcast_shapes([x.shape[i] for i in others], [index.shape[i] for i in others])
    wide_x = broadcast(x, (*shape[:where], x.shape[where], *shape[where:]))
    wide = broadcast(index, (*shape[:where], index.shape[where], *shape[where:]))
    wide = value_of(wrapped(wide, x.shape[where]))
    order = (*others, where)
    rows, columns = transpose(wide_x, order), transpose(wide, order)
    batch = tuple(range(len(others)))
    numbers = GatherNumbers((), (len(others),), (len(others),), batch, batch)
    found = gather(rows, reshape(columns, (*columns.shape, 1)), numbers, [1] * len(order))
    return transpose(found, np.argsort(order).tolist())
