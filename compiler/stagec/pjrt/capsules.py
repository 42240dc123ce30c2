"""What DLPack's capsules say, and the memory of a buffer on a CPU for dtypes that the buffer protocol lacks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib import _jax

_OF_BITS: Mapping[int, str] = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
"""DLPack's kinds of elements (`DLDataTypeCode`), as NumPy's names of dtypes begin."""
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_NAMES: Mapping[int, str] = {6: "bool", **{7 + i: f"float8_{kind}" for i, kind in enumerate(_FLOAT8)}}


@functools.cache
def _pointer() -> Callable[[Any, bytes], int]:
    """Return the function for the pointer in a capsule: a new prototype takes longer than what it reads."""
    # A prototype of its own: the one of `ctypes.pythonapi` is for all packages of this process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))


def tensor(capsule: Any) -> Sequence[int]:
    """Return the six words of the tensor in DLPack's capsule, which must live longer.

    The address; the device; dimensions and dtype; the address of the shape; that of the strides; and the bytes from the
    address to the first element (DLTensor in https://dmlc.github.io/dlpack/latest/c_api.html).
    """
    return list((ctypes.c_uint64 * 6).from_address(_pointer()(capsule, b"dltensor")))


def described(capsule: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype, by NumPy's name, of the tensor in DLPack's capsule; "" for a dtype that NumPy lacks."""
    _, _, kind, shape, *_ = tensor(capsule)
    ndim, code, bits = kind & 0xFFFFFFFF, kind >> 32 & 0xFF, kind >> 40 & 0xFF
    name = _OF_BITS[code] + str(bits) if code in _OF_BITS else _NAMES.get(code, "")
    return (*(ctypes.c_int64 * ndim).from_address(shape),) if ndim else (), name


class Memory:
    """The memory of a buffer in the usual layout, read-only. It lives as long as this object."""

    def __init__(self, buffer: _jax.ArrayImpl, shape: tuple[int, ...], itemsize: int) -> None:
        # jaxlib's own method for the address, `unsafe_buffer_pointer`, imports JAX if it is installed.
        self._capsule = _jax.buffer_to_dlpack_managed_tensor(buffer)  # keeps the memory
        address, *_, start = tensor(self._capsule)
        self.__array_interface__ = {
            "data": (address + start, True),  # read-only
            "shape": shape,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }
