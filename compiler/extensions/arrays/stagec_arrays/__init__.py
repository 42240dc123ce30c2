"""Array functions traced by stagec itself, on numpy and jaxlib alone: the arrays frontend, without JAX.

Three layers, from the bottom to the top:

1. Values and their rules: `dtypes` (kinds, promotion), `dims` (symbolic sizes), `values` (what is known of an array),
   `program` (a function as a list of equations), `tracing` (running a function to get its program), `lowering` (a
   program to StableHLO), `execution` (arrays outside a trace), `binding` (an operation goes to one or the other).
2. `primitives`: the table of operations, each with its rule of shapes, its lowering and its derivative.
3. `namespace`: the Python array API standard (https://data-apis.org/array-api/2025.12/) and parts of JAX's API, written
   with primitives.

`primitives.derivatives` turns a program into that of its vector-Jacobian product, `modules` into a module in the form
of `jax.export`. The public faces are this package, `numpy`, `lax`, `nn` and `random`. ARCHITECTURE.md beside this
package says how to add a primitive, a function and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.core.faces import lazily

if TYPE_CHECKING:
    from stagec_arrays import lax as lax, nn as nn, numpy as numpy, random as random
    from stagec_arrays.dims import symbolic_shape as symbolic_shape
    from stagec_arrays.dtypes import enable_x64 as enable_x64
    from stagec_arrays.namespace.parallel import set_mesh as set_mesh, shard_map as shard_map
    from stagec_arrays.namespace.policies import (
        checkpoint_name as checkpoint_name,
        checkpoint_policies as checkpoint_policies,
    )
    from stagec_arrays.namespace.transformations import (
        checkpoint as checkpoint,
        custom_vjp as custom_vjp,
        grad as grad,
        stop_gradient as stop_gradient,
        value_and_grad as value_and_grad,
        vjp as vjp,
    )
    from stagec_arrays.primitives.contractions import default_matmul_precision as default_matmul_precision
    from stagec_arrays.pytrees import (
        register_dataclass as register_dataclass,
        register_pytree_node as register_pytree_node,
    )
    from stagec_arrays.values import ShapeDtypeStruct as ShapeDtypeStruct

_MODULES = {
    "dims": ("symbolic_shape",),
    "dtypes": ("enable_x64",),
    "namespace.parallel": ("set_mesh", "shard_map"),
    "namespace.policies": ("checkpoint_name", "checkpoint_policies"),
    "namespace.transformations": ("checkpoint", "custom_vjp", "grad", "stop_gradient", "value_and_grad", "vjp"),
    "primitives.contractions": ("default_matmul_precision",),
    "pytrees": ("register_dataclass", "register_pytree_node"),
    "values": ("ShapeDtypeStruct",),
}
_NAMES = tuple(name for names in _MODULES.values() for name in names)
_NAMESPACES = "lax", "nn", "numpy", "random"
if not TYPE_CHECKING:  # type checkers take the names that are imported as themselves above
    __all__ = list(_NAMES + _NAMESPACES)

# `numpy` gives arrays their operators.
__getattr__ = lazily(__name__, _MODULES, _NAMESPACES, first="numpy")


def __dir__() -> list[str]:
    return [*_NAMES, *_NAMESPACES]
