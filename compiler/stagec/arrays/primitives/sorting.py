"""The primitive that sorts, and what is made with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec.arrays import dtypes
from stagec.arrays.binding import bind
from stagec.arrays.dtypes import BOOL, COMPLEX, FLOATING, KINDS
from stagec.arrays.lowering import IRValue, Rule, compare, constant, integer, tensor_type
from stagec.arrays.primitives.structural import iota
from stagec.arrays.program import Primitive
from stagec.arrays.values import ShapedArray


def sort(operands: Sequence[Any], axis: int, keys: int = 1) -> list[Any]:
    """Return arrays of one shape, all in the order of the first `keys` of them along an axis, which is stable.

    NaNs come last, and are equal, as -0 and 0 are. Complex numbers are ordered by their real parts first.
    """
    found: list[Any] = bind(SORT, *operands, axis=axis, keys=keys)
    return found


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
    kinds = [tensor_type(aval) for aval in rule.outputs]
    operation = hlo.SortOp(kinds, list(values), dimension=integer(axis), is_stable=ir.BoolAttr.get(True))
    scalars = [ShapedArray((), aval.dtype) for aval in rule.inputs for _ in range(2)]
    block = rule.block(operation, 0, scalars)
    with ir.InsertionPoint(block):
        arguments = list(block.arguments)
        pairs: list[tuple[IRValue, IRValue, dtypes.DType]] = []
        for number in range(keys):
            dtype = rule.inputs[number].dtype
            first, second = (_comparable(one, dtype) for one in arguments[2 * number : 2 * number + 2])
            pairs += [(a, b, kind) for (a, kind), (b, _) in zip(first, second, strict=True)]
        first_key, second_key, dtype = pairs[-1]
        found = _before(first_key, second_key, "LT", dtype)
        for first_key, second_key, dtype in pairs[-2::-1]:
            same = _before(first_key, second_key, "EQ", dtype)
            found = hlo.select(same, found, _before(first_key, second_key, "LT", dtype))
        hlo.return_([found])
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
