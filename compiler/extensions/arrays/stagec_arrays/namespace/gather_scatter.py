"""Reading and writing at places that are values, under the names of `jax.lax`: dynamic slices, gather, scatter.

https://docs.jax.dev/en/latest/jax.lax.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.dims import Dim
from stagec_arrays.dtypes import INTEGRAL, KINDS, SIGNED
from stagec_arrays.namespace.indexing import missing
from stagec_arrays.namespace.promotion import array_of, named
from stagec_arrays.primitives import elementwise as p, indexing
from stagec_arrays.primitives.slicing import along, row
from stagec_arrays.primitives.structural import broadcast, convert, full, reshape, size
from stagec_arrays.values import Literal, axis_of, shown

GatherDimensionNumbers = indexing.GatherDimensionNumbers


def _starts(x: Any, starts: Any, function: str) -> list[Any]:
    """Return the start of a slice, an integer for each axis; a negative one counts from the back."""
    if hasattr(starts, "shape") and len(starts.shape) == 1:
        given = array_of(starts, function)
        starts = [row(given, i) for i in range(given.shape[0])]
    if len(starts) != len(x.shape):
        raise ValueError(f"{function}: expected {len(x.shape)} indices, one for each axis, not {len(starts)}")
    return [_start(x, axis, start, function) for axis, start in enumerate(starts)]


def _start(x: Any, axis: int, start: Any, function: str) -> Any:
    if type(start) is int:
        number = x.shape[axis] + start if start < 0 else start
        return Literal(np.asarray(number, np.int32)) if type(number) is int else array_of(number)
    index = array_of(start, function)
    if KINDS[index.dtype] not in INTEGRAL or index.shape != ():
        raise TypeError(f"{function}: an index is one integer, not {index.dtype} of shape {shown(index.shape)}")
    wide = dtypes.int64 if dtypes.BITS[index.dtype] == 64 else dtypes.int32
    if KINDS[index.dtype] != SIGNED:
        return convert(p.minimum(index, dtypes.limits(index.dtype)[1] >> (dtypes.BITS[index.dtype] >= 32)), wide)
    index = convert(index, wide)
    return p.select(p.less(index, 0), p.add(index, size(x, axis, wide)), index)


def _of_one_dtype(starts: Sequence[Any]) -> list[Any]:
    wide = dtypes.int64 if any(start.dtype == dtypes.int64 for start in starts) else dtypes.int32
    return [convert(start, wide) for start in starts]


def dynamic_slice(operand: Any, start_indices: Any, slice_sizes: Sequence[Any]) -> Any:
    """Return the slice of `slice_sizes` at computed starts, which are moved such that it is inside.

    As `jax.lax.dynamic_slice`. start_indices: an integer for each axis, or a vector; a negative one counts from the
    back.
    """
    x = array_of(operand, "dynamic_slice")
    sizes = tuple(map(dims.size_of, slice_sizes))
    if len(sizes) != len(x.shape) or any(
        type(own) is int and type(whole) is int and own > whole for own, whole in zip(sizes, x.shape, strict=False)
    ):
        raise ValueError(f"dynamic_slice: a slice of {shown(sizes)} is not in an array of shape {shown(x.shape)}")
    starts = _of_one_dtype(_starts(x, start_indices, "dynamic_slice"))
    return indexing.dynamic_slice(x, starts, sizes) if sizes else x


def dynamic_slice_in_dim(operand: Any, start_index: Any, slice_size: Any, axis: int = 0) -> Any:
    """Return the slice of one axis at a computed start. As `jax.lax.dynamic_slice_in_dim`."""
    x = array_of(operand, "dynamic_slice_in_dim")
    where = axis_of(axis, len(x.shape))
    starts = [start_index if i == where else 0 for i in range(len(x.shape))]
    return dynamic_slice(x, starts, [slice_size if i == where else size for i, size in enumerate(x.shape)])


def dynamic_index_in_dim(operand: Any, index: Any, axis: int = 0, keepdims: bool = True) -> Any:
    """Return the part of one axis at a computed index. As `jax.lax.dynamic_index_in_dim`."""
    result = dynamic_slice_in_dim(operand, index, 1, axis)
    where = axis_of(axis, len(result.shape))
    return result if keepdims else reshape(result, (*result.shape[:where], *result.shape[where + 1 :]))


def dynamic_update_slice(operand: Any, update: Any, start_indices: Any) -> Any:
    """Return an array with `update` in place of the slice at computed starts. As `jax.lax.dynamic_update_slice`."""
    x, new = array_of(operand, "dynamic_update_slice"), array_of(update, "dynamic_update_slice")
    if new.dtype != x.dtype and not getattr(new, "weak_type", False):
        raise TypeError(f"dynamic_update_slice: expected an update of {x.dtype}, not of {new.dtype}")
    if len(new.shape) != len(x.shape) or any(
        type(own) is int and type(whole) is int and own > whole for own, whole in zip(new.shape, x.shape, strict=True)
    ):
        what = f"an update of shape {shown(new.shape)} is not in an array of shape {shown(x.shape)}"
        raise ValueError(f"dynamic_update_slice: {what}")
    starts = _of_one_dtype(_starts(x, start_indices, "dynamic_update_slice"))
    return indexing.dynamic_update_slice(x, convert(new, x.dtype), starts) if starts else convert(new, x.dtype)


def dynamic_update_slice_in_dim(operand: Any, update: Any, start_index: Any, axis: int) -> Any:
    """Return an array with a slice of one axis changed. As `jax.lax.dynamic_update_slice_in_dim`."""
    x = array_of(operand, "dynamic_update_slice_in_dim")
    where = axis_of(axis, len(x.shape))
    return dynamic_update_slice(x, update, [start_index if i == where else 0 for i in range(len(x.shape))])


def dynamic_update_index_in_dim(operand: Any, update: Any, index: Any, axis: int) -> Any:
    """Return an array with the part of one axis at an index changed. As `jax.lax.dynamic_update_index_in_dim`."""
    x, new = array_of(operand, "dynamic_update_index_in_dim"), array_of(update, "dynamic_update_index_in_dim")
    where = axis_of(axis, len(x.shape))
    if len(new.shape) != len(x.shape):
        new = reshape(new, (*new.shape[:where], 1, *new.shape[where:]))
    return dynamic_update_slice_in_dim(x, new, index, where)


class ScatterDimensionNumbers(NamedTuple):
    """The roles of a scatter's axes, as `jax.lax.ScatterDimensionNumbers`: those of the gather of its updates."""

    update_window_dims: Sequence[int]
    inserted_window_dims: Sequence[int]
    scatter_dims_to_operand_dims: Sequence[int]
    operand_batching_dims: Sequence[int] = ()
    scatter_indices_batching_dims: Sequence[int] = ()


def _numbers(given: Any) -> GatherDimensionNumbers:
    return GatherDimensionNumbers(*(tuple(map(int, part)) for part in given))


def _mode(function: str, mode: Any, default: str) -> str:
    name = default if mode is None else str(getattr(mode, "name", mode)).lower().replace("fill_or_drop", "fill")
    if name not in ("fill", "drop", "clip", "promise_in_bounds"):
        raise ValueError(f'{function}: mode is "clip", "fill", "drop" or "promise_in_bounds", not {mode!r}')
    return name.replace("drop", "fill")


def _indices(function: str, given: Any, numbers: GatherDimensionNumbers) -> Any:
    index = array_of(given, function)
    if KINDS[index.dtype] not in INTEGRAL:
        raise TypeError(f"{function}: indices are integers, not {index.dtype}")
    if not index.shape or index.shape[-1] != len(numbers.start_index_map):
        what = f"the last axis of indices has {len(numbers.start_index_map)} components, as dimension_numbers name"
        raise ValueError(f"{function}: {what}, and the shape is {shown(index.shape)}")
    return index


def gather(
    operand: Any,
    start_indices: Any,
    dimension_numbers: Any,
    slice_sizes: Sequence[Any],
    *,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    mode: Any = None,
    fill_value: Any = None,
) -> Any:
    """Return slices of an array, one for each index. As `jax.lax.gather`.

    mode: what a slice outside the array is. "clip": moved inside; "fill": of `fill_value`, by default NaN, the least
    signed or the largest unsigned integer, or True; "promise_in_bounds", which None is: the caller promises that
    every slice is inside.
    """
    x, numbers = array_of(operand, "gather"), _numbers(dimension_numbers)
    index, sizes = _indices("gather", start_indices, numbers), tuple(map(dims.size_of, slice_sizes))
    if len(sizes) != len(x.shape):
        raise ValueError(f"gather: expected {len(x.shape)} slice_sizes, one for each axis, not {len(sizes)}")
    result = indexing.gather(x, index, numbers, sizes)
    if _mode("gather", mode, "promise_in_bounds") != "fill":
        return result
    inside = indexing.are_inside(x, index, numbers, sizes)
    batch = [axis for axis in range(len(result.shape)) if axis not in numbers.offset_dims]
    other = missing(x.dtype) if fill_value is None else fill_value
    return p.select(broadcast(inside, result.shape, batch), result, full((), other, x.dtype))


def _scatter(name: str, how: str, what: str) -> Callable[..., Any]:
    def function(
        operand: Any,
        scatter_indices: Any,
        updates: Any,
        dimension_numbers: Any,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: Any = None,
    ) -> Any:
        x, new, numbers = array_of(operand, name), array_of(updates, name), _numbers(dimension_numbers)
        index = _indices(name, scatter_indices, numbers)
        if new.dtype != x.dtype and not getattr(new, "weak_type", False):
            raise TypeError(f"{name}: expected updates of {x.dtype}, not of {new.dtype}")
        new = convert(new, x.dtype)
        if len(new.shape) != len(numbers.offset_dims) + len(index.shape) - 1:
            what = f"{len(numbers.offset_dims)} axes of slices and {len(index.shape) - 1} of indices"
            raise ValueError(f"{name}: updates have {what}, and their shape is {shown(new.shape)}")
        sizes = indexing.slice_sizes(x, new, numbers)
        clipped = sizes if _mode(name, mode, "drop") == "clip" else None
        return indexing.scatter(x, index, new, numbers, how, unique_indices, clipped)

    return named(
        function,
        name,
        (
            f"Return an array in which slices, one for each index, are {what}. As `jax.lax.{name}`.\n\n"
            '    mode: what becomes of a slice that is not inside. "drop", which None is: nothing; '
            '"clip": it moves inside.\n'
            "    unique_indices: the caller promises that no element is changed twice."
        ),
    )


scatter = _scatter("scatter", "set", "replaced by updates")
scatter_add = _scatter("scatter_add", "add", "added to")
scatter_mul = _scatter("scatter_mul", "multiply", "multiplied by updates")
scatter_min = _scatter("scatter_min", "min", "the smaller of them and updates")
scatter_max = _scatter("scatter_max", "max", "the larger of them and updates")


def slice_in_dim(operand: Any, start_index: Any, limit_index: Any, stride: int = 1, axis: int = 0) -> Any:
    """Return the elements of one axis from a start to before a limit. None: all. As `jax.lax.slice_in_dim`."""
    x = array_of(operand, "slice_in_dim")
    where = axis_of(axis, len(x.shape))
    whole = x.shape[where]

    def bound(given: Any, default: Any) -> Any:
        if given is None:
            return default
        return given if isinstance(given, Dim) or given >= 0 else whole + given

    return along(x, where, bound(start_index, 0), bound(limit_index, whole), stride)
