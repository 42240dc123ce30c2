"""`stagec_arrays.numpy` with each of its functions inside `stagec.jit`: what array-api-tests are given the second time.

ARRAY_API_TESTS_MODULE="exec('from compiler.extensions.arrays.tests.jitted import xp')" pytest array_api_tests
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import stagec
import stagec_arrays.numpy
from stagec_arrays import pytrees
from stagec_arrays.execution import Array

OUTSIDE = {
    *("asarray", "from_dlpack", "nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"),
    *("finfo", "iinfo", "isdtype", "can_cast", "result_type", "broadcast_shapes", "enable_x64", "symbolic_shape"),
}
"""Functions that do not take or do not give arrays, or whose shapes depend on elements."""


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is traced again for each call, with the arrays among its arguments as those of `jit`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytrees.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Array)]

        def inner(*arrays: Any) -> Any:
            given = list(leaves)
            for i, one in zip(places, arrays, strict=True):
                given[i] = one
            positional, named = structure.unflatten(given)
            return function(*positional, **named)

        return stagec.jit(inner, frontend="arrays")(*(leaves[i] for i in places))

    return call


def namespace(module: types.ModuleType) -> types.ModuleType:
    """Return a module with the names of another, of which each function is traced, and each module made so too."""
    found = types.ModuleType(f"{module.__name__}_jitted", __doc__)
    for name in getattr(module, "__all__", dir(module)):
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            value = namespace(value)
        elif isinstance(value, types.FunctionType) and name not in OUTSIDE and not name.startswith("__"):
            value = jitted(value)
        setattr(found, name, value)
    return found


xp = namespace(stagec_arrays.numpy)
