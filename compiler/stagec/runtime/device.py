"""Arrays on the CPU client of jaxlib, and executables that run there. The only part of the loader that calls jaxlib.

jaxlib's classes expect a few attributes that jax adds in Python; the small classes here carry just those.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagec.avals import DTYPES, Aval
from stagec.runtime.custom_calls import register_custom_calls
from stagec.runtime.refusal import CallError, LoadError

# Read when jaxlib is loaded: without it XLA lists its devices on stderr. jax sets the same default.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

from jaxlib import _jax, xla_client

from stagec.runtime import jaxlib_lines


class _Sharding(_jax.SingleDeviceSharding):  # type: ignore[misc]  # jaxlib has no types for it
    """All of an array on one device; jaxlib asks it for these two in `batched_device_put`."""

    memory_kind = None

    def _to_xla_hlo_sharding(self, ndim: int) -> xla_client.HloSharding:
        return xla_client.HloSharding.replicate()


class _Partitioned(_jax.GSPMDSharding):  # type: ignore[misc]  # jaxlib has no types for it
    """An array in pieces, one on each of several devices."""

    memory_kind = None

    def _to_xla_hlo_sharding(self, ndim: int) -> xla_client.HloSharding:
        return self._hlo_sharding


class _Aval:
    """What jaxlib reads of an aval."""

    __slots__ = ("dtype", "shape", "weak_type")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak_type = False


Index = tuple[slice, ...]
"""Which part of an array a device holds: a slice for each dimension."""


class Array:
    """An array on the device; numpy reads it through `__array__`, and a loaded function takes it as an argument.

    placement: of an array on several devices, the part that each holds; None for one that is whole on the first.
    """

    __slots__ = ("_buffer", "dtype", "placement", "shape")

    def __init__(
        self,
        buffer: _jax.ArrayImpl,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        placement: tuple[Index, ...] | None = None,
    ) -> None:
        self._buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.placement = placement

    def is_deleted(self) -> bool:
        """Whether the buffer was given to a call that donates it; its values are gone."""
        return bool(self._buffer.is_deleted())

    def numpy(self) -> NDArray[Any]:
        """Return the values as a read-only array that shares the device's memory where numpy has the dtype.

        Raises CallError ("deleted") when the array was donated to a call.
        """
        if self._buffer.is_deleted():
            raise CallError("deleted", "this array was donated to a call; use the call's result")
        if self.placement is None:
            return _to_numpy(self._buffer, self.dtype)
        whole = np.empty(self.shape, self.dtype)
        done = []
        for part, index in zip(self._buffer._arrays, self.placement, strict=True):
            if index not in done:  # several devices may hold the same part
                whole[index] = _to_numpy(part, self.dtype)
                done.append(index)
        whole.flags.writeable = False
        return whole

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"Array(deleted, shape={self.shape}, dtype={self.dtype})"
        return f"Array({self.numpy()!r})"


def _to_numpy(buffer: _jax.ArrayImpl, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of a buffer on one device."""
    if dtype.isbuiltin == 1:
        buffer.block_until_ready()
        return np.asarray(memoryview(buffer))
    # The buffer protocol lacks the dtypes of ml_dtypes. jaxlib's own way has them, but imports jax if installed.
    values, _ = buffer._single_device_array_to_np_array_did_copy()
    return values  # type: ignore[no-any-return]


def dtype_of(aval: Aval) -> np.dtype[Any]:
    """Return numpy's dtype of the elements of `aval`; of a PRNG key, that of its words."""
    name = DTYPES[aval.dtype].numpy_name
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with jaxlib; imported for the models that need it

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


@functools.cache
def client(num_devices: int) -> _jax.Client:
    """Return the process's client with that many CPU devices.

    It is made once, at the first use: a process has one pool of threads for all that runs on one device.
    """
    return xla_client.make_cpu_client(num_devices=num_devices)


@functools.cache
def devices(num_devices: int) -> _jax.DeviceList:
    """Return the devices of `client(num_devices)`, in order."""
    return _jax.DeviceList(tuple(client(num_devices).local_devices()))


def assignment(num_devices: int) -> xla_client.DeviceAssignment:
    """Return the assignment of partition i to device i."""
    return xla_client.DeviceAssignment.create(np.arange(num_devices).reshape(1, num_devices))


@functools.cache
def _single() -> _Sharding:
    return _Sharding(client(1).local_devices()[0])


def put(values: NDArray[Any], donated: bool = False) -> Array:
    """Copy `values` to the device; where memory allows, share it instead, but never when the buffer is `donated`."""
    buffer = _put(values.shape, values.dtype, _single(), [values], client(1).local_devices(), donated)
    return Array(buffer, values.shape, values.dtype)


def _put(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any, parts: Sequence[Any], where: Any, donated: bool
) -> _jax.ArrayImpl:
    semantics = xla_client.HostBufferSemantics
    return _jax.batched_device_put(
        _Aval(shape, dtype),
        sharding,
        parts,
        where,
        True,
        # XLA overwrites a donated buffer: it must never be the caller's memory.
        donated,
        semantics.IMMUTABLE_ONLY_DURING_CALL if donated else semantics.ZERO_COPY,
        True,
    )


def placement(sharding: xla_client.HloSharding, shape: Sequence[int], num_devices: int) -> tuple[Index, ...]:
    """Return the part of an array of `shape` that each device holds.

    Raises ValueError when a dimension is not a multiple of the number of its parts: XLA would pad it.
    """
    whole = tuple(slice(0, size) for size in shape)
    if not sharding.is_tiled():
        return (whole,) * num_devices
    # Dimensions beyond the array's count the devices that hold the same part.
    tiles = sharding.tile_assignment_dimensions()
    counts = tiles[: len(shape)]
    if any(size % count for size, count in zip(shape, counts, strict=True)):
        raise ValueError(f"shape {tuple(shape)} does not divide into {'x'.join(map(str, counts))} parts")
    parts: list[Index] = [whole] * num_devices
    copies = math.prod(tiles[len(shape) :])
    for position, device in enumerate(sharding.tile_assignment_devices()):
        tile = np.unravel_index(position // copies, counts) if counts else ()
        parts[device] = tuple(
            slice(int(i) * size // count, (int(i) + 1) * size // count)
            for i, size, count in zip(tile, shape, counts, strict=True)
        )
    return tuple(parts)


ArraySpecs = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array, whole."""


class Executable:
    """A loaded executable: device arrays in, device arrays out, flat and in the order of its own parameters.

    loaded: jaxlib's executable.
    num_devices: on how many devices it runs; arrays are split over them as the executable says.
    parameter_shardings, output_shardings: XLA's form of that; empty for one device.
    """

    def __init__(
        self, loaded: _jax.LoadedExecutable, parameters: ArraySpecs, results: ArraySpecs, num_devices: int = 1
    ) -> None:
        """Raises ValueError when XLA split an array into parts of different sizes."""
        self.loaded = loaded
        self.num_devices = num_devices
        self._results = tuple(results)
        if num_devices == 1:
            self.parameter_shardings: tuple[xla_client.HloSharding, ...] = ()
            self.output_shardings: tuple[xla_client.HloSharding, ...] = ()
            self._handlers = [jaxlib_lines.result_handler(_Aval(*result), _single()) for result in results]
            return
        self.parameter_shardings = _shardings(loaded.get_parameter_shardings())
        self.output_shardings = _shardings(loaded.get_output_shardings())
        self._parameters = [
            (_Partitioned(devices(num_devices), sharding), placement(sharding, shape, num_devices))
            for sharding, (shape, _) in zip(self.parameter_shardings, parameters, strict=True)
        ]
        self._outputs = [
            placement(sharding, shape, num_devices)
            for sharding, (shape, _) in zip(self.output_shardings, results, strict=True)
        ]
        self._handlers = [
            jaxlib_lines.result_handler(_Aval(*result), _Partitioned(devices(num_devices), sharding))
            for sharding, result in zip(self.output_shardings, results, strict=True)
        ]

    @staticmethod
    def load(
        serialized: bytes,
        parameters: ArraySpecs,
        results: ArraySpecs,
        custom_calls: Sequence[str],
        num_devices: int = 1,
    ) -> Executable:
        """Load an executable that takes arrays `parameters` and gives arrays `results`.

        Raises LoadError ("custom-call", "executable").
        """
        unknown = register_custom_calls(custom_calls)
        if unknown:
            what = f"the executable calls {', '.join(unknown)}, which jaxlib does not have"
            raise LoadError("custom-call", what)
        try:
            loaded = client(num_devices).deserialize_executable(serialized, devices(num_devices))
        except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
            raise LoadError("executable", f"jaxlib does not load the executable: {error}") from error
        return Executable(loaded, parameters, results, num_devices)

    def put(self, number: int, values: NDArray[Any] | Array, donated: bool = False) -> Array:
        """Return parameter `number` as the executable wants it: an array that lies so already stays where it is.

        donated: the call will overwrite it.
        """
        if self.num_devices == 1:
            if isinstance(values, Array):
                return values if values.placement is None else put(values.numpy(), donated)
            return put(values, donated)
        sharding, parts = self._parameters[number]
        if isinstance(values, Array):
            if values.placement == parts:
                return values
            values = values.numpy()
        pieces = [np.ascontiguousarray(values[part]).reshape(values[part].shape) for part in parts]
        where = client(self.num_devices).local_devices()
        buffer = _put(values.shape, values.dtype, sharding, pieces, where, donated)
        return Array(buffer, values.shape, values.dtype, parts)

    def __call__(self, arguments: Sequence[Array]) -> list[Array]:
        """Run on `arguments`, which must be of the executable's own shapes and dtypes: XLA does not check."""
        outputs = self.loaded.execute_sharded([a._buffer for a in arguments]).consume_with_handlers(self._handlers)
        if self.num_devices == 1:
            return [Array(buffer, *result) for buffer, result in zip(outputs, self._results, strict=True)]
        # The devices of one CPU share its threads: two calls at a time, each waiting for its own, would wait for ever.
        for output in outputs:
            output.block_until_ready()
        results = zip(outputs, self._results, self._outputs, strict=True)
        return [Array(buffer, *result, parts) for buffer, result, parts in results]


def _shardings(protos: Sequence[xla_client.OpSharding] | None) -> tuple[xla_client.HloSharding, ...]:
    return tuple(map(xla_client.HloSharding.from_proto, protos or ()))
