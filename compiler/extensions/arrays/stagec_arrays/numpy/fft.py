"""Fourier transforms of the array API standard, on stagec's arrays (https://data-apis.org/array-api/2024.12/extensions/fourier_transform_functions.html).

Functions work in a trace and outside one, and have derivatives.
"""

from stagec_arrays.namespace.fft import (
    fft as fft,
    fftfreq as fftfreq,
    fftn as fftn,
    fftshift as fftshift,
    hfft as hfft,
    ifft as ifft,
    ifftn as ifftn,
    ifftshift as ifftshift,
    ihfft as ihfft,
    irfft as irfft,
    irfftn as irfftn,
    rfft as rfft,
    rfftfreq as rfftfreq,
    rfftn as rfftn,
)
