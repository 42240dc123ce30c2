"""The standard's functions that make arrays (https://data-apis.org/array-api/2024.12/API_specification/creation_functions.html)."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from stagec.pjrt import clients, dlpack
from stagec.pjrt.calling_convention import NUMBERS
from stagec.pjrt.jax_arrays import JaxArray
from stagec_arrays import binding, dims, dtypes, execution, tracing
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import INTEGRAL, KINDS, DType
from stagec_arrays.namespace.datatypes import check_device, check_real
from stagec_arrays.namespace.promotion import array_of, is_jaxs, is_scalar, like, refuse_masked
from stagec_arrays.primitives import elementwise as p
from stagec_arrays.primitives.slicing import concatenate
from stagec_arrays.primitives.structural import broadcast, convert, full as filled, iota, reshape
from stagec_arrays.values import Literal, Value


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Any:
    """Return an array of an array, of a number, or of numbers and arrays in lists and tuples.

    copy: True: always a copy. False: ValueError if a copy is needed. None: a copy where one is needed.
    """
    check_device(device)
    wanted = None if dtype is None else dtypes.asked(dtype)
    if isinstance(obj, Value):
        check_real("asarray", obj.dtype, wanted or obj.dtype)
        if copy is False and wanted not in (None, obj.dtype):
            raise ValueError(f"asarray: an array of {obj.dtype} cannot be one of {wanted} without a copy")
        if copy and hasattr(obj, "copy_of"):
            obj = obj.copy_of()
        return obj if wanted is None else convert(obj, wanted)
    if copy is False:
        raise ValueError(f"asarray: a {type(obj).__qualname__} must be copied into an array; leave copy out")
    refuse_masked(obj, "asarray")
    if isinstance(obj, list | tuple) and _has_values(obj):
        parts = [asarray(item, dtype=wanted) for item in obj]
        dtype_ = wanted or functools.reduce(dtypes.promote, [part.dtype for part in parts])
        rows = [reshape(convert(part, dtype_), (1, *part.shape)) for part in parts]
        return concatenate(rows, 0)
    if isinstance(obj, dims.Dim):
        return like(obj, wanted or dtypes.int32, "asarray")
    if isinstance(obj, Literal):
        obj = obj.value
    return binding.constant(_known(obj, wanted))


def _has_values(obj: Any) -> bool:
    return isinstance(obj, Value) or (isinstance(obj, list | tuple) and any(map(_has_values, obj)))


_PYTHON = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
"""Python's numbers by NumPy's kinds of dtypes."""


def _known(obj: Any, wanted: DType | None) -> np.ndarray[Any, Any]:
    """Return NumPy's array of known elements, with our default dtypes for Python's numbers."""
    array = np.asarray(obj)
    kind = array.dtype.kind
    if array.dtype.newbyteorder("=") not in KINDS:
        what = f"a {type(obj).__qualname__} is not an array of numbers (NumPy gives it the dtype {array.dtype})"
        raise TypeError(f"asarray: {what}")
    if wanted is None:
        if kind not in _PYTHON or hasattr(obj, "__array__") or hasattr(obj, "dtype"):
            wanted = dtypes.canonical(array.dtype)
        else:
            wanted = dtypes.of_python(_PYTHON[kind])
            if kind == "u" and wanted == dtypes.int64:
                wanted = array.dtype  # beyond int64
    if (
        isinstance(obj, (*NUMBERS, list, tuple))
        and KINDS[wanted] in INTEGRAL
        and array.dtype.kind in "iu"
        and array.size
    ):
        least, most = dtypes.limits(wanted)
        if not least <= array.min() <= array.max() <= most:
            raise OverflowError(f"asarray: {obj!r} is out of the range of {wanted}")
    check_real("asarray", array.dtype, wanted)
    with np.errstate(all="ignore"):
        return array.astype(wanted)


def _shape(shape: Any) -> Shape:
    return tuple(map(dims.size_of, shape if isinstance(shape, tuple | list) else (shape,)))


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of one number: a Python number, or an array of no dimensions."""
    check_device(device)
    sizes = _shape(shape)
    if isinstance(fill_value, dims.Dim):
        fill_value = array_of(fill_value)
    if isinstance(fill_value, Value):
        wanted = fill_value.dtype if dtype is None else dtypes.asked(dtype)
        return broadcast(convert(fill_value, wanted), sizes, ())
    python = type(fill_value) if is_scalar(fill_value) else None
    refuse_masked(fill_value, "full")
    if not python and (np.ndim(fill_value) or np.asarray(fill_value).dtype not in KINDS):
        raise TypeError(f"full: expected one number, not {fill_value!r}")
    own = dtypes.of_python(python) if python else dtypes.canonical(np.asarray(fill_value).dtype)
    wanted = own if dtype is None else dtypes.asked(dtype)
    number = like(fill_value, wanted).value if python else np.asarray(fill_value, wanted)
    if tracing.current() is None and dims.is_static(sizes):
        return execution.array(np.full(sizes, number))
    return filled(sizes, number, wanted)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of ones."""
    return full(shape, 1, dtype=dtype or dtypes.default(dtypes.FLOATING), device=device)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of zeros."""
    return full(shape, 0, dtype=dtype or dtypes.default(dtypes.FLOATING), device=device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of any elements: zeros."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of one number, of x's shape and dtype."""
    x = array_of(x, "full_like")
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def ones_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of ones, of x's shape and dtype."""
    return full_like(x, 1, dtype=dtype, device=device)


def zeros_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of zeros, of x's shape and dtype."""
    return full_like(x, 0, dtype=dtype, device=device)


def empty_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of any elements, of x's shape and dtype: zeros."""
    return zeros_like(x, dtype=dtype, device=device)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Any:
    """Return start, start + step, ... to before stop; of one number, from 0. Symbolic sizes are numbers."""
    check_device(device)
    if stop is None:
        start, stop = 0, start
    numbers = (start, stop, step)
    symbolic = any(isinstance(number, dims.Dim) for number in numbers)
    if any(isinstance(number, tracing.Tracer) for number in numbers):
        raise tracing.refuse(next(x for x in numbers if isinstance(x, tracing.Tracer)), "arange()", _WRITE_SIZES)
    if not symbolic:
        numbers = tuple(number if is_scalar(number) else np.asarray(number).item() for number in numbers)
    kind = float if any(isinstance(number, float) for number in numbers) else int
    wanted = dtypes.of_python(kind) if dtype is None else dtypes.asked(dtype)
    start, stop, step = numbers
    if step == 0:
        raise ValueError("arange: step is 0")
    if not symbolic:
        count = max(0, math.ceil((stop - start) / step))
        if kind is float or KINDS[wanted] not in INTEGRAL or tracing.current() is None:
            with np.errstate(all="ignore"):
                values = np.arange(count) * step + start if kind is int else start + np.arange(count) * np.float64(step)
                return binding.constant(values.astype(wanted))
    else:
        gap, room = (step, stop - start) if step > 0 else (-step, start - stop)
        count = dims.larger(0, room + gap - 1) // gap
    result = iota(wanted, (count,), 0)
    result = result if step == 1 else p.multiply(result, step)
    return result if not isinstance(start, dims.Dim) and start == 0 else p.add(result, like(start, wanted))


_WRITE_SIZES = "give numbers, or sizes of arrays (x.shape[0])"


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Any:
    """Return `num` numbers with equal distances from start to stop, which is one of them if `endpoint`."""
    check_device(device)
    if num < 0:
        raise ValueError(f"linspace: num is 0 or more, not {num}")
    if isinstance(start, tracing.Tracer) or isinstance(stop, tracing.Tracer):
        wanted = dtypes.default(dtypes.FLOATING) if dtype is None else dtypes.asked(dtype)
        part = np.arange(num) / max(1, num - 1 if endpoint else num)
        first, last = like(start, wanted), like(stop, wanted)
        weights = binding.constant(part.astype(wanted))
        return p.add(p.multiply(first, p.subtract(1.0, weights)), p.multiply(last, weights))
    first, last = (bound if is_scalar(bound) else np.asarray(bound).item() for bound in (start, stop))
    kind = complex if isinstance(first, complex) or isinstance(last, complex) else float
    wanted = dtypes.of_python(kind) if dtype is None else dtypes.asked(dtype)
    with np.errstate(all="ignore"):
        values = np.linspace(first, last, num, endpoint=endpoint)
        if KINDS[wanted] in INTEGRAL:
            values = np.floor(values)
        return binding.constant(values.astype(wanted))


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Any:
    """Return an array with ones on the k-th diagonal, and zeros elsewhere."""
    check_device(device)
    wanted = dtypes.default(dtypes.FLOATING) if dtype is None else dtypes.asked(dtype)
    shape = _shape((n_rows, n_rows if n_cols is None else n_cols))
    if tracing.current() is None and dims.is_static(shape):
        return execution.array(np.eye(shape[0], shape[1], k).astype(wanted))
    rows, columns = iota(dtypes.int32, shape, 0), iota(dtypes.int32, shape, 1)
    return convert(p.equal(p.add(rows, _offset(k)), columns), wanted)


def _offset(k: int) -> np.int32:
    """Return the number of a diagonal as one of 32 bits, as places are; none is so far away as what is cut off."""
    return np.int32(max(-(2**30), min(k, 2**30)))


def tril(x: Any, /, *, k: int = 0) -> Any:
    """Return the lower triangle of matrices, up to the k-th diagonal, and zeros above it."""
    return _triangle(array_of(x, "tril"), k, p.greater_equal)


def triu(x: Any, /, *, k: int = 0) -> Any:
    """Return the upper triangle of matrices, from the k-th diagonal, and zeros below it."""
    return _triangle(array_of(x, "triu"), k, p.less_equal)


def _triangle(x: Any, k: int, inside: Any) -> Any:
    if len(x.shape) < 2:
        raise ValueError(f"expected an array of 2 dimensions or more, not of {len(x.shape)}")
    shape = tuple(x.shape[-2:])
    rows, columns = iota(dtypes.int32, shape, 0), iota(dtypes.int32, shape, 1)
    zero = Literal(np.zeros((), x.dtype))
    return p.select(inside(p.add(rows, _offset(k)), columns), x, zero)


def meshgrid(*arrays: Any, indexing: str = "xy") -> tuple[Any, ...]:
    """Return arrays of coordinates, of vectors of coordinates.

    indexing: "ij" for axes in the order of the vectors, "xy" with the first two exchanged.
    """
    if indexing not in ("xy", "ij"):
        raise ValueError(f'meshgrid: indexing is "xy" or "ij", not {indexing!r}')
    given = [array_of(x, "meshgrid") for x in arrays]
    if any(len(x.shape) > 1 for x in given):
        raise ValueError("meshgrid: expected vectors")
    given = [reshape(x, (1,)) if not x.shape else x for x in given]
    axes = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        axes[:2] = [1, 0]
    shape: list[Any] = [0] * len(given)
    for x, axis in zip(given, axes, strict=True):
        shape[axis] = x.shape[0]
    return tuple(broadcast(x, shape, (axis,)) for x, axis in zip(given, axes, strict=True))


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Any:
    """Return another library's array; it shares its memory if it can (`stagec.from_dlpack`).

    It is copied in a trace, and if arrays here have another dtype (`stagec_arrays.enable_x64`) or order in memory.
    """
    check_device(device)
    if isinstance(x, Value) or (is_jaxs(x) and not isinstance(x, JaxArray)):  # keys, and what JAX traces
        return asarray(x, copy=copy)
    shared = dlpack.from_dlpack(x, device=clients.devices()[0], copy=copy)
    wanted = dtypes.canonical(shared.dtype)
    if tracing.current() is None and shared.dtype == wanted and shared.aval.layout is None:
        return execution.Array.of(shared)
    if copy is False:
        raise ValueError("from_dlpack: the array is copied; leave copy out")
    return binding.constant(shared.numpy().astype(wanted))
