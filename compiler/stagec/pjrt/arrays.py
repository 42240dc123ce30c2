"""Arrays on devices: arguments and results of a loaded function that stay on the device."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib import _jax, xla_client

from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import DTYPES, Aval, physical
from stagec.core.sizes.frozen import Frozen
from stagec.pjrt import clients, compatibility, failures, layouts
from stagec.pjrt.shardings import Index, Sharding

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AbstractArray:
    """The shape, dtype and sharding of an array, without its values; jaxlib reads it as it reads JAX's avals.

    shape, dtype: of the whole array. sharding: how it lies on devices. layout: the order of its elements in the memory
    of each device, in XLA's form ("{0,1}", `pjrt.layouts`); None: the usual one.
    """

    __slots__ = ("dtype", "layout", "shape", "sharding", "weak_type")

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding, layout: str | None = None
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sharding = sharding
        self.layout = layout
        self.weak_type = False

    def lies_as(self, other: AbstractArray) -> bool:
        """Whether an array of this shape and dtype lies in the same memory, part by part and element by element."""
        return self is other or (self.layout == other.layout and self.sharding.same(other.sharding, self.shape))


@functools.lru_cache(maxsize=4096)
def abstract_array(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding, layout: str | None = None
) -> AbstractArray:
    """Return the one object for all such arrays: calls see by identity that an array is like the last one there."""
    return AbstractArray(shape, dtype, sharding, layout)


class Shard(Frozen):
    """The part of an array that one device holds; fields are those of JAX's shards.

    device: its device. index: its part of the array, a slice for each dimension. data: its values, read-only; for an
    unreduced array, an addend of them.
    replica_id: 0 for the first device that holds the same data, 1 for the second, and so on.
    """

    device: _jax.Device
    index: Index
    replica_id: int
    data: NDArray[Any]

    def __init__(self, device: _jax.Device, index: Index, replica_id: int, data: NDArray[Any]) -> None:
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "replica_id", replica_id)
        object.__setattr__(self, "data", data)

    def __repr__(self) -> str:
        return f"Shard(device={self.device!r}, index={self.index!r}, replica_id={self.replica_id}, data={self.data!r})"


DLPACK_CPU = 1, 0
DLPACK_CUDA = 2
"""DLPack's kinds of devices (`DLDeviceType`), and the number of the CPU."""


class DeviceArray:
    """An array on devices: the result of `device_put`, and of functions with device arrays as arguments.

    A loaded function takes it as an argument. `numpy.asarray` reads it, and libraries share its memory by DLPack.
    `stagec_arrays.numpy.Array` is one with operators.

    aval: shape, dtype and sharding.
    """

    __slots__ = ("_buffer", "aval")

    def __init__(self, buffer: _jax.ArrayImpl, aval: AbstractArray) -> None:
        self._buffer = buffer
        self.aval = aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return self.aval.dtype

    @property
    def sharding(self) -> Sharding:
        """How it lies on devices."""
        return self.aval.sharding

    def is_deleted(self) -> bool:
        """Whether the buffer was given to a call that donates it; its values are gone."""
        return bool(self._buffer.is_deleted())

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all of its devices; False for some arrays if processes run together."""
        return self.sharding.is_fully_addressable

    def numpy(self) -> NDArray[Any]:
        """Return the values as a read-only array that shares the device's memory if numpy has the dtype.

        Raises CallError ("deleted") when the array was donated to a call, ("addressable") when only other processes
        have a part of it, RunError if the call that makes it failed.
        """
        self._check()
        if not self.aval.sharding.is_fully_addressable and not is_readable(self.aval):
            here = f"this process has {len(self.sharding.own)} of its {len(self.sharding.devices)} devices"
            what = f"an array of shape {self.shape} is not whole in this process: {here}"
            raise CallError("addressable", f"{what}; read the parts that it has, array.addressable_shards")
        try:
            values: NDArray[Any] = to_numpy([self])[0]
        except RuntimeError as error:
            raise failures.of_call(error, "reading an array") from error
        return values

    @property
    def addressable_shards(self) -> list[Shard]:
        """The part that each device of this process holds, in the order of the partitions.

        Raises CallError ("deleted"), RunError if the call that makes it failed.
        """
        self._check()
        parts, devices = self.sharding.parts(self.shape), self.sharding.devices
        try:
            self._buffer.block_until_ready()
            pieces = [self._buffer] if self.sharding.spec is None else self._buffer._arrays
            values = [_to_numpy(piece, self.aval) for piece in pieces]
        except RuntimeError as error:
            raise failures.of_call(error, "reading an array") from error
        return [
            Shard(devices[i], parts[i].slices, parts[:i].count(parts[i]), data)
            for i, data in zip(self.sharding.own, values, strict=True)
        ]

    def copy(self) -> DeviceArray:
        """Return a copy on the same devices. Raises CallError ("deleted")."""
        self._check()
        if self.aval.layout is not None:
            # jaxlib's copy is in the usual layout, and says that it is in this one (0.10.1).
            return DeviceArray(in_layout(self._buffer, self.aval, self.aval), self.aval)
        if not self.is_fully_addressable:  # jaxlib's copy would put the parts of process 1 on devices of process 0
            return of_pieces(self.shape, self.sharding, [shard.data for shard in self.addressable_shards])
        copied = _jax.batched_copy_array_to_devices_with_sharding(
            [self._buffer], [self.sharding.device_list], [self.sharding.xla], [_jax.ArrayCopySemantics.ALWAYS_COPY]
        )
        return DeviceArray(copied[0], self.aval)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it and pickle it as NumPy's array: unpickling puts it on the first CPU device.

        Raises TypeError for an array on several devices, CallError ("deleted").
        """
        return restored, (self._whole(),)

    def _whole(self) -> NDArray[Any]:
        if self.sharding.spec is not None:
            raise TypeError("an array on several devices is not pickled; pickle array.numpy(), which is whole")
        return self.numpy()

    def _check(self) -> None:
        if self._buffer.is_deleted():
            raise CallError("deleted", "this array was donated to a call; use the call's result")

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule of the array's memory: do not write to it, as with JAX's arrays.

        https://data-apis.org/array-api/2025.12/API_specification/generated/array_api.array.__dlpack__.html

        stream: a stream of the device that waits for the array. None: the call waits.
        max_version: any; the capsule has the version of JAX's capsules, which is below 1.0.
        dl_device: the array's own device, or the CPU.
        copy: True: a writable copy. False: BufferError if a copy is needed.
        Raises BufferError if DLPack has no such array, CallError ("deleted").
        """
        self._check()
        own = self.__dlpack_device__()
        wanted = own if dl_device is None else tuple(map(int, dl_device))
        if wanted != own:
            if copy is False or wanted != DLPACK_CPU:
                raise BufferError(f"the array is on DLPack's device {own}, not on {wanted}")
            return restored(self.numpy()).__dlpack__()
        buffer = (self.copy() if copy else self)._buffer
        if stream in (None, -1):  # -1: nobody waits, which jaxlib does not have
            buffer.block_until_ready()
            stream = None
        try:
            return _jax.buffer_to_dlpack_managed_tensor(buffer, stream=stream)
        except _jax.JaxRuntimeError as error:
            raise BufferError(f"DLPack does not take an array of {self.dtype}: {error}") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's kind of the device, and its number. Raises BufferError for an array on several devices."""
        if self.sharding.spec is not None:
            raise BufferError("DLPack has arrays on one device; give it the data of addressable_shards")
        (device,) = self.sharding.devices
        match clients.platform_of(device):
            case "cpu":
                return DLPACK_CPU
            case "cuda":
                return DLPACK_CUDA, device.local_hardware_id
            case platform:
                raise BufferError(f"DLPack has no devices of {platform}; give it array.numpy()")

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"{type(self).__name__}(deleted, shape={self.shape}, dtype={self.dtype})"
        if not is_readable(self.aval):
            return f"DeviceArray(in several processes, shape={self.shape}, dtype={self.dtype})"
        return f"DeviceArray({self.numpy()!r})"


def restored(values: NDArray[Any]) -> DeviceArray:
    """Return a pickled array, on the first CPU device."""
    return put(values, single_device(), donated=True)


def to_numpy(arrays: Sequence[DeviceArray]) -> list[Any]:
    """Return the values of arrays that were not donated, as `DeviceArray.numpy` does; it waits for all at once.

    Arrays that this process has not whole stay device arrays.
    """
    return reading([array.aval for array in arrays])([array._buffer for array in arrays])


def reading(avals: Sequence[AbstractArray]) -> Callable[[Sequence[_jax.ArrayImpl]], list[Any]]:
    """Return a function that returns the values of buffers of these avals, as `to_numpy` does.

    Arrays that this process has not whole stay device arrays.
    """
    if all(aval.sharding.spec is None and _has_memory(aval) for aval in avals):
        return _read_memory
    return lambda buffers: _read(buffers, avals)


def _read_memory(buffers: Sequence[_jax.ArrayImpl]) -> list[NDArray[Any]]:
    """Return the values of buffers on one device, of dtypes and in a layout that the buffer protocol has."""
    _jax.batched_block_until_ready(buffers)
    return list(map(np.asarray, buffers))


def _read(buffers: Sequence[_jax.ArrayImpl], avals: Sequence[AbstractArray]) -> list[Any]:
    _jax.batched_block_until_ready(buffers)
    return [
        _to_numpy(buffer, aval) if aval.sharding.spec is None else _assembled(buffer, aval)
        for buffer, aval in zip(buffers, avals, strict=True)
    ]


def is_readable(aval: AbstractArray) -> bool:
    """Whether the devices of this process hold all parts of an array."""
    return aval.sharding.is_fully_addressable or aval.sharding.holders(aval.shape) is not None


def _assembled(buffer: _jax.ArrayImpl, aval: AbstractArray) -> NDArray[Any] | DeviceArray:
    """Return the values of a ready array on several devices; return the array itself if it is not whole here.

    Unreduced parts are added as XLA:CPU's all-reduce adds them: in order, narrow floats such as bfloat16 as f32.
    """
    parts, holders = aval.sharding.own_parts(aval.shape), aval.sharding.holders(aval.shape)
    if holders is None:
        return DeviceArray(buffer, aval)
    narrow = aval.dtype.isbuiltin != 1 and "float" in aval.dtype.name
    summed = parts[holders[-1]].addend > 0
    whole = np.empty(aval.shape, np.float32 if narrow and summed else aval.dtype)
    for number in holders:
        part, piece = parts[number], _to_numpy(buffer._arrays[number], aval)
        if part.addend:
            whole[part.slices] += piece
        else:
            whole[part.slices] = piece
    whole = whole.astype(aval.dtype, copy=False)
    whole.flags.writeable = False
    return whole


def _has_memory(aval: AbstractArray) -> bool:
    """Return whether the buffer protocol has it: its dtype and layout, in the memory of a CPU."""
    return aval.dtype.isbuiltin == 1 and aval.layout is None and aval.sharding.devices[0].platform == "cpu"


def _to_numpy(buffer: _jax.ArrayImpl, aval: AbstractArray) -> NDArray[Any]:
    """Return the values of a ready buffer on one device. aval: of it, or of its array."""
    if aval.layout is None and (aval.dtype.isbuiltin == 1 or aval.dtype.name == "bfloat16"):
        if aval.sharding.devices[0].platform != "cpu":
            here = single_device()
            always = [_jax.ArrayCopySemantics.ALWAYS_COPY]
            copies = _jax.batched_copy_array_to_devices_with_sharding([buffer], [here.device_list], [here.xla], always)
            _jax.batched_block_until_ready(copies)
            buffer = copies[0]
        if aval.dtype.isbuiltin == 1:
            return np.asarray(memoryview(buffer))
        from stagec.pjrt.capsules import Memory  # imports ctypes

        shape = aval.sharding.shard_shape(aval.shape)
        return np.asarray(Memory(buffer, shape, aval.dtype.itemsize)).view(aval.dtype)
    # jaxlib's own way has all dtypes and layouts, but imports JAX if it is installed: 0.5 s of a start with an H100.
    values, _ = buffer._single_device_array_to_np_array_did_copy()
    return values  # type: ignore[no-any-return]


def dtype_of(aval: Aval) -> np.dtype[Any]:
    """Return numpy's dtype of the elements of `aval`; for a PRNG key, the dtype of its words."""
    name = DTYPES[aval.dtype].numpy_name
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with jaxlib; imported for the models that need it

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def zeros(aval: Aval) -> NDArray[Any]:
    """Return zeros that take no memory. aval: static; of a PRNG key its words are 0."""
    return np.broadcast_to(np.zeros((), dtype_of(aval)), tuple(map(int, physical(aval).shape)))


_DTYPES = frozenset(dtype.numpy_name for dtype in DTYPES.values())
_CHARACTERS = frozenset("?bBhHiIlLqQefdFD")
"""NumPy's own dtypes among them, as it writes them in one character."""
_SINGLE: dict[tuple[_jax.Device, str | None], Sharding] = {}


def single_device(device: _jax.Device | None = None, memory_kind: str | None = None) -> Sharding:
    """Return the sharding of arrays that are whole on `device`; None is `clients.own_device()`."""
    where = device or clients.own_device(), memory_kind
    return _SINGLE.get(where) or _SINGLE.setdefault(where, Sharding(where[:1], None, memory_kind))


def put(values: NDArray[Any], sharding: Sharding, donated: bool = False, layout: str | None = None) -> DeviceArray:
    """Copy `values` to devices; if memory allows, share it instead, but never when the buffer is `donated`.

    Raises RunError.
    """
    aval = abstract_array(values.shape, values.dtype, sharding, layout)
    try:
        return DeviceArray(placing(aval, donated)(sharding.pieces(values)), aval)
    except RuntimeError as error:
        what = f"copying an array of shape {values.shape} and dtype {values.dtype} to {sharding.devices[0]}"
        raise failures.of_call(error, what) from error


def placing(aval: AbstractArray, donated: bool = False) -> Callable[[Sequence[NDArray[Any]]], _jax.ArrayImpl]:
    """Return a function that makes the buffer of an array of `aval`, like `put`, from the pieces of the own devices."""
    if aval.layout is not None:
        return functools.partial(_put_in_layout, aval)
    xla, devices, put = aval.sharding.xla, aval.sharding.own_devices, _jax.batched_device_put
    # XLA overwrites a donated buffer: it must never be the caller's memory. An accelerator reads it later than the CPU.
    shared = not donated and devices[0].platform == "cpu"
    kinds = xla_client.HostBufferSemantics
    semantics = kinds.ZERO_COPY if shared else kinds.IMMUTABLE_ONLY_DURING_CALL
    spec = aval.sharding.spec
    if shared or spec is None or spec.is_replicated():
        return lambda pieces: put(aval, xla, pieces, devices, True, donated, semantics, True)
    return lambda pieces: put(aval, xla, _apart(pieces), devices, True, donated, semantics, True)


def _put_in_layout(aval: AbstractArray, pieces: Sequence[NDArray[Any]]) -> _jax.ArrayImpl:
    usual = abstract_array(aval.shape, aval.dtype, aval.sharding)
    buffer = in_layout(placing(usual)(pieces), usual, aval)
    buffer.block_until_ready()  # until then it may read the caller's memory
    return buffer


def in_layout(buffer: _jax.ArrayImpl, before: AbstractArray, after: AbstractArray) -> _jax.ArrayImpl:
    """Return a buffer in another layout, on the same devices: a copy, unless it has no elements."""
    if 0 in after.shape:
        return buffer
    sharding = after.sharding
    part = sharding.shard_shape(after.shape)
    copying = layouts.copying(part, after.dtype, before.layout, after.layout, sharding.devices)
    outputs = copying.execute_sharded([buffer])
    (copied,) = outputs.consume_with_handlers([compatibility.result_handler(after, sharding.xla)])
    return copied


def _apart(pieces: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """Return pieces that do not share memory.

    Of an array that is split, `batched_device_put` does not copy those: RuntimeError, bad_function_call (0.10.1).
    """
    addresses = [piece.ctypes.data for piece in pieces]
    pairs = zip(pieces, addresses, strict=True)
    return [piece.copy() if address in addresses[:i] else piece for i, (piece, address) in enumerate(pairs)]


def of_pieces(shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[NDArray[Any]]) -> DeviceArray:
    """Return an array from copies of the pieces for each device of this process."""
    aval = abstract_array(shape, pieces[0].dtype, sharding)
    return DeviceArray(placing(aval, donated=True)(pieces), aval)


def unfit(leaf: object) -> str:
    """Say why `jax.jit` takes no such leaf, and what to pass; "" for an array, and for a value that is traced.

    NumPy makes an array of many objects, and drops what their classes add: the mask of a masked array, a unit. JAX
    takes NumPy's arrays with those of derived classes (matrix, memmap), but masked ones, its scalars, and JAX's arrays.
    https://docs.jax.dev/en/latest/_autosummary/jax.jit.html has no list of these; tests/pjrt/test_arguments.py has one.
    """
    if is_masked(leaf):
        return "a masked array, whose mask would be lost: pass x.filled(VALUE), or x.data and x.mask"
    kind = type(leaf)
    if isinstance(leaf, np.ndarray | np.generic | DeviceArray | _jax.ArrayImpl) or kind.__module__.startswith(
        "stagec."
    ):
        return ""
    if str(getattr(leaf, "dtype", "")).startswith("key<") or is_traced(leaf):
        return ""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    parts = "" if hasattr(leaf, "__array__") else ", or a dict of its fields, or a tuple of its children"
    return f"a {name}, which is not an array: pass numpy.asarray(x){parts}"


def is_masked(leaf: object) -> bool:
    """Whether it is an array of `numpy.ma`, which numpy imports when somebody makes one."""
    return isinstance(leaf, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def is_traced(leaf: object) -> bool:
    """Whether it stands for a value in a function that JAX traces."""
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    return tracer is not None and isinstance(leaf, tracer)


def values_of(leaf: Any) -> NDArray[Any]:
    """Return an array as numpy's. Raises CallError ("dtype") for what is `unfit`, and for elements that XLA lacks."""
    if type(leaf) is not np.ndarray and (what := unfit(leaf)):
        raise CallError("dtype", f"the argument is {what}")
    values = np.asarray(leaf)
    # To ask NumPy for a name takes a microsecond.
    if values.dtype.char not in _CHARACTERS and values.dtype.name not in _DTYPES:
        raise CallError("dtype", f"the argument has dtype {values.dtype}, which arrays on devices do not have")
    return values


def contiguous(values: NDArray[Any]) -> NDArray[Any]:
    """Return `values` as XLA reads memory: row by row, without gaps, and as `native`."""
    return native(np.ascontiguousarray(values)).reshape(values.shape)


def native(values: NDArray[Any]) -> NDArray[Any]:
    """Return `values` with bytes in the machine's order, because XLA ignores the dtype's byte order."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
