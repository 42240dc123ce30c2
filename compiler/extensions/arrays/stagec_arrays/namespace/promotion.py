"""Operands of functions: recognize arrays, and promote several operands to one dtype."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from stagec.pjrt.arrays import is_masked, unfit
from stagec.pjrt.calling_convention import NUMBERS
from stagec_arrays import binding, dtypes
from stagec_arrays.dims import Dim
from stagec_arrays.dtypes import FLOATING, INEXACT, KINDS, DType
from stagec_arrays.primitives.structural import convert, size_value
from stagec_arrays.values import Literal, Value, literal


def is_scalar(x: Any) -> bool:
    """Whether x is a Python number, whose dtype gives way to that of arrays."""
    return type(x) in dtypes.OF_PYTHON


def array_of(x: Any, function: str = "") -> Any:
    """Return an operand as an array: a value of stagec's as another object, NumPy's array or a number as a value.

    function: its name, for messages. Raises TypeError for anything but an array.
    """
    if isinstance(x, Value):
        return x.same()
    if isinstance(x, Literal):
        return x
    if isinstance(x, NUMBERS):
        return literal(x, dtypes.of_python(type(x)), weak_type=type(x) is not bool) if is_scalar(x) else _of_numpy(x)
    name = f"{function}: " if function else ""
    if hasattr(x, "__array__"):
        if what := unfit(x):
            raise TypeError(f"{name}an operand is {what}")
        return _of_numpy(x)
    if isinstance(x, Dim):
        return size_value(x)
    raise TypeError(f"{name}expected an array, not a {type(x).__qualname__}; write asarray(...) of it")


def named(function: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """Give a function, made for one of several names, its name and docstring, and return it."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def refuse_masked(x: Any, function: str) -> None:
    """Raise TypeError for a masked array, also in lists and tuples: NumPy would drop the mask."""
    if is_masked(x):
        raise TypeError(f"{function}: {unfit(x)}")
    for item in x if isinstance(x, list | tuple) and "numpy.ma" in sys.modules else ():
        refuse_masked(item, function)


def is_jaxs(x: Any) -> bool:
    """Whether x is a JAX array, or a value that JAX traces."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(x, "__array__")


def numpy_of(x: Any) -> np.ndarray[Any, Any]:
    """Convert an array of another library with NumPy. Raises TypeError for JAX's tracers."""
    try:
        return np.asarray(x)
    except TypeError as error:
        if is_jaxs(x):
            what = "JAX traces this value, so a function of stagec_arrays.numpy cannot take it"
            raise TypeError(f"{what}; trace the whole function with one of both") from error
        raise


def _of_numpy(x: Any) -> Any:
    array = numpy_of(x)
    wanted = dtypes.canonical(array.dtype)
    if wanted not in KINDS:
        raise TypeError(f"stagec has no arrays of dtype {array.dtype}")
    return binding.constant(array.astype(wanted, copy=False))


def dtype_of(*operands: Any) -> tuple[DType, bool]:
    """Return the dtype that operands promote to, and whether it is weak. Raises TypeError if they do not promote."""
    strong: DType | None = None
    weak: list[DType] = []
    kinds: list[str] = []
    for x in operands:
        if is_scalar(x):
            kinds.append(dtypes.OF_PYTHON[type(x)])
        elif getattr(x, "weak_type", False):
            weak.append(x.dtype)
            kinds.append(KINDS[x.dtype])
        else:
            dtype = x if isinstance(x, np.dtype) else x.dtype
            strong = dtype if strong is None else dtypes.promote(strong, dtype)
    if strong is None:
        strong = max(weak, key=lambda dtype: dtypes.RANK[KINDS[dtype]]) if weak else dtypes.bool_
        for kind in kinds:
            strong = dtypes.with_scalar(strong, kind)
        return strong, True
    for kind in kinds:
        strong = dtypes.with_scalar(strong, kind)
    return strong, False


def promoted(*operands: Any, function: str = "", inexact: bool = False) -> list[Any]:
    """Return operands as arrays of one dtype. inexact: a floating-point one, the default of integers.

    Raises TypeError if they do not promote, OverflowError if a Python integer does not fit.
    """
    if len(operands) == 2 and _alike(*operands) and (not inexact or KINDS[operands[0].dtype] in INEXACT):
        return list(operands)
    given = [x if is_scalar(x) else array_of(x, function) for x in operands]
    dtype, weak = dtype_of(*given)
    if inexact and KINDS[dtype] not in INEXACT:
        dtype = dtypes.default(FLOATING)
    return [literal(x, dtype, weak) if is_scalar(x) else convert(x, dtype, weak) for x in given]


def _alike(x: Any, y: Any) -> bool:
    """Whether two operands are arrays of stagec's of one dtype that is not weak, as most are."""
    return isinstance(x, Value) and isinstance(y, Value) and x.dtype is y.dtype and not (x.weak_type or y.weak_type)


def inexact(x: Any, function: str = "") -> Any:
    """Return an operand as an array of floating-point or complex numbers."""
    if isinstance(x, Value) and KINDS[x.dtype] in INEXACT and not x.weak_type:
        return x.same()
    return promoted(x, function=function, inexact=True)[0]


def like(x: Any, dtype: DType, function: str = "") -> Any:
    """Return an operand as an array of a dtype."""
    return literal(x, dtype) if is_scalar(x) else convert(array_of(x, function), dtype)
