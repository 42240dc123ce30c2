"""Random numbers, choices and orders under JAX's names, with the bits of `jax.random` (https://docs.jax.dev/en/latest/jax.random.html).

What JAX compiles as one program runs here as one (`execution.as_one`): XLA may keep a product in more bits for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import COMPLEX, FLOATING, INEXACT, INTEGRAL, KINDS, SIGNED, DType
from stagec_arrays.execution import as_one
from stagec_arrays.namespace import keys
from stagec_arrays.namespace.creation import arange
from stagec_arrays.namespace.indexing import take
from stagec_arrays.namespace.manipulation import moveaxis
from stagec_arrays.namespace.promotion import array_of, inexact, is_scalar, like
from stagec_arrays.namespace.searching import searchsorted
from stagec_arrays.namespace.statistical import cumulative_sum
from stagec_arrays.primitives import elementwise as p, reductions as r, sorting
from stagec_arrays.primitives.slicing import along, row
from stagec_arrays.primitives.structural import broadcast, convert, full, reshape, transpose
from stagec_arrays.values import Literal, axis_of, broadcast_shapes, literal, shown

_ROOT_2 = math.sqrt(2)
_FINFO: Any = ml_dtypes.finfo  # it knows NumPy's dtypes too


def _floating(function: str, dtype: Any, kinds: frozenset[str] = frozenset({FLOATING})) -> DType:
    wanted = dtypes.default(FLOATING) if dtype is None else dtypes.asked(dtype)
    if KINDS[wanted] not in kinds or dtypes.BITS[wanted] < 8:
        raise ValueError(f"{function}: expected a floating-point dtype of 8 bits or more, not {wanted}")
    return wanted


def _require_fit(function: str, shape: Shape, *parameters: Any) -> None:
    """Raise ValueError if parameters do not broadcast to the shape that is asked for."""
    shapes = [tuple(parameter.shape) for parameter in parameters]
    if broadcast_shapes(shape, *shapes) != tuple(shape):
        raise ValueError(f"{function}: parameters of shapes {', '.join(map(shown, shapes))} are not of {shown(shape)}")


def _scalar(value: Any, dtype: DType) -> Literal:
    return Literal(np.asarray(value).astype(dtype))


def uniform(key: Any, shape: Sequence[Any] = (), dtype: Any = None, minval: Any = 0.0, maxval: Any = 1.0) -> Any:
    """Return numbers of equal probability from minval to before maxval. As `jax.random.uniform`."""
    words, _ = keys.words_of("uniform", key)
    wanted, sizes = _floating("uniform", dtype), keys.shape_of("uniform", shape)
    low, high = like(minval, wanted, "uniform"), like(maxval, wanted, "uniform")
    _require_fit("uniform", sizes, low, high)
    return _uniform(words, low, high, shape=sizes, dtype=wanted)


@as_one
def _uniform(words: Any, low: Any, high: Any, *, shape: Shape, dtype: DType) -> Any:
    # Random bits are the fraction of a number from 1 to before 2.
    info = _FINFO(dtype)
    bits = max(info.bits, 8) if info.nmant >= 8 else 8
    unsigned = dtypes.NAMED[f"uint{info.bits}"]
    drawn = convert(keys.random_bits(words, shape=shape, bits=bits), unsigned)
    bits_of_1 = np.array(1, dtype).view(unsigned)
    fraction = p.bitwise_or(p.shift_right_logical(drawn, bits - info.nmant), bits_of_1)
    floats = p.subtract(p.bitcast(fraction, dtype), 1.0)
    return p.maximum(low, p.add(p.multiply(floats, p.subtract(high, low)), low))


def normal(key: Any, shape: Sequence[Any] = (), dtype: Any = None) -> Any:
    """Return numbers of the standard normal distribution, which may be complex. As `jax.random.normal`."""
    words, _ = keys.words_of("normal", key)
    wanted = _floating("normal", dtype, INEXACT)
    return _normal(words, shape=keys.shape_of("normal", shape), dtype=wanted)


@as_one
def _normal(words: Any, *, shape: Shape, dtype: DType) -> Any:
    if KINDS[dtype] == COMPLEX:
        both = keys.split_words(words, shape=(2,))
        part = dtypes.real_part(dtype)
        real, imag = (convert(_normal(row(both, i), shape=shape, dtype=part), dtype) for i in range(2))
        return p.divide(p.add(real, p.multiply(imag, 1j)), _ROOT_2)
    low = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
    u = _uniform(words, Literal(low), _scalar(1, dtype), shape=shape, dtype=dtype)
    return p.multiply(_scalar(_ROOT_2, dtype), p.erf_inv(u))


def truncated_normal(key: Any, lower: Any, upper: Any, shape: Sequence[Any] | None = None, dtype: Any = None) -> Any:
    """Return numbers of the standard normal distribution between two bounds. As `jax.random.truncated_normal`.

    shape: None is that of the bounds.
    """
    words, _ = keys.words_of("truncated_normal", key)
    wanted = _floating("truncated_normal", dtype)
    low, high = like(lower, wanted, "truncated_normal"), like(upper, wanted, "truncated_normal")
    sizes = broadcast_shapes(low.shape, high.shape) if shape is None else keys.shape_of("truncated_normal", shape)
    _require_fit("truncated_normal", sizes, low, high)
    return _truncated_normal(words, low, high, shape=sizes, dtype=wanted)


@as_one
def _truncated_normal(words: Any, low: Any, high: Any, *, shape: Shape, dtype: DType) -> Any:
    root = _scalar(_ROOT_2, dtype)
    a, b = p.erf(p.divide(low, root)), p.erf(p.divide(high, root))
    drawn = p.multiply(root, p.erf_inv(_uniform(words, a, b, shape=shape, dtype=dtype)))
    infinite = _scalar(np.inf, dtype)
    inside = p.maximum(p.next_after(low, infinite), drawn)
    return p.minimum(p.next_after(high, p.negative(infinite)), inside)


def bernoulli(key: Any, p: Any = 0.5, shape: Sequence[Any] | None = None, mode: str = "low") -> Any:
    """Return bools that are true with probability p. As `jax.random.bernoulli`.

    shape: None is that of p. mode: "high" draws twice as many bits, for a small p.
    """
    if mode not in ("high", "low"):
        raise ValueError(f'bernoulli: mode is "high" or "low", not {mode!r}')
    words, _ = keys.words_of("bernoulli", key)
    chance = array_of(p, "bernoulli")
    if KINDS[chance.dtype] != FLOATING:
        raise TypeError(f"bernoulli: p is of floating-point numbers, not of {chance.dtype}")
    sizes = tuple(chance.shape) if shape is None else keys.shape_of("bernoulli", shape)
    _require_fit("bernoulli", sizes, chance)
    return _bernoulli(words, convert(chance, chance.dtype), shape=sizes, mode=mode)


@as_one
def _bernoulli(words: Any, chance: Any, *, shape: Shape, mode: str) -> Any:
    dtype = chance.dtype
    zero, unit = _scalar(0, dtype), _scalar(1, dtype)
    if mode == "low":
        return p.less(_uniform(words, zero, unit, shape=shape, dtype=dtype), chance)
    both = _uniform(words, zero, unit, shape=(2, *shape), dtype=dtype)
    info = _FINFO(dtype)
    return p.less(p.multiply(row(both, 1), 2.0**-info.nmant), p.subtract(chance, row(both, 0)))


def exponential(key: Any, shape: Sequence[Any] = (), dtype: Any = None) -> Any:
    """Return numbers of the exponential distribution of rate 1. As `jax.random.exponential`."""
    words, _ = keys.words_of("exponential", key)
    wanted = _floating("exponential", dtype)
    return _exponential(words, shape=keys.shape_of("exponential", shape), dtype=wanted)


@as_one
def _exponential(words: Any, *, shape: Shape, dtype: DType) -> Any:
    u = _uniform(words, _scalar(0, dtype), _scalar(1, dtype), shape=shape, dtype=dtype)
    return p.negative(p.log1p(p.negative(u)))


def gumbel(key: Any, shape: Sequence[Any] = (), dtype: Any = None, mode: str | None = None) -> Any:
    """Return numbers of the standard Gumbel distribution. As `jax.random.gumbel`.

    mode: "high" draws twice as many bits, for large numbers of small probability; "highest" (of f32) all 64 of them;
    None is "low".
    """
    if mode not in (None, "highest", "high", "low"):
        raise ValueError(f'gumbel: mode is "highest", "high" or "low", not {mode!r}')
    words, _ = keys.words_of("gumbel", key)
    wanted = _floating("gumbel", dtype)
    return _gumbel(words, shape=keys.shape_of("gumbel", shape), dtype=wanted, mode=mode or "low")


@as_one
def _gumbel(words: Any, *, shape: Shape, dtype: DType, mode: str) -> Any:
    info = _FINFO(dtype)
    zero, unit = _scalar(0, dtype), _scalar(1, dtype)
    if mode == "low":
        u = _uniform(words, _scalar(info.tiny, dtype), unit, shape=shape, dtype=dtype)
        return p.negative(p.log(p.negative(p.log(u))))
    if mode == "highest" and dtype == dtypes.float32:
        return _gumbel_of_64_bits(keys.random_bits(words, shape=(2, *shape), bits=32))
    both = _uniform(words, zero, unit, shape=(2, *shape), dtype=dtype)
    high, low = row(both, 0), row(both, 1)
    finer = p.add(p.add(high, p.multiply(low, 2.0**-info.nmant)), _scalar(info.tiny, dtype))
    x = p.select(p.greater_equal(high, 0.5), high, finer)
    return p.negative(p.log(p.negative(p.log1p(p.negative(x)))))


def _gumbel_of_64_bits(bits: Any) -> Any:
    """Return f32 of u32[2, ...]: the number is as near to 0 or 1 as 64 bits can say."""
    high, low = row(bits, 0), row(bits, 1)
    low_of_rest = p.bitwise_not(low)
    carried = convert(p.equal(low_of_rest, 2**32 - 1), dtypes.uint32)
    rest = p.add(p.bitwise_not(high), carried), p.add(low_of_rest, 1)
    small = p.less(high, 2**31)
    x = _fraction(p.select(small, high, rest[0]), p.select(small, low, rest[1]))
    of_small = p.negative(p.log(p.negative(p.log1p(p.negative(x)))))
    return p.select(small, of_small, p.negative(p.log(p.negative(p.log(x)))))


def _fraction(high: Any, low: Any) -> Any:
    """Return f32 between 0 and 1 of the 64 bits behind the point."""
    info = _FINFO(dtypes.float32)
    zeros, more = p.count_leading_zeros(high), p.count_leading_zeros(low)
    none = p.equal(zeros, 32)
    tail = p.select(none, p.shift_left(low, more), p.shift_right_logical(low, p.subtract(32, zeros)))
    mantissa = p.shift_right_logical(p.bitwise_or(p.shift_left(high, zeros), tail), 32 - info.nmant - 1)
    mantissa = p.bitwise_and(mantissa, (1 << info.nmant) - 1)
    exponent = p.subtract(int(-info.minexp), p.select(none, p.add(more, 32), zeros))
    exponent = p.bitwise_and(p.shift_left(exponent, info.nmant), (1 << 30) - (1 << info.nmant - 1))
    return p.bitcast(p.bitwise_or(exponent, mantissa), dtypes.float32)


# Choices, integers and orders.


def categorical(
    key: Any,
    logits: Any,
    axis: int = -1,
    shape: Sequence[Any] | None = None,
    replace: bool = True,
    mode: str | None = None,
) -> Any:
    """Return which of several things is drawn, by logarithms of their probabilities. As `jax.random.categorical`.

    logits: along `axis`, of each thing; they need not add up to 1. shape: None is that of the others. replace: whether
    one thing can be drawn twice. mode: as of `gumbel`.
    """
    keys.words_of("categorical", key)
    logits = array_of(logits, "categorical")
    where = axis_of(axis, len(logits.shape))
    batch = tuple(size for i, size in enumerate(logits.shape) if i != where)
    sizes = batch if shape is None else keys.shape_of("categorical", shape)
    if broadcast_shapes(sizes, batch) != sizes:
        raise ValueError(f"categorical: distributions of shape {shown(batch)} are not of {shown(sizes)}")
    prefix, own = sizes[: len(sizes) - len(batch)], list(sizes[len(sizes) - len(batch) :])
    index = dtypes.default(SIGNED)
    if replace:
        own.insert(where, logits.shape[where])
        noise = gumbel(key, (*prefix, *own), logits.dtype, mode)
        return r.argmax(p.add(noise, logits), len(prefix) + where, index)
    count = dims.product(prefix)
    if count > logits.shape[where]:
        raise ValueError(f"categorical: {count} cannot be drawn from {logits.shape[where]} without replacement")
    noisy = p.add(logits, gumbel(key, logits.shape, logits.dtype, mode))
    _, indices = sorting.top_k(moveaxis(noisy, where, -1), count)
    rank = len(indices.shape)
    return reshape(transpose(indices, (rank - 1, *range(rank - 1))), sizes)


def randint(key: Any, shape: Sequence[Any], minval: Any, maxval: Any, dtype: Any = None) -> Any:
    """Return integers from minval to before maxval. As `jax.random.randint`; dtype: None is the default one."""
    words, _ = keys.words_of("randint", key)
    wanted = dtypes.default(SIGNED) if dtype is None else dtypes.asked(dtype)
    if KINDS[wanted] not in INTEGRAL:
        raise TypeError(f"randint: expected a dtype of integers, not {wanted}")
    low, high = (_integers(bound) for bound in (minval, maxval))
    drawn = wanted
    if dtypes.BITS[wanted] < 32:  # more bits have less bias
        drawn, (least, most) = dtypes.int32, dtypes.limits(wanted)
        low = _clipped(convert(low, drawn), least, most)
        high = _clipped(convert(high, drawn), least, most + 1)
    sizes = keys.shape_of("randint", shape)
    _require_fit("randint", sizes, low, high)
    return convert(_randint(words, low, high, shape=sizes, dtype=drawn), wanted)


def _integers(x: Any) -> Any:
    result = array_of(x, "randint")
    return convert(result, result.dtype if KINDS[result.dtype] in INTEGRAL else dtypes.default(SIGNED))


def _clipped(x: Any, low: int, high: int) -> Any:
    return p.minimum(p.maximum(x, low), high)


def _in_range(x: Any, dtype: DType) -> Any:
    """Return integers in another dtype; one that it does not have becomes the nearest that it has."""
    theirs, own = np.iinfo(dtype), np.iinfo(x.dtype)
    return convert(_clipped(x, max(theirs.min, own.min), min(theirs.max, own.max)), dtype)


@as_one
def _randint(words: Any, low: Any, high: Any, *, shape: Shape, dtype: DType) -> Any:
    # Twice as many bits as a number has, so that the rest of the division by the span has little bias.
    last = min(int(np.iinfo(dtype).max), int(np.iinfo(high.dtype).max))
    beyond = p.greater(high, last)
    low, high = _in_range(low, dtype), _in_range(high, dtype)
    bits = dtypes.BITS[dtype]
    unsigned = dtypes.NAMED[f"uint{bits}"]
    both = keys.split_words(words, shape=(2,))
    first, second = (keys.random_bits(row(both, i), shape=shape, bits=bits) for i in range(2))
    span = convert(p.subtract(high, low), unsigned)
    span = p.select(p.less_equal(high, low), 1, span)
    span = p.select(p.bitwise_and(beyond, p.greater(high, low)), p.add(span, 1), span)
    factor = p.remainder(Literal(np.asarray(2 ** (bits // 2), unsigned)), span)
    factor = p.remainder(p.multiply(factor, factor), span)
    result = p.add(p.multiply(p.remainder(first, span), factor), p.remainder(second, span))
    return p.add(low, convert(p.remainder(result, span), dtype))


def permutation(key: Any, x: Any, axis: int = 0, independent: bool = False) -> Any:
    """Return an array with its parts along an axis in random order; of an integer, the numbers below it.

    independent: whether each vector along the axis has its own order. As `jax.random.permutation`.
    """
    words, _ = keys.words_of("permutation", key)
    if is_scalar(x):
        if type(x) is not int:
            raise TypeError(f"permutation: expected an integer or an array, not {x!r}")
        return _shuffled(words, arange(x), axis=axis_of(axis, 1))
    x = array_of(x, "permutation")
    if x.shape == ():
        return permutation(key, int(x.__index__()), axis, independent)
    where = axis_of(axis, len(x.shape))
    size = dims.product(x.shape) if independent or len(x.shape) == 1 else x.shape[where]
    if type(size) is not int:
        raise ValueError(f"permutation: the sizes of shape {shown(x.shape)} must be numbers")
    if independent or len(x.shape) == 1:
        return _shuffled(words, x, axis=where)
    return take(x, _shuffled(words, arange(size), axis=0), axis=where)


@as_one
def _shuffled(words: Any, x: Any, *, axis: int) -> Any:
    # Sorted by random numbers, as often as makes it improbable that two of one element are equal each time.
    rounds = math.ceil(3 * math.log(max(1, dims.product(x.shape))) / math.log(2**32 - 1))
    for _ in range(rounds):
        both = keys.split_words(words, shape=(2,))
        words, order = row(both, 0), keys.random_bits(row(both, 1), shape=tuple(x.shape), bits=32)
        _, x = sorting.sort([order, x], axis)
    return x


def choice(
    key: Any,
    a: Any,
    shape: Sequence[Any] = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
    mode: str | None = None,
) -> Any:
    """Return a random sample of the parts of an array along an axis; of an integer, of the numbers below it.

    p: a vector of probabilities; None: all are equal. replace: whether a part can be drawn twice.
    mode: as of `gumbel`. As `jax.random.choice`.
    """
    keys.words_of("choice", key)
    sizes = keys.shape_of("choice", shape)
    whole = array_of(a, "choice")
    number = whole.shape == ()
    where = 0 if number else axis_of(axis, len(whole.shape))
    count = (a if type(a) is int else int(whole.__index__())) if number else whole.shape[where]
    draws = dims.product(sizes)
    if draws == 0:
        return full(sizes, 0, whole.dtype)
    if count <= 0:
        raise ValueError("choice: there is nothing to draw from")
    if not replace and draws > count:
        raise ValueError(f"choice: {draws} cannot be drawn from {count} without replacement")
    if p is None and not replace:
        result = along(permutation(key, count if number else whole, where), where, 0, draws)
    else:
        drawn = randint(key, sizes, 0, count) if p is None else _by_chance(key, sizes, count, replace, p, mode)
        drawn = convert(drawn, dtypes.default(SIGNED))
        result = drawn if number else take(whole, reshape(drawn, (draws,)), axis=where)
    return reshape(result, sizes if number else (*whole.shape[:where], *sizes, *whole.shape[where + 1 :]))


def _by_chance(key: Any, shape: Shape, count: Any, replace: bool, chances: Any, mode: str | None) -> Any:
    """Return the numbers of things that are drawn by their probabilities."""
    chances = inexact(chances, "choice")
    if tuple(chances.shape) != (count,):
        what = f"p has shape {shown(chances.shape)}"
        raise ValueError(f"choice: expected a vector of probabilities, one for each of {count}; {what}")
    if not replace:
        noisy = p.add(gumbel(key, (count,), chances.dtype, mode), p.log(chances))
        return sorting.top_k(noisy, dims.product(shape))[1]
    sums = cumulative_sum(chances)
    u = uniform(key, shape, sums.dtype)
    last = broadcast(row(sums, count - 1), shape, ())
    return searchsorted(sums, p.multiply(last, p.subtract(literal(1.0, u.dtype), u)))
