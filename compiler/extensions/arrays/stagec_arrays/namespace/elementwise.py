"""The standard's elementwise functions (https://data-apis.org/array-api/2024.12/API_specification/elementwise_functions.html)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagec_arrays import binding, dtypes
from stagec_arrays.binding import unwrap
from stagec_arrays.dtypes import BOOL, COMPLEX, FLOATING, INTEGRAL, KINDS, SIGNED, UNSIGNED
from stagec_arrays.namespace.complexes import computed
from stagec_arrays.namespace.promotion import array_of, inexact, is_scalar, like, named, promoted
from stagec_arrays.primitives import cumulative, elementwise as p
from stagec_arrays.primitives.reductions import reduce_and, reduce_or
from stagec_arrays.primitives.structural import broadcast, convert, full
from stagec_arrays.values import Literal, Value, broadcast_shapes, gives_views

# Functions of one array of floating-point numbers: integers become such numbers.


def _floating(name: str, operation: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    def function(x: Any, /) -> Any:
        x = inexact(x, name)
        return operation(x) if KINDS[x.dtype] != COMPLEX else computed(name, operation, x)

    return named(function, name, f"Return {what} of each element.")


acos = _floating("acos", p.acos, "the inverse cosine, in radians,")
acosh = _floating("acosh", p.acosh, "the inverse hyperbolic cosine")
asin = _floating("asin", p.asin, "the inverse sine, in radians,")
asinh = _floating("asinh", p.asinh, "the inverse hyperbolic sine")
atan = _floating("atan", p.atan, "the inverse tangent, in radians,")
atanh = _floating("atanh", p.atanh, "the inverse hyperbolic tangent")
cos = _floating("cos", p.cos, "the cosine, of radians,")
cosh = _floating("cosh", p.cosh, "the hyperbolic cosine")
exp = _floating("exp", p.exp, "e to the power")
expm1 = _floating("expm1", p.expm1, "e to the power, less 1,")
log = _floating("log", p.log, "the natural logarithm")
log1p = _floating("log1p", p.log1p, "the natural logarithm of 1 more")
reciprocal = _floating("reciprocal", lambda x: p.divide(1.0, x), "the reciprocal")
sin = _floating("sin", p.sin, "the sine, of radians,")
sinh = _floating("sinh", p.sinh, "the hyperbolic sine")
sqrt = _floating("sqrt", p.sqrt, "the square root")
tan = _floating("tan", p.tan, "the tangent, of radians,")
tanh = _floating("tanh", p.tanh, "the hyperbolic tangent")


def _log_of_base(base: float) -> Callable[[Any], Any]:
    def operation(x: Any) -> Any:
        if KINDS[x.dtype] == COMPLEX:
            result, scale = computed("log", p.log, x), 1.0 / math.log(base)
            return p.complex_(p.multiply(p.real(result), scale), p.multiply(p.imag(result), scale))
        return p.divide(p.log(x), math.log(base))

    return operation


log2 = _floating("log2", _log_of_base(2.0), "the logarithm of base 2")
log10 = _floating("log10", _log_of_base(10.0), "the logarithm of base 10")


# Functions of two arrays, which promote.


def _numbers(
    name: str, operation: Callable[[Any, Any], Any], what: str, inexact: bool = False
) -> Callable[[Any, Any], Any]:
    """Return a function of two arrays. inexact: whether integers become floating-point numbers."""

    def function(x1: Any, x2: Any, /) -> Any:
        return operation(*promoted(x1, x2, function=name, inexact=inexact))

    return named(function, name, f"Return {what}.")


add = _numbers("add", p.add, "the sum of two arrays")
subtract = _numbers("subtract", p.subtract, "the difference of two arrays")
multiply = _numbers("multiply", p.multiply, "the product of two arrays")
maximum = _numbers("maximum", p.maximum, "the larger of each two elements, and NaN where one of them is NaN")
minimum = _numbers("minimum", p.minimum, "the smaller of each two elements, and NaN where one of them is NaN")


def _equality(operation: Callable[[Any, Any], Any], both: Callable[[Any, Sequence[int]], Any]) -> Any:
    """Of PRNG keys, that of both words."""

    def compare(x1: Any, x2: Any) -> Any:
        if x1.dtype is not dtypes.KEY:
            return operation(x1, x2)
        result = operation(unwrap(x1), unwrap(x2))
        return both(result, [len(result.shape) - 1])

    return compare


equal = _numbers("equal", _equality(p.equal, reduce_and), "whether elements are equal")
not_equal = _numbers("not_equal", _equality(p.not_equal, reduce_or), "whether elements are not equal")
less = _numbers("less", p.less, "whether the first's elements are less")
less_equal = _numbers("less_equal", p.less_equal, "whether the first's elements are less or equal")
greater = _numbers("greater", p.greater, "whether the first's elements are greater")
greater_equal = _numbers("greater_equal", p.greater_equal, "whether the first's elements are greater or equal")
bitwise_and = _numbers("bitwise_and", p.bitwise_and, "the bits that both have")
bitwise_or = _numbers("bitwise_or", p.bitwise_or, "the bits that one of them or both have")
bitwise_xor = _numbers("bitwise_xor", p.bitwise_xor, "the bits that exactly one of them has")
bitwise_left_shift = _numbers("bitwise_left_shift", p.shift_left, "bits moved to the left, zeros in their place")


divide = _numbers("divide", p.divide, "the quotient of two arrays, of floating-point numbers", True)
atan2 = _numbers("atan2", p.atan2, "the angle, in radians, of the point (x2, x1)", True)
nextafter = _numbers("nextafter", p.next_after, "the next number after x1 in the direction of x2", True)
logaddexp = _numbers("logaddexp", cumulative.logaddexp, "log(exp(x1) + exp(x2)), without overflow on the way", True)


def bitwise_right_shift(x1: Any, x2: Any, /) -> Any:
    """Return bits moved to the right, with copies of the sign in their place."""
    first, second = promoted(x1, x2, function="bitwise_right_shift")
    dtypes.require("bitwise_right_shift", first.dtype, INTEGRAL)
    move = p.shift_right_logical if KINDS[first.dtype] == UNSIGNED else p.shift_right_arithmetic
    return move(first, second)


def bitwise_invert(x: Any, /) -> Any:
    """Return each element with all bits turned over."""
    return p.bitwise_not(array_of(x, "bitwise_invert"))


def copysign(x1: Any, x2: Any, /) -> Any:
    """Return the magnitudes of x1 with the signs of x2."""
    first, second = promoted(x1, x2, function="copysign", inexact=True)
    dtypes.require("copysign", first.dtype, dtypes.REAL)
    size = p.absolute(first)
    return p.select(signbit(second), p.negative(size), size)


def floor_divide(x1: Any, x2: Any, /) -> Any:
    """Return the quotient of two arrays, rounded down.

    Integers divided by 0 give the same as in JAX: -2, 0 // 0 gives -1, and unsigned integers give their largest.
    """
    first, second = promoted(x1, x2, function="floor_divide")
    dtypes.require("floor_divide", first.dtype, dtypes.REAL)
    if KINDS[first.dtype] in INTEGRAL:
        divisor, is_zero = _divisor(second)
        quotient = p.divide(first, divisor)
        if KINDS[first.dtype] == SIGNED:
            less = _other_sign(p.remainder(first, divisor), divisor)
            quotient = p.select(less, p.subtract(quotient, 1), quotient)
        if is_zero is None:
            return quotient
        least, most = dtypes.limits(first.dtype)
        by_zero = most if least == 0 else p.select(p.equal(first, 0), like(-1, first.dtype), like(-2, first.dtype))
        return p.select(is_zero, by_zero, quotient)
    rest = p.remainder(first, second)
    quotient = p.divide(p.subtract(first, rest), second)
    quotient = p.select(_other_sign(rest, second), p.subtract(quotient, 1.0), quotient)
    whole, plain = p.round_even(quotient), p.round_even(p.divide(first, second))  # both without a derivative
    whole = p.select(p.equal(whole, 0.0), p.multiply(plain, 0.0), whole)  # a zero has the quotient's sign
    exact = p.bitwise_or(p.bitwise_not(p.is_finite(plain)), p.bitwise_not(p.is_finite(second)))
    return p.select(exact, plain, whole)


def _divisor(x: Any) -> tuple[Any, Any]:
    """Return integers with 1 in place of 0, and where that is; None for a number that is not 0.

    XLA's compiler ends the process (SIGFPE) if it divides a known integer by a known 0.
    """
    if isinstance(x, Literal) and x.value != 0:
        return x, None
    is_zero = p.equal(x, 0)
    return p.select(is_zero, like(1, x.dtype), x), is_zero


def _other_sign(rest: Any, divisor: Any) -> Any:
    """Whether a rest that is not 0 has another sign than the divisor: it is then of a quotient that is one less."""
    return p.bitwise_and(p.not_equal(p.less(rest, 0), p.less(divisor, 0)), p.not_equal(rest, 0))


def remainder(x1: Any, x2: Any, /) -> Any:
    """Return the rest of the division rounded down: it has the sign of x2. Of integers divided by 0 it is 0."""
    first, second = promoted(x1, x2, function="remainder")
    dtypes.require("remainder", first.dtype, dtypes.REAL)
    if KINDS[first.dtype] in INTEGRAL:
        second, _ = _divisor(second)
    rest = p.remainder(first, second)
    if KINDS[first.dtype] == UNSIGNED:
        return rest
    result = p.select(_other_sign(rest, second), p.add(rest, second), rest)
    if KINDS[first.dtype] in INTEGRAL:
        return result
    return p.zero_with_sign(result, second)


def pow(x1: Any, x2: Any, /) -> Any:  # noqa: A001 - the standard's name
    """Return x1 to the power x2. Of a Python integer it is a product of few factors, as in JAX.

    Integers wrap around. Raises TypeError if they have an exponent that is known and negative; of one that a trace
    does not know the result is 1 / x1**-x2 without its fraction.
    """
    if type(x2) is int and not is_scalar(x1):
        first = array_of(x1, "pow")
        kind = KINDS[first.dtype]
        if (kind in INTEGRAL and x2 >= 0) or (kind in dtypes.INEXACT and -64 < x2 < 64):
            return p.integer_power(first, x2)
    first, second = promoted(x1, x2, function="pow")
    if KINDS[first.dtype] == SIGNED and (known := binding.known(second)) is not None and (known < 0).any():
        what = f"pow: {first.dtype} has no power of a negative exponent, such as {known.min()}"
        raise TypeError(f"{what}; write astype(x, float32) ** exponent")
    return p.power(first, second)


def hypot(x1: Any, x2: Any, /) -> Any:
    """Return the length of the vector (x1, x2), without overflow on the way."""
    first, second = promoted(x1, x2, function="hypot", inexact=True)
    first, second = p.absolute(first), p.absolute(second)
    large, small = p.maximum(first, second), p.minimum(first, second)
    ratio = p.divide(small, p.select(p.equal(large, 0.0), 1.0, large))
    result = p.multiply(large, p.sqrt(p.add(p.square(ratio), 1.0)))
    infinite = p.bitwise_or(p.equal(first, math.inf), p.equal(second, math.inf))
    return p.select(infinite, math.inf, p.select(p.equal(large, 0.0), large, result))


def _logical(name: str, operation: Callable[..., Any], what: str) -> Callable[..., Any]:
    def function(x1: Any, x2: Any, /) -> Any:
        return operation(_bools(x1, name), _bools(x2, name))

    return named(function, name, f"Return whether {what} true.")


def _bools(x: Any, name: str) -> Any:
    return Literal(np.asarray(bool(x))) if is_scalar(x) else convert(array_of(x, name), dtypes.bool_)


logical_and = _logical("logical_and", p.bitwise_and, "both elements are")
logical_or = _logical("logical_or", p.bitwise_or, "one of the elements or both are")
logical_xor = _logical("logical_xor", p.bitwise_xor, "exactly one of the elements is")


def logical_not(x: Any, /) -> Any:
    """Return whether each element is false."""
    return p.bitwise_not(_bools(x, "logical_not"))


# Functions of one array.


def abs(x: Any, /) -> Any:  # noqa: A001 - the standard's name
    """Return the absolute value of each element."""
    x = array_of(x, "abs")
    if KINDS[x.dtype] == COMPLEX:  # of what is infinite it is, whatever the other part is
        return p.select(isinf(x), math.inf, p.absolute(x))
    return x if x.dtype == dtypes.bool_ else p.absolute(x)


def negative(x: Any, /) -> Any:
    """Return each element with the other sign."""
    return p.negative(array_of(x, "negative"))


def positive(x: Any, /) -> Any:
    """Return each element unchanged."""
    x = array_of(x, "positive")
    dtypes.require("positive", x.dtype, dtypes.NUMERIC)
    return x


def square(x: Any, /) -> Any:
    """Return each element times itself."""
    return p.square(array_of(x, "square"))


def sign(x: Any, /) -> Any:
    """Return -1, 0 or 1 for each element, and a complex number's direction."""
    x = array_of(x, "sign")
    if KINDS[x.dtype] == COMPLEX:
        length = p.absolute(x)
        nonzero = p.select(p.equal(length, 0.0), 1.0, length)
        result = p.complex_(p.divide(p.real(x), nonzero), p.divide(p.imag(x), nonzero))
        return p.select(p.equal(x, 0.0), 0.0, result)
    return p.select(p.equal(x, 0.0), 0.0, p.sign(x)) if KINDS[x.dtype] == FLOATING else p.sign(x)


def _rounding(name: str, operation: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    def function(x: Any, /) -> Any:
        x = array_of(x, name)
        if KINDS[x.dtype] in {*INTEGRAL, BOOL}:
            return x
        if KINDS[x.dtype] == COMPLEX:
            return p.complex_(operation(p.real(x)), operation(p.imag(x)))
        return operation(x)

    return named(function, name, f"Return each number rounded {what}.")


ceil = _rounding("ceil", p.ceil, "up")
floor = _rounding("floor", p.floor, "down")
round = _rounding("round", p.round_even, "to the nearest whole number, to the even one of two")  # noqa: A001
trunc = _rounding("trunc", p.truncate, "towards 0")


def isfinite(x: Any, /) -> Any:
    """Return whether each element is a finite number."""
    x = array_of(x, "isfinite")
    if KINDS[x.dtype] == COMPLEX:
        return p.bitwise_and(p.is_finite(p.real(x)), p.is_finite(p.imag(x)))
    return p.is_finite(x) if KINDS[x.dtype] == FLOATING else full(x.shape, True, dtypes.bool_)


def isinf(x: Any, /) -> Any:
    """Return whether each element is infinite."""
    x = array_of(x, "isinf")
    if KINDS[x.dtype] == COMPLEX:
        return p.bitwise_or(isinf(p.real(x)), isinf(p.imag(x)))
    if KINDS[x.dtype] != FLOATING:
        return full(x.shape, False, dtypes.bool_)
    return p.equal(p.absolute(x), math.inf)


def isnan(x: Any, /) -> Any:
    """Return whether each element is NaN."""
    x = array_of(x, "isnan")
    return p.not_equal(x, x) if KINDS[x.dtype] in dtypes.INEXACT else full(x.shape, False, dtypes.bool_)


def signbit(x: Any, /) -> Any:
    """Return whether the sign of each element is set: of -0.0 it is, and of some NaNs."""
    x = inexact(x, "signbit")
    dtypes.require("signbit", x.dtype, dtypes.REAL)
    bits = dtypes.NAMED[f"int{dtypes.BITS[x.dtype]}"]
    return p.less(p.bitcast(x, bits), 0)


def conj(x: Any, /) -> Any:
    """Return the complex conjugate of each element."""
    x = array_of(x, "conj")
    return p.conj(x) if KINDS[x.dtype] == COMPLEX else x


@gives_views
def real(x: Any, /) -> Any:
    """Return the real part of each element."""
    x = array_of(x, "real")
    return p.real(x) if KINDS[x.dtype] == COMPLEX else x


@gives_views
def imag(x: Any, /) -> Any:
    """Return the imaginary part of each element."""
    x = array_of(x, "imag")
    return p.imag(x) if KINDS[x.dtype] == COMPLEX else full(x.shape, 0, x.dtype)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    """Return each element, limited to the range from min to max; None: no limit."""
    x = array_of(x, "clip")
    shapes = [x.shape, *(bound.shape for bound in (min, max) if isinstance(bound, Value | np.ndarray))]
    result = broadcast(x, broadcast_shapes(*shapes))
    if min is not None:
        low = _bound(min, x.dtype)
        result = result if low is None else p.maximum(result, low)
    if max is not None:
        high = _bound(max, x.dtype)
        result = result if high is None else p.minimum(result, high)
    return result


def _bound(bound: Any, dtype: dtypes.DType) -> Any:
    """Return a bound as an array of a dtype; None for a number beyond all integers of it."""
    if is_scalar(bound) and KINDS[dtype] in INTEGRAL:
        least, most = dtypes.limits(dtype)
        if isinstance(bound, float):
            bound = math.floor(bound) if math.isfinite(bound) else (most if bound > 0 else least)
        return like(sorted((least, bound, most))[1], dtype)
    return like(bound, dtype, "clip")
