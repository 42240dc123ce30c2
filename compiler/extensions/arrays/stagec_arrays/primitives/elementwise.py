"""Primitives that compute each element of the result from the elements in its place.

Operands broadcast by NumPy's rules, and have one dtype; a Python number takes that of the other operands. Derivatives
follow JAX's conventions: that of a function of complex numbers is multiplied, not conjugated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo as hlo

from stagec_arrays import dtypes, lowering
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import ANY, BOOL, COMPLEX, FLOATING, INEXACT, INTEGRAL, KINDS, NUMERIC, REAL, UNSIGNED
from stagec_arrays.lowering import IRValue, Rule
from stagec_arrays.primitives.structural import reshape, unbroadcast
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, Value, broadcast_shapes

Operation: TypeAlias = Callable[..., Any]
"""A function that binds a primitive of elements."""

_ONLY_FLOATING = frozenset({FLOATING})
_ONLY_COMPLEX = frozenset({COMPLEX})
_BITS = INTEGRAL | {BOOL}


def _row(
    name: str,
    kinds: frozenset[str],
    lower: type[ir.OpView] | Callable[..., IRValue],
    vjp: Callable[..., Any] | None = None,
    result: Callable[[dtypes.DType], dtypes.DType] = lambda dtype: dtype,
) -> Operation:
    """Add a row to the table, and return the function that binds it.

    kinds: of the dtypes that it takes. lower: an operation of MLIR's, or what takes a `Rule` and the operands' MLIR
    values, each of the shape of the result.
    vjp: takes the cotangent, the operands and the result; gives a cotangent for each operand, of the result's shape.
    result: of an operand's dtype, that of the result.
    """

    def infer(*avals: ShapedArray) -> ShapedArray:
        shape, dtype, weak_type = avals[0]
        for aval in avals[1:]:
            if aval.dtype != dtype:
                raise TypeError(f"{name}: expected arrays of one dtype, not {', '.join(str(a.dtype) for a in avals)}")
            weak_type = weak_type and aval.weak_type
        dtypes.require(name, dtype, kinds)
        for aval in avals[1:]:
            if aval.shape != shape:
                shape = broadcast_shapes(shape, aval.shape)
        out = ShapedArray(shape, result(dtype), weak_type)
        for aval in avals:
            if aval == out:
                return aval  # the same object: a program has few
        return out

    def derive(d: Any) -> list[Any]:
        assert vjp is not None
        given = vjp(d.cotangent, *d.operands, d.results[0])
        parts = given if isinstance(given, tuple) else (given,)
        return [
            None if part is None else unbroadcast(part, operand.shape)
            for part, operand in zip(parts, d.operands, strict=True)
        ]

    def lowered(rule: Rule, *values: IRValue) -> IRValue:
        wide = values if len(values) == 1 else rule.broadcasts(values)
        return lowering.build(lower, *wide) if isinstance(lower, type) else lower(rule, *wide)

    primitive = Primitive(name, infer, lowered, derive if vjp is not None else None)

    def function(*operands: Any) -> Any:
        return bind(primitive, *(operands if len(operands) == 1 else _of_one_dtype(operands)))

    function.__name__ = function.__qualname__ = name
    return function


_ARRAYS = Value, Literal


def _of_one_dtype(operands: tuple[Any, ...]) -> Sequence[Any]:
    """Return operands with Python's numbers as scalars of the others' dtype."""
    if all(isinstance(operand, _ARRAYS) for operand in operands):
        return operands
    dtype = next(operand.dtype for operand in operands if hasattr(operand, "dtype"))
    return [
        operand if hasattr(operand, "dtype") else Literal(np.asarray(operand).astype(dtype)) for operand in operands
    ]


def _to_bool(dtype: dtypes.DType) -> dtypes.DType:
    return dtypes.bool_


# Comparisons, and choosing.


def _comparison(name: str, direction: str, kinds: frozenset[str]) -> Any:
    def lower(rule: Rule, x: IRValue, y: IRValue) -> IRValue:
        return lowering.compare(x, y, direction, rule.inputs[0].dtype)

    return _row(name, kinds, lower, None, _to_bool)


equal: Operation = _comparison("equal", "EQ", ANY)
not_equal: Operation = _comparison("not_equal", "NE", ANY)
less: Operation = _comparison("less", "LT", REAL | {BOOL})
less_equal: Operation = _comparison("less_equal", "LE", REAL | {BOOL})
greater: Operation = _comparison("greater", "GT", REAL | {BOOL})
greater_equal: Operation = _comparison("greater_equal", "GE", REAL | {BOOL})


def select(condition: Any, x: Any, y: Any) -> Any:
    """Return the elements of x where the condition, an array of bools, is true, and those of y elsewhere."""
    return bind(SELECT, condition, *_of_one_dtype((x, y)))


def _select_infer(condition: ShapedArray, x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if condition.dtype != dtypes.bool_ or x.dtype != y.dtype:
        raise TypeError(f"select: expected bools and two arrays of one dtype, not {condition}, {x}, {y}")
    shape = broadcast_shapes(condition.shape, x.shape, y.shape)
    return ShapedArray(shape, x.dtype, x.weak_type and y.weak_type)


def _select_vjp(d: Any) -> list[Any]:
    condition, x, y = d.operands
    g, zero = d.cotangent, Literal(np.zeros((), d.cotangent.dtype))
    return [
        None,
        unbroadcast(select(condition, g, zero), x.shape),
        unbroadcast(select(condition, zero, g), y.shape),
    ]


SELECT = Primitive(
    "select",
    _select_infer,
    lambda rule, *values: hlo.select(*rule.broadcasts(values)),
    _select_vjp,
    of_keys=lambda condition, x, y: ((reshape(condition, (*condition.shape, 1)), x, y), {}),
)


# Arithmetic.


def _extremum(operation: Any, direction: str) -> Any:
    """Complex numbers are compared as pairs."""

    def lower(rule: Rule, x: IRValue, y: IRValue) -> IRValue:
        dtype = rule.inputs[0].dtype
        if KINDS[dtype] != COMPLEX:
            return operation(x, y)
        part = dtypes.real_part(dtype)
        first = lowering.compare(hlo.real(x), hlo.real(y), direction, part)
        second = lowering.compare(hlo.imag(x), hlo.imag(y), direction, part)
        same = lowering.compare(hlo.real(x), hlo.real(y), "EQ", part)
        return hlo.select(hlo.select(same, second, first), x, y)

    return lower


def _of_larger(g: Any, x: Any, y: Any, z: Any) -> tuple[Any, Any]:
    """Half goes to each where they are equal."""
    nothing, half, whole = (Literal(np.asarray(share, g.dtype)) for share in (0, 0.5, 1))

    def part(own: Any, other: Any) -> Any:
        return multiply(g, select(equal(own, z), select(equal(other, z), half, whole), nothing))

    return part(x, y), part(y, x)


def _sign_lower(rule: Rule, x: IRValue) -> IRValue:
    aval = rule.inputs[0]
    if KINDS[aval.dtype] != UNSIGNED:
        return hlo.sign(x)
    zero = rule.full(0, aval)
    return hlo.select(lowering.compare(x, zero, "EQ", aval.dtype), zero, rule.full(1, aval))


def _abs_lower(rule: Rule, x: IRValue) -> IRValue:
    return x if KINDS[rule.inputs[0].dtype] == UNSIGNED else hlo.abs(x)


def _abs_vjp(g: Any, x: Any, y: Any) -> Any:
    if KINDS[x.dtype] != COMPLEX:
        return select(greater_equal(x, 0), g, negative(g))  # at 0 as to its right
    length = select(equal(y, 0), Literal(np.ones((), y.dtype)), y)
    return multiply(complex_(g, Literal(np.zeros((), g.dtype))), divide(conj(x), complex_(length, multiply(length, 0))))


def _zero_with_sign_lower(rule: Rule, x: IRValue, y: IRValue) -> IRValue:
    dtype = rule.inputs[0].dtype
    aval, bits = ShapedArray(rule.out.shape, dtype), dtypes.NAMED[f"int{dtypes.BITS[dtype]}"]
    zero, integers = rule.full(0, aval), ShapedArray(rule.out.shape, bits)
    word = hlo.bitcast_convert(lowering.tensor_type(integers), y)
    signed = hlo.select(lowering.compare(word, rule.full(0, integers), "LT", bits), rule.full(-0.0, aval), zero)
    return hlo.select(lowering.compare(x, zero, "EQ", dtype), signed, x)


_BITS_OF_A_POWER = 6
"""XLA reads no more bits of an integer exponent: of a larger one it gives the power of the rest."""


def _power_lower(rule: Rule, x: IRValue, y: IRValue) -> IRValue:
    """Of integers, the product of a power for each six bits of the exponent, which wraps around.

    A negative exponent gives 1 / x**-y without its fraction: 1 or -1 for these, and 0 for others.
    """
    dtype = rule.inputs[0].dtype
    if KINDS[dtype] not in INTEGRAL:
        return hlo.power(x, y)

    def number(value: int) -> IRValue:
        return rule.full(value, ShapedArray(rule.out.shape, dtype))

    result, base, rest, left = None, x, y, dtypes.BITS[dtype]
    while result is None or left > 0:
        last = left <= _BITS_OF_A_POWER
        factor = hlo.power(base, rest if last else hlo.and_(rest, number(2**_BITS_OF_A_POWER - 1)))
        result = factor if result is None else hlo.multiply(result, factor)
        left -= _BITS_OF_A_POWER
        if not last:
            base = hlo.power(base, number(2 ** (_BITS_OF_A_POWER - 1)))
            base = hlo.multiply(base, base)
            rest = hlo.shift_right_logical(rest, number(_BITS_OF_A_POWER))
    if KINDS[dtype] == UNSIGNED:
        return result
    others = lowering.compare(hlo.abs(x), number(1), "NE", dtype)
    whole = hlo.and_(others, lowering.compare(y, number(0), "LT", dtype))
    return hlo.select(whole, number(0), result)


def _power_vjp(g: Any, x: Any, y: Any, z: Any) -> tuple[Any, Any]:
    nothing, unit = (Literal(np.asarray(number, y.dtype)) for number in (0, 1))
    slope = multiply(y, power(x, select(equal(y, 0), unit, subtract(y, unit))))
    of_x = multiply(g, select(equal(y, 0), nothing, slope))
    safe = select(equal(x, 0), Literal(np.ones((), x.dtype)), x)
    return of_x, multiply(g, multiply(log(safe), z))


add: Operation = _row("add", NUMERIC | {BOOL}, hlo.AddOp, lambda g, x, y, z: (g, g))
subtract: Operation = _row("subtract", NUMERIC, hlo.SubtractOp, lambda g, x, y, z: (g, negative(g)))
multiply: Operation = _row("multiply", NUMERIC | {BOOL}, hlo.MulOp, lambda g, x, y, z: (multiply(g, y), multiply(g, x)))
divide: Operation = _row(
    "divide", NUMERIC, hlo.DivOp, lambda g, x, y, z: (divide(g, y), negative(multiply(g, divide(z, y))))
)
remainder: Operation = _row(  # with the sign of x, as C has it
    "remainder", REAL, hlo.RemOp, lambda g, x, y, z: (g, negative(multiply(g, truncate(divide(x, y)))))
)
zero_with_sign: Operation = _row(  # x, but of 0 that with the sign of y
    "zero_with_sign", _ONLY_FLOATING, _zero_with_sign_lower, lambda g, x, y, z: (g, None)
)
power: Operation = _row("power", NUMERIC, _power_lower, _power_vjp)
maximum: Operation = _row("maximum", ANY, _extremum(hlo.maximum, "GT"), _of_larger)
minimum: Operation = _row("minimum", ANY, _extremum(hlo.minimum, "LT"), _of_larger)
negative: Operation = _row("negative", NUMERIC, hlo.NegOp, lambda g, x, y: negative(g))
sign: Operation = _row("sign", NUMERIC, _sign_lower)
absolute: Operation = _row("absolute", NUMERIC, _abs_lower, _abs_vjp, dtypes.real_part)
square: Operation = _row(
    "square", NUMERIC, lambda rule, x: hlo.multiply(x, x), lambda g, x, y: multiply(g, multiply(x, 2))
)

bitwise_and: Operation = _row("and", _BITS, hlo.AndOp)
bitwise_or: Operation = _row("or", _BITS, hlo.OrOp)
bitwise_xor: Operation = _row("xor", _BITS, hlo.XorOp)
bitwise_not: Operation = _row("not", _BITS, hlo.NotOp)
shift_left: Operation = _row("shift_left", INTEGRAL, hlo.ShiftLeftOp)
shift_right_arithmetic: Operation = _row("shift_right_arithmetic", INTEGRAL, hlo.ShiftRightArithmeticOp)
shift_right_logical: Operation = _row("shift_right_logical", INTEGRAL, hlo.ShiftRightLogicalOp)
count_leading_zeros: Operation = _row("count_leading_zeros", INTEGRAL, hlo.ClzOp)

floor: Operation = _row("floor", _ONLY_FLOATING, hlo.FloorOp)
ceil: Operation = _row("ceil", _ONLY_FLOATING, hlo.CeilOp)
round_even: Operation = _row("round_even", _ONLY_FLOATING, hlo.RoundNearestEvenOp)
is_finite: Operation = _row("is_finite", _ONLY_FLOATING, hlo.IsFiniteOp, None, _to_bool)
next_after: Operation = _row("next_after", _ONLY_FLOATING, chlo.NextAfterOp)


def integer_power(x: Any, exponent: int) -> Any:
    """Return x to the power of a Python integer, as a product of few factors."""
    return bind(INTEGER_POWER, x, exponent=exponent)


def _integer_power_infer(x: ShapedArray, *, exponent: int) -> ShapedArray:
    if KINDS[x.dtype] not in (NUMERIC if exponent >= 0 else INEXACT):
        raise TypeError(f"pow: {x.dtype} has no power of {exponent}")
    return x


def _integer_power_lower(rule: Rule, x: IRValue, *, exponent: int) -> IRValue:
    ones = rule.full(1, rule.out)
    left, factor, result = max(exponent, -exponent), x, ones
    while left:
        if left & 1:
            result = factor if result is ones else hlo.multiply(result, factor)
        left >>= 1
        if left:
            factor = hlo.multiply(factor, factor)
    return result if exponent >= 0 else hlo.divide(ones, result)


def _integer_power_vjp(d: Any, *, exponent: int) -> list[Any]:
    if exponent in (0, 1):
        return [d.cotangent if exponent else None]
    (x,) = d.operands
    return [multiply(d.cotangent, multiply(float(exponent), integer_power(x, exponent - 1)))]


INTEGER_POWER = Primitive("integer_power", _integer_power_infer, _integer_power_lower, _integer_power_vjp)


def truncate(x: Any) -> Any:
    """Return each number cut off at the point."""
    return select(less(x, 0), ceil(x), floor(x))


# Exponentials, and functions of angles.


def _logistic_lower(rule: Rule, x: IRValue) -> IRValue:
    """As JAX lowers it: StableHLO's own operation has other bits."""
    ones = rule.full(1, rule.out)
    return hlo.divide(ones, hlo.add(ones, hlo.exponential(hlo.negate(x))))


def _one_less(x: Any) -> Any:
    return subtract(x, 1.0)


exp: Operation = _row("exp", INEXACT, hlo.ExpOp, lambda g, x, y: multiply(g, y))
expm1: Operation = _row("expm1", INEXACT, hlo.Expm1Op, lambda g, x, y: multiply(g, add(y, 1.0)))
log: Operation = _row("log", INEXACT, hlo.LogOp, lambda g, x, y: divide(g, x))
log1p: Operation = _row("log1p", INEXACT, hlo.Log1pOp, lambda g, x, y: divide(g, add(x, 1.0)))
sqrt: Operation = _row("sqrt", INEXACT, hlo.SqrtOp, lambda g, x, y: divide(multiply(g, 0.5), y))
rsqrt: Operation = _row("rsqrt", INEXACT, hlo.RsqrtOp, lambda g, x, y: multiply(g, multiply(divide(y, x), -0.5)))
cbrt: Operation = _row("cbrt", _ONLY_FLOATING, hlo.CbrtOp, lambda g, x, y: multiply(g, divide(1 / 3, multiply(y, y))))
logistic: Operation = _row(
    "logistic", INEXACT, _logistic_lower, lambda g, x, y: multiply(g, multiply(y, subtract(1.0, y)))
)

sin: Operation = _row("sin", INEXACT, hlo.SineOp, lambda g, x, y: multiply(g, cos(x)))
cos: Operation = _row("cos", INEXACT, hlo.CosineOp, lambda g, x, y: negative(multiply(g, sin(x))))
tan: Operation = _row("tan", INEXACT, hlo.TanOp, lambda g, x, y: multiply(g, add(square(y), 1.0)))
asin: Operation = _row("asin", INEXACT, chlo.AsinOp, lambda g, x, y: multiply(g, rsqrt(subtract(1.0, square(x)))))
acos: Operation = _row(
    "acos", INEXACT, chlo.AcosOp, lambda g, x, y: negative(multiply(g, rsqrt(subtract(1.0, square(x)))))
)
atan: Operation = _row("atan", INEXACT, chlo.AtanOp, lambda g, x, y: divide(g, add(square(x), 1.0)))
sinh: Operation = _row("sinh", INEXACT, chlo.SinhOp, lambda g, x, y: multiply(g, cosh(x)))
cosh: Operation = _row("cosh", INEXACT, chlo.CoshOp, lambda g, x, y: multiply(g, sinh(x)))
tanh: Operation = _row(
    "tanh", INEXACT, hlo.TanhOp, lambda g, x, y: multiply(g, multiply(add(y, 1.0), subtract(1.0, y)))
)
asinh: Operation = _row("asinh", INEXACT, chlo.AsinhOp, lambda g, x, y: multiply(g, rsqrt(add(square(x), 1.0))))


def _acosh_vjp(g: Any, x: Any, y: Any) -> Any:
    if KINDS[x.dtype] != COMPLEX:
        return multiply(g, rsqrt(_one_less(square(x))))  # JAX's, also where the function has no value
    # A product of two roots: the root of the product has another sign where the real part is negative.
    return multiply(g, multiply(rsqrt(_one_less(x)), rsqrt(add(x, 1.0))))


acosh: Operation = _row("acosh", INEXACT, chlo.AcoshOp, _acosh_vjp)
atanh: Operation = _row(
    "atanh", INEXACT, chlo.AtanhOp, lambda g, x, y: divide(g, multiply(add(x, 1.0), subtract(1.0, x)))
)


def _atan2_vjp(g: Any, y: Any, x: Any, z: Any) -> tuple[Any, Any]:
    scaled = divide(g, add(square(x), square(y)))
    return multiply(scaled, x), negative(multiply(scaled, y))


atan2: Operation = _row("atan2", INEXACT, hlo.Atan2Op, _atan2_vjp)

# Special functions.

_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)


def _gauss(g: Any, x: Any) -> Any:
    return multiply(g, multiply(exp(negative(square(x))), _TWO_OVER_ROOT_PI))


erf: Operation = _row("erf", _ONLY_FLOATING, chlo.ErfOp, lambda g, x, y: _gauss(g, x))
erfc: Operation = _row("erfc", _ONLY_FLOATING, chlo.ErfcOp, lambda g, x, y: negative(_gauss(g, x)))
erf_inv: Operation = _row(
    "erf_inv",
    _ONLY_FLOATING,
    chlo.ErfInvOp,
    lambda g, x, y: multiply(g, multiply(exp(square(y)), 1 / _TWO_OVER_ROOT_PI)),
)
lgamma: Operation = _row("lgamma", _ONLY_FLOATING, chlo.LgammaOp, lambda g, x, y: multiply(g, digamma(x)))
digamma: Operation = _row(
    "digamma", _ONLY_FLOATING, chlo.DigammaOp, lambda g, x, y: multiply(g, polygamma(Literal(np.ones((), x.dtype)), x))
)
polygamma: Operation = _row(
    "polygamma", _ONLY_FLOATING, chlo.PolygammaOp, lambda g, m, x, y: (None, multiply(g, polygamma(add(m, 1.0), x)))
)

# Complex numbers.


def _zero(x: Any) -> Literal:
    return Literal(np.zeros((), x.dtype))


complex_: Operation = _row(
    "complex",
    _ONLY_FLOATING,
    hlo.ComplexOp,
    lambda g, x, y, z: (real(g), negative(imag(g))),
    dtypes.complex_of,
)
real: Operation = _row("real", _ONLY_COMPLEX, hlo.RealOp, lambda g, x, y: complex_(g, _zero(g)), dtypes.real_part)
imag: Operation = _row(
    "imag", _ONLY_COMPLEX, hlo.ImagOp, lambda g, x, y: complex_(_zero(g), negative(g)), dtypes.real_part
)
conj: Operation = _row("conj", _ONLY_COMPLEX, chlo.ConjOp, lambda g, x, y: conj(g))


def bitcast(x: Any, dtype: dtypes.DType) -> Any:
    """Return the bits of each element as one of another dtype of as many bits."""
    return bind(BITCAST, x, dtype=dtype)


def _bitcast_infer(x: ShapedArray, *, dtype: dtypes.DType) -> ShapedArray:
    if dtypes.BITS[x.dtype] != dtypes.BITS[dtype]:
        raise TypeError(f"bitcast: {x.dtype} and {dtype} differ in their number of bits")
    return ShapedArray(x.shape, dtype)


BITCAST = Primitive(
    "bitcast",
    _bitcast_infer,
    lambda rule, x, *, dtype: hlo.bitcast_convert(lowering.tensor_type(rule.out), x),
)
