"""Derivatives where functions have none or several (0, ties, multiples, infinities, NaN): those of `jax.grad`.

Modules: `stagec_arrays/primitives/elementwise.py`, `stagec_arrays/primitives/reductions.py`.
"""

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.nn
import stagec_arrays.numpy as xp

inf, nan = np.inf, np.nan
POINTS = np.asarray(
    [0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, 6, -7.5, inf, -inf, nan, 1e-30, 1e30, 89, -104, 2**24], np.float32
)
PAIRS = tuple(np.asarray(one, np.float32) for one in zip(*itertools.product(POINTS, POINTS), strict=True))
NOT_HERE = {
    *("np.from_dlpack", "np.unique_values"),  # of arrays whose elements are known
    "np.expand_dims",  # has no default axis in JAX
    "np.nextafter",  # has no derivative in JAX; here it is 0
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    # The power of 0 is 1 for each x. JAX has NaN for its derivative where x is 0 and the exponent is a float.
    "np.pow": lambda x, y: y == 0,
    # XLA divides by a square, which is 0 in float32.
    "np.hypot": lambda x, y: np.maximum(abs(x), abs(y)) == np.float32(1e-30),
    # JAX takes 0 for an infinity: 2.7 for the derivative of logaddexp(1, inf) by the 1, which is 0. And it has 1 for
    # both of two large equal numbers, where it is a half.
    "np.logaddexp": lambda x, y: (np.maximum(x, y) == inf) | ((x == y) & (x > 2**23)),
}
"""Where derivatives are not JAX's, and why: docs/arrays.md says so too."""

TIES = np.asarray([[2, 2, 0, -1], [2, 0, 0, -1], [-0.0, 3, 3, 3]], np.float32)
RANKED = np.asarray([[2, 2, 1], [0, 0, 0], [4, -4, 4]], np.float32)
OF_ARRAYS: dict[str, tuple[Callable[..., Any], np.ndarray[Any, Any]]] = {
    "max": (lambda n, lax, nn, x: n.max(x, axis=0), TIES),
    "max of all": (lambda n, lax, nn, x: n.max(x), TIES),
    "min": (lambda n, lax, nn, x: n.min(x, axis=1), TIES),
    "prod": (lambda n, lax, nn, x: n.prod(x, axis=1), TIES),
    "std": (lambda n, lax, nn, x: n.std(x, axis=1), TIES),
    "std of equals": (lambda n, lax, nn, x: n.std(x, axis=1), RANKED[1:2]),
    "var": (lambda n, lax, nn, x: n.var(x, axis=1), RANKED),
    "cumulative_prod": (lambda n, lax, nn, x: n.cumulative_prod(x, axis=1), TIES),
    "sort": (lambda n, lax, nn, x: n.sort(x, axis=1) * n.asarray([1.0, 2, 3, 4]), TIES),
    "clip": (lambda n, lax, nn, x: n.clip(x, 0.0, 3.0), TIES),
    "clip to an array": (lambda n, lax, nn, x: n.clip(x, n.flip(x), None), TIES),
    "where": (lambda n, lax, nn, x: n.where(x != 0, x // x, 0.0), TIES),
    "where of %": (lambda n, lax, nn, x: n.where(x != 0, x % 2.0 + 3.0 % x, 0.0), TIES),
    "diff": (lambda n, lax, nn, x: n.abs(n.diff(x)), TIES),
    "round": (lambda n, lax, nn, x: n.round(x / 2) + n.sign(x) + n.trunc(x), TIES),
    "vector_norm": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1), RANKED),
    "vector_norm 1": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1, ord=1), RANKED),
    "vector_norm 3": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1, ord=3), RANKED),
    "vector_norm 0": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1, ord=0), RANKED),
    "vector_norm inf": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1, ord=inf), RANKED[::2]),
    "vector_norm -inf": (lambda n, lax, nn, x: n.linalg.vector_norm(x, axis=1, ord=-inf), RANKED),
    "matrix_norm": (lambda n, lax, nn, x: n.linalg.matrix_norm(x), RANKED),
    "matrix_norm of 0": (lambda n, lax, nn, x: n.linalg.matrix_norm(x * 0), RANKED),
    "matrix_norm 1": (lambda n, lax, nn, x: n.linalg.matrix_norm(x, ord=1), RANKED),
    "matrix_norm inf": (lambda n, lax, nn, x: n.linalg.matrix_norm(x, ord=inf), RANKED),
    "matrix_norm -inf": (lambda n, lax, nn, x: n.linalg.matrix_norm(x, ord=-inf), RANKED),
    "det": (lambda n, lax, nn, x: n.linalg.det(x), RANKED),
    "logsumexp": (lambda n, lax, nn, x: nn.logsumexp(x, axis=1), np.asarray([[-inf, -inf], [inf, 1], [0, 0]])),
    "softmax": (lambda n, lax, nn, x: nn.softmax(x, axis=1)[:, 0], np.asarray([[-inf, 1], [0, 0], [88, -104]])),
    "cummax": (lambda n, lax, nn, x: lax.cummax(x, 1), TIES),
    "cummin": (lambda n, lax, nn, x: lax.cummin(x, 1), TIES),
    "cumlogsumexp": (lambda n, lax, nn, x: lax.cumlogsumexp(x, 1), TIES),
    "top_k": (lambda n, lax, nn, x: lax.top_k(x, 2)[0] * n.asarray([1.0, 2]), TIES),
    "clamp": (lambda n, lax, nn, x: lax.clamp(n.asarray(0.0), x, n.asarray(3.0)), TIES),
    "windows": (lambda n, lax, nn, x: lax.reduce_window(x, -inf, lax.max, (2, 2), (1, 1), "VALID"), TIES),
    "take": (lambda n, lax, nn, x: n.take(x, n.asarray([0, 0, 2]), axis=1), TIES),
    "complex abs": (lambda n, lax, nn, x: n.abs(x + 1j * x) + n.abs(x * 1j), TIES),
    "complex sign": (lambda n, lax, nn, x: n.real(n.sqrt(x + 0j)), np.abs(TIES) + 1),
    "integer powers": (lambda n, lax, nn, x: x**3 + x**2 + x**1 + x**0, TIES),
    "negative powers": (lambda n, lax, nn, x: x**-1 + x**-2, TIES),
    "powers of arrays": (lambda n, lax, nn, x: x ** n.asarray([1.0, 2, 3, 0.5]), np.abs(TIES)),
    "array powers": (lambda n, lax, nn, x: 2.0**x + (x * 0) ** n.abs(x + 2), TIES),
}


def of_elements() -> dict[str, tuple[Any, Any, int]]:
    """Each pair of functions, stagec's and JAX's, that takes a vector or two and gives floats."""
    found = {}
    for label, ours, theirs in (("np", xp, jnp), ("lax", stagec_arrays.lax, jax.lax), ("nn", stagec_arrays.nn, jax.nn)):
        for name in (name for name in dir(ours) if not name.startswith("_")):
            functions = getattr(ours, name), getattr(theirs, name, None)
            if f"{label}.{name}" in NOT_HERE or None in functions or not isinstance(functions[0], types.FunctionType):
                continue
            for arity in (1, 2):
                try:
                    result = functions[0](*[POINTS[:2]] * arity)
                except (TypeError, ValueError, LookupError, NameError):
                    continue
                if getattr(result, "dtype", None) == np.float32 and hasattr(result, "shape"):
                    found[f"{label}.{name}({'xy'[:arity]})"] = *functions, arity
    return found


OF_ELEMENTS = of_elements()


def derivatives(of: Any, n: Any, jit: Any, functions: Sequence[Any], args: Any) -> list[Sequence[Any]]:
    """Those of the sums of functions, by each argument. One program has all, which compiles sooner."""
    numbers = tuple(range(len(args)))

    def every(*args: Any) -> Any:
        return [of(lambda *args, one=one: n.sum(n.real(one(*args))), numbers)(*args) for one in functions]

    return [list(map(np.asarray, each)) for each in jit(every)(*args)]


def ours(function: Any) -> Any:
    return stagec.jit(function, frontend="arrays")


def test_there_are_many() -> None:
    assert len(OF_ELEMENTS) > 100
    for name in ("np.abs(x)", "np.remainder(xy)", "np.hypot(xy)", "nn.softplus(x)", "lax.lgamma(x)", "np.pow(xy)"):
        assert name in OF_ELEMENTS


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("arity", [1, 2])
def test_of_elements(arity: int, part: int) -> None:
    rows = {name: row for name, row in OF_ELEMENTS.items() if row[2] == arity}
    names = list(rows)[part::8]
    args = PAIRS if arity == 2 else (POINTS,)
    found = derivatives(stagec_arrays.grad, xp, ours, [rows[name][0] for name in names], args)
    wanted = derivatives(jax.grad, jnp, jax.jit, [rows[name][1] for name in names], args)
    for name, one, other in zip(names, found, wanted, strict=True):
        differs = OTHERS.get(name.partition("(")[0], lambda *args: np.zeros(len(args[0]), bool))(*args)
        for a, b in zip(one, other, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            with np.errstate(invalid="ignore"):
                same = np.isclose(a, b, 1e-4, 1e-6, equal_nan=True) | (a == b) | differs
            assert [(*(one[i] for one in args), a[i], b[i]) for i in np.flatnonzero(~same)] == [], name


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_of_arrays(name: str) -> None:
    function, x = OF_ARRAYS[name]
    x = x.astype(np.float32)
    (found,) = derivatives(
        stagec_arrays.grad, xp, ours, [lambda x: function(xp, stagec_arrays.lax, stagec_arrays.nn, x)], (x,)
    )
    (wanted,) = derivatives(jax.grad, jnp, jax.jit, [lambda x: function(jnp, jax.lax, jax.nn, x)], (x,))
    np.testing.assert_allclose(found[0], wanted[0], 1e-4, 1e-5)


def test_a_power_of_zero_has_no_slope() -> None:
    x = np.asarray([0, nan, inf, 2], np.float32)
    (found,) = derivatives(stagec_arrays.grad, xp, ours, [xp.pow], (x, np.zeros_like(x)))
    assert found[0].tolist() == [0] * 4


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "bool", "complex64"])
def test_indices_that_are_outside(dtype: str) -> None:
    """Only a trace does not know that they are."""
    x, rows = np.arange(12).reshape(3, 4).astype(dtype), np.asarray([[0, 9, -1, -4, -5, 3]] * 3)

    def function(n: Any, x: Any, rows: Any) -> tuple[Any, ...]:
        return n.take(x, rows[0], axis=1), n.take(x[0], rows[0]), n.take_along_axis(x, rows, axis=1)

    found = ours(lambda *args: function(xp, *args))(x, rows)
    for one, wanted in zip(found, jax.jit(lambda *args: function(jnp, *args))(x, rows), strict=True):
        assert one.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(one), wanted)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        xp.take(xp.asarray(x), rows[0], axis=1)
