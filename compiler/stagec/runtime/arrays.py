"""Arrays on devices: what a loaded function takes and gives where values are to stay there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib import _jax, xla_client

from stagec.avals import DTYPES, Aval
from stagec.runtime import clients
from stagec.runtime.node_types import children_by_jax
from stagec.runtime.refusal import CallError

if TYPE_CHECKING:
    from numpy.typing import NDArray


Index = tuple[slice, ...]
"""Which part of an array a device holds: a slice for each dimension."""


class Sharding:
    """How an array lies on devices: members are those of `jax.sharding.Sharding`.

    https://docs.jax.dev/en/latest/jax.sharding.html

    devices: in the order of the partitions.
    spec: XLA's form of which part each has; None: the array is whole, on the one device.
    """

    __slots__ = ("_parts", "device_list", "devices", "spec", "xla")

    def __init__(self, devices: tuple[_jax.Device, ...], spec: xla_client.HloSharding | None = None) -> None:
        self.devices = devices
        self.spec = spec
        self.device_list = _jax.DeviceList(devices)
        # Of this class, and no subclass in Python, C++ reads all without calling Python.
        self.xla = _jax.GSPMDSharding(self.device_list, spec or xla_client.HloSharding.replicate())
        self._parts: dict[tuple[int, ...], tuple[Index, ...]] = {}

    @property
    def device_set(self) -> frozenset[_jax.Device]:
        """The devices, in no order."""
        return frozenset(self.devices)

    def parts(self, shape: tuple[int, ...]) -> tuple[Index, ...]:
        """Return the part of an array of `shape` that each of `devices` holds. Raises ValueError as `placement`."""
        found = self._parts.get(shape)
        if found is None:
            spec = self.spec or xla_client.HloSharding.replicate()
            found = self._parts[shape] = placement(spec, shape, len(self.devices))
        return found

    def pieces(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Return what each of `devices` holds of `values`. Raises ValueError as `placement`."""
        if self.spec is None:
            return [values]
        held = [values[part] for part in self.parts(values.shape)]
        return [np.ascontiguousarray(piece).reshape(piece.shape) for piece in held]

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> Mapping[_jax.Device, Index]:
        """Return the part of an array of `global_shape` that each device holds."""
        return dict(zip(self.devices, self.parts(global_shape), strict=True))

    def shard_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part that each device holds."""
        return tuple(part.stop - part.start for part in self.parts(global_shape)[0])

    def same(self, other: Sharding, shape: tuple[int, ...]) -> bool:
        """Whether an array of `shape` lies on the same devices in the same parts."""
        if self is other:
            return True
        return self.devices == other.devices and self.parts(shape) == other.parts(shape)

    def __repr__(self) -> str:
        where = ", ".join(str(device.id) for device in self.devices)
        return f"Sharding(devices {where}{f', {self.spec}' if self.spec else ''})"


class AbstractArray:
    """What is known of an array without its values; jaxlib reads it as it reads JAX's avals.

    shape, dtype: of the whole array. sharding: how it lies on devices.
    """

    __slots__ = ("dtype", "shape", "sharding", "weak_type")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sharding = sharding
        self.weak_type = False


@functools.lru_cache(maxsize=4096)
def abstract_array(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> AbstractArray:
    """Return the one object for all such arrays: calls tell by identity that an array is like the last one there."""
    return AbstractArray(shape, dtype, sharding)


@dataclass(frozen=True)
class Shard:
    """The part of an array that one device holds; fields are those of JAX's shards.

    device: where it is. index: which part of the array, a slice for each dimension. data: its values, read-only.
    replica_id: 0 for the first device that holds this part, 1 for the second, and so on.
    """

    device: _jax.Device
    index: Index
    replica_id: int
    data: NDArray[Any]


class Array:
    """An array on devices; numpy reads it through `__array__`, and a loaded function takes it as an argument.

    aval: shape, dtype and sharding.
    """

    __slots__ = ("_buffer", "aval")

    def __init__(self, buffer: _jax.ArrayImpl, aval: AbstractArray) -> None:
        self._buffer = buffer
        self.aval = aval

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""
        return self.aval.dtype

    @property
    def sharding(self) -> Sharding:
        """How it lies on devices."""
        return self.aval.sharding

    def is_deleted(self) -> bool:
        """Whether the buffer was given to a call that donates it; its values are gone."""
        return bool(self._buffer.is_deleted())

    def numpy(self) -> NDArray[Any]:
        """Return the values as a read-only array that shares the device's memory where numpy has the dtype.

        Raises CallError ("deleted") when the array was donated to a call.
        """
        self._check()
        (values,) = to_numpy([self])
        return values

    @property
    def addressable_shards(self) -> list[Shard]:
        """The part that each device holds, in the order of the partitions. Raises CallError ("deleted")."""
        self._check()
        self._buffer.block_until_ready()
        indices = self.sharding.parts(self.shape)
        pieces = [self._buffer] if self.sharding.spec is None else self._buffer._arrays
        return [
            Shard(device, index, indices[:i].count(index), _to_numpy(piece, self.dtype))
            for i, (device, index, piece) in enumerate(zip(self.sharding.devices, indices, pieces, strict=True))
        ]

    def copy(self) -> Array:
        """Return a copy on the same devices. Raises CallError ("deleted")."""
        self._check()
        copied = _jax.batched_copy_array_to_devices_with_sharding(
            [self._buffer], [self.sharding.device_list], [self.sharding.xla], [_jax.ArrayCopySemantics.ALWAYS_COPY]
        )
        return Array(copied[0], self.aval)

    def _check(self) -> None:
        if self._buffer.is_deleted():
            raise CallError("deleted", "this array was donated to a call; use the call's result")

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


def to_numpy(arrays: Sequence[Array]) -> list[NDArray[Any]]:
    """Return the values of arrays, none of which was donated, as `Array.numpy` does; all are awaited at once."""
    return reading([array.aval for array in arrays])([array._buffer for array in arrays])


def reading(avals: Sequence[AbstractArray]) -> Callable[[Sequence[_jax.ArrayImpl]], list[NDArray[Any]]]:
    """Return what gives the values of buffers of these avals, as `to_numpy` does."""
    if all(aval.sharding.spec is None and aval.dtype.isbuiltin == 1 for aval in avals):
        return _read_memory
    return lambda buffers: _read(buffers, avals)


def _read_memory(buffers: Sequence[_jax.ArrayImpl]) -> list[NDArray[Any]]:
    """Return the values of buffers on one device, of dtypes that the buffer protocol has."""
    _jax.batched_block_until_ready(buffers)
    return [np.asarray(memoryview(buffer)) for buffer in buffers]


def _read(buffers: Sequence[_jax.ArrayImpl], avals: Sequence[AbstractArray]) -> list[NDArray[Any]]:
    _jax.batched_block_until_ready(buffers)
    return [
        _to_numpy(buffer, aval.dtype) if aval.sharding.spec is None else _assembled(Array(buffer, aval))
        for buffer, aval in zip(buffers, avals, strict=True)
    ]


def _assembled(array: Array) -> NDArray[Any]:
    """Return the values of an array that lies on several devices."""
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if not shard.replica_id:
            whole[shard.index] = shard.data
    whole.flags.writeable = False
    return whole


def _to_numpy(buffer: _jax.ArrayImpl, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of a buffer on one device, which is ready."""
    if dtype.isbuiltin == 1:
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


_SINGLE: dict[_jax.Device, Sharding] = {}


def single_device(device: _jax.Device | None = None) -> Sharding:
    """Return the sharding of arrays that are whole on `device`; None is the first device of `clients.devices()`."""
    device = device or clients.devices()[0]
    return _SINGLE.get(device) or _SINGLE.setdefault(device, Sharding((device,)))


def put(values: NDArray[Any], sharding: Sharding, donated: bool = False) -> Array:
    """Copy `values` to devices; where memory allows, share it instead, but never when the buffer is `donated`."""
    aval = abstract_array(values.shape, values.dtype, sharding)
    return Array(placing(aval, donated)(sharding.pieces(values)), aval)


def placing(aval: AbstractArray, donated: bool = False) -> Callable[[Sequence[NDArray[Any]]], _jax.ArrayImpl]:
    """Return what makes the buffer of an array of `aval`, as `put` does, from the pieces that the devices hold."""
    xla, devices, place = aval.sharding.xla, aval.sharding.devices, _jax.batched_device_put
    # XLA overwrites a donated buffer: it must never be the caller's memory. An accelerator reads it later than the CPU.
    shared = not donated and devices[0].platform == "cpu"
    kinds = xla_client.HostBufferSemantics
    semantics = kinds.ZERO_COPY if shared else kinds.IMMUTABLE_ONLY_DURING_CALL
    spec = aval.sharding.spec
    if shared or spec is None or spec.is_replicated():
        return lambda pieces: place(aval, xla, pieces, devices, True, donated, semantics, True)
    return lambda pieces: place(aval, xla, _apart(pieces), devices, True, donated, semantics, True)


def _apart(pieces: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """Return pieces of which no two are the same memory.

    Of an array that is split, `batched_device_put` copies none of those: RuntimeError, bad_function_call (0.10.1).
    """
    places = [piece.ctypes.data for piece in pieces]
    pairs = zip(pieces, places, strict=True)
    return [piece.copy() if place in places[:i] else piece for i, (piece, place) in enumerate(pairs)]


def make_array_from_single_device_arrays(
    shape: tuple[int, ...], sharding: Sharding, arrays: Sequence[NDArray[Any] | Array]
) -> Array:
    """Return an array of `shape` from the part that each device is to hold, without ever making the whole.

    As JAX's function of the same name
    (https://docs.jax.dev/en/latest/_autosummary/jax.make_array_from_single_device_arrays.html).

    sharding: as `Function.input_shardings` tells it, or of another array.
    arrays: of one dtype, in the order of the sharding's devices.
    Raises CallError ("shape", "dtype") when a part is another one than the device holds.
    """
    shape = tuple(map(int, shape))
    pieces = [_native(np.ascontiguousarray(array)) for array in arrays]
    parts = sharding.parts(shape)
    if len(pieces) != len(parts):
        raise CallError("shape", f"{len(parts)} devices hold the array, {len(pieces)} parts are given")
    for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        wanted = tuple(index.stop - index.start for index in part)
        given = np.shape(arrays[number])
        if given != wanted:
            raise CallError("shape", f"part {number} has shape {given}, {wanted} is wanted")
        if piece.dtype != pieces[0].dtype:
            raise CallError("dtype", f"part {number} has dtype {piece.dtype}, part 0 has {pieces[0].dtype}")
    pieces = [piece.reshape(np.shape(array)) for piece, array in zip(pieces, arrays, strict=True)]
    aval = abstract_array(shape, pieces[0].dtype, sharding)
    return Array(placing(aval, donated=True)(pieces), aval)


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


def device_put(tree: Any, device: _jax.Device | None = None) -> Any:
    """Return `tree` with every array copied to the device, in the containers it was in.

    As `jax.device_put` does (https://docs.jax.dev/en/latest/_autosummary/jax.device_put.html), to one device.

    Use it for state that a function donates, so that it stays on the device between calls.
    device: one of `devices(platform)`; None is the first of this process's CPU.
    tree: numpy arrays in dicts, lists, tuples, namedtuples and None, and in types that are registered with JAX where
        the process has imported JAX; elsewhere give a dict of an object's fields, which every function takes too.
    Raises CallError ("dtype") for a leaf that is no array.
    """
    if tree is None or isinstance(tree, Array):
        return tree
    if isinstance(tree, dict | list | tuple) or not hasattr(tree, "__array__"):
        if type(tree) not in (dict, list, tuple) and (found := children_by_jax(tree)):
            children, structure = found
            return structure.unflatten([device_put(child, device) for child in children])
        match tree:
            case dict():
                return {key: device_put(value, device) for key, value in tree.items()}
            case list():
                return [device_put(value, device) for value in tree]
            case tuple():
                values = [device_put(value, device) for value in tree]
                return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    array = np.asarray(tree)
    if array.dtype.hasobject:
        kind = type(tree).__qualname__
        raise CallError("dtype", f"a {kind} is no array: give a dict of its fields, or a tuple of its children")
    # A copy of its own: a function may donate it, and the caller's memory must not change.
    return put(_native(array), single_device(device), donated=True)


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """Return `values` with bytes in the machine's order: XLA reads them so, whatever the dtype says."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
