"""The standard's functions of dtypes, and the inspection of the namespace.

https://data-apis.org/array-api/2024.12/API_specification/data_type_functions.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stagec.pjrt import clients
from stagec_arrays import dtypes, tracing
from stagec_arrays.dtypes import BOOL, COMPLEX, FLOATING, INTEGRAL, KINDS, SIGNED, UNSIGNED, DType
from stagec_arrays.namespace.promotion import array_of, dtype_of, is_scalar, like
from stagec_arrays.primitives.structural import broadcast, convert
from stagec_arrays.values import Value, broadcast_shapes, gives_views


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """Return the elements as ones of another dtype. copy: whether not to return x itself if it has the dtype.

    Raises TypeError for complex numbers as real ones.
    """
    check_device(device)
    given = array_of(x, "astype")
    wanted = dtypes.asked(dtype)
    check_real("astype", given.dtype, wanted)
    if wanted == given.dtype and not getattr(given, "weak_type", False):
        if not copy and isinstance(x, Value):
            return x
        return given.copy_of() if copy and hasattr(given, "copy_of") else given
    return convert(given, wanted)


def check_real(name: str, dtype: DType, wanted: DType) -> None:
    """Raise TypeError if complex numbers would lose their imaginary parts."""
    if KINDS.get(dtype) == COMPLEX and KINDS[wanted] not in (COMPLEX, BOOL):
        raise TypeError(f"{name}: {dtype} would lose its imaginary part as {wanted}; write real(x) or imag(x)")


@gives_views
def broadcast_arrays(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays broadcast to one shape."""
    given = [array_of(x, "broadcast_arrays") for x in arrays]
    shape = broadcast_shapes(*(x.shape for x in given)) if given else ()
    return tuple(broadcast(x, shape) for x in given)


@gives_views
def broadcast_to(x: Any, /, shape: Any) -> Any:
    """Return an array repeated to a shape."""
    return broadcast(array_of(x, "broadcast_to"), shape if isinstance(shape, tuple | list) else (shape,))


def can_cast(from_: Any, to: Any, /) -> bool:
    """Return whether a dtype, or an array's, promotes to another one."""
    wanted = _dtype(to)
    try:
        return dtypes.promote(_dtype(from_), wanted) == wanted
    except TypeError:
        return False


def result_type(*arrays_and_dtypes: Any) -> DType:
    """Return the dtype that arrays, dtypes and Python's numbers promote to."""
    if not arrays_and_dtypes:
        raise ValueError("result_type: expected an array or a dtype")
    given = (x if is_scalar(x) or isinstance(x, Value) else _dtype(x) for x in arrays_and_dtypes)
    return dtype_of(*given)[0]


def _dtype(x: Any) -> DType:
    result = x.dtype if isinstance(x, Value | np.ndarray | np.generic) else np.dtype(dtypes.NAMED.get(x, x))
    return dtypes.canonical(result)


@dataclass(frozen=True)
class FInfo:
    """The limits of a floating-point dtype: numbers as Python's floats."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IInfo:
    """The limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FInfo:  # noqa: A002 - the standard's name
    """Return the limits of a floating-point dtype, or of the parts of a complex one."""
    dtype = _dtype(type)
    dtypes.require("finfo", dtype, dtypes.INEXACT)
    part = dtypes.real_part(dtype)
    result = ml_dtypes.finfo(part)  # type: ignore[no-untyped-call]
    numbers = (float(result.eps), float(result.max), float(result.min), float(result.smallest_normal))
    return FInfo(int(result.bits), *numbers, part)


def iinfo(type: Any, /) -> IInfo:  # noqa: A002 - the standard's name
    """Return the limits of an integer dtype."""
    dtype = _dtype(type)
    dtypes.require("iinfo", dtype, INTEGRAL)
    result = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return IInfo(int(result.bits), int(result.max), int(result.min), dtype)


_KINDS_BY_NAME: dict[str, frozenset[str]] = {
    "bool": frozenset({BOOL}),
    "signed integer": frozenset({SIGNED}),
    "unsigned integer": frozenset({UNSIGNED}),
    "integral": INTEGRAL,
    "real floating": frozenset({FLOATING}),
    "complex floating": frozenset({COMPLEX}),
    "numeric": dtypes.NUMERIC,
}


def isdtype(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype belongs to a kind: a name such as "integral", a dtype, or a tuple of these."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, member) for member in kind)
    result = np.dtype(dtype)
    if isinstance(kind, str):
        if kind not in _KINDS_BY_NAME:
            raise ValueError(f"{kind!r} is not a kind of dtypes; write one of {', '.join(_KINDS_BY_NAME)}")
        return KINDS[result] in _KINDS_BY_NAME[kind]
    return bool(result == np.dtype(kind))


# Devices. There is one outside a trace; inside, it is that for which the function is compiled.


def device_of(x: Any) -> Any:
    """Return the device that an array is on; None of a trace: it is that for which the function is compiled."""
    return None if isinstance(x, tracing.Tracer) else clients.own_device()


def check_device(device: Any) -> None:
    """Raise ValueError if arrays cannot be made on a device; None is any."""
    if device is not None and device != clients.own_device():
        raise ValueError(f"arrays are made on {clients.own_device()}, not on {device!r}; leave device out")


class NamespaceInfo:
    """The contents of the namespace (https://data-apis.org/array-api/2024.12/API_specification/inspection.html)."""

    def capabilities(self) -> dict[str, Any]:
        """Return what code may rely on: masks and shapes that depend on data work only outside a trace."""
        known = tracing.current() is None
        return {"boolean indexing": known, "data-dependent shapes": known, "max dimensions": None}

    def default_device(self) -> Any:
        """Return the device of new arrays."""
        return clients.own_device()

    def devices(self) -> tuple[Any, ...]:
        """Return the devices that arrays can be on: since version 2025.12 of the standard a tuple."""
        return (clients.own_device(),)

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """Return the default dtypes of a device."""
        check_device(device)
        integer = dtypes.default(SIGNED)
        floats = {"real floating": dtypes.default(FLOATING), "complex floating": dtypes.default(COMPLEX)}
        return {**floats, "integral": integer, "indexing": integer}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """Return the standard's dtypes, of a kind or several, by name."""
        check_device(device)
        result = {name: dtypes.NAMED[name] for name in STANDARD}
        return {
            name: dtype
            for name, dtype in result.items()
            if dtypes.canonical(dtype) == dtype and (kind is None or isdtype(dtype, kind))
        }


STANDARD = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "complex64", "complex128"),
)
"""The standard's dtypes by name."""


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807 - the standard's name
    """Return the inspection of the namespace."""
    return NamespaceInfo()


def typed(x: Any, dtype: Any) -> Any:
    """Return an operand as an array, of a dtype that a caller asks for, or of its own for None."""
    return array_of(x) if dtype is None else like(x, dtypes.asked(dtype))
