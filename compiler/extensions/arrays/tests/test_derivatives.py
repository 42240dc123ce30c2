"""Derivatives that users steer, under JAX's names: `custom_vjp`, `checkpoint`, `vjp`; and finite differences.

Modules: `stagec_arrays/namespace/flat.py`, `stagec_arrays/namespace/policies.py`,
`stagec_arrays/namespace/transformations.py`, `stagec_arrays/primitives/calls.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.nn
import stagec_arrays.numpy as xp
from compiler.extensions.arrays.tests import mistakes

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
        steered(xp, stagec_arrays.custom_vjp, stagec_arrays.checkpoint),
        steered(jnp, jax.custom_vjp, jax.checkpoint),
    )
    (value, pull), (wanted, wanted_pull) = stagec_arrays.vjp(ours, X, PLACES), jax.vjp(theirs, X, PLACES)
    np.testing.assert_allclose(float(value), float(wanted), 1e-6)
    (of_x, of_i), (wanted_of_x, _) = pull(np.float32(2)), wanted_pull(np.float32(2))
    np.testing.assert_allclose(np.asarray(of_x), wanted_of_x, 1e-5)
    assert (of_i.dtype, of_i.shape) == (jax.dtypes.float0, (3,))
    twice = stagec.jit(
        stagec_arrays.grad(lambda x: xp.sum(stagec_arrays.grad(ours)(x, PLACES) ** 2)), frontend="arrays"
    )
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(theirs)(x, PLACES) ** 2)))(X)
    np.testing.assert_allclose(np.asarray(twice(X)), wanted, 1e-5)
    found, pull, aux = stagec_arrays.vjp(lambda x: (x * 2, {"x": x}), X, has_aux=True)
    assert [float(one[2]) for one in (found, pull(X)[0], aux["x"])] == [4, 4, 2]


def policies(of: Any) -> dict[str, Any]:
    """Policies of stagec's or JAX's."""
    by_name = of.save_only_these_names("mixed")
    return {
        "none": None,
        "everything": of.everything_saveable,
        "nothing": of.nothing_saveable,
        "dots": of.dots_saveable,
        "no batch": of.checkpoint_dots_with_no_batch_dims,
        "only": of.save_only_these_names("scores"),
        "any but": of.save_any_names_but_these("scores"),
        "except": of.save_anything_except_these_names("scores"),
        "both": of.save_from_both_policies(by_name, of.dots_with_no_batch_dims_saveable),
    }


def attention(n: Any, checkpoint: Any, name: Any, policy: Any) -> Any:
    """A loss with products that have batch axes, ones that have none, and values with names."""

    def block(x: Any, w: Any) -> Any:
        h = n.sin(x @ w[0])
        scores = n.sin(name(h @ h.mT, "scores"))
        return n.sin(n.sin(n.sin(name({"h": scores @ h}, "mixed")["h"]) @ w[1]) @ w[2])

    return lambda x, w: n.sum(checkpoint(block, policy=policy)(x, w) ** 2)


def test_policies_of_checkpoints_keep_what_jaxs_keep() -> None:
    """The gradient's program has as many products as JAX's, and values are the same."""
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(3, 4, 4)).astype(np.float32) / 2
    theirs = {
        name: jax.value_and_grad(attention(jnp, jax.checkpoint, checkpoint_name, policy), (0, 1))
        for name, policy in policies(jax.checkpoint_policies).items()
    }
    ours = {
        name: stagec_arrays.value_and_grad(
            attention(xp, stagec_arrays.checkpoint, stagec_arrays.checkpoint_name, policy), (0, 1)
        )
        for name, policy in policies(stagec_arrays.checkpoint_policies).items()
    }
    products = {}
    for name, function in ours.items():
        program = stagec.jit(function, frontend="arrays").trace(x, w).as_text()
        products[name] = program.count("= dot_general")
        assert products[name] == str(jax.make_jaxpr(theirs[name])(x, w)).count("= dot_general"), name
    assert (products["everything"], products["no batch"], products["both"], products["none"]) == (15, 17, 16, 20)

    def both(grad: Any, n: Any, function: Any, x: Any, w: Any) -> Any:
        """Derivatives, and those of them."""
        return function(x, w), grad(lambda x: n.sum(function(x, w)[1][0] ** 2))(x)

    wanted = jax.jit(lambda x, w: both(jax.grad, jnp, theirs["none"], x, w))(x, w)
    found = stagec.jit(lambda x, w: both(stagec_arrays.grad, xp, ours["both"], x, w), frontend="arrays")(x, w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, 1e-4, 1e-4)


def layers(n: Any, lax: Any, checkpoint: Any, policy: Any) -> Any:
    """A loss of layers in a loop, of each of which a part is a checkpoint."""

    def part(x: Any, w: Any) -> Any:
        return n.sin(n.sin(x @ w[0]) @ w[1])

    def turn(x: Any, w: Any) -> Any:
        y = checkpoint(part, policy=policy)(x, w)
        return n.sin(y), n.sum(y)

    return lambda x, w: n.sum(lax.scan(turn, x, w)[0] ** 2)


def test_policies_of_checkpoints_in_a_loop() -> None:
    """What they keep of each turn is not computed again: two products of four, as in JAX."""
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(5, 2, 4, 4)).astype(np.float32) / 2
    dots = jax.checkpoint_policies.dots_saveable, stagec_arrays.checkpoint_policies.dots_saveable
    products = []
    for theirs, ours in ((None, None), dots):
        function = jax.value_and_grad(layers(jnp, jax.lax, jax.checkpoint, theirs), (0, 1))
        own = stagec_arrays.value_and_grad(layers(xp, stagec_arrays.lax, stagec_arrays.checkpoint, ours), (0, 1))
        traced = stagec.jit(own, frontend="arrays").trace(x, w)
        texts = str(jax.make_jaxpr(function)(x, w)), traced.as_text()
        products.append([text.count("= dot_general") for text in texts])
    # Of ours, two are of the loop that keeps what is carried; without a policy also two that give what sin is of.
    assert products == [[8, 12], [6, 8]]
    found = traced.lower().compile().call_flat([x, w])
    for a, b in zip(found, jax.tree.leaves(jax.jit(function)(x, w)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, 1e-4, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        (
            lambda x: [stagec_arrays.checkpoint(xp.sin, policy=jax.checkpoint_policies.dots_saveable)(x)],
            TypeError,
            "checkpoint: the policy is JAX's; write the one of its name in stagec_arrays.checkpoint_policies",
        ),
        (
            lambda x: [stagec_arrays.checkpoint(xp.sin, policy=lambda *_, **__: None)(x)],
            TypeError,
            "checkpoint: the policy says None of sin; write True where its results are kept, and False elsewhere",
        ),
    ],
)
def test_a_policy_that_is_none(case: Any) -> None:
    mistakes.check(case, X)


def test_a_derivative_that_does_not_fit() -> None:
    @stagec_arrays.custom_vjp
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
            stagec_arrays.grad(lambda x: xp.sum(function(x)))(X)


def smooth(x: Any, kernel: Any) -> Any:
    """What has a derivative everywhere where nothing is equal."""
    lax, nn = stagec_arrays.lax, stagec_arrays.nn
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
    with stagec_arrays.enable_x64():
        arguments = [rng.normal(size=(4, 6)), rng.normal(size=(2, 2, 2, 3))]
        direction = [rng.normal(size=one.shape) for one in arguments]
        both = stagec.jit(stagec_arrays.value_and_grad(smooth, (0, 1)), frontend="arrays")
        after, before = (
            float(both(*(a + sign * 1e-6 * b for a, b in zip(arguments, direction, strict=True)))[0])
            for sign in (1, -1)
        )
        gradients = both(*arguments)[1]
        slope = sum(float(np.vdot(np.asarray(g), b)) for g, b in zip(gradients, direction, strict=True))
        assert (after - before) / 2e-6 == pytest.approx(slope, rel=1e-6)
