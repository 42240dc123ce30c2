"""Random numbers of functions of `stagec.numpy`, under the names of `jax.random` and with its bits.

    import stagec.random

    key = stagec.random.key(0)
    noise, step = stagec.random.split(key)
    x = stagec.random.normal(noise, (3, 4))

The generator is threefry2x32, partitionable, which is JAX's default (https://docs.jax.dev/en/latest/jax.random.html). A
key is an array of dtype `key<fry>`: it can be indexed and stacked, and passed through loops and to exported functions.
"""

from stagec import numpy as _numpy  # noqa: F401 - it gives arrays their operators
from stagec.arrays.namespace.choices import categorical, choice, permutation, randint
from stagec.arrays.namespace.keys import PRNGKey, bits, fold_in, key, key_data, key_impl, split, wrap_key_data
from stagec.arrays.namespace.samplers import (
    bernoulli,
    exponential,
    gumbel,
    normal,
    truncated_normal,
    uniform,
)

__all__ = [
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "key_data",
    "key_impl",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
    "wrap_key_data",
]
