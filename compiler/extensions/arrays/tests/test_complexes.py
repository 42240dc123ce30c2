"""Functions of complex numbers at their limits and cuts: C99's, as NumPy has them, whatever the other part is."""

from typing import Any

import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.numpy as xp

PARTS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -2.5, 7e153, -7e153, 1e-30, 3e4]
NUMBERS = np.asarray([complex(a, b) for a in PARTS for b in PARTS])
NAMES = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "exp",
    "log",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]


def same(found: Any, wanted: Any) -> Any:
    """Whether parts are equal: both NaN, or close; and of the same sign where that is a side of a cut."""
    close = np.isclose(found, wanted, 1e-6, 1e-40, equal_nan=True)
    return close & (np.isnan(wanted) | (wanted == 0) | (np.signbit(found) == np.signbit(wanted)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_limits_are_c99s(name: str) -> None:
    wanted = getattr(np, name)(NUMBERS)
    with stagec_arrays.enable_x64():
        for call in getattr(xp, name), stagec.jit(getattr(xp, name), frontend="arrays"):
            found = np.asarray(call(NUMBERS))
            real, imag = same(found.real, wanted.real), same(found.imag, wanted.imag)
            # C99 leaves the sign of an infinity beside a NaN open.
            open_ = np.isinf(wanted) & (np.isnan(wanted.real) | np.isnan(wanted.imag))
            real |= open_ & (np.abs(found.real) == np.abs(wanted.real))
            imag |= open_ & (np.abs(found.imag) == np.abs(wanted.imag))
            assert NUMBERS[~(real & imag)].tolist() == []


def test_zeros_have_the_standards_signs() -> None:
    """XLA's tanh(inf + bj) is 1 + 0j or 1 - 0j, by the sine of 2b."""
    with stagec_arrays.enable_x64():
        for b in (0.5, 2.0, 5.0):
            found = complex(xp.tanh(xp.asarray(complex(np.inf, b))))
            assert (found, np.signbit(found.imag)) == (1 + 0j, False)
        assert np.isnan(complex(xp.asinh(xp.asarray(complex(np.nan, 7e153)))).real)


def test_derivatives_are_those_of_the_functions() -> None:
    """On each side of the cuts; `jax.numpy.acosh` has another sign where the real part is negative."""
    x = np.asarray([0.3 + 0.4j, -0.7 - 0.2j, 0.5 + 0j, 1.5 - 2j])

    def gradients(x: Any) -> list[Any]:
        return [
            stagec_arrays.grad(lambda x, name=name: xp.sum(xp.real(getattr(xp, name)(x) * (1 - 2j))))(x)
            for name in NAMES
        ]

    with stagec_arrays.enable_x64():
        found = stagec.jit(gradients, frontend="arrays")(x)
    for name, one in zip(NAMES, found, strict=True):
        function = getattr(np, name)
        wanted = (function(x + 1e-6) - function(x - 1e-6)) / 2e-6 * (1 - 2j)
        np.testing.assert_allclose(one, wanted, 1e-7, 1e-7, err_msg=name)
