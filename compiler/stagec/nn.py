"""Activations of functions of `stagec.numpy`, under the names and with the values and derivatives of `jax.nn`.

https://docs.jax.dev/en/latest/jax.nn.html
"""

from stagec import numpy as _numpy  # noqa: F401 - it gives arrays their operators
from stagec.arrays.namespace.activations import (
    elu,
    gelu,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)

__all__ = [
    "elu",
    "gelu",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
]
