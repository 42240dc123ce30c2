"""Primitives that all others need: conversion, reshape, transpose, broadcast and its derivative, the sum; counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import BOOL, COMPLEX, KINDS, DType
from stagec_arrays.lowering import IRValue, Rule, build, compare, constant, integers, tensor_type
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, shown


def convert(x: Any, dtype: DType, weak_type: bool = False) -> Any:
    """Return the elements as ones of another dtype; bool(x) is x != 0, an integer of a float is cut off."""
    if x.dtype == dtype and bool(getattr(x, "weak_type", False)) == weak_type:
        return x
    if isinstance(x, Literal):
        with np.errstate(all="ignore"):
            return Literal(x.value.astype(dtype), weak_type)
    return bind(CONVERT, x, dtype=dtype, weak_type=weak_type)


def _convert_lower(rule: Rule, x: IRValue, *, dtype: DType, weak_type: bool) -> IRValue:
    (aval,) = rule.inputs
    if dtype == aval.dtype:
        return x
    if KINDS[dtype] == BOOL:
        return compare(x, rule.full(0, aval), "NE", aval.dtype)
    if KINDS[aval.dtype] == COMPLEX and KINDS[dtype] != COMPLEX:
        x = hlo.real(x)
    return hlo.convert(tensor_type(ShapedArray(aval.shape, dtype)), x)


CONVERT = Primitive(
    "convert",
    lambda x, *, dtype, weak_type: ShapedArray(x.shape, dtype, weak_type),
    _convert_lower,
    lambda d, *, dtype, weak_type: [convert(d.cotangent, d.operands[0].dtype, d.operands[0].weak_type)],
)


def reshape(x: Any, shape: Sequence[Any]) -> Any:
    """Return the elements, in row-major order, in another shape of as many elements."""
    shape = tuple(shape)
    return x if tuple(x.shape) == shape else bind(RESHAPE, x, shape=shape)


def _reshape_infer(x: ShapedArray, *, shape: Shape) -> ShapedArray:
    if dims.product(x.shape) != dims.product(shape):
        raise ValueError(f"reshape: {shown(x.shape)} has a different number of elements than {shown(shape)}")
    return ShapedArray(shape, x.dtype, x.weak_type)


RESHAPE = Primitive(
    "reshape",
    _reshape_infer,
    lambda rule, x, *, shape: rule.reshape(x, rule.out),
    lambda d, *, shape: [reshape(d.cotangent, d.operands[0].shape)],
    of_keys=lambda x, *, shape: ((x,), {"shape": (*shape, 2)}),
)


def transpose(x: Any, permutation: Sequence[int]) -> Any:
    """Return the array with dimension `permutation[i]` as the i-th."""
    permutation = tuple(permutation)
    return x if permutation == tuple(range(len(permutation))) else bind(TRANSPOSE, x, permutation=permutation)


TRANSPOSE = Primitive(
    "transpose",
    lambda x, *, permutation: ShapedArray(tuple(x.shape[axis] for axis in permutation), x.dtype, x.weak_type),
    lambda rule, x, *, permutation: build(hlo.TransposeOp, x, permutation=integers(permutation)),
    lambda d, *, permutation: [transpose(d.cotangent, np.argsort(permutation).tolist())],
    of_keys=lambda x, *, permutation: ((x,), {"permutation": (*permutation, len(permutation))}),
)


def broadcast(x: Any, shape: Sequence[Any], axes: Sequence[int] | None = None) -> Any:
    """Return the array repeated to `shape`; its own dimensions become `axes` of it, None: the last.

    A dimension of size 1 is repeated, another must have the size already.
    """
    shape = tuple(shape)
    if axes is None:
        axes = range(len(shape) - len(x.shape), len(shape))
    axes = tuple(axes)
    if tuple(x.shape) == shape and not isinstance(x, Literal):
        return x
    return bind(BROADCAST, x, shape=shape, axes=axes)


def _broadcast_infer(x: ShapedArray, *, shape: Shape, axes: tuple[int, ...]) -> ShapedArray:
    if any(axis < 0 for axis in axes) or any(
        size not in (1, shape[axis]) for size, axis in zip(x.shape, axes, strict=True)
    ):
        raise ValueError(f"an array of shape {shown(x.shape)} does not broadcast to {shown(shape)}")
    return ShapedArray(shape, x.dtype, x.weak_type)


def _broadcast_vjp(d: Any, *, shape: Shape, axes: tuple[int, ...]) -> list[Any]:
    (x,) = d.operands
    repeated = [axis for axis, size in zip(axes, x.shape, strict=True) if size != shape[axis]]
    added = [axis for axis in range(len(shape)) if axis not in axes]
    return [reshape(reduce_sum(d.cotangent, sorted([*repeated, *added])), x.shape)]


BROADCAST = Primitive(
    "broadcast",
    _broadcast_infer,
    lambda rule, x, *, shape, axes: rule.broadcast(x, rule.inputs[0], shape, axes),
    _broadcast_vjp,
    of_keys=lambda x, *, shape, axes: ((x,), {"shape": (*shape, 2), "axes": (*axes, len(shape))}),
)


def unbroadcast(x: Any, shape: Shape) -> Any:
    """Return the sum over the dimensions in which an array of `shape` was repeated to become one like x."""
    if tuple(x.shape) == tuple(shape):
        return x
    first = len(x.shape) - len(shape)
    axes = [*range(first), *(first + i for i, size in enumerate(shape) if size != x.shape[first + i])]
    return reshape(reduce_sum(x, axes), shape)


def reduce_sum(x: Any, axes: Sequence[int]) -> Any:
    """Return the sum of the elements along axes, which are gone in the result."""
    return bind(REDUCE_SUM, x, axes=tuple(axes)) if len(axes) else x


def reduced(x: ShapedArray, axes: Sequence[int]) -> Shape:
    """Return the shape without axes."""
    return tuple(size for axis, size in enumerate(x.shape) if axis not in axes)


def reduce_lower(rule: Rule, x: IRValue, axes: Sequence[int], start: Any, combine: Any) -> IRValue:
    """Lower a reduction of one array. start: what an empty one gives. combine: takes and gives MLIR values."""
    out = rule.out
    operation = hlo.ReduceOp([tensor_type(out)], [x], [constant(np.asarray(start).astype(out.dtype))], integers(axes))
    rule.reducer(operation, combine)
    return operation.result


def _reduce_sum_vjp(d: Any, *, axes: tuple[int, ...]) -> list[Any]:
    (x,) = d.operands
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    return [broadcast(d.cotangent, x.shape, kept)]


REDUCE_SUM = Primitive(
    "reduce_sum",
    lambda x, *, axes: ShapedArray(reduced(x, axes), x.dtype, x.weak_type),
    lambda rule, x, *, axes: reduce_lower(rule, x, axes, 0, hlo.or_ if rule.out.dtype == dtypes.bool_ else hlo.add),
    _reduce_sum_vjp,
)


def iota(dtype: DType, shape: Sequence[Any], axis: int) -> Any:
    """Return an array that counts 0, 1, 2, ... along an axis."""
    return bind(IOTA, dtype=dtype, shape=tuple(shape), axis=axis)


IOTA = Primitive(
    "iota",
    lambda *, dtype, shape, axis: ShapedArray(shape, dtype),
    lambda rule, *, dtype, shape, axis: rule.iota(rule.out, axis),
)


def full(shape: Sequence[Any], value: Any, dtype: DType) -> Any:
    """Return an array of one number, a Python scalar or NumPy's."""
    with np.errstate(all="ignore"):
        scalar = Literal(np.asarray(value).astype(dtype))
    return broadcast(scalar, shape, ())


def size(x: Any, axis: int, dtype: DType) -> Any:
    """Return the size of a dimension as an array of no dimensions: a number, or where it is symbolic, a value."""
    number = x.shape[axis]
    return Literal(np.asarray(number, dtype)) if type(number) is int else convert(size_value(number), dtype)


def size_value(number: Any) -> Any:
    """Return a size, which may be symbolic, as an i32 of no dimensions."""
    return bind(SIZE, size=number)


SIZE = Primitive(
    "size",
    lambda *, size: ShapedArray((), dtypes.int32),
    lambda rule, *, size: rule.lowering.size(size),
)
