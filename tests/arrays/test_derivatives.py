"""Derivatives that users steer, under JAX's names: `custom_vjp`, `checkpoint`, `vjp`; and finite differences."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec.lax
import stagec.nn
import stagec.numpy as xp

X, PLACES = np.arange(3.0, dtype=np.float32), np.arange(3)


def steered(n: Any, custom_vjp: Any, checkpoint: Any) -> Any:
    @partial(custom_vjp, nondiff_argnums=(0,))
    def scaled(by: float, x: Any, i: Any) -> Any:
        return {"a": x * by, "b": x + i}

    def backward(by: float, needed: Any, g: Any) -> Any:  # another derivative than the function's
        return g["a"] * by * 10 + g["b"] * needed[0], None

    scaled.defvjp(lambda by, x, i: (scaled(by, x, i), (x,)), backward)

    @partial(checkpoint, static_argnums=(1,))
    def again(x: Any, by: int) -> Any:
        return n.sin(x * by)

    def function(x: Any, i: Any) -> Any:
        found = scaled(3.0, x, i)
        return n.sum(found["a"] * found["b"]) + n.sum(again(x, 2)) + n.sum(scaled(2.0, x, i=i)["a"])

    return function


def test_steered_derivatives_are_jaxs() -> None:
    ours, theirs = (
        steered(xp, stagec.custom_vjp, stagec.checkpoint),
        steered(jnp, jax.custom_vjp, jax.checkpoint),
    )
    (value, pull), (wanted, wanted_pull) = stagec.vjp(ours, X, PLACES), jax.vjp(theirs, X, PLACES)
    np.testing.assert_allclose(float(value), float(wanted), 1e-6)
    (of_x, of_i), (wanted_of_x, _) = pull(np.float32(2)), wanted_pull(np.float32(2))
    np.testing.assert_allclose(np.asarray(of_x), wanted_of_x, 1e-5)
    assert (of_i.dtype, of_i.shape) == (jax.dtypes.float0, (3,))
    twice = stagec.jit(stagec.grad(lambda x: xp.sum(stagec.grad(ours)(x, PLACES) ** 2)), frontend="arrays")
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(theirs)(x, PLACES) ** 2)))(X)
    np.testing.assert_allclose(np.asarray(twice(X)), wanted, 1e-5)
    found, pull, aux = stagec.vjp(lambda x: (x * 2, {"x": x}), X, has_aux=True)
    assert [float(one[2]) for one in (found, pull(X)[0], aux["x"])] == [4, 4, 2]


def test_a_derivative_that_does_not_fit() -> None:
    @stagec.custom_vjp
    def function(x: Any) -> Any:
        return x

    for backward, message in (
        (lambda x, g: g, "gives a tuple with the cotangent of each of 1 arguments, not a Array"),
        (lambda x, g: (g, g), "of each of 1 arguments, not 2"),
        (lambda x, g: (g[:1],), r"a cotangent of argument 0 has shape \(1,\), the argument \(3,\)"),
        (lambda x, g: ({"a": g},), "the cotangent of argument 0 has structure"),
    ):
        function.defvjp(lambda x: (x, x), backward)
        with pytest.raises((TypeError, ValueError), match=message):
            stagec.grad(lambda x: xp.sum(function(x)))(X)


def smooth(x: Any, kernel: Any) -> Any:
    """What has a derivative everywhere where nothing is equal."""
    lax, nn = stagec.lax, stagec.nn
    image = xp.reshape(x, (1, 4, 3, 2))
    layout = ("NHWC", "HWIO", "NHWC")
    parts = [
        lax.conv_general_dilated(image, kernel, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=layout),
        lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 2), "SAME"),
        lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "VALID"),
        *(lax.cumprod(x, 1), lax.cummax(x, 0), lax.cumlogsumexp(x, 1), lax.sort((x, x * 2), num_keys=2)[1]),
        *(lax.top_k(x, 3)[0], nn.softmax(x), nn.gelu(x), nn.logsumexp(x, axis=0), nn.standardize(x)),
        lax.scatter_mul(
            x,
            np.array([[0], [2], [0]]),
            xp.stack([x[1], x[0], x[3]]),
            lax.ScatterDimensionNumbers((1,), (0,), (0,)),
        ),
    ]
    return sum(xp.sum(xp.sin(part)) for part in parts)


def test_finite_differences() -> None:
    """In a direction, in f64, through what no test compares with JAX's derivative alone."""
    rng = np.random.default_rng(1)
    with stagec.enable_x64():
        arguments = [rng.normal(size=(4, 6)), rng.normal(size=(2, 2, 2, 3))]
        direction = [rng.normal(size=one.shape) for one in arguments]
        both = stagec.jit(stagec.value_and_grad(smooth, (0, 1)), frontend="arrays")
        after, before = (
            float(both(*(a + sign * 1e-6 * b for a, b in zip(arguments, direction, strict=True)))[0])
            for sign in (1, -1)
        )
        gradients = both(*arguments)[1]
        slope = sum(float(np.vdot(np.asarray(g), b)) for g, b in zip(gradients, direction, strict=True))
        assert (after - before) / 2e-6 == pytest.approx(slope, rel=1e-6)
