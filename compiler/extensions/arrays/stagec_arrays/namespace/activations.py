"""Activations and the like under JAX's names, with its values and derivatives.

https://docs.jax.dev/en/latest/jax.nn.html. What JAX compiles as one program runs as one (`execution.as_one`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes, tracing
from stagec_arrays.dtypes import COMPLEX, FLOATING, KINDS, DType
from stagec_arrays.execution import as_one
from stagec_arrays.namespace.elementwise import logaddexp
from stagec_arrays.namespace.manipulation import expand_dims, squeeze
from stagec_arrays.namespace.promotion import array_of, inexact, named, promoted
from stagec_arrays.namespace.statistical import Axis, kept, mean, sum as summed
from stagec_arrays.primitives import elementwise as p, reductions as r
from stagec_arrays.primitives.calls import call_custom_vjp, stopped
from stagec_arrays.primitives.structural import broadcast, convert, full, iota
from stagec_arrays.values import axes_of, axis_of, broadcast_shapes


def _with_derivative(name: str, function: Callable[..., Any], derive: Callable[..., Any], *values: Any) -> Any:
    """Call `function`; its derivative is `derive(cotangent, *values)`, one for each value.

    name: of the function, in a program's text.
    """
    if tracing.current() is None:
        return function(*values)

    def of_operands(operands: Any, cotangents: Any) -> Any:
        return derive(cotangents[0], *operands)

    return call_custom_vjp(name, lambda *given: [function(*given)], of_operands, values)[0]


def relu(x: Any) -> Any:
    """Return the larger of x and 0, whose derivative at 0 is 0. As `jax.nn.relu`."""
    return _relu(array_of(x, "relu"))


@as_one
def _relu(x: Any) -> Any:
    def derive(g: Any, x: Any) -> Any:
        return [p.select(p.greater(x, 0), g, 0)]

    return _with_derivative("relu", lambda x: p.maximum(x, 0), derive, convert(x, x.dtype))


def _of_one(name: str, operation: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    """Return a function of one array of floating-point numbers."""

    def function(x: Any) -> Any:
        return operation(inexact(x, name))

    return named(function, name, f"Return {what}. As `jax.nn.{name}`.")


@as_one
def _relu6(x: Any) -> Any:
    def derive(g: Any, x: Any) -> Any:
        return [p.select(p.bitwise_and(p.greater(x, 0), p.less(x, 6)), g, 0)]

    return _with_derivative("relu6", lambda x: p.minimum(p.maximum(x, 0), 6), derive, x)


relu6 = _of_one("relu6", _relu6, "x, limited to the range from 0 to 6, outside which its derivative is 0")
sigmoid = _of_one("sigmoid", p.logistic, "1 / (1 + exp(-x))")
softplus = _of_one("softplus", as_one(lambda x: logaddexp(x, 0)), "log(1 + exp(x))")
log_sigmoid = _of_one("log_sigmoid", as_one(lambda x: p.negative(logaddexp(p.negative(x), 0))), "log(sigmoid(x))")
silu = swish = _of_one("silu", as_one(lambda x: p.multiply(x, p.logistic(x))), "x * sigmoid(x)")
tanh = _of_one("tanh", p.tanh, "the hyperbolic tangent")


def gelu(x: Any, approximate: bool = True) -> Any:
    """Return x times the probability that a number of the normal distribution is less. As `jax.nn.gelu`.

    approximate: whether it is computed by tanh, and not by erf.
    """
    x = inexact(x, "gelu")
    if approximate:
        cube = p.multiply(p.multiply(x, x), x)
        inner = p.multiply(p.add(x, p.multiply(cube, 0.044715)), math.sqrt(2 / math.pi))
        return p.multiply(x, p.multiply(p.add(p.tanh(inner), 1.0), 0.5))
    return p.multiply(p.multiply(x, 0.5), p.erfc(p.multiply(p.negative(x), math.sqrt(0.5))))


def elu(x: Any, alpha: Any = 1.0) -> Any:
    """Return x where it is more than 0, and alpha * (exp(x) - 1) elsewhere. As `jax.nn.elu`."""
    return _elu(*promoted(x, alpha, function="elu", inexact=True))


@as_one
def _elu(x: Any, alpha: Any) -> Any:
    more = p.greater(x, 0)
    return p.select(more, x, p.multiply(alpha, p.expm1(p.select(more, 0, x))))


@as_one
def _selu(x: Any) -> Any:
    alpha = full((), 1.6732632423543772848170429916717, x.dtype)
    return p.multiply(_elu(x, alpha), 1.0507009873554804934193349852946)


selu = _of_one("selu", _selu, "the `elu` of numbers for which layers keep mean and variance")


def leaky_relu(x: Any, negative_slope: Any = 1e-2) -> Any:
    """Return x where it is 0 or more, and negative_slope * x elsewhere. As `jax.nn.leaky_relu`."""
    return _leaky_relu(*promoted(x, negative_slope, function="leaky_relu", inexact=True))


@as_one
def _leaky_relu(x: Any, slope: Any) -> Any:
    return p.select(p.greater_equal(x, 0), x, p.multiply(slope, x))


def _chosen(x: Any, where: Any, other: Any) -> Any:
    """Return x where a mask is true, and a number elsewhere; None: everywhere."""
    return x if where is None else p.select(where, x, other)


def _largest(x: Any, axis: Axis, where: Any, keepdims: bool = True) -> Any:
    axes = axes_of(axis, len(x.shape))
    return kept(x, r.reduce_max(_chosen(x, where, -np.inf), axes), axes, keepdims)


def _mask(where: Any, x: Any) -> Any:
    if where is None:
        return None
    result = convert(array_of(where, "where"), dtypes.bool_)
    return broadcast(result, broadcast_shapes(result.shape, x.shape))


def softmax(x: Any, axis: Axis = -1, where: Any = None) -> Any:
    """Return exp(x), divided by its sum along axes. As `jax.nn.softmax`.

    where: the elements to include; None: all. The result is 0 elsewhere.
    """
    x = inexact(x, "softmax")
    mask = _mask(where, x)
    if mask is not None:
        x = broadcast(x, mask.shape)
    axes = axes_of(axis, len(x.shape))

    def function(x: Any, mask: Any = None) -> Any:
        high = _largest(x, axes, mask)
        whole = p.exp(p.subtract(_chosen(x, mask, -np.inf), high))
        result = p.divide(whole, summed(_chosen(whole, mask, 0), axis=axes, keepdims=True))
        return _chosen(result, mask, 0)

    def derive(g: Any, x: Any, mask: Any = None) -> Any:
        result = p.multiply(g, (y := softmax(x, axes, mask)))
        own = p.subtract(result, p.multiply(y, summed(_chosen(result, mask, 0), axis=axes, keepdims=True)))
        return [own] if mask is None else [own, None]

    return _with_derivative("softmax", function, derive, x, *([] if mask is None else [mask]))


def log_softmax(x: Any, axis: Axis = -1, where: Any = None) -> Any:
    """Return the logarithm of `softmax`: -inf at excluded elements. As `jax.nn.log_softmax`."""
    x = inexact(x, "log_softmax")
    mask = _mask(where, x)
    return _log_softmax(x, *([] if mask is None else [mask]), axes=axes_of(axis, len(x.shape)))


@as_one
def _log_softmax(x: Any, mask: Any = None, *, axes: tuple[int, ...]) -> Any:
    if mask is not None:
        x = broadcast(x, mask.shape)
    shifted = p.subtract(_chosen(x, mask, -np.inf), stopped(_largest(x, axes, mask)))
    total = summed(_chosen(p.exp(shifted), mask, 0), axis=axes, keepdims=True)
    return _chosen(p.subtract(shifted, p.log(total)), mask, -np.inf)


def logsumexp(
    a: Any, axis: Axis = None, b: Any = None, keepdims: bool = False, return_sign: bool = False, where: Any = None
) -> Any:
    """Return log(sum(b * exp(a))) along axes, without overflow on the way. As `jax.nn.logsumexp`.

    b: None is 1. where: the elements to add up; None: all. return_sign: whether the sign of the sum is returned too,
    and the logarithm is of its absolute value; it is NaN otherwise where the sum is negative.
    """
    given = promoted(a, *([] if b is None else [b]), function="logsumexp", inexact=True)
    x, factor = given[0], (given[1] if b is not None else None)
    mask = _mask(where, x)
    if mask is not None:
        x = p.select(mask, x, 0)
    if factor is not None:
        x = p.select(p.not_equal(factor, 0), x, -np.inf)
    axes = axes_of(axis, len(x.shape))
    high = _largest(p.real(x) if KINDS[x.dtype] == COMPLEX else x, axes, mask)
    high = stopped(p.select(p.is_finite(high), high, 0))
    whole = p.exp(p.subtract(x, convert(high, x.dtype)))
    if factor is not None:
        whole = p.multiply(whole, factor)
    total = summed(_chosen(whole, mask, 0), axis=axes, keepdims=True)
    sign = p.sign(total)
    if return_sign or KINDS[x.dtype] != COMPLEX:
        total = p.absolute(total)
    result = p.add(p.log(total), convert(high, total.dtype))
    if factor is not None and not return_sign and KINDS[result.dtype] == FLOATING:
        result = p.select(p.less(sign, 0), np.nan, result)
    if not keepdims and axes:
        result, sign = (squeeze(array, axes) for array in (result, sign))
    return (result, sign) if return_sign else result


def standardize(
    x: Any,
    axis: Axis = -1,
    mean: Any = None,
    variance: Any = None,
    epsilon: Any = 1e-5,
    where: Any = None,
    *,
    algorithm: str = "fast",
) -> Any:
    """Return (x - mean) / sqrt(variance + epsilon), along axes. As `jax.nn.standardize`.

    mean, variance: None is those of x. where: the elements to include; None: all. algorithm: "fast" computes the
    variance as the mean of squares less the square of the mean, "stable" as the mean of squares of x - mean.
    """
    if algorithm not in ("fast", "stable"):
        raise ValueError(f'standardize: algorithm is "fast" or "stable", not {algorithm!r}')
    names = {"mean": mean, "variance": variance, "epsilon": epsilon}
    given = {name: value for name, value in names.items() if value is not None}
    first, *rest = promoted(x, *given.values(), function="standardize", inexact=True)
    mask = _mask(where, first)
    axes = axes_of(axis, len(first.shape))
    masks = [] if mask is None else [mask]
    return _standardize(first, *rest, *masks, axes=axes, names=(*given, *["where"] * len(masks)), algorithm=algorithm)


@as_one
def _standardize(x: Any, *values: Any, axes: tuple[int, ...], names: tuple[str, ...], algorithm: str) -> Any:
    given = dict(zip(names, values, strict=True))
    mask, center, variance = given.get("where"), given.get("mean"), given.get("variance")
    if center is None:
        center = _mean(x, axes, mask)
    if variance is None and algorithm == "stable":
        variance = _mean(p.square(p.subtract(x, center)), axes, mask)
    elif variance is None:  # it may come out less than 0
        variance = p.maximum(p.subtract(_mean(p.square(x), axes, mask), p.square(center)), 0)
    return p.multiply(p.subtract(x, center), p.rsqrt(p.add(variance, given["epsilon"])))


def _mean(x: Any, axes: tuple[int, ...], mask: Any) -> Any:
    if mask is None:
        return mean(x, axis=axes, keepdims=True)
    wide = convert(x, dtypes.float32) if dtypes.BITS[x.dtype] < 32 else x
    count = summed(convert(broadcast(mask, x.shape), wide.dtype), axis=axes, keepdims=True)
    return convert(p.divide(summed(p.select(mask, wide, 0), axis=axes, keepdims=True), count), x.dtype)


def one_hot(x: Any, num_classes: Any, *, dtype: Any = None, axis: int = -1) -> Any:
    """Return 1 at the place that an integer says along a new axis, and 0 elsewhere. As `jax.nn.one_hot`.

    num_classes: the size of the axis. An integer outside it gives 0 everywhere. dtype: None is the default
    floating-point one.
    """
    x = array_of(x, "one_hot")
    wanted: DType = dtypes.default(FLOATING) if dtype is None else dtypes.asked(dtype)
    where = axis_of(axis, len(x.shape) + 1)
    shape = [1] * len(x.shape)
    shape.insert(where, dims.size_of(num_classes))
    return convert(p.equal(expand_dims(x, axis=where), iota(x.dtype, shape, where)), wanted)
