"""DLPack: arrays of other libraries as device arrays that share their memory.

https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib import _jax

from stagec.core.sizes.avals import SHORT_NAMES, Aval
from stagec.pjrt import capsules, clients, compatibility, layouts
from stagec.pjrt.arrays import (
    DLPACK_CPU,
    DLPACK_CUDA,
    DeviceArray,
    abstract_array,
    contiguous,
    dtype_of,
    put,
    single_device,
)
from stagec.pjrt.jax_arrays import JaxArray


def from_dlpack(x: Any, /, *, device: _jax.Device | None = None, copy: bool | None = None) -> DeviceArray:
    """Return another library's array as a device array that shares its memory.

    As `from_dlpack` of the array API standard
    (https://data-apis.org/array-api/2025.12/API_specification/generated/array_api.from_dlpack.html).

    x: an array of NumPy, JAX, PyTorch, CuPy or any library with `__dlpack__` and `__dlpack_device__`. It lives as long
        as the result does; while it does, do not write to it.
    device: one of `devices(platform)`. None: that of x.
    copy: None: a copy if one is needed: for another device, for memory of a CPU that does not begin at a multiple of 64
        bytes, and for elements with gaps between them. True: always a copy. False: ValueError if one is needed.

    A call that donates the result never writes to memory of others: XLA takes a copy of it, and the result stays.

    Raises TypeError for an object without DLPack, BufferError if its library or XLA does not share such an array,
    LoadError ("platform") for a device that this process does not have.

    >>> import numpy as np
    >>> x = stagec.from_dlpack(np.ones((1, 16), np.float32))
    >>> np.from_dlpack(x).shape
    (1, 16)
    """
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise TypeError(f"a {type(x).__qualname__} has no DLPack: it lacks __dlpack__ or __dlpack_device__")
    kind, number = map(int, x.__dlpack_device__())
    source = _device(kind, number, device)
    target = device or source
    if copy is not True and target == source:
        shared = _shared(x, kind, source)
        if shared is not None:
            return shared
    if copy is False:
        where = f"it is not on {target}" if target != source else "XLA cannot use it where it is"
        raise ValueError(f"from_dlpack: the array must be copied, because {where}; leave copy out")
    if kind == DLPACK_CPU[0]:
        values = x if isinstance(x, np.ndarray | DeviceArray | JaxArray) else np.from_dlpack(x)
    else:
        values = _shared(x, kind, source)
    if values is None:
        raise BufferError("from_dlpack: XLA takes arrays of a device only where there are no gaps between elements")
    return put(contiguous(np.asarray(values)), single_device(target), donated=True)


def _device(kind: int, number: int, asked: _jax.Device | None) -> _jax.Device:
    """Return the device that DLPack names. asked: the wanted device; it decides between several CPUs."""
    if kind == DLPACK_CPU[0]:
        is_cpu = asked is not None and clients.platform_of(asked) == "cpu"
        return asked if asked is not None and is_cpu else clients.devices()[0]
    if kind == DLPACK_CUDA:
        return next(device for device in clients.devices("cuda") if device.local_hardware_id == number)
    raise BufferError(f"from_dlpack: the array is on DLPack's device {(kind, number)}; XLA shares CPUs and NVIDIA's")


def _shared(x: Any, kind: int, device: _jax.Device) -> DeviceArray | None:
    """Return an array in the memory of `x`; None if XLA cannot use it there. Raises BufferError."""
    if isinstance(x, np.ndarray):  # DLPack below 1.0 has no arrays that are read-only, and no dtypes of ml_dtypes
        if not (x.flags.c_contiguous and x.dtype.isnative):
            return None
        array = put(x, single_device(device))
        return array if array._buffer.unsafe_buffer_pointer() == x.ctypes.data else None
    stream = None if kind == DLPACK_CPU[0] else device.get_stream_for_external_ready_events()
    capsule = x.__dlpack__() if stream is None else x.__dlpack__(stream=stream)
    try:
        shape, name = capsules.described(capsule)  # jaxlib's arrays say neither, unless JAX is imported
    except ValueError as error:
        raise BufferError(f"from_dlpack: __dlpack__ gives no capsule of a DLPack below 1.0: {error}") from error
    if name not in SHORT_NAMES:
        raise BufferError(f"from_dlpack: XLA has no arrays of {name or 'this dtype'}")
    try:
        buffer = compatibility.from_dlpack(capsule, device, stream, kind)
    except _jax.JaxRuntimeError as error:
        if "aligned" in str(error) or "striding" in str(error):
            return None
        raise BufferError(f"from_dlpack: XLA does not take the array: {error}") from error
    sharding = single_device(device)
    dtype = dtype_of(Aval(SHORT_NAMES[name], shape))
    return DeviceArray(buffer, abstract_array(shape, dtype, sharding, layouts.of_array(buffer, shape, dtype, sharding)))
