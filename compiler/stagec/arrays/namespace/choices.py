"""Random integers, choices and orders under JAX's names, with the bits of `jax.random`.

What JAX compiles as one program runs here as one (`execution.as_one`): XLA may keep a product in more bits for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from stagec.arrays import dims, dtypes
from stagec.arrays.dims import Shape
from stagec.arrays.dtypes import INTEGRAL, KINDS, SIGNED, DType
from stagec.arrays.execution import as_one
from stagec.arrays.namespace import keys
from stagec.arrays.namespace.creation import arange
from stagec.arrays.namespace.indexing import take
from stagec.arrays.namespace.manipulation import moveaxis
from stagec.arrays.namespace.promotion import array_of, inexact, is_scalar
from stagec.arrays.namespace.samplers import gumbel, require_fit, row, uniform
from stagec.arrays.namespace.searching import searchsorted
from stagec.arrays.namespace.statistical import cumulative_sum
from stagec.arrays.primitives import elementwise as p, reductions as r, sorting
from stagec.arrays.primitives.slicing import slice_
from stagec.arrays.primitives.structural import broadcast, convert, full, reshape, transpose
from stagec.arrays.values import Literal, axis_of, broadcast_shapes, literal, shown

_IINFO: Any = ml_dtypes.iinfo  # it knows NumPy's dtypes too


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
        info: Any = _IINFO(wanted)
        drawn = dtypes.int32
        low = _clipped(convert(low, drawn), int(info.min), int(info.max))
        high = _clipped(convert(high, drawn), int(info.min), int(info.max) + 1)
    sizes = keys.shape_of("randint", shape)
    require_fit("randint", sizes, low, high)
    return convert(_randint(words, low, high, shape=sizes, dtype=drawn), wanted)


def _integers(x: Any) -> Any:
    result = array_of(x, "randint")
    return convert(result, result.dtype if KINDS[result.dtype] in INTEGRAL else dtypes.default(SIGNED))


def _clipped(x: Any, low: int, high: int) -> Any:
    return p.minimum(p.maximum(x, low), high)


def _in_range(x: Any, dtype: DType) -> Any:
    """Return integers as ones of another dtype, those that it does not have as its nearest."""
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
        shuffled = permutation(key, count if number else whole, where)
        limit = [*shuffled.shape[:where], draws, *shuffled.shape[where + 1 :]]
        result = slice_(shuffled, [0] * len(limit), limit)
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
    last = broadcast(reshape(slice_(sums, (count - 1,), (count,)), ()), shape, ())
    return searchsorted(sums, p.multiply(last, p.subtract(literal(1.0, u.dtype), u)))
