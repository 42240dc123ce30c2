"""Primitives that read and write elements at places that are values: gather, scatter, slices at computed starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind, wrap
from stagec_arrays.dims import Shape
from stagec_arrays.lowering import IRValue, Rule, integer, integers, tensor_type
from stagec_arrays.primitives import elementwise
from stagec_arrays.primitives.reductions import reduce_and
from stagec_arrays.primitives.slicing import concatenate
from stagec_arrays.primitives.structural import broadcast, convert, iota, reshape, size_value
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray


class GatherDimensionNumbers(NamedTuple):
    """The roles of a gather's axes, as `jax.lax.GatherDimensionNumbers`; a scatter has the same for its updates.

    The last axis of the indices is that of their components.

    offset_dims: axes of the result that are axes of a slice. collapsed_slice_dims: axes of the operand, of which a
    slice has one element that is not an axis of the result. start_index_map: for each component of an
    index, the axis of the operand. operand_batching_dims, start_indices_batching_dims: axes of both that go together.
    """

    offset_dims: Sequence[int]
    collapsed_slice_dims: Sequence[int]
    start_index_map: Sequence[int]
    operand_batching_dims: Sequence[int] = ()
    start_indices_batching_dims: Sequence[int] = ()


def gather(x: Any, indices: Any, numbers: GatherDimensionNumbers, sizes: Sequence[Any]) -> Any:
    """Return slices of `sizes` of an array, one for each index; a start is moved such that its slice is inside.

    https://openxla.org/stablehlo/spec#gather
    """
    shape = _gather_infer(x, indices, numbers=numbers, sizes=tuple(sizes)).shape
    if 0 in shape:  # XLA takes none of an empty array
        return _empty(shape, x.dtype)
    for axis in numbers.start_index_map:
        if x.shape[axis] == 0:
            raise IndexError(f"an index is out of range for axis {axis} of size 0")
    return bind(GATHER, x, indices, numbers=numbers, sizes=tuple(sizes))


def _empty(shape: Shape, dtype: dtypes.DType) -> Any:
    """Return an array without elements."""
    if dtype is dtypes.KEY:
        return wrap(_empty((*shape, 2), dtypes.uint32))
    return broadcast(Literal(np.zeros((), dtype)), shape, ())


def _gather_infer(x: Any, indices: Any, *, numbers: GatherDimensionNumbers, sizes: Shape) -> ShapedArray:
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    own = [size for axis, size in enumerate(sizes) if axis not in gone]
    batch = list(indices.shape[:-1])
    rank = len(own) + len(batch)
    shape = [own.pop(0) if axis in numbers.offset_dims else batch.pop(0) for axis in range(rank)]
    return ShapedArray(tuple(shape), x.dtype, bool(getattr(x, "weak_type", False)))


def _gather_lower(
    rule: Rule, x: IRValue, indices: IRValue, *, numbers: GatherDimensionNumbers, sizes: Shape
) -> IRValue:
    axes: dict[str, Any] = {name: list(part) for name, part in numbers._asdict().items()}
    dimensions = hlo.GatherDimensionNumbers.get(**axes, index_vector_dim=len(rule.inputs[1].shape) - 1)
    if dims.is_static(sizes):
        return hlo.gather(x, indices, dimensions, integers(sizes))
    return hlo.dynamic_gather(x, indices, rule.lowering.shape(sizes), dimensions)


def _gather_vjp(d: Any, *, numbers: GatherDimensionNumbers, sizes: Shape) -> list[Any]:
    x, indices = d.operands
    zeros = broadcast(Literal(np.zeros((), d.cotangent.dtype)), x.shape, ())
    return [scatter(zeros, indices, d.cotangent, numbers, "add", clipped=tuple(sizes)), None]


def _gather_of_keys(
    x: Any, indices: Any, *, numbers: GatherDimensionNumbers, sizes: Shape
) -> tuple[Any, dict[str, Any]]:
    rank = len(_gather_infer(x, indices, numbers=numbers, sizes=sizes).shape)
    return (x, indices), {"numbers": numbers._replace(offset_dims=(*numbers.offset_dims, rank)), "sizes": (*sizes, 2)}


GATHER = Primitive("gather", _gather_infer, _gather_lower, _gather_vjp, of_keys=_gather_of_keys)

_COMBINE: dict[str, Callable[[IRValue, IRValue], IRValue]] = {
    "set": lambda old, new: new,
    "add": hlo.add,
    "multiply": hlo.multiply,
    "max": hlo.maximum,
    "min": hlo.minimum,
}


def scatter(
    x: Any,
    indices: Any,
    updates: Any,
    numbers: GatherDimensionNumbers,
    how: str = "set",
    unique: bool = False,
    clipped: Sequence[Any] | None = None,
    inside: bool = False,
) -> Any:
    """Return an array in which slices, one for each index, are changed by updates; a slice that is not inside is not.

    how: "set", "add", "multiply", "max" or "min". unique: whether no element is changed twice.
    clipped: sizes of the slices, to move their starts such that they are inside, as `gather` does.
    inside: whether the caller knows that all are inside.
    https://openxla.org/stablehlo/spec#scatter
    """
    if 0 in x.shape or 0 in updates.shape:
        return x
    if clipped is not None:
        indices = elementwise.minimum(elementwise.maximum(indices, 0), _last_starts(x, indices, numbers, clipped))
    known = inside or clipped is not None
    return bind(SCATTER, x, indices, updates, numbers=numbers, how=how, unique=unique, inside=known)


def _last_starts(x: Any, indices: Any, numbers: GatherDimensionNumbers, sizes: Sequence[Any]) -> Any:
    """Return the largest indices whose slices are inside, of the indices' dtype and number of dimensions."""
    room = [x.shape[axis] - sizes[axis] for axis in numbers.start_index_map]
    shape = (*[1] * (len(indices.shape) - 1), len(room))
    if dims.is_static(room):
        return np.asarray(room).clip(0, dtypes.limits(indices.dtype)[1]).astype(indices.dtype).reshape(shape)
    most = min(dtypes.limits(indices.dtype)[1], 2**31 - 1)
    parts = [reshape(convert(elementwise.minimum(size_value(size), most), indices.dtype), (1,)) for size in room]
    return reshape(concatenate(parts, 0), shape)


def are_inside(x: Any, indices: Any, numbers: GatherDimensionNumbers, sizes: Sequence[Any]) -> Any:
    """Return for each index whether its slice, of `sizes`, is inside the array."""
    low = elementwise.greater_equal(indices, 0)
    high = elementwise.less_equal(indices, _last_starts(x, indices, numbers, sizes))
    return reduce_and(elementwise.bitwise_and(low, high), [len(indices.shape) - 1])


def _scatter_lower(
    rule: Rule, *values: IRValue, numbers: GatherDimensionNumbers, how: str, unique: bool, **_: bool
) -> IRValue:
    x, indices, updates = values
    dimensions = hlo.ScatterDimensionNumbers.get(
        update_window_dims=list(numbers.offset_dims),
        inserted_window_dims=list(numbers.collapsed_slice_dims),
        input_batching_dims=list(numbers.operand_batching_dims),
        scatter_indices_batching_dims=list(numbers.start_indices_batching_dims),
        scattered_dims_to_operand_dims=list(numbers.start_index_map),
        index_vector_dim=len(rule.inputs[1].shape) - 1,
    )
    operation = hlo.ScatterOp(
        [tensor_type(rule.out)],
        [x],
        indices,
        [updates],
        dimensions,
        indices_are_sorted=ir.BoolAttr.get(False),
        unique_indices=ir.BoolAttr.get(unique),
    )
    rule.reducer(operation, _COMBINE[how])
    return operation.results[0]


def slice_sizes(x: Any, updates: Any, numbers: GatherDimensionNumbers) -> list[Any]:
    """Return the sizes of the slices that a scatter changes."""
    own = [updates.shape[axis] for axis in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    return [1 if axis in gone else own.pop(0) for axis in range(len(x.shape))]


def _scatter_vjp(d: Any, *, numbers: GatherDimensionNumbers, how: str, unique: bool, inside: bool) -> list[Any]:
    x, indices, updates = d.operands
    g, sizes = d.cotangent, slice_sizes(x, updates, numbers)
    zeros = broadcast(Literal(np.zeros((), g.dtype)), updates.shape, ())

    def taken(y: Any) -> Any:
        """Zeros for a slice that is not inside, because the scatter ignored its update."""
        result = gather(y, indices, numbers, sizes)
        if inside:
            return result
        batch = [axis for axis in range(len(updates.shape)) if axis not in numbers.offset_dims]
        mask = broadcast(are_inside(x, indices, numbers, sizes), updates.shape, batch)
        return elementwise.select(mask, result, zeros)

    if how == "add":
        return [g, None, taken(g)]
    if how == "multiply":
        of_updates = _of_factors(g, x, updates, lambda y, z, how: taken(scatter(y, indices, z, numbers, how)))
        return [scatter(g, indices, updates, numbers, how, unique, inside=inside), None, of_updates]
    if how in ("max", "min"):
        # Each of those that are the extremum has an equal part.
        result = d.results[0]
        own, others = _ones(x, result), _ones(updates, gather(result, indices, numbers, sizes))
        part = elementwise.divide(g, scatter(own, indices, others, numbers, "add", inside=inside))
        return [elementwise.multiply(own, part), None, elementwise.multiply(others, taken(part))]
    of_updates = taken(g)
    # Of several updates to one element the one that was kept is known by its number.
    if not unique:
        count = broadcast_numbers(updates.shape)
        marks = broadcast(Literal(np.zeros((), count.dtype)), x.shape, ())
        kept = gather(scatter(marks, indices, count, numbers, inside=inside), indices, numbers, sizes)
        of_updates = elementwise.select(elementwise.equal(kept, count), of_updates, zeros)
    return [scatter(g, indices, zeros, numbers, unique=unique, inside=inside), None, of_updates]


def _ones(x: Any, y: Any) -> Any:
    """Return 1 where elements are equal, and 0 elsewhere."""
    return convert(elementwise.equal(x, y), x.dtype)


def _of_factors(g: Any, x: Any, updates: Any, taken: Callable[[Any, Any, str], Any]) -> Any:
    """Return the cotangents of factors: of each the product of all others, which no division gives for zeros.

    taken: of an array, updates and how, the elements at the updates' places of the array so changed.
    """
    is_zero = elementwise.equal(updates, 0)
    safe = elementwise.select(is_zero, 1, updates)
    own = convert(is_zero, x.dtype)
    nothing = broadcast(Literal(np.zeros((), x.dtype)), x.shape, ())
    product = taken(elementwise.multiply(g, x), safe, "multiply")
    alone = elementwise.equal(taken(nothing, own, "add"), own)  # whether no other is zero
    return elementwise.select(alone, elementwise.divide(product, safe), 0)


def broadcast_numbers(shape: Shape) -> Any:
    """Return an array of 1, 2, 3, ... in row-major order."""
    return elementwise.add(reshape(iota(np.dtype(np.int32), (dims.product(shape),), 0), shape), 1)


def _scatter_of_keys(
    x: Any, indices: Any, updates: Any, *, numbers: GatherDimensionNumbers, how: str, unique: bool, inside: bool
) -> tuple[Any, dict[str, Any]]:
    if how != "set":
        raise TypeError(f"scatter: PRNG keys are not numbers: they can be set, but {how!r} needs numbers")
    wide = numbers._replace(offset_dims=(*numbers.offset_dims, len(updates.shape)))
    return (x, indices, updates), {"numbers": wide, "how": how, "unique": unique, "inside": inside}


SCATTER = Primitive(
    "scatter",
    lambda x, indices, updates, *, numbers, how, unique, inside: x,
    _scatter_lower,
    _scatter_vjp,
    of_keys=_scatter_of_keys,
)


def _first(starts: Sequence[Any]) -> Literal:
    """Return where the words of a key start, of the dtype of other starts."""
    return Literal(np.zeros((), starts[0].dtype if starts else np.int32))


def dynamic_slice(x: Any, starts: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the slice of `sizes` at computed starts: an integer array of no dimensions for each axis, moved inside."""
    return bind(DYNAMIC_SLICE, x, *starts, sizes=tuple(sizes))


def _dynamic_slice_lower(rule: Rule, x: IRValue, *starts: IRValue, sizes: Shape) -> IRValue:
    if dims.is_static(sizes):
        return hlo.dynamic_slice(x, list(starts), integers(sizes))
    aval = rule.inputs[0]
    count = len(starts)
    vector = tensor_type(ShapedArray((1,), np.dtype(np.int32)))
    scalar = tensor_type(ShapedArray((), np.dtype(np.int32)))
    shape, wanted = rule.lowering.shape(aval.shape), rule.lowering.shape(sizes)
    first = hlo.concatenate([hlo.reshape(vector, hlo.convert(scalar, start)) for start in starts], integer(0))
    first = hlo.clamp(rule.lowering.shape((0,) * count), first, hlo.subtract(shape, wanted))
    last = hlo.add(first, wanted)
    return hlo.real_dynamic_slice(tensor_type(rule.out), x, first, last, rule.lowering.shape((1,) * count))


def _dynamic_slice_vjp(d: Any, *, sizes: Shape) -> list[Any]:
    x, *starts = d.operands
    zeros = broadcast(Literal(np.zeros((), d.cotangent.dtype)), x.shape, ())
    return [dynamic_update_slice(zeros, d.cotangent, starts), *[None] * len(starts)]


DYNAMIC_SLICE = Primitive(
    "dynamic_slice",
    lambda x, *starts, sizes: ShapedArray(sizes, x.dtype, x.weak_type),
    _dynamic_slice_lower,
    _dynamic_slice_vjp,
    of_keys=lambda x, *starts, sizes: ((x, *starts, _first(starts)), {"sizes": (*sizes, 2)}),
)


def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any]) -> Any:
    """Return the array with `update` in place of the slice at computed starts, which is moved inside."""
    return bind(DYNAMIC_UPDATE_SLICE, x, update, *starts)


def _dynamic_update_slice_vjp(d: Any) -> list[Any]:
    _, update, *starts = d.operands
    zeros = broadcast(Literal(np.zeros((), d.cotangent.dtype)), update.shape, ())
    own = dynamic_update_slice(d.cotangent, zeros, starts)
    return [own, dynamic_slice(d.cotangent, starts, update.shape), *[None] * len(starts)]


DYNAMIC_UPDATE_SLICE = Primitive(
    "dynamic_update_slice",
    lambda x, update, *starts: x,
    lambda rule, x, update, *starts: hlo.dynamic_update_slice(x, update, list(starts)),
    _dynamic_update_slice_vjp,
    of_keys=lambda x, update, *starts: ((x, update, *starts, _first(starts)), {}),
)
