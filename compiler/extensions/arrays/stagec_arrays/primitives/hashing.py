"""Primitives of random numbers: the hash function threefry2x32, and the numbers of elements that it takes.

What they compute is `jax._src.prng`'s, of the paper "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dims import Shape
from stagec_arrays.lowering import IRValue, Rule, compare, constant, integers, tensor_type
from stagec_arrays.program import Primitive
from stagec_arrays.values import ShapedArray, broadcast_shapes

_ROTATIONS = np.array([[13, 15, 26, 6], [17, 29, 16, 24]], np.uint32)
_PARITY = np.uint32(0x1BD11BDA)
_U32, _U64 = dtypes.uint32, dtypes.NAMED["uint64"]


def threefry2x32(key: tuple[Any, Any], counts: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two arrays of u32, the hash of two arrays of u32 under a key of two, which broadcast."""
    first, second = bind(THREEFRY2X32, *key, *counts)
    return first, second


def _threefry_infer(*avals: ShapedArray) -> list[ShapedArray]:
    assert all(aval.dtype == _U32 for aval in avals), avals
    return [ShapedArray(broadcast_shapes(*(aval.shape for aval in avals)), _U32)] * 2


def _threefry_lower(rule: Rule, *values: IRValue) -> list[IRValue]:
    """Lower it as JAX does: as a loop where CPUs may run it, whose compiler takes long for the twenty rounds.

    Each of five turns is four rounds; keys and rotations are exchanged after each.
    """
    shape = rule.out.shape
    first, second, *x = rule.broadcasts(values)
    parity = rule.full(_PARITY, rule.out)
    keys = [first, second, hlo.xor(hlo.xor(first, second), parity)]
    x = [hlo.add(x[0], first), hlo.add(x[1], second)]
    keys = [*keys[1:], keys[0]]
    if "cpu" not in rule.lowering.platforms:
        for turn in range(5):
            rotations = [rule.full(by, rule.out) for by in _ROTATIONS[turn % 2]]
            x = _turn(x, keys, rotations, rule.full(32, rule.out), rule.full(turn + 1, rule.out))
            keys = [*keys[1:], keys[0]]
        return x
    scalar = ShapedArray((), _U32)
    start = [constant(np.asarray(0, np.uint32)), *x, *keys, *map(constant, _ROTATIONS)]
    avals = [scalar, *[rule.out] * 5, *[ShapedArray((4,), _U32)] * 2]
    operation = hlo.WhileOp(list(map(tensor_type, avals)), start)
    test = rule.block(operation, 0, avals)
    with ir.InsertionPoint(test):
        hlo.return_([compare(test.arguments[0], constant(np.asarray(5, np.uint32)), "LT", _U32)])
    block = rule.block(operation, 1, avals)
    with ir.InsertionPoint(block):
        count, *rest = block.arguments
        following = hlo.add(count, constant(np.asarray(1, np.uint32)))
        rotations = [_element(rule, rest[5], number) for number in range(4)]
        number = rule.broadcast(following, scalar, shape, ())
        turned = _turn(rest[:2], rest[2:5], rotations, rule.full(32, rule.out), number)
        hlo.return_([following, *turned, *rest[3:5], rest[2], rest[6], rest[5]])
    return list(operation.results)[1:3]


def _element(rule: Rule, vector: IRValue, number: int) -> IRValue:
    """Return an element of a vector of u32, broadcast to the shape of the result."""
    part = hlo.slice(vector, integers([number]), integers([number + 1]), integers([1]))
    scalar = ShapedArray((), _U32)
    return rule.broadcast(hlo.reshape(tensor_type(scalar), part), scalar, rule.out.shape, ())


def _turn(
    x: Sequence[IRValue], keys: Sequence[IRValue], rotations: Sequence[IRValue], bits: IRValue, number: IRValue
) -> list[IRValue]:
    first, second = x
    for by in rotations:
        first = hlo.add(first, second)
        rotated = hlo.or_(hlo.shift_left(second, by), hlo.shift_right_logical(second, hlo.subtract(bits, by)))
        second = hlo.xor(first, rotated)
    return [hlo.add(first, keys[0]), hlo.add(hlo.add(second, keys[1]), number)]


THREEFRY2X32 = Primitive("threefry2x32", _threefry_infer, _threefry_lower, several=True)


def iota_2x32(shape: Sequence[Any]) -> tuple[Any, Any]:
    """Return the numbers 0, 1, 2, ... in row-major order, as the high and low halves of 64 bits: two arrays of u32."""
    high, low = bind(IOTA_2X32, shape=tuple(shape))
    return high, low


def _iota_lower(rule: Rule, *, shape: Shape) -> list[IRValue]:
    if dims.is_static(shape) and dims.product(shape) <= 2**32:
        return [rule.full(0, rule.out), _counted(rule, shape, _U32)]
    numbers, wide = _counted(rule, shape, _U64), ShapedArray(shape, _U64)
    high = hlo.shift_right_logical(numbers, rule.full(32, wide))
    return [hlo.convert(tensor_type(rule.out), half) for half in (high, numbers)]


def _counted(rule: Rule, shape: Shape, dtype: dtypes.DType) -> IRValue:
    aval, scalar = ShapedArray(shape, dtype), ShapedArray((), dtype)
    result, stride, kind = rule.full(0, aval), 1, tensor_type(scalar)
    for axis in reversed(range(len(shape))):
        is_known = type(stride) is int
        by = constant(np.asarray(stride, dtype)) if is_known else hlo.convert(kind, rule.lowering.size(stride))
        part = hlo.multiply(rule.iota(aval, axis), rule.broadcast(by, scalar, shape, ()))
        result = hlo.add(result, part)
        stride = stride * shape[axis]
    return result


IOTA_2X32 = Primitive("iota_2x32", lambda *, shape: [ShapedArray(shape, _U32)] * 2, _iota_lower, several=True)
