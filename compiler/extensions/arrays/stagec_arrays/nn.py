"""Activations of functions of `stagec_arrays.numpy`, under the names and with the values and derivatives of `jax.nn`.

https://docs.jax.dev/en/latest/jax.nn.html
"""

from stagec_arrays import numpy as _numpy  # noqa: F401 - it gives arrays their operators
from stagec_arrays.namespace.activations import (
    elu as elu,
    gelu as gelu,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    one_hot as one_hot,
    relu as relu,
    relu6 as relu6,
    selu as selu,
    sigmoid as sigmoid,
    silu as silu,
    softmax as softmax,
    softplus as softplus,
    standardize as standardize,
    swish as swish,
    tanh as tanh,
)
