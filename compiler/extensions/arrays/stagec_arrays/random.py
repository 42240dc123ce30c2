"""Random numbers of functions of `stagec_arrays.numpy`, under the names of `jax.random` and with its bits.

    import stagec_arrays.random

    key = stagec_arrays.random.key(0)
    noise, step = stagec_arrays.random.split(key)
    x = stagec_arrays.random.normal(noise, (3, 4))

The generator is threefry2x32, partitionable, which is JAX's default (https://docs.jax.dev/en/latest/jax.random.html). A
key is an array of dtype `key<fry>`: it can be indexed and stacked, and passed through loops and to exported functions.
"""

from stagec_arrays import numpy as _numpy  # noqa: F401 - it gives arrays their operators
from stagec_arrays.namespace.keys import (
    PRNGKey as PRNGKey,
    bits as bits,
    fold_in as fold_in,
    key as key,
    key_data as key_data,
    key_impl as key_impl,
    split as split,
    wrap_key_data as wrap_key_data,
)
from stagec_arrays.namespace.samplers import (
    bernoulli as bernoulli,
    categorical as categorical,
    choice as choice,
    exponential as exponential,
    gumbel as gumbel,
    normal as normal,
    permutation as permutation,
    randint as randint,
    truncated_normal as truncated_normal,
    uniform as uniform,
)
