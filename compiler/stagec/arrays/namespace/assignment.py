"""Writing elements: `x[key] = value`, `x.at[key]`.

https://data-apis.org/array-api/2024.12/API_specification/indexing.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stagec.arrays import dims, dtypes, execution, tracing
from stagec.arrays.dtypes import BOOL, KINDS
from stagec.arrays.namespace.index_keys import MASK, expanded, plain, split
from stagec.arrays.namespace.indexing import gathered, getitem, sliced, value_of
from stagec.arrays.namespace.promotion import array_of, is_scalar, like
from stagec.arrays.places import here
from stagec.arrays.primitives import elementwise as p
from stagec.arrays.primitives.indexing import GatherNumbers, scatter
from stagec.arrays.primitives.structural import broadcast, convert, full, iota, reshape
from stagec.arrays.tracing import Tracer
from stagec.arrays.values import Value, shown


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
        slices, arrays = split(x, expanded(x, entries))
        every = reshape(iota(dtypes.int32, (count,), 0), x.shape)
        places = gathered(sliced(every, slices), arrays, outside=-1)  # a scatter leaves those out
        inside = unique = not any(isinstance(entry, Value | np.ndarray) for entry in arrays)
    else:
        numbers: Any = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64).reshape(x.shape)
        places = numbers[plain(key)]
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
    indices = reshape(value_of(places), (total, 1))
    vectors = reshape(x, (count,)), indices, reshape(given, (total,))
    flat = scatter(*vectors, GatherNumbers((), (0,), (0,)), how, unique, inside=inside)
    return reshape(flat, x.shape)


def _masked(x: Any, mask: Any, value: Any, how: str) -> Any:
    """Return x with a number where a mask is true."""
    number = like(value, x.dtype) if is_scalar(value) else convert(array_of(value), x.dtype)
    if number.shape != ():
        raise tracing.refuse(mask, "a mask as an index for an array of values", MASK)
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
        values[plain(key)] = like(value, x.dtype).value if is_scalar(value) else given
        x._buffer = execution.array(values)._buffer
        return
    if x._trace is not tracing.current():
        raise TypeError(f"{here()}: an array of a trace around is changed in this one; write x = x.at[key].set(value)")
    x._operand = updated(x, key, value)._operand
