"""Integers that wrap around, and what has no quotient: beside NumPy and JAX, outside a trace and inside one.

Modules: `stagec_arrays/namespace/elementwise.py`, `stagec_arrays/primitives/elementwise.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as nps

import stagec
import stagec_arrays
import stagec_arrays.numpy as xp

DTYPES = [np.dtype(f"{sign}{bits}") for sign in ("int", "uint") for bits in (8, 16, 32, 64)]
POWER = stagec.jit(xp.pow, frontend="arrays")
QUOTIENTS = stagec.jit(lambda x, y: (x // y, x % y), frontend="arrays")


@st.composite
def pairs(draw: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two vectors of one dtype, small numbers and all others."""
    dtype = draw(st.sampled_from(DTYPES))
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    numbers = st.integers(max(least, -3), 70) | st.integers(least, most)
    first, second = (draw(nps.arrays(dtype, 6, elements=numbers)) for _ in range(2))
    return first, second


@settings(max_examples=150, deadline=None)
@given(pairs())
@example((np.asarray([0, 1, 2, -1, -2, 3], np.int32), np.full(6, 64, np.int32)))
@example((np.full(6, 5, np.uint8), np.asarray([255, 128, 127, 64, 63, 0], np.uint8)))
def test_powers_are_numpys(arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    x, y = arrays
    exponent = np.where(y < 0, ~y, y)
    wanted = np.power(x, exponent)
    with stagec_arrays.enable_x64():
        for found in (xp.asarray(x) ** xp.asarray(exponent), POWER(x, exponent)):
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(found), wanted)
        # What only a trace does not know to be negative has the whole part of the quotient.
        signs = np.where(np.abs(x) == 1, x ** (y & 1), 0)
        np.testing.assert_array_equal(np.asarray(POWER(x, y)), np.where(y < 0, signs, wanted))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(-9, 9), st.integers(0, 300))
@example(np.dtype("int32"), 2, 64)
def test_powers_of_pythons_numbers(dtype: np.dtype[Any], base: int, exponent: int) -> None:
    base = base % 10 if dtype.kind == "u" else base
    wanted = np.asarray(pow(base, exponent, 2**64)).astype(dtype)
    with stagec_arrays.enable_x64():
        x = np.full(2, base, dtype)
        for found in (xp.asarray(x) ** exponent, stagec.jit(lambda x: x**exponent, frontend="arrays")(x)):
            assert (found.dtype, np.asarray(found).tolist()) == (dtype, [wanted] * 2)


@pytest.mark.parametrize(("exponent", "least"), [(-1, -1), (np.asarray([2, -3], np.int32), -3)])
def test_negative_powers_of_integers(exponent: Any, least: int) -> None:
    message = f"pow: int32 has no power of a negative exponent, such as {least}; write astype"
    for call in (xp.pow, lambda x, y: stagec.jit(lambda x: x**y, frontend="arrays")(x)):
        with pytest.raises(TypeError, match=message):
            call(xp.asarray([1, 2]), exponent)


@settings(max_examples=100, deadline=None)
@given(pairs())
@example((np.asarray([5, 0, -5, -128, 127, 1], np.int8), np.asarray([0, 0, 0, -1, -1, 3], np.int8)))
def test_quotients_are_jaxs(arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    """Those by 0 too."""
    x, y = arrays
    with jax.enable_x64(), stagec_arrays.enable_x64():
        wanted = jnp.floor_divide(x, y), jnp.remainder(x, y)
        ours = xp.asarray(x), xp.asarray(y)
        for results in (QUOTIENTS(x, y), (ours[0] // ours[1], ours[0] % ours[1])):
            for found, one in zip(results, wanted, strict=True):
                assert found.dtype == one.dtype
                np.testing.assert_array_equal(np.asarray(found), one)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_a_known_number_is_divided_by_zero(dtype: str) -> None:
    """XLA's compiler would end the process where it folds constants."""
    five = xp.asarray(5, dtype=dtype)
    for zero in (0, xp.asarray(0, dtype=dtype)):
        for results in (
            stagec.jit(lambda zero=zero: (five // zero, five % zero), frontend="arrays")(),
            (five // zero, five % zero),
        ):
            assert list(map(int, results)) == [-2 if dtype == "int32" else 255, 0]
