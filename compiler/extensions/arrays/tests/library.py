"""What functions of arrays are written with, so that the same code runs with JAX and with stagec."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Library(NamedTuple):
    """JAX or stagec: a namespace of arrays, `lax`, `nn`, `random`, and what the package itself has."""

    xp: Any
    lax: Any
    nn: Any
    random: Any
    shard_map: Callable[..., Any]
    P: Any
    value_and_grad: Callable[..., Any]
    custom_vjp: Callable[..., Any]
    checkpoint: Callable[..., Any]


def stagecs() -> Library:
    """Return that of stagec."""
    import stagec
    import stagec_arrays.numpy
    from stagec_arrays import lax, nn, random

    transformations = stagec_arrays.value_and_grad, stagec_arrays.custom_vjp, stagec_arrays.checkpoint
    return Library(
        stagec_arrays.numpy, lax, nn, random, stagec_arrays.shard_map, stagec.PartitionSpec, *transformations
    )


def jaxs() -> Library:
    """Return that of JAX."""
    import jax
    import jax.numpy

    transformations = jax.value_and_grad, jax.custom_vjp, jax.checkpoint
    return Library(jax.numpy, jax.lax, jax.nn, jax.random, jax.shard_map, jax.P, *transformations)
