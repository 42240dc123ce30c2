"""The memory of a buffer on a CPU as NumPy takes it, for dtypes of ml_dtypes: the buffer protocol lacks them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from jaxlib import _jax


@functools.cache
def _pointer() -> Callable[[Any, bytes], int]:
    """Return the function for the pointer in a capsule: a new prototype takes longer than what it reads."""
    # A prototype of its own: the one of `ctypes.pythonapi` is for all packages of this process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))


class Memory:
    """The memory of a buffer in the usual layout, read-only. It lives as long as this object."""

    def __init__(self, buffer: _jax.ArrayImpl, shape: tuple[int, ...], itemsize: int) -> None:
        # jaxlib's own method for the address, `unsafe_buffer_pointer`, imports JAX if it is installed.
        self._capsule = _jax.buffer_to_dlpack_managed_tensor(buffer)  # keeps the memory
        # Six words: the address, device, dimensions and dtype, shape, strides, and bytes from the address to the first
        # element (DLTensor in https://dmlc.github.io/dlpack/latest/c_api.html).
        address, *_, start = (ctypes.c_uint64 * 6).from_address(_pointer()(self._capsule, b"dltensor"))
        self.__array_interface__ = {
            "data": (address + start, True),  # read-only
            "shape": shape,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }
