"""Activations: the values of `jax.nn` bit for bit, and its derivatives.

Modules: `stagec_arrays/namespace/activations.py`, `stagec_arrays/nn.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.nn
import stagec_arrays.numpy as xp

X = np.array([[-np.inf, -3.5, -0.5, -0.0, 0.0], [0.7, 1.0, 5.9, 6.0, 30.0], [-1.25, 2.0, 0.1, -8.0, 3.0]], np.float32)
NORMAL = X[1:]
MASK = np.array([[True, False, True, True, False], [False, False, False, True, True]])
OF_ONE: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: lambda nn, x, name=name: getattr(nn, name)(x)
        for name in (
            *("relu", "relu6", "sigmoid", "softplus", "silu", "swish", "elu", "leaky_relu", "selu", "tanh"),
            *("log_sigmoid", "log_softmax", "softmax", "logsumexp", "standardize"),
        )
    },
    "gelu": lambda nn, x: nn.gelu(x[1:]),
    "gelu_of_erf": lambda nn, x: nn.gelu(x[1:], approximate=False),
    "elu_2": lambda nn, x: nn.elu(x, 2.0),
    "leaky_relu_2": lambda nn, x: nn.leaky_relu(x, 0.2),
    "softmax_0": lambda nn, x: nn.softmax(x, axis=0),
    "softmax_where": lambda nn, x: nn.softmax(x[1:], where=MASK),
    "log_softmax_where": lambda nn, x: nn.log_softmax(x[1:], axis=(0, 1), where=MASK),
    "logsumexp_all": lambda nn, x: nn.logsumexp(x, axis=1, keepdims=True),
    "logsumexp_where": lambda nn, x: nn.logsumexp(x[1:], axis=1, where=MASK),
    "logsumexp_b": lambda nn, x: nn.logsumexp(x[1:], axis=0, b=np.array([[0.0], [-2.0]], x.dtype), return_sign=True),
    "logsumexp_nan": lambda nn, x: nn.logsumexp(x[1:], axis=1, b=np.asarray(-2.0, x.dtype)),
    "standardize_stable": lambda nn, x: nn.standardize(x[1:], 0, epsilon=1e-3, algorithm="stable"),
    "standardize_where": lambda nn, x: nn.standardize(x[1:], where=MASK, mean=np.asarray(0.5, x.dtype)),
}


def leaves(tree: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(one) for one in jax.tree.leaves(tree)]


@pytest.mark.pinned(but=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_derivatives_are_jaxs(dtype: str) -> None:
    """Values in one program, bit for bit; derivatives in another, of f32."""
    x = X.astype(dtype)

    def values(nn: Any, x: Any) -> Any:
        return {name: function(nn, x) for name, function in OF_ONE.items()}

    wanted = jax.jit(lambda x: values(jax.nn, x))(x)
    found = stagec.jit(lambda x: values(stagec_arrays.nn, x), frontend="arrays")(x)
    for name in OF_ONE:
        for ours, theirs in zip(leaves(found[name]), leaves(wanted[name]), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32), name)

    if dtype == "bfloat16":  # the rules of derivatives are the same
        return

    def gradients(grad: Any, n: Any, nn: Any, x: Any) -> Any:
        def total(function: Any) -> Any:
            return lambda x: sum(n.sum(n.astype(leaf, "float32") * 3.0) for leaf in jax.tree.leaves(function(nn, x)))

        return {name: grad(total(function))(x) for name, function in OF_ONE.items()}

    wanted = jax.jit(lambda x: gradients(jax.grad, jnp, jax.nn, x))(x)
    found = stagec.jit(lambda x: gradients(stagec_arrays.grad, xp, stagec_arrays.nn, x), frontend="arrays")(x)
    for name in OF_ONE:
        ours, theirs = (np.asarray(one) for one in (found[name], wanted[name]))
        np.testing.assert_allclose(ours, theirs, 2e-6, 2e-6, err_msg=name)


def test_outside_of_a_trace() -> None:
    for name in ("relu", "softmax", "logsumexp", "silu"):
        found, wanted = (OF_ONE[name](nn, NORMAL) for nn in (stagec_arrays.nn, jax.nn))
        np.testing.assert_array_equal(np.asarray(found), wanted, name)
    classes = np.array([[0, 2], [3, -1]])
    for axis in (-1, 0):
        wanted = jax.nn.one_hot(classes, 3, axis=axis)
        np.testing.assert_array_equal(np.asarray(stagec_arrays.nn.one_hot(classes, 3, axis=axis)), wanted)
    assert stagec_arrays.nn.one_hot(classes, 3, dtype="int8").dtype == np.int8
    assert stagec_arrays.nn.relu(np.array([-1, 2])).dtype == np.int32
    assert float(stagec_arrays.nn.relu(-1.0)) == 0


def test_mistakes() -> None:
    with pytest.raises(ValueError, match='algorithm is "fast" or "stable", not \'slow\''):
        stagec_arrays.nn.standardize(X, algorithm="slow")
    with pytest.raises(IndexError, match="axis 2 is out of range for an array of 2 dimensions"):
        stagec_arrays.nn.softmax(X, axis=2)
