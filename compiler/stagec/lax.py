"""Control flow and derivatives of functions of `stagec.numpy`, under the names and with the semantics of `jax.lax`.

`cond`, `switch`, `while_loop`, `fori_loop`, `scan` and `map` take functions and pytrees of arrays
(https://docs.jax.dev/en/latest/jax.lax.html#control-flow-operators). They work in a trace and outside of one.
"""

from stagec.arrays.namespace import array_object as _array_object  # noqa: F401 - it gives arrays their operators
from stagec.arrays.namespace.control import cond, fori_loop, map, scan, switch, while_loop  # noqa: A004 - JAX's name
from stagec.arrays.namespace.parallel import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    with_sharding_constraint,
)
from stagec.arrays.namespace.transformations import stop_gradient

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "cond",
    "fori_loop",
    "map",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "scan",
    "stop_gradient",
    "switch",
    "while_loop",
    "with_sharding_constraint",
]
