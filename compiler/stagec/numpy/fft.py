"""Fourier transforms of the array API standard, on stagec's arrays (https://data-apis.org/array-api/2024.12/extensions/fourier_transform_functions.html).

Functions work in a trace and outside one, and have derivatives.
"""

from stagec.arrays.namespace.fft import (
    fft,
    fftfreq,
    fftn,
    fftshift,
    hfft,
    ifft,
    ifftn,
    ifftshift,
    ihfft,
    irfft,
    irfftn,
    rfft,
    rfftfreq,
    rfftn,
)

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]
