"""Functions of complex numbers at their limits: infinite and undefined parts, where XLA gives other ones than C99.

The standard has C99's (https://data-apis.org/array-api/2024.12/API_specification/elementwise_functions.html), for each
function as a list of special cases. Those that XLA computes otherwise are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagec.arrays.primitives import elementwise as p

_INF, _NAN = math.inf, math.nan


def _bad(x: Any) -> Any:
    return p.bitwise_not(p.is_finite(x))


def _nan(x: Any) -> Any:
    return p.not_equal(x, x)


def _is(x: Any, number: float) -> Any:
    return p.equal(x, number)


def _infinite(x: Any) -> Any:
    return p.equal(p.absolute(x), _INF)


def _both(*conditions: Any) -> Any:
    found = conditions[0]
    for one in conditions[1:]:
        found = p.bitwise_and(found, one)
    return found


Case = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], tuple[Any, Any]]]
"""When it is, of the real and imaginary part, and the parts of the result then."""

_LOG: Sequence[Case] = (
    (lambda a, b: _both(_infinite(a), _nan(b)), lambda a, b: (_INF, _NAN)),
    (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (_INF, _NAN)),
)
_CASES: Mapping[str, Sequence[Case]] = {
    "acos": ((lambda a, b: _both(_is(a, 0.0), _nan(b)), lambda a, b: (math.pi / 2, _NAN)),),
    "acosh": ((lambda a, b: _both(_is(a, 0.0), _nan(b)), lambda a, b: (_NAN, math.pi / 2)),),
    "asinh": ((lambda a, b: _both(_nan(a), _is(b, 0.0)), lambda a, b: (_NAN, b)),),
    "atanh": (
        (lambda a, b: p.bitwise_or(_nan(a), _nan(b)), lambda a, b: (_NAN, _NAN)),
        (
            lambda a, b: _both(p.bitwise_or(_is(a, 0.0), _infinite(a)), _nan(b)),
            lambda a, b: (p.multiply(p.sign(a), 0.0), _NAN),
        ),
        (lambda a, b: _both(_nan(a), _infinite(b)), lambda a, b: (0.0, p.multiply(p.sign(b), math.pi / 2))),
    ),
    "cosh": (
        (lambda a, b: _both(_is(a, 0.0), _bad(b)), lambda a, b: (_NAN, 0.0)),
        (lambda a, b: _both(_infinite(a), _bad(b)), lambda a, b: (_INF, _NAN)),
    ),
    "exp": (
        (lambda a, b: _both(_is(a, -_INF), _bad(b)), lambda a, b: (0.0, 0.0)),
        (lambda a, b: _both(_is(a, _INF), _bad(b)), lambda a, b: (_INF, _NAN)),
    ),
    "expm1": (
        (lambda a, b: _both(_is(a, -_INF), _bad(b)), lambda a, b: (-1.0, 0.0)),
        (lambda a, b: _both(_is(a, _INF), _bad(b)), lambda a, b: (_INF, _NAN)),
    ),
    "log": _LOG,
    "log1p": _LOG,
    "sinh": ((lambda a, b: _both(p.bitwise_or(_is(a, 0.0), _infinite(a)), _bad(b)), lambda a, b: (a, _NAN)),),
    "sqrt": (
        (lambda a, b: _both(_is(a, -_INF), _nan(b)), lambda a, b: (_NAN, _INF)),
        (lambda a, b: _both(_is(a, _INF), _nan(b)), lambda a, b: (_INF, _NAN)),
    ),
    "tanh": ((lambda a, b: _both(_is(a, 0.0), _bad(b)), lambda a, b: (a, _NAN)),),
}


def at_limits(name: str, x: Any, found: Any) -> Any:
    """Return what a function of complex numbers gives, `found`, with the standard's parts where XLA has others."""
    cases = _CASES.get(name)
    if cases is None:
        return found
    a, b = p.real(x), p.imag(x)
    real, imag = p.real(found), p.imag(found)
    for condition, parts in cases:
        there, (first, second) = condition(a, b), parts(a, b)
        real, imag = p.select(there, first, real), p.select(there, second, imag)
    return p.complex_(real, imag)
