"""The memory of a buffer on a CPU as NumPy takes it, for dtypes of ml_dtypes: the buffer protocol lacks them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from jaxlib import _jax


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack 1 (https://dmlc.github.io/dlpack/latest/c_api.html). strides: in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


@functools.cache
def _pointer() -> Callable[[Any, bytes], int]:
    """Return the function for the pointer in a capsule: a new prototype takes longer than what it reads."""
    # A prototype of its own: the one of `ctypes.pythonapi` is for all packages of this process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))


class Memory:
    """The memory of a buffer, read-only. It lives as long as this object."""

    def __init__(self, buffer: _jax.ArrayImpl, itemsize: int) -> None:
        self._capsule = _jax.buffer_to_dlpack_managed_tensor(buffer)  # keeps the memory
        tensor = _Tensor.from_address(_pointer()(self._capsule, b"dltensor"))
        self.__array_interface__ = {
            "data": ((tensor.data or 0) + tensor.byte_offset, True),  # read-only
            "shape": tuple(tensor.shape[: tensor.ndim]),
            "strides": tuple(itemsize * stride for stride in tensor.strides[: tensor.ndim]),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }
