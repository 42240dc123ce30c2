"""Functions of elements, sorting and barriers, under the names of `jax.lax`.

https://docs.jax.dev/en/latest/jax.lax.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagec_arrays import binding, dtypes, pytrees, tracing
from stagec_arrays.namespace.promotion import array_of, inexact, like, named, promoted
from stagec_arrays.primitives import elementwise as p, sorting
from stagec_arrays.primitives.calls import BARRIER, call_custom_vjp
from stagec_arrays.primitives.structural import reduce_sum
from stagec_arrays.values import axis_of, shown


def _of_one(name: str, operation: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return operation(inexact(x, name))

    return named(function, name, f"Return {what} of each element. As `jax.lax.{name}`.")


erf = _of_one("erf", p.erf, "the error function")
erfc = _of_one("erfc", p.erfc, "1 less the error function")
erf_inv = _of_one("erf_inv", p.erf_inv, "the inverse of the error function")
lgamma = _of_one("lgamma", p.lgamma, "the logarithm of the absolute value of the gamma function")
digamma = _of_one("digamma", p.digamma, "the derivative of lgamma")
rsqrt = _of_one("rsqrt", p.rsqrt, "1 divided by the square root")
cbrt = _of_one("cbrt", p.cbrt, "the cube root")
logistic = _of_one("logistic", p.logistic, "1 / (1 + exp(-x))")


def _of_two(name: str, operation: Callable[[Any, Any], Any], what: str) -> Callable[[Any, Any], Any]:
    def function(x: Any, y: Any) -> Any:
        return operation(*promoted(x, y, function=name))

    return named(function, name, f"Return {what} of each two elements. As `jax.lax.{name}`.")


add = _of_two("add", p.add, "the sum")
mul = _of_two("mul", p.multiply, "the product")
max = _of_two("max", p.maximum, "the larger")  # noqa: A001 - JAX's names
min = _of_two("min", p.minimum, "the smaller")  # noqa: A001


def select(pred: Any, on_true: Any, on_false: Any) -> Any:
    """Return the elements of one array where a bool is true, and of another elsewhere. As `jax.lax.select`."""
    condition = array_of(pred, "select")
    x, y = array_of(on_true, "select"), array_of(on_false, "select")
    if x.shape != y.shape or (condition.shape != () and condition.shape != x.shape):
        shapes = ", ".join(shown(operand.shape) for operand in (condition, x, y))
        raise ValueError(f"select: expected arrays of one shape, and bools of that shape or one bool, not {shapes}")
    if condition.dtype != dtypes.bool_:
        raise TypeError(f"select: expected bools, not {condition.dtype}")
    return p.select(condition, *promoted(x, y, function="select"))


def clamp(min: Any, x: Any, max: Any) -> Any:  # noqa: A002 - JAX's names
    """Return x, limited to the range from `min` to `max`; the derivative is 0 outside it. As `jax.lax.clamp`.

    min, max: of the shape of x, or of no dimensions.
    """
    value = array_of(x, "clamp")
    bounds = [like(bound, value.dtype, "clamp") for bound in (min, max)]
    if any(bound.shape not in ((), value.shape) for bound in bounds):
        shapes = " and ".join(shown(bound.shape) for bound in bounds)
        raise ValueError(f"clamp: expected bounds of shape {shown(value.shape)} or of no dimensions, not {shapes}")
    if tracing.current() is None:
        return _clamped(bounds[0], value, bounds[1])

    def derive(operands: Any, cotangents: Any) -> list[Any]:
        (g,), (low, x, high) = cotangents, operands
        inside = p.bitwise_and(p.greater(x, low), p.less(x, high))
        parts = [p.greater(low, x), inside, p.less(high, x)]
        result = [p.select(part, g, 0) for part in parts]
        return [
            gradient if tuple(gradient.shape) == tuple(of.shape) else reduce_sum(gradient, range(len(gradient.shape)))
            for gradient, of in zip(result, operands, strict=True)
        ]

    return call_custom_vjp("clamp", lambda *given: [_clamped(*given)], derive, [bounds[0], value, bounds[1]])[0]


def _clamped(low: Any, x: Any, high: Any) -> Any:
    return p.minimum(p.maximum(x, low), high)


def sort(operand: Any, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Any:
    """Return a sorted array, or several of one shape, all in the order of the first `num_keys`.

    As `jax.lax.sort`: NaNs are last, and equal elements keep their order.
    """
    if not isinstance(operand, tuple | list):
        x = array_of(operand, "sort")
        return sorting.sort([x], axis_of(dimension, len(x.shape)))[0]
    arrays = [array_of(leaf, "sort") for leaf in operand]
    if not arrays or len({tuple(x.shape) for x in arrays}) != 1:
        raise ValueError(f"sort: expected arrays of one shape, not {', '.join(shown(x.shape) for x in arrays)}")
    if not 1 <= num_keys <= len(arrays):
        raise ValueError(f"sort: num_keys is from 1 to {len(arrays)}, the number of arrays, not {num_keys}")
    return tuple(sorting.sort(arrays, axis_of(dimension, len(arrays[0].shape)), num_keys))


def sort_key_val(keys: Any, values: Any, dimension: int = -1, is_stable: bool = True) -> Any:
    """Return two arrays, both in the order of the first. As `jax.lax.sort_key_val`."""
    return sort((keys, values), dimension, is_stable)


def top_k(operand: Any, k: Any, *, axis: int = -1) -> tuple[Any, Any]:
    """Return the k largest elements along an axis, largest first, and where they are. As `jax.lax.top_k`."""
    x = array_of(operand, "top_k")
    return sorting.top_k(x, k, axis_of(axis, len(x.shape)))


def optimization_barrier(operand: Any) -> Any:
    """Return a tree of arrays such that the compiler moves nothing past it. As `jax.lax.optimization_barrier`."""
    leaves, structure = pytrees.flatten(operand)
    return structure.unflatten(binding.bind(BARRIER, *map(array_of, leaves))) if leaves else operand
