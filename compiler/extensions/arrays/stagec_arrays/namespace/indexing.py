"""Reading elements: `x[key]`, `take`.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stagec_arrays import binding, dims, dtypes, execution, tracing
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import INTEGRAL, KINDS
from stagec_arrays.namespace.index_keys import expanded, plain, split, wrapped
from stagec_arrays.namespace.promotion import array_of
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.indexing import GatherDimensionNumbers, are_inside, gather
from stagec_arrays.primitives.slicing import concatenate, reverse, slice_
from stagec_arrays.primitives.structural import broadcast, convert, reshape, transpose
from stagec_arrays.tracing import Tracer
from stagec_arrays.values import Value, as_view, axis_of, broadcast_shapes, one_axis_of


def getitem(x: Any, key: Any) -> Any:
    """Return the elements that a key names: integers, slices, `...`, None, arrays of integers, and known masks.

    Raises IndexError for an index outside the array, TracerError for a traced mask.
    """
    entries = key if isinstance(key, tuple) else (key,)
    result = _item(x, key, entries)
    return result if any(isinstance(entry, _COPYING) for entry in entries) else as_view(result, x, _WRITE)


_COPYING = Value, np.ndarray, list, bool, np.bool_
"""What is in a key whose elements NumPy copies."""
_WRITE = "write a[0, 1] = 5, not a[0][1] = 5"


def _item(x: Any, key: Any, entries: tuple[Any, ...]) -> Any:
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
    whole = [axis for axis, bounds in enumerate(slices) if bounds[2] < 0 and not dims.is_static(bounds)]
    x = reverse(x, whole)
    for axis, (first, last, step) in enumerate(slices):
        if step > 0 or axis in whole:
            size = x.shape[axis]
            begin, end = (first, last) if step > 0 else (size - 1 - first, size - 1 - last)
            start.append(begin)
            limit.append(begin + dims.larger(0, end - begin))
            steps.append(abs(step))
            continue
        # From the last that is taken to the first, and turned around.
        count = max(0, -((first - last) // step))
        start.append(first + (count - 1) * step if count else 0)
        limit.append(first + 1 if count else 0)
        steps.append(-step)
        turned.append(axis)
    return reverse(slice_(x, start, limit, steps), turned)


def gathered(x: Any, entries: Sequence[Any], outside: Any = None) -> Any:
    """Return the elements at indices along axes; entries: for each axis an array, an int or None, and "new" axes.

    outside: the value of an element outside the array; None: the nearest one's.
    """
    plan = gathering(x.shape, entries)
    if plan.numbers is not None:
        elements = gather(x, plan.index, plan.numbers, plan.sizes)
        if outside is not None:
            batch = [axis for axis in range(len(plan.parts)) if axis not in plan.numbers.offset_dims]
            inside = broadcast(are_inside(x, plan.index, plan.numbers, plan.sizes), plan.parts, batch)
            elements = p.select(inside, elements, outside)
        return reshape(elements, plan.shape)
    axes = [entry for entry in entries if not is_new(entry)]
    start = [0 if entry is None else entry for entry in axes]
    limit = [size if entry is None else entry + 1 for size, entry in zip(x.shape, axes, strict=True)]
    return reshape(slice_(x, start, limit), plan.shape)


def has_arrays(entries: Sequence[Any]) -> bool:
    """Whether an entry is an array, so that integers beside it are arrays too."""
    return any(isinstance(entry, Value | np.ndarray) for entry in entries)


class Gathering(NamedTuple):
    """How elements at indices are gathered, or scattered.

    index, numbers, sizes: as `gather` takes them; numbers is None if no index is an array, and nothing is gathered.
    parts: the shape of what it gives. shape: the same with new axes, and without those that integers name.
    """

    index: Any
    numbers: GatherDimensionNumbers | None
    sizes: Shape
    parts: Shape
    shape: Shape


def gathering(whole: Shape, entries: Sequence[Any]) -> Gathering:
    """Return how elements of an array of shape `whole` are gathered; entries: as of `gathered`."""
    if not has_arrays(entries):
        kept = iter(whole)
        named = [(entry, 1 if is_new(entry) else next(kept)) for entry in entries]
        shape = tuple(size for entry, size in named if entry is None or is_new(entry))
        return Gathering(None, None, (), tuple(whole), shape)
    axes = [entry for entry in entries if not is_new(entry)]
    indexed = [axis for axis, entry in enumerate(axes) if entry is not None]
    places = [i for i, entry in enumerate(entries) if entry is not None and not is_new(entry)]
    together = places == list(range(places[0], places[-1] + 1))
    indices = [index_array(axes[axis]) for axis in indexed]
    shape = broadcast_shapes(*(index.shape for index in indices))
    rank, before = len(shape), (sum(1 for axis in range(indexed[0]) if axis not in indexed) if together else 0)
    wide = dtypes.int64 if any(index.dtype == dtypes.int64 for index in indices) else dtypes.int32
    columns = [reshape(broadcast(convert(value_of(i), wide), shape), (*shape, 1)) for i in indices]
    own = [size for axis, size in enumerate(whole) if axis not in indexed]
    offset = (*range(before), *range(before + rank, len(own) + rank))
    sizes = tuple(1 if axis in indexed else size for axis, size in enumerate(whole))
    numbers = GatherDimensionNumbers(offset, tuple(indexed), tuple(indexed))
    parts = (*own[:before], *shape, *own[before:])
    index = concatenate(columns, rank)
    return Gathering(index, numbers, sizes, parts, _with_new_axes(parts, entries, together, rank))


def _with_new_axes(parts: Shape, entries: Sequence[Any], together: bool, rank: int) -> Shape:
    if not any(map(is_new, entries)):
        return parts
    shape, sizes, placed = [], list(parts), False
    if not together:
        shape, sizes, placed = sizes[:rank], sizes[rank:], True
    for entry in entries:
        if is_new(entry):
            shape.append(1)
        elif entry is None:
            shape.append(sizes.pop(0))
        elif not placed:
            shape, sizes, placed = [*shape, *sizes[:rank]], sizes[rank:], True
    return tuple(shape)


def is_new(entry: Any) -> bool:
    """Whether an entry stands for a new axis, not for one of the array."""
    return isinstance(entry, str)


def value_of(index: Any) -> Any:
    """Return indices, which may be NumPy's, as a value."""
    return binding.constant(index) if isinstance(index, np.ndarray) else index


def index_array(entry: Any) -> Any:
    """Return an index as an array; an integer as NumPy's."""
    return np.asarray(entry, np.int32 if entry < 2**31 else np.int64) if type(entry) is int else array_of(entry)


def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    """Return the parts of an array at indices along an axis, which a vector needs no name for.

    An index outside the array that a trace does not know gives NaN, as in JAX; of integers the least or, where they
    are unsigned, the largest, and True of bools. Raises IndexError where it is known.
    """
    x = array_of(x, "take")
    where = one_axis_of(axis, len(x.shape), "take")
    index = array_of(indices, "take")
    if KINDS[index.dtype] not in INTEGRAL:
        raise TypeError(f"take: indices are integers, not {index.dtype}")
    key = (*[slice(None)] * where, index)
    if binding.known(index) is not None:
        return getitem(x, key)
    slices, arrays = split(x, expanded(x, key))
    return gathered(sliced(x, slices), arrays, outside=missing(x.dtype))


def missing(dtype: dtypes.DType) -> Any:
    """Return the value of a missing element, as in JAX."""
    if KINDS[dtype] in INTEGRAL:
        least, most = dtypes.limits(dtype)
        return least or most
    return True if dtype == dtypes.bool_ else float("nan")


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """Return elements at indices along an axis, which are of as many dimensions as x; the others broadcast.

    An index outside gives the same as in `take`.
    """
    x, index = array_of(x, "take_along_axis"), array_of(indices, "take_along_axis")
    where = axis_of(axis, len(x.shape))
    if KINDS[index.dtype] not in INTEGRAL:
        raise TypeError(f"take_along_axis: indices are integers, not {index.dtype}")
    if len(index.shape) != len(x.shape):
        raise ValueError(f"take_along_axis: expected indices of {len(x.shape)} dimensions, not of {len(index.shape)}")
    others = [i for i in range(len(x.shape)) if i != where]
    shape: Shape = broadcast_shapes([x.shape[i] for i in others], [index.shape[i] for i in others])
    wide_x = broadcast(x, (*shape[:where], x.shape[where], *shape[where:]))
    wide = broadcast(index, (*shape[:where], index.shape[where], *shape[where:]))
    wide = value_of(wrapped(wide, x.shape[where]))
    order = (*others, where)
    rows, columns = transpose(wide_x, order), transpose(wide, order)
    batch = tuple(range(len(others)))
    numbers = GatherDimensionNumbers((), (len(others),), (len(others),), batch, batch)
    starts, sizes = reshape(columns, (*columns.shape, 1)), [1] * len(order)
    result = gather(rows, starts, numbers, sizes)
    if isinstance(wide, Tracer):
        result = p.select(are_inside(rows, starts, numbers, sizes), result, missing(x.dtype))
    return transpose(result, np.argsort(order).tolist())
