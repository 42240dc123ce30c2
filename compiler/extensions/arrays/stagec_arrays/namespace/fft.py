"""The standard's extension of Fourier transforms: the functions of `stagec_arrays.numpy.fft`.

https://data-apis.org/array-api/2024.12/extensions/fourier_transform_functions.html. Sizes that are transformed are
numbers; those of other axes may be symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec_arrays import binding, dtypes
from stagec_arrays.dtypes import COMPLEX, FLOATING, KINDS
from stagec_arrays.namespace.datatypes import check_device
from stagec_arrays.namespace.manipulation import roll
from stagec_arrays.namespace.promotion import array_of, inexact
from stagec_arrays.primitives import elementwise as p, fourier
from stagec_arrays.primitives.matrices import as_dtype, conjugate
from stagec_arrays.primitives.slicing import pad, slice_
from stagec_arrays.primitives.structural import convert, transpose
from stagec_arrays.values import Literal, axes_of

Norm = str
_OTHER = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def fft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the Fourier transform along an axis, which is truncated or padded with zeros to n elements.

    norm: which transform is divided by the number of elements: "backward", the inverse; "forward", this one; "ortho",
        both, by its root.
    """
    return _transformed("fft", "FFT", x, _one(n), axis, norm)


def ifft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the inverse of `fft`."""
    return _transformed("ifft", "IFFT", x, _one(n), axis, norm)


def rfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the first half of the Fourier transform of real numbers; the other half is its mirror image."""
    return _transformed("rfft", "RFFT", x, _one(n), axis, norm)


def irfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the inverse of `rfft`: n real numbers. None: twice as many as x has, less 2."""
    return _transformed("irfft", "IRFFT", x, _one(n), axis, norm)


def fftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Any:
    """Return the Fourier transform along several axes, None: all, or as many of the last as there are sizes s."""
    return _transformed("fftn", "FFT", x, s, axes, norm)


def ifftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Any:
    """Return the inverse of `fftn`."""
    return _transformed("ifftn", "IFFT", x, s, axes, norm)


def rfftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Any:
    """Return the Fourier transform of real numbers along several axes: of the last of them the first half."""
    return _transformed("rfftn", "RFFT", x, s, axes, norm)


def irfftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Any:
    """Return the inverse of `rfftn`."""
    return _transformed("irfftn", "IRFFT", x, s, axes, norm)


def hfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the Fourier transform, which is real, of numbers whose second half is the conjugate mirror image."""
    x = array_of(x, "hfft")
    return _transformed("hfft", "IRFFT", conjugate(x), _one(n), axis, _other(norm, "hfft"))


def ihfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Any:
    """Return the inverse of `hfft`."""
    return conjugate(_transformed("ihfft", "RFFT", x, _one(n), axis, _other(norm, "ihfft")))


def _one(n: int | None) -> tuple[int, ...] | None:
    return None if n is None else (n,)


def _other(norm: Norm, name: str) -> Norm:
    return _OTHER[_known(norm, name)]


def _known(norm: Norm, name: str) -> Norm:
    if norm not in _OTHER:
        raise ValueError(f'{name}: norm is {norm!r}; write "backward", "ortho" or "forward"')
    return norm


def _transformed(name: str, kind: str, x: Any, sizes: Sequence[int] | None, axis: Any, norm: Norm) -> Any:
    x = _operand(name, kind, x)
    rank = len(x.shape)
    if axis is None and sizes is not None:
        axis = tuple(range(-len(sizes), 0))
    axes = axes_of(axis, rank)
    if sizes is not None and len(sizes) != len(axes):
        raise ValueError(f"{name}: s has {len(sizes)} sizes, and axes are {len(axes)}")
    if not axes:
        return x
    lengths = _lengths(name, kind, x, sizes, axes)
    others = [axis for axis in range(rank) if axis not in axes]
    order = [*others, *axes]
    first, last = list(lengths), lengths[-1]
    taken = [*first[:-1], last // 2 + 1] if kind == "IRFFT" else first
    result = _sized(transpose(x, order), [*[None] * len(others), *taken])
    result = _along_last(result, kind, lengths)
    count = math.prod(lengths)
    power = {"backward": 0.0, "ortho": 0.5, "forward": 1.0}[_known(norm, name)]
    scale = count**power if kind in ("IFFT", "IRFFT") else count**-power
    result = result if power == 0.0 else p.multiply(result, scale)
    return transpose(result, np.argsort(order).tolist())


def _operand(name: str, kind: str, x: Any) -> Any:
    x = inexact(x, name)
    if kind == "RFFT":
        if KINDS[x.dtype] == COMPLEX:
            raise TypeError(f"{name}: expected real numbers, not {x.dtype}; write fft or fftn")
        return convert(x, x.dtype if x.dtype == dtypes.float64 else dtypes.float32)
    if KINDS[x.dtype] == COMPLEX:
        return convert(x, x.dtype)
    return as_dtype(x, dtypes.complex_of(x.dtype))


def _lengths(name: str, kind: str, x: Any, sizes: Sequence[int] | None, axes: Sequence[int]) -> tuple[int, ...]:
    """Return how many numbers are transformed, along each axis."""
    if sizes is None:
        result = [x.shape[axis] for axis in axes]
        if kind == "IRFFT":
            result[-1] = 2 * (result[-1] - 1)
    else:
        result = [x.shape[axis] if size == -1 else size for size, axis in zip(sizes, axes, strict=True)]
    for size, axis in zip(result, axes, strict=True):
        if type(size) is not int:
            what = f"axis {axis} has the symbolic size {size}, and what is transformed must be a number"
            raise ValueError(f"{name}: {what}; write it as n or s")
        if size < 1:
            raise ValueError(f"{name}: axis {axis} has {size} elements to transform; expected 1 or more")
    return tuple(result)


def _sized(x: Any, sizes: Sequence[int | None]) -> Any:
    """Return the array truncated or padded with zeros at the end to these sizes; None keeps a size."""
    limit = [own if size is None or own <= size else size for own, size in zip(x.shape, sizes, strict=True)]
    x = slice_(x, [0] * len(limit), limit)
    high = [0 if size is None else size - own for own, size in zip(x.shape, sizes, strict=True)]
    return pad(x, Literal(np.zeros((), x.dtype)), [0] * len(limit), high)


def _along_last(x: Any, kind: str, lengths: tuple[int, ...]) -> Any:
    """Transform the last axes: as many as XLA takes at once, and the others before them, or after them for an RFFT."""
    last = lengths[-fourier.MOST_AXES :]
    if len(last) == len(lengths):
        return fourier.fft(x, kind, lengths)
    rest, rank = lengths[: -len(last)], len(x.shape)
    if kind == "IRFFT":
        return fourier.fft(_along_first(x, "IFFT", rest, rank - len(lengths)), kind, last)
    return _along_first(fourier.fft(x, kind, last), "IFFT" if kind == "IFFT" else "FFT", rest, rank - len(lengths))


def _along_first(x: Any, kind: str, lengths: tuple[int, ...], start: int) -> Any:
    rank, axes = len(x.shape), range(start, start + len(lengths))
    order = [*(axis for axis in range(rank) if axis not in axes), *axes]
    return transpose(_along_last(transpose(x, order), kind, lengths), np.argsort(order).tolist())


# Frequencies.


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
    """Return the frequencies of the elements that `fft` gives of n numbers at a distance of d."""
    return _frequencies("fftfreq", n, d, dtype, device, [*range((n + 1) // 2), *range(-(n // 2), 0)])


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
    """Return the frequencies of the elements that `rfft` gives of n numbers at a distance of d."""
    return _frequencies("rfftfreq", n, d, dtype, device, range(n // 2 + 1))


def _frequencies(name: str, n: int, d: float, dtype: Any, device: Any, numbers: Sequence[int]) -> Any:
    check_device(device)
    wanted = dtypes.default(FLOATING) if dtype is None else dtypes.asked(dtype)
    if KINDS[wanted] != FLOATING:
        raise TypeError(f"{name}: expected a real floating-point dtype, not {wanted}")
    return binding.constant((np.asarray(numbers, np.float64) / (n * d)).astype(wanted))


def fftshift(x: Any, /, *, axes: int | Sequence[int] | None = None) -> Any:
    """Return the array with frequency zero in the middle of axes; None: of all."""
    return _shifted(x, axes, 1, "fftshift")


def ifftshift(x: Any, /, *, axes: int | Sequence[int] | None = None) -> Any:
    """Return the inverse of `fftshift`."""
    return _shifted(x, axes, -1, "ifftshift")


def _shifted(x: Any, axes: int | Sequence[int] | None, way: int, name: str) -> Any:
    x = array_of(x, name)
    where = axes_of(axes, len(x.shape))
    return roll(x, tuple(way * (x.shape[axis] // 2) for axis in where), axis=where) if where else x
