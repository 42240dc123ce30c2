"""The primitive of Fourier transforms, along the last axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import KINDS
from stagec_arrays.lowering import IRValue, Rule, integers
from stagec_arrays.primitives.derivatives import Derivative
from stagec_arrays.primitives.elementwise import conj, divide, multiply
from stagec_arrays.primitives.matrices import as_dtype
from stagec_arrays.primitives.platforms import by_platform
from stagec_arrays.program import Primitive
from stagec_arrays.values import ShapedArray

MOST_AXES = 3
"""How many axes XLA transforms at once."""


def fft(x: Any, kind: str, lengths: tuple[int, ...]) -> Any:
    """Return the Fourier transform along the last axes, at most three, of these lengths.

    kind: "FFT", "IFFT", "RFFT" (of real numbers: half of the last axis) or "IRFFT" (of such a half). The inverse ones
    divide by the number of elements. As `jax.lax.fft`.
    """
    return bind(FFT, x, kind=kind, lengths=lengths)


def _infer(x: ShapedArray, *, kind: str, lengths: tuple[int, ...]) -> ShapedArray:
    if not dims.is_static(lengths):
        raise ValueError("fft: the size of an axis that is transformed must be a number; give it as n or s")
    batch = x.shape[: len(x.shape) - len(lengths)]
    half = (*lengths[:-1], lengths[-1] // 2 + 1)
    wanted = half if kind == "IRFFT" else lengths
    real = kind == "RFFT"
    if x.shape[len(batch) :] != wanted or (KINDS[x.dtype] == dtypes.COMPLEX) == real:
        raise ValueError(f"fft: {kind} of lengths {lengths} is not of an array of {x}")
    dtype = dtypes.complex_of(x.dtype) if real else dtypes.real_part(x.dtype) if kind == "IRFFT" else x.dtype
    return ShapedArray((*batch, *(half if real else lengths)), dtype)


def _lower(rule: Rule, x: IRValue, *, kind: str, lengths: tuple[int, ...]) -> IRValue:
    return hlo.fft(x, hlo.FftTypeAttr.get(kind), integers(lengths))


def _lower_device(rule: Rule, x: IRValue, *, kind: str, lengths: tuple[int, ...]) -> IRValue:
    """Transform the last axis of an IRFFT apart: cuFFT takes all axes for symmetric, where others take that one."""
    if kind != "IRFFT" or len(lengths) == 1:
        return _lower(rule, x, kind=kind, lengths=lengths)
    rank = len(rule.inputs[0].shape)
    first = rank - len(lengths)
    there = [*range(first), rank - 1, *range(first, rank - 1)]
    x = _lower(rule, hlo.transpose(x, integers(there)), kind="IFFT", lengths=lengths[:-1])
    x = hlo.transpose(x, integers(np.argsort(there).tolist()))
    return _lower(rule, x, kind="IRFFT", lengths=lengths[-1:])


def _vjp(d: Derivative, *, kind: str, lengths: tuple[int, ...]) -> list[Any]:
    g, count = d.cotangent, math.prod(lengths)
    if kind == "RFFT":
        halved = divide(conj(g), as_dtype(_twice(g, lengths[-1]), g.dtype))
        return [multiply(fft(halved, "IRFFT", lengths), count)]
    if kind == "IRFFT":
        result = fft(g, "RFFT", lengths)
        twice = as_dtype(_twice(result, lengths[-1]), result.dtype)
        return [conj(multiply(multiply(result, twice), 1 / count))]
    return [fft(g, kind, lengths)]


def _twice(x: Any, length: int) -> Any:
    """Return how often each number of the last axis stands for one of the whole, of `length`: it has a mirror image."""
    result = np.full((x.shape[-1],), 2, dtypes.real_part(x.dtype))
    result[0] = 1
    if length % 2 == 0:
        result[-1] = 1
    return result.reshape((1,) * (len(x.shape) - 1) + result.shape)


FFT = Primitive("fft", _infer, by_platform(_lower, cuda=_lower_device, rocm=_lower_device), _vjp)
