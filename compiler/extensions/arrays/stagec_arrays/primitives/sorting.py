"""The primitives that sort, and that find the largest elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo as hlo

from stagec_arrays import dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import BOOL, COMPLEX, FLOATING, KINDS
from stagec_arrays.lowering import IRValue, Rule, compare, constant, integer, integers, tensor_type
from stagec_arrays.primitives.indexing import GatherDimensionNumbers, scatter
from stagec_arrays.primitives.slicing import concatenate
from stagec_arrays.primitives.structural import full, iota, reshape
from stagec_arrays.program import Primitive
from stagec_arrays.values import ShapedArray, shown


def sort(operands: Sequence[Any], axis: int, keys: int = 1) -> list[Any]:
    """Return arrays of one shape, all in the order of the first `keys` of them along an axis, which is stable.

    NaNs come last, and are equal, as -0 and 0 are. Complex numbers are ordered by their real parts first.
    """
    result: list[Any] = bind(SORT, *operands, axis=axis, keys=keys)
    return result


def _canonical(x: IRValue, dtype: dtypes.DType) -> IRValue:
    """Return a float such that equal ones have equal bits."""
    zero, nan = constant(np.zeros((), dtype)), constant(np.full((), np.nan, dtype))
    x = hlo.select(compare(x, zero, "EQ", dtype), zero, x)
    return hlo.select(compare(x, x, "NE", dtype), nan, x)


def _comparable(x: IRValue, dtype: dtypes.DType) -> list[tuple[IRValue, dtypes.DType]]:
    if KINDS[dtype] == COMPLEX:
        part = dtypes.real_part(dtype)
        return [(_canonical(hlo.real(x), part), part), (_canonical(hlo.imag(x), part), part)]
    return [(_canonical(x, dtype) if KINDS[dtype] == FLOATING else x, dtype)]


def _before(x: IRValue, y: IRValue, direction: str, dtype: dtypes.DType) -> IRValue:
    if KINDS[dtype] != FLOATING:
        return compare(x, y, direction, dtype)
    total = hlo.ComparisonTypeAttr.get("TOTALORDER")
    return hlo.compare(x, y, hlo.ComparisonDirectionAttr.get(direction), compare_type=total)


def _sort_lower(rule: Rule, *values: IRValue, axis: int, keys: int) -> list[IRValue]:
    kinds = list(map(tensor_type, rule.outputs))
    operation = hlo.SortOp(kinds, list(values), dimension=integer(axis), is_stable=ir.BoolAttr.get(True))
    scalars = [ShapedArray((), aval.dtype) for aval in rule.inputs for _ in range(2)]
    block = rule.block(operation, 0, scalars)
    with ir.InsertionPoint(block):
        arguments = list(block.arguments)
        pairs: list[tuple[IRValue, IRValue, dtypes.DType]] = []
        for number in range(keys):
            dtype = rule.inputs[number].dtype
            first, second = (_comparable(argument, dtype) for argument in arguments[2 * number : 2 * number + 2])
            pairs += [(a, b, kind) for (a, kind), (b, _) in zip(first, second, strict=True)]
        first_key, second_key, dtype = pairs[-1]
        is_before = _before(first_key, second_key, "LT", dtype)
        for first_key, second_key, dtype in pairs[-2::-1]:
            same = _before(first_key, second_key, "EQ", dtype)
            is_before = hlo.select(same, is_before, _before(first_key, second_key, "LT", dtype))
        hlo.return_([is_before])
    return list(operation.results)


def _sort_vjp(d: Any, *, axis: int, keys: int) -> list[Any]:
    places = iota(dtypes.int32, d.operands[0].shape, axis)
    order = sort([*d.operands[:keys], places], axis, keys)[-1]
    # What came from a place goes back to it: sorted by the places.
    wanted = [g for g in d.cotangents if g is not None]
    back = iter(sort([order, *wanted], axis)[1:])
    return [None if g is None else next(back) for g in d.cotangents]


def _sort_infer(*avals: ShapedArray, axis: int, keys: int) -> list[ShapedArray]:
    assert all(aval.shape == avals[0].shape for aval in avals), avals
    assert KINDS[avals[0].dtype] in dtypes.ANY | {BOOL}
    return list(avals)


SORT = Primitive("sort", _sort_infer, _sort_lower, _sort_vjp, several=True)


def top_k(x: Any, k: Any, axis: int = -1) -> tuple[Any, Any]:
    """Return the k largest elements along an axis, largest first, and where they are; of equal ones the first.

    k: a number, or symbolic. As `jax.lax.top_k`.
    """
    values, indices = bind(TOP_K, x, k=k, axis=axis % len(x.shape))
    return values, indices


def _top_k_infer(x: ShapedArray, *, k: Any, axis: int) -> list[ShapedArray]:
    if KINDS[x.dtype] == COMPLEX:
        raise TypeError("top_k takes real numbers, which have an order")
    size = x.shape[axis]
    if (type(k) is int and k < 0) or (type(k) is int and type(size) is int and k > size):
        raise ValueError(f"top_k: axis {axis} of shape {shown(x.shape)} does not have {k} elements")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return [ShapedArray(shape, x.dtype, x.weak_type), ShapedArray(shape, dtypes.int32)]


def _top_k_lower(rule: Rule, x: IRValue, *, k: Any, axis: int) -> list[IRValue]:
    rank = len(rule.out.shape)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    if axis != rank - 1:
        x = hlo.transpose(x, integers(order))
    if type(k) is int:
        result = list(chlo.top_k(x, integer(k)))
    else:
        moved = [ShapedArray(tuple(aval.shape[i] for i in order), aval.dtype) for aval in rule.outputs]
        name = ir.StringAttr.get("stablehlo.dynamic_top_k")
        result = list(hlo.CustomCallOp(list(map(tensor_type, moved)), [x, rule.lowering.size(k)], name).results)
    return result if axis == rank - 1 else [hlo.transpose(output, integers(order)) for output in result]


def _top_k_vjp(d: Any, *, k: Any, axis: int) -> list[Any]:
    # Each index goes back to its place: a scatter of the cotangent along the axis.
    g = d.cotangents[0]
    if g is None:
        return [None]
    x, indices = d.operands[0], d.results[1]
    places = [iota(dtypes.int32, g.shape, i) if i != axis else indices for i in range(len(g.shape))]
    components = concatenate([reshape(place, (*g.shape, 1)) for place in places], len(g.shape))
    axes = tuple(range(len(g.shape)))
    numbers = GatherDimensionNumbers((), axes, axes)
    return [scatter(full(x.shape, 0, g.dtype), components, g, numbers, "add", unique=True, inside=True)]


TOP_K = Primitive("top_k", _top_k_infer, _top_k_lower, _top_k_vjp, several=True)
