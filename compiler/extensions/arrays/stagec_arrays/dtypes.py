"""Dtypes: the list of them, their kinds, how two of them promote, and the default ones.

A dtype is NumPy's (`numpy.dtype`), with those of ml_dtypes. Promotion is the standard's
(https://data-apis.org/array-api/2024.12/API_specification/type_promotion.html), and where the standard leaves it open,
JAX's (https://docs.jax.dev/en/latest/type_promotion.html). As in JAX, there are no dtypes of 64 bits unless
`enable_x64` is on: arrays of them become 32-bit ones, and the default dtypes are int32, float32 and complex64.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from stagec.core.sizes.avals import DTYPES

DType: TypeAlias = np.dtype[Any]

BOOL, SIGNED, UNSIGNED = "bool", "signed integer", "unsigned integer"
PRNG_KEY = "PRNG key"
FLOATING, COMPLEX = "real floating", "complex floating"
INTEGRAL = frozenset({SIGNED, UNSIGNED})
INEXACT = frozenset({FLOATING, COMPLEX})
REAL = INTEGRAL | {FLOATING}
NUMERIC = REAL | {COMPLEX}
ANY = NUMERIC | {BOOL}
"""Kinds of dtypes by the standard's names, and sets of them."""


class KeyDType:
    """The dtype of PRNG keys of threefry2x32, `key<fry>` as in JAX: an element is two u32, not a number.

    It replaces a `numpy.dtype`, because NumPy has none for keys.
    """

    name = "key<fry>"
    itemsize = 8
    isbuiltin = 0

    def __repr__(self) -> str:
        return self.name


def _named(name: str) -> DType:
    return np.dtype(getattr(ml_dtypes, name, name))


def _kind(short: str) -> str:
    first = {"b": BOOL, "i": SIGNED, "u": UNSIGNED, "c": COMPLEX}.get(short[0], FLOATING)
    return FLOATING if short == "bf16" else first


_BY_SHORT: Mapping[str, DType] = {
    short: _named(known.numpy_name) for short, known in DTYPES.items() if not short.startswith(("key<", "f0"))
}
KEY: Any = KeyDType()
"""The one object of its class."""
SHORT: Mapping[DType, str] = {dtype: short for short, dtype in _BY_SHORT.items()} | {KEY: KEY.name}
"""The short name of each dtype, as `core.sizes.avals` writes it: "f32"."""
KINDS: Mapping[DType, str] = {dtype: _kind(short) for short, dtype in _BY_SHORT.items()} | {KEY: PRNG_KEY}
BITS: Mapping[DType, int] = {dtype: DTYPES[short].bits for short, dtype in _BY_SHORT.items()} | {KEY: 64}
NAMED: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _BY_SHORT.values()})
"""Every dtype of numbers by its name: "float32", "bfloat16"."""

bool_, int32, int64 = NAMED["bool"], NAMED["int32"], NAMED["int64"]
float32, float64 = NAMED["float32"], NAMED["float64"]
complex64, complex128 = NAMED["complex64"], NAMED["complex128"]
uint8, uint32 = NAMED["uint8"], NAMED["uint32"]

_NARROW = {int64: int32, NAMED["uint64"]: uint32, float64: float32, complex128: complex64}
_X64: ContextVar[bool | None] = ContextVar("stagec_enable_x64", default=None)
_X64_OF_PROCESS = os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "yes", "y", "on", "t")


def x64() -> bool:
    """Return whether there are dtypes of 64 bits."""
    chosen = _X64.get()
    return _X64_OF_PROCESS if chosen is None else chosen


@contextlib.contextmanager
def enable_x64(new_val: bool = True) -> Iterator[None]:
    """Use 64-bit dtypes inside a `with` statement.

    As `jax.enable_x64`. Outside, the environment variable JAX_ENABLE_X64 decides.

    new_val: False uses dtypes of at most 32 bits.

    >>> import stagec_arrays.numpy as np
    >>> with stagec_arrays.enable_x64():
    ...     print(np.zeros(3).dtype)
    float64
    """
    before = _X64.set(new_val)
    try:
        yield
    finally:
        _X64.reset(before)


def default(kind: str) -> DType:
    """Return the default dtype of a kind; of bools there is one."""
    wide = {SIGNED: int64, UNSIGNED: NAMED["uint64"], FLOATING: float64, COMPLEX: complex128}.get(kind, bool_)
    return wide if x64() else _NARROW.get(wide, wide)


OF_PYTHON: Mapping[type, str] = {bool: BOOL, int: SIGNED, float: FLOATING, complex: COMPLEX}
"""The kinds of Python numbers."""


def of_python(kind: type) -> DType:
    """Return the default dtype of a Python bool, int, float or complex."""
    return default(OF_PYTHON[kind])


def canonical(dtype: DType) -> DType:
    """Return the dtype that stands for `dtype`: in this machine's byte order, of 32 bits for 64 where x64 is off."""
    if dtype is not KEY and not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    return _NARROW.get(dtype, dtype) if not x64() else dtype


@functools.cache
def limits(dtype: DType) -> tuple[Any, Any]:
    """Return the smallest and the largest number of a dtype: infinite ones if it has them."""
    if KINDS[dtype] == BOOL:
        return False, True
    if KINDS[dtype] in INTEGRAL:
        integers = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        return int(integers.min), int(integers.max)
    with np.errstate(all="ignore"):
        if np.isinf(np.asarray(np.inf).astype(dtype)):
            return -np.inf, np.inf
    result = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call] # float8_e4m3fn has none: its infinity would be NaN
    return float(result.min), float(result.max)


def asked(dtype: Any) -> DType:
    """Return the dtype that a caller asks for, which may be a name or a NumPy class.

    Raises TypeError for anything but a dtype of arrays. Warns, as JAX does, if one of 64 bits becomes one of 32.
    """
    if dtype is KEY or (isinstance(dtype, str) and dtype == KEY.name):
        return KEY  # type: ignore[no-any-return]
    try:
        known = dtype if isinstance(dtype, np.dtype) else np.dtype(NAMED.get(dtype, dtype))
    except (TypeError, ValueError):
        raise TypeError(f"{dtype!r} is not a dtype; write one of {', '.join(NAMED)}") from None
    if known not in KINDS:
        raise TypeError(f"stagec has no arrays of dtype {known}; write one of {', '.join(NAMED)}")
    narrow = canonical(known)
    if narrow != known:
        what = f"you asked for {known} and get {narrow}: dtypes of 64 bits need enable_x64"
        warnings.warn(what, UserWarning, stacklevel=3)
    return narrow


def of_short(short: str) -> DType:
    """Return the dtype of a short name ("f32"). Raises TypeError for float0, and keys of other generators."""
    if short == KEY.name:
        return KEY  # type: ignore[no-any-return]
    if short not in _BY_SHORT:
        raise TypeError(f"arrays have no dtype {short}")
    return _BY_SHORT[short]


def promote(first: DType, second: DType) -> DType:
    """Return the dtype that two dtypes promote to. Raises TypeError if they do not promote."""
    if first == second:
        return first
    a, b = KINDS[first], KINDS[second]
    if PRNG_KEY in (a, b):
        raise TypeError(f"{first} and {second} do not promote: PRNG keys are not numbers")
    if a == BOOL or b == BOOL:
        return second if a == BOOL else first
    if a in INTEGRAL and b in INTEGRAL:
        return _promote_integers(first, second)
    if a in INTEGRAL or b in INTEGRAL:
        return second if a in INTEGRAL else first
    if COMPLEX in (a, b):
        return complex128 if BITS[first] == 128 or BITS[second] == 128 or float64 in (first, second) else complex64
    if min(BITS[first], BITS[second]) < 16:
        what = f"{first} and {second} do not promote: float8 and narrower dtypes do not promote"
        raise TypeError(f"{what}; convert one with astype")
    if BITS[first] == BITS[second]:
        return float32  # bfloat16 and float16
    return first if BITS[first] > BITS[second] else second


def _promote_integers(first: DType, second: DType) -> DType:
    if KINDS[first] == KINDS[second]:
        return first if BITS[first] >= BITS[second] else second
    signed, unsigned = (first, second) if KINDS[first] == SIGNED else (second, first)
    if BITS[signed] > BITS[unsigned]:
        return signed
    wide = 2 * BITS[unsigned]
    return default(FLOATING) if wide > 64 else canonical(NAMED[f"int{max(wide, 8)}"])


RANK = {BOOL: 0, SIGNED: 1, UNSIGNED: 1, FLOATING: 2, COMPLEX: 3}


def with_scalar(dtype: DType, kind: str) -> DType:
    """Return the dtype that an array and a Python scalar, or a weakly typed array, of a kind promote to.

    The array's own, unless the scalar has a higher kind: then that kind's, with the same precision if it is known.
    """
    own = KINDS[dtype]
    if own == PRNG_KEY:
        raise TypeError(f"{dtype} and a number do not promote: PRNG keys are not numbers")
    if RANK[kind] <= RANK[own]:
        return dtype
    if kind == COMPLEX and own == FLOATING:
        return complex_of(dtype)
    return default(kind)


def complex_of(dtype: DType) -> DType:
    """Return the dtype of complex numbers with parts of a dtype; complex64 for narrow parts."""
    return complex128 if dtype in (float64, complex128) else complex64


def real_part(dtype: DType) -> DType:
    """Return the dtype of the parts of a complex number; another dtype unchanged."""
    return {complex64: float32, complex128: float64}.get(dtype, dtype)


def require(name: str, dtype: DType, kinds: frozenset[str]) -> None:
    """Raise TypeError if `dtype` is not of one of the kinds that the function `name` takes."""
    if KINDS[dtype] not in kinds:
        wanted = {ANY: "any", NUMERIC: "numeric", REAL: "real-valued", INEXACT: "floating-point"}.get(kinds)
        wanted = wanted or " or ".join(sorted(kinds))
        raise TypeError(f"{name}: expected an array of a {wanted} dtype, not of {dtype}")
