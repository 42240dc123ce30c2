"""Keys of random numbers under JAX's names: `key`, `split`, `fold_in`, and the bits that they stand for.

The generator is threefry2x32, partitionable, as is JAX's default (https://docs.jax.dev/en/latest/jax.random.html).
A key is an array of dtype `key<fry>`, or its two words, an array of u32, as `PRNGKey` gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import constant, unwrap, wrap
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import INTEGRAL, KINDS, DType
from stagec_arrays.execution import as_one
from stagec_arrays.namespace.promotion import array_of, is_scalar
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.hashing import iota_2x32, threefry2x32
from stagec_arrays.primitives.slicing import concatenate, row
from stagec_arrays.primitives.structural import convert, reshape
from stagec_arrays.values import literal, shown

IMPLEMENTATION = "threefry2x32"
_U32 = dtypes.uint32


def words_of(function: str, key: Any) -> tuple[Any, bool]:
    """Return the two words of one key, and whether they were given as such. Raises TypeError, ValueError."""
    x = array_of(key, function)
    if x.dtype is dtypes.KEY:
        if x.shape != ():
            raise ValueError(f"{function} takes one key, not an array of keys of shape {shown(x.shape)}")
        return unwrap(x), False
    if x.dtype != _U32 or tuple(x.shape) != (2,):
        what = f"an array of {x.dtype} of shape {shown(x.shape)}"
        raise TypeError(f"{function} takes a key, as stagec_arrays.random.key(seed) makes it, or uint32[2], not {what}")
    return x, True


def shape_of(function: str, shape: Any) -> Shape:
    """Return the shape that a caller asks for. Raises TypeError."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"{function}: a shape is a tuple of sizes, not {shape!r}")
    return tuple(map(dims.size_of, shape))


def check_impl(impl: Any, dtype: Any = None) -> None:
    """Raise ValueError for another generator than threefry2x32."""
    if impl is not None and dtype is not None:
        raise ValueError("impl and dtype have the same meaning: give one of them")
    chosen = impl if impl is not None else dtype
    if chosen not in (None, IMPLEMENTATION, dtypes.KEY.name) and chosen is not dtypes.KEY:
        raise ValueError(f"stagec has no generator {chosen!r}; write {IMPLEMENTATION!r}")


def key(seed: Any, *, impl: Any = None, dtype: Any = None) -> Any:
    """Return the key of a seed, an integer: of dtype `key<fry>` and no dimensions. As `jax.random.key`.

    impl, dtype: None or "threefry2x32", the only generator. A Python seed is cut to 64 bits where `enable_x64` is
    on, and to 32 otherwise. Raises TypeError, OverflowError and ValueError.
    """
    check_impl(impl, dtype)
    return wrap(_seeded("key", seed))


def PRNGKey(seed: Any, *, impl: Any = None) -> Any:  # noqa: N802 - JAX's name
    """Return the key of a seed as its two words, an array of u32. As `jax.random.PRNGKey`; prefer `key`."""
    check_impl(impl)
    return _seeded("PRNGKey", seed)


def _seeded(function: str, seed: Any) -> Any:
    if is_scalar(seed) and not isinstance(seed, bool | int):
        raise TypeError(f"{function}: a seed is an integer, not {seed!r}")
    if isinstance(seed, int):
        # As JAX does it: an int64, of which 32 bits are left where there are no others.
        number = int(np.int64(seed))
        return constant(np.array([number >> 32 & 0xFFFFFFFF if dtypes.x64() else 0, number & 0xFFFFFFFF], np.uint32))
    x = array_of(seed, function)
    if x.dtype is dtypes.KEY:
        raise TypeError(f"{function}: a seed is an integer, and a key is given")
    if x.shape != () or KINDS[x.dtype] not in INTEGRAL:
        raise TypeError(f"{function}: a seed is one integer, not an array of {x.dtype} of shape {shown(x.shape)}")
    return _seed(x)


@as_one
def _seed(seed: Any) -> Any:
    low = reshape(convert(seed, _U32), (1,))  # of a negative one the two's complement
    if dtypes.BITS[seed.dtype] <= 32:
        high = convert(p.multiply(low, 0), _U32)
    else:
        high = reshape(convert(p.shift_right_logical(seed, 32), _U32), (1,))
    return concatenate([high, low], 0)


def halves(words: Any) -> tuple[Any, Any]:
    """Return the two words of a key as arrays of no dimensions."""
    return row(words, 0), row(words, 1)


@as_one
def split_words(words: Any, *, shape: Shape) -> Any:
    """Return the words of new keys, u32[*shape, 2]."""
    result = threefry2x32(halves(words), iota_2x32(shape))
    return concatenate([reshape(word, (*shape, 1)) for word in result], len(shape))


@as_one
def _fold(words: Any, data: Any) -> Any:
    result = threefry2x32(halves(words), (literal(0, _U32), data))
    return concatenate([reshape(word, (1,)) for word in result], 0)


@as_one
def random_bits(words: Any, *, shape: Shape, bits: int) -> Any:
    """Return random unsigned integers of 8, 16, 32 or 64 bits."""
    high, low = threefry2x32(halves(words), iota_2x32(shape))
    if bits == 64:
        wide = dtypes.NAMED["uint64"]
        return p.bitwise_or(p.shift_left(convert(high, wide), 32), convert(low, wide))
    return convert(p.bitwise_xor(high, low), dtypes.NAMED[f"uint{bits}"])


def split(key: Any, num: int | tuple[int, ...] = 2) -> Any:
    """Return new keys made from one: `num` of them, or an array of that shape. As `jax.random.split`."""
    words, raw = words_of("split", key)
    shape = shape_of("split", tuple(num) if isinstance(num, Sequence) else (num,))
    result = split_words(words, shape=shape)
    return result if raw else wrap(result)


def fold_in(key: Any, data: Any) -> Any:
    """Return a new key made from a key and 32 bits of an integer. As `jax.random.fold_in`."""
    words, raw = words_of("fold_in", key)
    number = literal(data, _U32) if type(data) is int else array_of(data, "fold_in")
    if number.shape != () or KINDS[number.dtype] not in INTEGRAL:
        raise TypeError(f"fold_in: expected one integer, not {number.dtype} of shape {shown(number.shape)}")
    result = _fold(words, convert(number, _U32))
    return result if raw else wrap(result)


def key_data(keys: Any) -> Any:
    """Return the words of keys, u32 in a last dimension of size 2. As `jax.random.key_data`."""
    return unwrap(array_of(keys, "key_data"))


def wrap_key_data(key_bits_array: Any, *, impl: Any = None, dtype: Any = None) -> Any:
    """Return the keys of words, u32 in a last dimension of size 2. As `jax.random.wrap_key_data`."""
    check_impl(impl, dtype)
    return wrap(array_of(key_bits_array, "wrap_key_data"))


def key_impl(keys: Any) -> str:
    """Return the name of the generator that keys are of: "threefry2x32"."""
    key_data(keys)
    return IMPLEMENTATION


def bits(key: Any, shape: Sequence[Any] = (), dtype: Any = None) -> Any:
    """Return random bits as unsigned integers; dtype: None is the default one. As `jax.random.bits`."""
    words, _ = words_of("bits", key)
    wanted: DType = dtypes.default(dtypes.UNSIGNED) if dtype is None else dtypes.asked(dtype)
    if KINDS[wanted] != dtypes.UNSIGNED or dtypes.BITS[wanted] < 8:
        raise ValueError(f"bits: expected a dtype of unsigned integers of 8 bits or more, not {wanted}")
    return random_bits(words, shape=shape_of("bits", shape), bits=dtypes.BITS[wanted])
