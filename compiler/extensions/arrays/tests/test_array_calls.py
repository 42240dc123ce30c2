"""Calls of functions of `stagec.jit`: which calls differ, which are refused and where, and sizes as numbers.

Modules: `stagec_arrays/locations.py`, `stagec_arrays/frontend/staging.py`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.numpy as xp
from stagec_arrays import random

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    return stagec.jit(function, frontend="arrays", **options)


def test_static_arguments_that_are_equal_are_told_apart_by_type() -> None:
    function = jit(lambda x, by: x + 100 if isinstance(by, bool) else x * by, static_argnums=1)
    assert [float(function(2.0, by)) for by in (1, True, 1.0)] == [2, 102, 2]
    assert [function(np.int32(2), by).dtype for by in (1, 1.0)] == [np.int32, np.float32]


def test_a_call_is_compiled_for_the_settings_around_it() -> None:
    traces = []
    function = jit(lambda x: (traces.append(1), x @ x.T)[1])
    for _ in range(2):
        function(X)
        with stagec_arrays.default_matmul_precision("highest"):
            function(X)
        with stagec_arrays.set_mesh(stagec.Mesh((1,), ("d",))):
            function(X)
    assert len(traces) == 3


def test_arrays_of_64_bits_stay_so() -> None:
    with stagec_arrays.enable_x64():
        wide = xp.asarray(1.5)
    assert (jit(lambda x: x * 2)(wide).dtype, (wide * 2).dtype) == (np.float64, np.float64)
    assert (xp.ones(1, dtype="uint32") + xp.ones(1, dtype="int32")).dtype == np.int32


def test_arrays_of_another_byte_order() -> None:
    swapped = np.arange(3, dtype=">i4")
    for found in (xp.asarray(swapped), jit(lambda x: x)(swapped), xp.zeros(3, dtype="int32") + swapped):
        np.testing.assert_array_equal(np.asarray(found), [0, 1, 2])


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"static_argnums": 7}, (1.0, 2), "static_argnums has 7, and it takes 2 arguments by position"),
        ({"static_argnames": "z"}, (1.0, 2), "static_argnames has 'z', and it takes x, y"),
        ({"donate_argnums": 2}, (1.0, 2), "donate_argnums has 2"),
        ({"donate_argnums": 1, "static_argnums": 1}, (1.0, 2), "argument 1 is static, so it cannot be donated"),
        ({}, (1.0, 2**40), "an argument is 1099511627776, which is out of the range of int32"),
        ({}, (1.0, stagec_arrays.ShapeDtypeStruct((2,), "float32")), r"ShapeDtypeStruct\(f32\[2\]\) has no elements"),
        (
            {},
            (1.0, stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("n"), "float32")),
            "has no elements: a call takes",
        ),
    ],
)
def test_calls_that_are_refused(options: dict[str, Any], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError), match=message):
        jit(lambda x, y: x * y, **options)(*args)


def test_what_was_donated_is_named() -> None:
    x = xp.asarray(X)
    jit(lambda x: x + 1, donate_argnums=0)(x)
    for use in (lambda: x + 1, lambda: jit(lambda x: x)(x)):
        with pytest.raises(stagec.CallError, match="this array was donated to a call; use the call's result"):
            use()


def test_what_jax_traces_is_refused_by_a_call() -> None:
    with pytest.raises(TypeError, match="JAX traces this value"):
        jax.jit(jit(lambda y: y * 2).__call__)(2.0)


def test_a_size_is_a_number_of_a_program() -> None:
    """A symbolic one is in arithmetic of arrays what it is in JAX's."""

    def function(n: Any, x: Any) -> Any:
        size = x.shape[0]
        return [x * size, size - x, 1 / size * x, size / 2 + x, x**size, x % size, x < size, size > x, n.sum(x) / size]

    struct = stagec_arrays.ShapeDtypeStruct((*stagec_arrays.symbolic_shape("rows"), 3), "float32")
    exported = (
        jit(lambda x: [*function(xp, x), xp.asarray(x.shape[0]), xp.full((2,), x.shape[0])]).trace(struct).export()
    )
    wanted = [*function(jnp, X), np.int32(2), np.full(2, 2, np.int32)]
    for found, one in zip(exported.call(X), wanted, strict=True):
        np.testing.assert_allclose(found, one, 1e-6)


def test_numbers_from_a_size_down() -> None:
    struct = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("n"), "float32")

    def function(x: Any) -> list[Any]:
        return [xp.arange(x.shape[0], 0, step) for step in (-1, -2)] + [xp.arange(1, x.shape[0], 3)]

    for size in (4, 5, 7):
        found = jit(function).trace(struct).export().call(np.ones(size, np.float32))
        wanted = [np.arange(size, 0, -1), np.arange(size, 0, -2), np.arange(1, size, 3)]
        assert [one.tolist() for one in found] == [one.tolist() for one in wanted]


def test_loops_without_turns() -> None:
    def function(lax: Any, n: Any, x: Any) -> Any:
        return [
            lax.scan(lambda c, r: (c * r, c), x[0], x[:0]),
            lax.scan(lambda c, r: (c + n.sum(r), c), 0, x[:0]),
            lax.map(lambda r: r * 2, x[:0]),
        ]

    wanted = jax.tree.leaves(function(jax.lax, jnp, X))
    for found in (function(stagec_arrays.lax, xp, xp.asarray(X)), jit(lambda x: function(stagec_arrays.lax, xp, x))(X)):
        for a, b in zip(jax.tree.leaves(found), wanted, strict=True):
            assert (np.asarray(a).tolist(), a.shape, a.dtype) == (b.tolist(), b.shape, b.dtype)
    gradient = stagec_arrays.grad(
        lambda x: xp.sum(stagec_arrays.lax.scan(lambda c, r: (c * r, c), x[0], x[:0])[0] ** 2)
    )(X)
    np.testing.assert_array_equal(np.asarray(gradient), [2 * X[0], 0 * X[1]])


def test_small_dtypes_have_limits() -> None:
    """Of int4 NumPy knows none, and float8_e4m3fn has no infinity."""
    four, eight = xp.asarray([7, -8, 3], dtype="int4"), xp.asarray([7, -8, 3], dtype=ml_dtypes.float8_e4m3fn)
    assert [int(xp.max(four)), int(xp.argmax(four)), int(xp.clip(four, -2, 100)[1])] == [7, 0, -2]
    assert [float(xp.max(eight)), float(xp.min(eight))] == [7, -8]
    assert xp.asarray([5, 6])[xp.asarray([1], dtype="int4")].tolist() == [6]
    assert "abc"[xp.asarray(1, dtype="int4")] == "b"
    with pytest.raises(OverflowError, match="100 is out of the range of int4"):
        four + 100


def test_numbers_are_formatted_as_pythons() -> None:
    assert f"{xp.asarray(1.5):.3f}" == "1.500"


def test_elements_are_divided_and_raised() -> None:
    x = X + 1
    for name, by in (("divide", 2.0), ("power", 3.0)):
        wanted = getattr(jnp.asarray(x).at[0], name)(by)
        np.testing.assert_allclose(np.asarray(getattr(xp.asarray(x).at[0], name)(by)), wanted, 1e-6)


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x + np.ones(5, np.float32), "do not broadcast"),
    (lambda x: x & x, "and: expected an array"),
    (lambda x: xp.sum(x, axis=5), "axis 5 is out of range"),
    (lambda x: x[9], "index 9 is out of range|out of bounds"),
    (lambda x: xp.full((2,), "a"), "full: expected one number, not 'a'"),
    (lambda x: xp.arange(0, 5, 0), "arange: step is 0"),
    (lambda x: xp.repeat(x, -1), "a size is 0 or more, not -1"),
    (lambda x: xp.tile(x, (1.5,)), "a size is an integer, not 1.5"),
    (lambda x: xp.roll(x, (1, 2), axis=0), "roll: 2 shifts are given for 1 axes"),
    (lambda x: stagec_arrays.lax.scan(lambda c, r: (c, r), 0.0, (x, x[:1])), "and length, are one size, not 1, 2"),
    (lambda x: stagec_arrays.lax.scan(lambda c, r: (c, r), 0.0, None), "xs has no arrays.*; give length"),
    (lambda x: stagec_arrays.lax.fori_loop(0, 2.5, lambda i, v: v, x), "a bound is one integer, not float32"),
    (lambda x: stagec_arrays.lax.cond(x, lambda: 1, lambda: 2), "expected one bool"),
    (lambda x: stagec_arrays.grad(xp.sum, argnums=3)(x) * 1, "argnums is 3, and 1 arguments are given"),
    (lambda x: stagec_arrays.grad(xp.sum, has_aux=True)(x)[0], "has_aux: the function gives a pair"),
    (
        lambda x: stagec_arrays.vjp(lambda v: v * 2, x)[1](X.astype(np.int32)),
        "a cotangent is of int32, its result of float32",
    ),
    (lambda x: random.normal(x, (3,)), "normal takes a key"),
    (lambda x: random.wrap_key_data(x) and x, "the words of a key are uint32 in a last dimension of size 2"),
    (lambda x: xp.astype(x * 1j, "float32"), "complex64 would lose its imaginary part as float32; write real"),
    (lambda x: xp.asarray(1j, dtype="float32") * x, "asarray: complex128 would lose its imaginary part"),
    (
        lambda x: stagec_arrays.lax.cond(True, lambda: x, lambda: x[0]),
        r"other avals: false_fun \(f32\[3\]\), true_fun \(f32\[2,3\]\)",
    ),
    (lambda x: xp.linalg.inv(x) * 1, "inv: expected square matrices"),
]


@pytest.mark.parametrize(("function", "message"), MISTAKES)
def test_a_mistake_in_a_trace_has_the_users_line(function: Callable[[Any], Any], message: str) -> None:
    code = function.__code__
    with pytest.raises((TypeError, ValueError, IndexError), match=message) as eager:
        function(xp.asarray(X))
    with pytest.raises(eager.type, match=message) as traced:
        jit(function).trace(X)
    place = re.escape(f"{code.co_filename}:{code.co_firstlineno}: ")
    assert re.match(place, str(traced.value))
    assert len(re.findall(place, str(traced.value))) == 1


def test_a_forward_rule_that_gives_no_pair() -> None:
    function = stagec_arrays.custom_vjp(lambda x: x)
    function.defvjp(lambda x: x, lambda needed, g: (g,))
    with pytest.raises(TypeError, match="<lambda> gives a pair: the result, and what bwd needs"):
        stagec_arrays.grad(function)(1.0)


def test_what_the_user_raises_stays_as_it_is() -> None:
    def function(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        jit(function).trace(X)


def test_a_result_that_is_not_an_array_names_the_function() -> None:
    def function(x: Any) -> Any:
        return "a"

    line = function.__code__.co_firstlineno
    with pytest.raises(TypeError, match=rf"^{re.escape(__file__)}:{line}: a result is a str, which is not an array"):
        jit(function).trace(X)


def test_a_value_that_leaked_out_names_the_line() -> None:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1]).trace(X)
    with pytest.raises(stagec_arrays.tracing.LeakedTracer, match=rf"is used outside it, at {re.escape(__file__)}:\d+;"):
        kept[0] + 1
