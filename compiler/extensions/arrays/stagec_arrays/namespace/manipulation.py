"""The standard's functions that move elements (https://data-apis.org/array-api/2024.12/API_specification/manipulation_functions.html)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.namespace.indexing import take
from stagec_arrays.namespace.promotion import array_of, dtype_of
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.slicing import along, concatenate, reverse
from stagec_arrays.primitives.structural import broadcast, convert, reshape as reshaped, transpose
from stagec_arrays.tracing import Tracer, refuse
from stagec_arrays.values import as_view, axes_of, axis_of, gives_views, shown


def _together(arrays: Any, name: str) -> list[Any]:
    given = [array_of(x, name) for x in arrays]
    if not given:
        raise ValueError(f"{name}: expected one array or more")
    dtype, weak = dtype_of(*given)
    return [convert(x, dtype, weak) for x in given]


def concat(arrays: Any, /, *, axis: int | None = 0) -> Any:
    """Return arrays behind each other along an axis; None: their elements, in one vector."""
    given = _together(arrays, "concat")
    if axis is None:
        return concatenate([reshape(x, (-1,)) for x in given], 0)
    ranks = {len(x.shape) for x in given}
    if len(ranks) != 1 or 0 in ranks:
        raise ValueError(f"concat: expected arrays of the same number of dimensions, not of {sorted(ranks)}")
    return concatenate(given, axis_of(axis, ranks.pop()))


def stack(arrays: Any, /, *, axis: int = 0) -> Any:
    """Return arrays of one shape, with a new axis for which of them it is."""
    given = _together(arrays, "stack")
    if len({tuple(x.shape) for x in given}) != 1:
        raise ValueError(f"stack: expected arrays of one shape, not {', '.join(shown(x.shape) for x in given)}")
    shape = given[0].shape
    where = axis_of(axis, len(shape) + 1)
    return concatenate([reshaped(x, (*shape[:where], 1, *shape[where:])) for x in given], where)


@gives_views
def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Return the parts of an array along an axis, without it."""
    x = array_of(x, "unstack")
    where = axis_of(axis, len(x.shape))
    count = x.shape[where]
    if type(count) is not int:
        raise ValueError(f"unstack: the size of axis {axis} of shape {shown(x.shape)} must be a number")
    rest = tuple(size for i, size in enumerate(x.shape) if i != where)
    return tuple(reshaped(along(x, where, number, number + 1), rest) for number in range(count))


@gives_views
def expand_dims(x: Any, /, axis: int | Sequence[int] = 0) -> Any:
    """Return an array with new axes of size 1, at these places in the result."""
    x = array_of(x, "expand_dims")
    places = axis if isinstance(axis, tuple | list) else (axis,)
    rank = len(x.shape) + len(places)
    new = axes_of(tuple(places), rank)
    sizes = iter(x.shape)
    return reshaped(x, tuple(1 if i in new else next(sizes) for i in range(rank)))


@gives_views
def squeeze(x: Any, /, axis: int | tuple[int, ...]) -> Any:
    """Return an array without axes, which are of size 1."""
    x = array_of(x, "squeeze")
    gone = axes_of(axis, len(x.shape))
    if any(x.shape[i] != 1 for i in gone):
        raise ValueError(f"squeeze: axis {axis} of shape {shown(x.shape)} is not of size 1")
    return reshaped(x, tuple(size for i, size in enumerate(x.shape) if i not in gone))


@gives_views
def permute_dims(x: Any, /, axes: tuple[int, ...]) -> Any:
    """Return an array with its axes in another order."""
    x = array_of(x, "permute_dims")
    order = axes_of(tuple(axes), len(x.shape))
    if len(order) != len(x.shape):
        raise ValueError(f"permute_dims: expected {len(x.shape)} axes, not {axes}")
    return transpose(x, order)


@gives_views
def moveaxis(x: Any, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> Any:
    """Return an array with axes moved to other places; the others keep their order."""
    x = array_of(x, "moveaxis")
    rank = len(x.shape)
    old, new = (
        axes_of(given if isinstance(given, tuple | list) else (given,), rank) for given in (source, destination)
    )
    if len(old) != len(new):
        raise ValueError(f"moveaxis: {source} and {destination} name different numbers of axes")
    order = [i for i in range(rank) if i not in old]
    for where, which in sorted(zip(new, old, strict=True)):
        order.insert(where, which)
    return transpose(x, order)


def reshape(x: Any, /, shape: Any, *, copy: bool | None = None) -> Any:
    """Return the elements in another shape; one size may be -1, for the rest."""
    given, x = x, array_of(x, "reshape")
    sizes = list(shape if isinstance(shape, tuple | list) else (shape,))
    for size in sizes:
        if isinstance(size, Tracer):
            raise refuse(size, "reshape()", "give numbers, or sizes of arrays (x.shape[0])")
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, dims.Dim) and size == -1]
    if len(unknown) > 1:
        raise ValueError("reshape: one size may be -1")
    if unknown:
        known = dims.product([size for size in sizes if isinstance(size, dims.Dim) or size != -1])
        total = dims.product(x.shape)
        if not isinstance(known, dims.Dim) and known == 0:
            raise ValueError(f"reshape: -1 stands for any size in {shown(sizes)}")
        if not isinstance(total, dims.Dim) and not isinstance(known, dims.Dim) and total % known:
            raise ValueError(f"reshape: an array of shape {shown(x.shape)} has no shape {shown(sizes)}")
        sizes[unknown[0]] = total // known
    result = reshaped(x, tuple(map(dims.size_of, sizes)))
    if copy:
        return result.copy_of() if result is x and hasattr(x, "copy_of") else result
    return as_view(result, given, "write reshape(x, shape, copy=True) for a copy")


@gives_views
def flip(x: Any, /, *, axis: int | tuple[int, ...] | None = None) -> Any:
    """Return an array with its elements in the other order along axes; None: all."""
    x = array_of(x, "flip")
    return reverse(x, axes_of(axis, len(x.shape)))


def roll(x: Any, /, shift: int | tuple[int, ...], *, axis: int | tuple[int, ...] | None = None) -> Any:
    """Return an array with its elements moved along axes, those at the end to the front; None: as one vector."""
    x = array_of(x, "roll")
    if axis is None:
        flat = reshape(x, (-1,))
        return reshaped(roll(flat, shift, axis=0), x.shape)
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    shifts = shift if isinstance(shift, tuple | list) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ValueError(f"roll: {len(shifts)} shifts are given for {len(axes)} axes")
    for by, number in zip(shifts, axes, strict=True):
        x = _rolled(x, int(by), axis_of(number, len(x.shape)))
    return x


def _rolled(x: Any, by: int, axis: int) -> Any:
    size = x.shape[axis]
    if size == 0 or size == 1:
        return x
    first = by % size
    if first == 0:
        return x
    return concatenate([along(x, axis, size - first, size), along(x, axis, 0, size - first)], axis)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Any:
    """Return an array with each element, or part along an axis, several times; None: elements, in one vector.

    repeats: how often; or an array of integers, one for each element, which must be known.
    """
    x = array_of(x, "repeat")
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    where = axis_of(axis, len(x.shape))
    if isinstance(repeats, Tracer):
        raise refuse(repeats, "repeat()", "give integers: the size of the result depends on them")
    if not isinstance(repeats, int):
        counts = np.asarray(repeats)
        if counts.size != 1:
            size = x.shape[where]
            return take(x, np.repeat(np.arange(size, dtype=np.int32), counts), axis=where)
        repeats = int(counts.reshape(()))
    repeats = dims.size_of(repeats)
    shape = [*x.shape[: where + 1], repeats, *x.shape[where + 1 :]]
    spread = broadcast(x, shape, [i for i in range(len(shape)) if i != where + 1])
    return reshaped(spread, (*x.shape[:where], x.shape[where] * repeats, *x.shape[where + 1 :]))


def tile(x: Any, repetitions: tuple[int, ...], /) -> Any:
    """Return an array several times behind itself along each axis; axes that are missing are new ones at the front."""
    x = array_of(x, "tile")
    rank = max(len(x.shape), len(repetitions))
    sizes = (*[1] * (rank - len(x.shape)), *x.shape)
    times = (*[1] * (rank - len(repetitions)), *map(dims.size_of, repetitions))
    shape = [size for pair in zip(times, sizes, strict=True) for size in pair]
    spread = broadcast(reshaped(x, sizes), shape, range(1, 2 * rank, 2))
    return reshaped(spread, tuple(a * b for a, b in zip(times, sizes, strict=True)))


def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbours along an axis, n times, with `prepend` and `append` at its ends."""
    x = array_of(x, "diff")
    where = axis_of(axis, len(x.shape))
    parts = [part for part in (prepend, x, append) if part is not None]
    x = concat(parts, axis=where) if len(parts) > 1 else x
    for _ in range(n):
        size = x.shape[where]
        if size == 0:
            break
        later, earlier = along(x, where, 1, size), along(x, where, 0, size - 1)
        x = p.bitwise_xor(later, earlier) if x.dtype == dtypes.bool_ else p.subtract(later, earlier)
    return x
