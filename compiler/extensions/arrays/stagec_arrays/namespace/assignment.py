"""Writing elements: `x[key] = value`, `x.at[key]`.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes, execution, tracing
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import BOOL, KINDS
from stagec_arrays.locations import here
from stagec_arrays.namespace.index_keys import MASK, expanded, plain, split
from stagec_arrays.namespace.indexing import gathering, getitem, has_arrays, index_array, is_new, sliced
from stagec_arrays.namespace.promotion import array_of, is_scalar, like
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.indexing import GatherDimensionNumbers, dynamic_slice, dynamic_update_slice, scatter
from stagec_arrays.primitives.slicing import pad, reverse, slice_
from stagec_arrays.primitives.structural import broadcast, convert, full, iota, reshape
from stagec_arrays.tracing import Tracer
from stagec_arrays.values import Literal, shown


def updated(x: Any, key: Any, value: Any, how: str = "set") -> Any:
    """Return an array in which the elements that a key names are changed by a value, which is broadcast to them.

    how: "set", "add", "multiply", "max" or "min". Elements at traced indices that are not in the array are left out, as
    in JAX. Raises what `getitem` raises, TypeError and ValueError.
    """
    given = like(value, x.dtype) if is_scalar(value) else array_of(value)
    if dtypes.promote(given.dtype, x.dtype) != x.dtype:
        raise TypeError(f"elements of {x.dtype} cannot be changed by an array of {given.dtype}; convert it with astype")
    given = convert(given, x.dtype)
    entries = tuple(
        plain(entry) if isinstance(entry, list) else entry for entry in (key if isinstance(key, tuple) else (key,))
    )
    if len(entries) == 1 and _is_mask(entries[0]):
        (mask,) = entries
        if isinstance(mask, Tracer) or (given.shape == () and x.dtype is not dtypes.KEY):
            return _masked(x, array_of(mask), given, how)
    slices, indices = split(x, expanded(x, entries))
    if not has_arrays(indices):
        _without_integers(x, slices, indices)
    part = Part(x, slices)
    plan = gathering(part.shape, indices)
    own = tuple(given.shape)
    while len(own) > len(plan.shape) and own[0] == 1:
        own = own[1:]
    try:
        given = broadcast(reshape(given, own), plan.shape)
    except ValueError:
        raise ValueError(
            f"a value of shape {shown(given.shape)} does not broadcast to elements of {shown(plan.shape)}"
        ) from None
    if 0 in plan.shape:
        return x.same()
    new = reshape(given, plan.parts)
    if plan.numbers is not None:
        unique = _are_unique(part.shape, indices)
        inside = unique is not None
        return part.written(scatter(part.read(), plan.index, new, plan.numbers, how, bool(unique), inside=inside))
    return part.written(new if how == "set" else _COMBINE[how](part.read(), new))


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, bool) or (hasattr(entry, "dtype") and KINDS.get(entry.dtype) == BOOL)


def _without_integers(x: Any, slices: list[Any], indices: list[Any]) -> None:
    """Write integers as slices of one element; where one may not be in the array as arrays, so that x stays then."""
    axes = [i for i, entry in enumerate(indices) if not is_new(entry)]
    named = [(axis, i) for axis, i in enumerate(axes) if indices[i] is not None]
    outside = [
        i for axis, i in named if not (dims.at_least(indices[i], 0) and dims.at_least(x.shape[axis], indices[i] + 1))
    ]
    for i in outside:
        indices[i] = index_array(indices[i])
    for axis, i in named if not outside else ():
        slices[axis] = indices[i], indices[i] + 1, 1


def _are_unique(shape: Sequence[Any], indices: Sequence[Any]) -> bool | None:
    """Whether indices name no element twice; None if it is not known, nor whether they are inside the array."""
    axes = zip((entry for entry in indices if not is_new(entry)), shape, strict=True)
    named = [(entry, size) for entry, size in axes if entry is not None]
    if not all(isinstance(entry, int | np.ndarray) and type(size) is int for entry, size in named):
        return None
    arrays, sizes = zip(*named, strict=True)
    places = np.ravel_multi_index(np.broadcast_arrays(*arrays), sizes)
    return bool(np.unique(places).size == places.size)


class Part:
    """The elements of an array in slices: for each axis start, end and step, which `index_keys.split` gives.

    shape: of them.
    """

    def __init__(self, x: Any, slices: Sequence[tuple[Any, Any, int]]) -> None:
        self._x = x
        self._slices = slices
        room = [last - first if step > 0 else first - last for first, last, step in slices]
        self.shape: Shape = tuple(
            (dims.larger(0, length) + abs(step) - 1) // abs(step)
            for length, (_, _, step) in zip(room, slices, strict=True)
        )
        self._steps = [1 if n == 1 else abs(step) for n, (_, _, step) in zip(self.shape, slices, strict=True)]
        self._turned = [axis for axis, (_, _, step) in enumerate(slices) if step < 0]
        self._start = [
            first if step > 0 else first + (n - 1) * step
            for n, (first, _, step) in zip(self.shape, slices, strict=True)
        ]
        # From the first to the last of them.
        self._window = [(n - 1) * step + 1 for n, step in zip(self.shape, self._steps, strict=True)]

    def read(self) -> Any:
        """Return the elements."""
        if tracing.current() is not None:
            return sliced(self._x, self._slices)
        return reverse(slice_(self._around(), [0] * len(self.shape), self._window, self._steps), self._turned)

    def written(self, new: Any) -> Any:
        """Return the array with `new` in their place."""
        x = self._x
        apart = [axis for axis, step in enumerate(self._steps) if step > 1]
        for axis in apart:
            if x.dtype is dtypes.KEY or not dims.at_least(self.shape[axis], 1):
                return self._scattered(new, axis)
        new = reverse(new, self._turned)
        if apart:
            nothing, between = [0] * len(self.shape), [step - 1 for step in self._steps]
            wide = pad(new, Literal(np.zeros((), x.dtype)), nothing, nothing, between)
            taken = [self._is_taken(axis) for axis in apart]
            new = p.select(functools.reduce(p.bitwise_and, taken), wide, self._around())
        if tuple(self._window) == tuple(x.shape):
            return convert(new, x.dtype, x.weak_type)
        return dynamic_update_slice(x, new, self._starts())

    def _around(self) -> Any:
        """Return the array from the first to the last of them, on each axis."""
        if tracing.current() is None:  # the start as data: one compiled program for all
            return dynamic_slice(self._x, self._starts(), self._window)
        return slice_(self._x, self._start, [a + b for a, b in zip(self._start, self._window, strict=True)])

    def _starts(self) -> list[Any]:
        large = any(type(size) is int and size >= 2**31 for size in self._x.shape)
        wide = dtypes.int64 if large else dtypes.int32
        return [
            Literal(np.asarray(start, wide)) if type(start) is int else convert(array_of(start), wide)
            for start in self._start
        ]

    def _is_taken(self, axis: int) -> Any:
        """Return the mask of the window's elements along an axis that belong to the part."""
        ones = full((self.shape[axis],), True, dtypes.bool_)
        own = pad(ones, Literal(np.zeros((), np.bool_)), [0], [0], [self._steps[axis] - 1])
        return broadcast(own, self._window, (axis,))

    def _scattered(self, new: Any, axis: int) -> Any:
        """Return the result of `written`, slice by slice of one axis, which may have no slices."""
        whole = [(0, size, 1) for size in self._x.shape]
        first, last, step = self._slices[axis]
        along = Part(self._x, [*whole[:axis], (first, last, step), *whole[axis + 1 :]])
        inner = [*self._slices[:axis], (0, self.shape[axis], 1), *self._slices[axis + 1 :]]
        count = p.multiply(iota(dtypes.int32, (self.shape[axis],), 0), step)
        index = reshape(p.add(count, array_of(first)), (self.shape[axis], 1))
        offset = tuple(other for other in range(len(whole)) if other != axis)
        updates = Part(along.read(), inner).written(new)
        return scatter(
            self._x, index, updates, GatherDimensionNumbers(offset, (axis,), (axis,)), unique=True, inside=True
        )


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": p.add,
    "multiply": p.multiply,
    "max": p.maximum,
    "min": p.minimum,
}


def _masked(x: Any, mask: Any, number: Any, how: str) -> Any:
    """Return x with a number where a mask is true."""
    if number.shape != ():
        raise tracing.refuse(mask, "a mask as an index for an array of values", MASK)
    if tuple(mask.shape) != tuple(x.shape[: len(mask.shape)]):
        raise IndexError(f"a mask of shape {shown(mask.shape)} does not fit an array of shape {shown(x.shape)}")
    wide = reshape(mask, (*mask.shape, *[1] * (len(x.shape) - len(mask.shape))))
    new = broadcast(number, x.shape, ()) if how == "set" else _COMBINE[how](x, number)
    return p.select(wide, new, x)


class At:
    """`x.at[key]`: change elements and return the changed array, as JAX's `jax.numpy.ndarray.at`."""

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

    Raises TypeError if a traced value is put into an array outside the trace, or into one of a trace around it,
    and for an array that NumPy has as a view of another, which would keep its elements.
    """
    if (view := x.view) is not None:
        what = f"{here()}: NumPy has this array as a view of another array, whose elements would stay as they are"
        raise TypeError(f"{what}; {view.write}, or change a copy: x = asarray(x, copy=True)")
    if isinstance(x, execution.Array):
        if tracing.current() is not None:
            raise TypeError(
                f"{here()}: an array from outside the trace is changed in it; write x = x.at[key].set(value)"
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
        values[plain(key)] = like(value, x.dtype).value if is_scalar(value) else given
        x._buffer = execution.array(values)._buffer
        return
    if x._trace is not tracing.current():
        raise TypeError(f"{here()}: an array of a trace around is changed in this one; write x = x.at[key].set(value)")
    x._operand = updated(x, key, value)._operand
