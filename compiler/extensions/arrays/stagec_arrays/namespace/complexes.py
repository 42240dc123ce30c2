"""Functions of complex numbers where XLA gives other results than C99: at infinite and undefined parts, and at cuts.

The standard has C99's (https://data-apis.org/array-api/2024.12/API_specification/elementwise_functions.html), for each
function as a list of special cases. They hold for all numbers of a kind: XLA's NaN depends on how large the other part
is, and its zeros on the sign of a sine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagec_arrays import dtypes
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.structural import full

_INF, _NAN = math.inf, math.nan
_is, _both, _either = p.equal, p.bitwise_and, p.bitwise_or


def _bad(x: Any) -> Any:
    return p.bitwise_not(p.is_finite(x))


def _nan(x: Any) -> Any:
    return p.not_equal(x, x)


def _infinite(x: Any) -> Any:
    return p.equal(p.absolute(x), _INF)


def _negative(x: Any) -> Any:
    """Return whether the sign is set, of -0 too."""
    return p.less(p.bitcast(x, dtypes.NAMED[f"int{dtypes.BITS[x.dtype]}"]), 0)


def _signed(number: float, x: Any) -> Any:
    """Return a number with the sign of x."""
    size = full(x.shape, number, x.dtype)
    return p.select(_negative(x), p.negative(size), size)


Case = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], tuple[Any, Any]]]
"""When it is, of the real and imaginary part, and the parts of the result then. Later cases go before earlier ones."""

_UNDEFINED: Case = (lambda a, b: _either(_nan(a), _nan(b)), lambda a, b: (_NAN, _NAN))
_LOG: Sequence[Case] = (
    _UNDEFINED,
    (lambda a, b: _both(_infinite(a), _nan(b)), lambda a, b: (_INF, _NAN)),
    (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (_INF, _NAN)),
)
_REAL: Case = (lambda a, b: _both(_nan(a), _is(b, 0.0)), lambda a, b: (_NAN, b))


def _exponential(least: float) -> Sequence[Case]:
    return (
        _UNDEFINED,
        _REAL,
        (lambda a, b: _both(_is(a, -_INF), _bad(b)), lambda a, b: (least, 0.0)),
        (lambda a, b: _both(_is(a, _INF), _bad(b)), lambda a, b: (_INF, _NAN)),
        (lambda a, b: _both(_is(a, _INF), _is(b, 0.0)), lambda a, b: (_INF, b)),
    )


_CASES: Mapping[str, Sequence[Case]] = {
    "acos": (
        _UNDEFINED,
        (lambda a, b: _both(_is(a, 0.0), _nan(b)), lambda a, b: (math.pi / 2, _NAN)),
        (lambda a, b: _both(_infinite(a), _nan(b)), lambda a, b: (_NAN, -_INF)),
        (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (_NAN, p.negative(b))),
    ),
    "acosh": (
        *_LOG,
        (lambda a, b: _both(_is(a, 0.0), _nan(b)), lambda a, b: (_NAN, math.pi / 2)),
    ),
    "asinh": (
        _UNDEFINED,
        _REAL,
        (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (_INF, _NAN)),
        (lambda a, b: _both(_infinite(a), _nan(b)), lambda a, b: (a, _NAN)),
    ),
    "atanh": (
        _UNDEFINED,
        (lambda a, b: _both(_either(_is(a, 0.0), _infinite(a)), _nan(b)), lambda a, b: (_signed(0.0, a), _NAN)),
        (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (0.0, _signed(math.pi / 2, b))),
    ),
    "cosh": (
        _UNDEFINED,
        _REAL,
        (lambda a, b: _both(_is(a, 0.0), _bad(b)), lambda a, b: (_NAN, 0.0)),
        (lambda a, b: _both(_infinite(a), _bad(b)), lambda a, b: (_INF, _NAN)),
    ),
    "exp": _exponential(0.0),
    "expm1": _exponential(-1.0),
    "log": _LOG,
    "log1p": _LOG,
    "sinh": (
        _UNDEFINED,
        _REAL,
        (lambda a, b: _both(_either(_is(a, 0.0), _infinite(a)), _bad(b)), lambda a, b: (a, _NAN)),
    ),
    "sqrt": (
        _UNDEFINED,
        (lambda a, b: _both(_is(a, -_INF), _nan(b)), lambda a, b: (_NAN, _INF)),
        (lambda a, b: _both(_is(a, _INF), _nan(b)), lambda a, b: (_INF, _NAN)),
        (lambda a, b: _infinite(b), lambda a, b: (_INF, b)),
    ),
    "tanh": (
        _UNDEFINED,
        _REAL,
        (lambda a, b: _both(_is(a, 0.0), _bad(b)), lambda a, b: (a, _NAN)),
        (lambda a, b: _infinite(a), lambda a, b: (_signed(1.0, a), _signed(0.0, b))),
    ),
}
_ODD = frozenset({"asinh", "atanh", "tanh"})
"""Of the functions whose values are mirrored at the real axis, those that are so at the imaginary one, with a sign."""
_MIRRORED = frozenset({"acos", "acosh", "exp", "expm1", "log1p", "sqrt"}) | _ODD
_TURNED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "asin": ("asinh", p.asinh),
    "atan": ("atanh", p.atanh),
    "cos": ("cosh", p.cosh),
    "sin": ("sinh", p.sinh),
    "tan": ("tanh", p.tanh),
}
"""The standard says of these what they are: of 1j times the number, 1j times the result but for the cosine."""


def computed(name: str, operation: Callable[[Any], Any], x: Any) -> Any:
    """Return a function of complex numbers, `operation` as XLA computes it, with the standard's results at limits."""
    a, b = p.real(x), p.imag(x)
    if name in _TURNED:
        result = computed(*_TURNED[name], p.complex_(p.negative(b), a))
        return result if name == "cos" else p.complex_(p.imag(result), p.negative(p.real(result)))
    real, imag = _parts(name, operation, a, b)
    for condition, parts in _CASES.get(name, ()):
        there, (first, second) = condition(a, b), parts(a, b)
        real, imag = p.select(there, first, real), p.select(there, second, imag)
    return p.complex_(real, imag)


def _parts(name: str, operation: Callable[[Any], Any], a: Any, b: Any) -> tuple[Any, Any]:
    if name in ("cosh", "sinh"):
        # XLA's are sums of exponentials, in which small parts are lost.
        even, odd = (p.cosh(a), p.sinh(a)) if name == "cosh" else (p.sinh(a), p.cosh(a))
        imag = p.multiply(odd, p.sin(b))
        # Infinity times zero is zero here: the sine is exactly that.
        lost = _both(_is(b, 0.0), _nan(imag))
        imag = p.select(lost, p.multiply(b, _signed(1.0, a)) if name == "cosh" else b, imag)
        return p.multiply(even, p.cos(b)), imag
    if name not in _MIRRORED:
        result = operation(p.complex_(a, b))
        return p.real(result), p.imag(result)
    # XLA forgets the sign of a zero, by which a number lies on one or the other side of a cut.
    left, below = _negative(a), _negative(b)
    odd = name in _ODD
    result = operation(p.complex_(p.select(left, p.negative(a), a) if odd else a, p.select(below, p.negative(b), b)))
    real, imag = p.real(result), p.imag(result)
    return p.select(left, p.negative(real), real) if odd else real, p.select(below, p.negative(imag), imag)
