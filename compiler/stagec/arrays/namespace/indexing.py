"""Reading and writing elements: `x[key]`, `x[key] = value`, `x.at[key]`, `take`.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from stagec.arrays import binding, dims, dtypes, execution, tracing
from stagec.arrays.dims import Dim, Shape
from stagec.arrays.dtypes import BOOL, INTEGRAL, KINDS, UNSIGNED
from stagec.arrays.namespace.promotion import array_of, is_scalar, like
from stagec.arrays.places import here
from stagec.arrays.primitives import elementwise as p
from stagec.arrays.primitives.indexing import GatherNumbers, are_inside, gather, scatter
from stagec.arrays.primitives.slicing import concatenate, reverse, slice_
from stagec.arrays.primitives.structural import broadcast, convert, full, iota, reshape, transpose
from stagec.arrays.tracing import Tracer
from stagec.arrays.values import Value, axis_of, broadcast_shapes, shown

_MASK = "write where(mask, x, other), which keeps the shape, or where(mask, value, x) to change elements"


def getitem(x: Any, key: Any) -> Any:
    """Return the elements that a key names: integers, slices, `...`, None, arrays of integers, and known masks.

    Raises IndexError for what is outside of the array, TracerError for a mask that is traced.
    """
    entries = key if isinstance(key, tuple) else (key,)
    if isinstance(x, execution.Array) and tracing.current() is None and not any(isinstance(e, Tracer) for e in entries):
        if x.dtype is dtypes.KEY:
            whole = [_plain(key), slice(None)] if not isinstance(key, tuple) else [*_plain(key), slice(None)]
            dots = any(entry is Ellipsis for entry in entries)
            return execution.array(x.words().numpy()[tuple(whole[: None if dots else -1])]).as_keys()
        return execution.array(x.numpy()[_plain(key)], shared=True)
    x = x.same()
    basic, arrays = _split(x, _expanded(x, entries))
    return _gathered(_sliced(x, basic), arrays)


def _plain(key: Any) -> Any:
    """Return a key as NumPy takes it. Raises IndexError for what is no key."""
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, Value | np.ndarray | list):
        known = np.asarray(key)
        if dtypes.KINDS.get(known.dtype) not in dtypes.INTEGRAL | {BOOL} and known.size:
            raise IndexError(f"an array of integers or bools is an index, not one of {known.dtype}")
        return known if known.dtype.kind in "biu" else known.astype(np.int64)
    if isinstance(key, float | str):
        raise IndexError(f"{key!r} is no index; write integers, slices, ..., None, or arrays of these")
    return key


def _expanded(x: Any, entries: tuple[Any, ...]) -> list[Any]:
    """Return a key with `...` written out, and masks as the integers that they stand for."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, bool | np.bool_) or (hasattr(entry, "dtype") and KINDS.get(entry.dtype) == BOOL):
            mask = binding.known(entry)
            if mask is None:
                raise tracing.refuse(entry, "a mask as an index", _MASK)
            if mask.ndim == 0:
                raise IndexError(f"a single bool is no index in a trace; {_MASK}")
            found += np.nonzero(mask)
        else:
            found.append(entry)
    taken = sum(entry is not None and entry is not Ellipsis for entry in found)
    rank = len(x.shape)
    dots = [i for i, entry in enumerate(found) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one ..., not several")
    if taken > rank:
        raise IndexError(f"{taken} indices are given for an array of {rank} dimensions, of shape {shown(x.shape)}")
    at = dots[0] if dots else len(found)
    return [*found[:at], *[slice(None)] * (rank - taken), *found[at + 1 :]]


def _split(x: Any, entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return what is done first, a slice for each axis, and then: for each axis of that an array, None or "new"."""
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
            arrays.append(_wrapped(index, size))
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
        raise IndexError(f"{entry!r} is no index; write integers, slices, ..., None, or arrays of these")
    number = int(entry.__index__())
    if type(size) is int and not -size <= number < size:
        raise IndexError(f"index {number} is out of range for axis {axis} of size {size}")
    return number + size if number < 0 else number


def _bounds(entry: slice, size: Any) -> tuple[Any, Any, int]:
    """Return start, end and step of a slice, as `slice.indices` does, for sizes that may be symbolic."""
    for part in (entry.start, entry.stop, entry.step):
        if isinstance(part, Tracer):
            raise tracing.refuse(part, "a slice", "write stagec.lax.dynamic_slice(x, starts, sizes)")
    if type(size) is int and not any(isinstance(one, Dim) for one in (entry.start, entry.stop)):
        return entry.indices(size)
    step = 1 if entry.step is None else int(entry.step)
    if step < 0 and (entry.start is not None or entry.stop is not None):
        raise IndexError("a slice with a negative step of a symbolic size has no bounds: write x[::-1], then a slice")
    if step < 0:
        return size - 1, -1, step
    start = 0 if entry.start is None else _from_front(entry.start, size)
    stop = size if entry.stop is None else _from_front(entry.stop, size)
    return start, stop, step


def _from_front(bound: Any, size: Any) -> Any:
    if isinstance(bound, Dim) or bound >= 0:
        if bound > size:
            return size
        return bound
    return max(size + bound, 0)


def _wrapped(index: Any, size: Any) -> Any:
    """Return indices with negative ones counted from the back."""
    if KINDS[index.dtype] == UNSIGNED and isinstance(index, Tracer):
        return index
    known = binding.known(index)
    if known is None:
        wide = dtypes.int64 if index.dtype == dtypes.int64 else dtypes.int32
        index = convert(index, wide)
        return p.select(p.less(index, 0), p.add(index, _size(size, wide)), index)
    known = known.astype(np.int64)
    if type(size) is not int:
        return _wrapped_symbolic(known, size)
    if known.size and not (-size <= known.min() and known.max() < size):
        raise IndexError(f"indices from {known.min()} to {known.max()} are out of range for a size of {size}")
    found: Any = np.where(known < 0, known + size, known).astype(np.int32 if size < 2**31 else np.int64)
    return found


def _wrapped_symbolic(known: np.ndarray[Any, Any], size: Any) -> Any:
    index = convert(binding.constant(known.astype(np.int32)), dtypes.int32)
    return p.select(p.less(index, 0), p.add(index, _size(size, dtypes.int32)), index)


def _size(size: Any, dtype: dtypes.DType) -> Any:
    return convert(array_of(size), dtype) if isinstance(size, Dim) else np.asarray(size, dtype)


def _sliced(x: Any, slices: Sequence[tuple[Any, Any, int]]) -> Any:
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


def _gathered(x: Any, entries: Sequence[Any], outside: Any = None) -> Any:
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
    columns = [reshape(broadcast(convert(_value(i), wide), shape), (*shape, 1)) for i in indices]
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


def _value(index: Any) -> Any:
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


# Writing.


def updated(x: Any, key: Any, value: Any, how: str = "set") -> Any:
    """Return an array in which the elements that a key names are changed by a value, which is broadcast to them.

    how: "set", "add", "multiply", "max" or "min". Elements at traced indices that are not in the array are left out, as
    in JAX. Raises what `getitem` raises, TypeError and ValueError.
    """
    entries = key if isinstance(key, tuple) else (key,)
    if len(entries) == 1 and isinstance(entries[0], Tracer) and KINDS[entries[0].dtype] == BOOL:
        return _masked(x, entries[0], value, how)
    given = like(value, x.dtype) if is_scalar(value) else array_of(value)
    if dtypes.promote(given.dtype, x.dtype) != x.dtype:
        raise TypeError(f"elements of {x.dtype} cannot be changed by an array of {given.dtype}; convert it with astype")
    given = convert(given, x.dtype)
    count = dims.product(x.shape)
    # Each element has a number, and the key is applied to those.
    if not dims.is_static(x.shape) or any(isinstance(entry, Tracer) for entry in entries):
        slices, arrays = _split(x, _expanded(x, entries))
        every = reshape(iota(dtypes.int32, (count,), 0), x.shape)
        places = _gathered(_sliced(every, slices), arrays, outside=-1)  # a scatter leaves those out
        inside = unique = not any(isinstance(entry, Value | np.ndarray) for entry in arrays)
    else:
        numbers: Any = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64).reshape(x.shape)
        places = numbers[_plain(key)]
        inside, unique = True, bool(np.unique(places).size == places.size)
    shape = tuple(places.shape)
    own = tuple(given.shape)
    while len(own) > len(shape) and own[0] == 1:
        own = own[1:]
    try:
        given = broadcast(reshape(given, own), shape)
    except ValueError:
        raise ValueError(
            f"a value of shape {shown(given.shape)} does not broadcast to elements of {shown(shape)}"
        ) from None
    total = dims.product(shape)
    indices = reshape(_value(places), (total, 1))
    vectors = reshape(x, (count,)), indices, reshape(given, (total,))
    flat = scatter(*vectors, GatherNumbers((), (0,), (0,)), how, unique, inside=inside)
    return reshape(flat, x.shape)


def _masked(x: Any, mask: Any, value: Any, how: str) -> Any:
    """Return x with a number where a mask is true."""
    number = like(value, x.dtype) if is_scalar(value) else convert(array_of(value), x.dtype)
    if number.shape != ():
        raise tracing.refuse(mask, "a mask as an index for an array of values", _MASK)
    if tuple(mask.shape) != tuple(x.shape[: len(mask.shape)]):
        raise IndexError(f"a mask of shape {shown(mask.shape)} is no index of an array of shape {shown(x.shape)}")
    wide = reshape(mask, (*mask.shape, *[1] * (len(x.shape) - len(mask.shape))))
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "set": lambda old, new: broadcast(new, x.shape, ()),
        "add": p.add,
        "multiply": p.multiply,
        "max": p.maximum,
        "min": p.minimum,
    }
    return p.select(wide, combine[how](x, number), x)


class At:
    """`x.at[key]`: what changes elements and returns the changed array, as JAX's (`jax.numpy.ndarray.at`)."""

    def __init__(self, x: Any, key: Any = None) -> None:
        self._x = x
        self._key = key

    def __getitem__(self, key: Any) -> At:
        return At(self._x, key)

    def get(self) -> Any:
        """Return the elements."""
        return getitem(self._x, self._key)

    def set(self, value: Any) -> Any:
        """Return the array with these elements."""
        return updated(self._x, self._key, value)

    def add(self, value: Any) -> Any:
        """Return the array with a value added to the elements; to one that is named twice, twice."""
        return updated(self._x, self._key, value, "add")

    def subtract(self, value: Any) -> Any:
        """Return the array with a value taken from the elements."""
        return updated(self._x, self._key, -value, "add")

    def multiply(self, value: Any) -> Any:
        """Return the array with the elements multiplied by a value."""
        return updated(self._x, self._key, value, "multiply")

    mul = multiply

    def divide(self, value: Any) -> Any:
        """Return the array with the elements divided by a value."""
        return p.divide(self._x, self._factors("divide", value))

    def power(self, value: Any) -> Any:
        """Return the array with the elements to the power of a value."""
        return p.power(self._x, self._factors("power", value))

    def _factors(self, name: str, value: Any) -> Any:
        """Return an array of ones, but for the elements, which a value is."""
        dtypes.require(name, self._x.dtype, dtypes.INEXACT)
        return updated(full(self._x.shape, 1, self._x.dtype), self._key, value, "multiply")

    def min(self, value: Any) -> Any:
        """Return the array with the smaller of each element and a value."""
        return updated(self._x, self._key, value, "min")

    def max(self, value: Any) -> Any:
        """Return the array with the larger of each element and a value."""
        return updated(self._x, self._key, value, "max")


def setitem(x: Any, key: Any, value: Any) -> None:
    """Change elements of x in place: the object becomes one of the changed array. Other objects keep their elements.

    Raises TypeError where a traced value is put into an array outside of the trace, or into one of a trace around it.
    """
    if isinstance(x, execution.Array):
        if tracing.current() is not None:
            raise TypeError(
                f"{here()}: an array from outside of the trace is changed in it; write x = x.at[key].set(value)"
            )
        if x.dtype is dtypes.KEY:
            x._buffer = updated(x, key, value)._buffer
            return
        values = np.array(x.numpy())
        given = np.asarray(array_of(value))
        if not is_scalar(value) and dtypes.promote(given.dtype, x.dtype) != x.dtype:
            raise TypeError(
                f"elements of {x.dtype} cannot be changed by an array of {given.dtype}; convert it with astype"
            )
        values[_plain(key)] = like(value, x.dtype).value if is_scalar(value) else given
        x._buffer = execution.array(values)._buffer
        return
    if x._trace is not tracing.current():
        raise TypeError(f"{here()}: an array of a trace around is changed in this one; write x = x.at[key].set(value)")
    x._operand = updated(x, key, value)._operand


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
    wide = _value(_wrapped(wide, x.shape[where]))
    order = (*others, where)
    rows, columns = transpose(wide_x, order), transpose(wide, order)
    batch = tuple(range(len(others)))
    numbers = GatherNumbers((), (len(others),), (len(others),), batch, batch)
    found = gather(rows, reshape(columns, (*columns.shape, 1)), numbers, [1] * len(order))
    return transpose(found, np.argsort(order).tolist())
