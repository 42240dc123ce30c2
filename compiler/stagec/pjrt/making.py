"""Arrays that callers make: whole on one device, from the parts of devices, or from the part of each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib import _jax

from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import Aval, physical
from stagec.core.trees.node_types import children_by_jax
from stagec.pjrt.arrays import (
    DeviceArray,
    contiguous,
    dtype_of,
    native,
    of_pieces,
    put,
    single_device,
    values_of,
)
from stagec.pjrt.shardings import Sharding

if TYPE_CHECKING:
    from numpy.typing import NDArray


def device_put(tree: Any, device: _jax.Device | None = None) -> Any:
    """Return `tree` with every array copied to a device, in the same containers.

    As `jax.device_put` does (https://docs.jax.dev/en/latest/_autosummary/jax.device_put.html), to one device.
    Use it for state that stays on the device between calls, such as arguments that a function donates.

    device: one of `devices(platform)`. None is the first CPU device of this process.
    tree: numpy arrays in dicts, lists, tuples, namedtuples and None. If the process has imported JAX, also in types
        that are registered with JAX. Otherwise pass a dict of the object's fields: every function takes that too.

    It returns when the copies are made. A call with a device array returns before its results are there, as in JAX. On
    a CPU it may read the memory of a numpy argument until then: do not write into that before you have read a result.

    Raises CallError ("dtype") for a leaf that is not an array, or a masked one, RunError if XLA cannot copy one.

    >>> import numpy as np
    >>> params = stagec.device_put({"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)})
    >>> y = stagec.load("model.aot")["mlp"](params, np.ones((1, 16), np.float32))
    >>> np.asarray(y).shape
    (1, 4)
    """
    if tree is None or isinstance(tree, DeviceArray):
        return tree
    if not isinstance(tree, np.ndarray | np.generic | _jax.ArrayImpl):
        if type(tree) not in (dict, list, tuple) and (parts := children_by_jax(tree)):
            children, structure = parts
            return structure.unflatten([device_put(child, device) for child in children])
        match tree:
            case dict():
                return {key: device_put(value, device) for key, value in tree.items()}
            case list():
                return [device_put(value, device) for value in tree]
            case tuple():
                values = [device_put(value, device) for value in tree]
                return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    array = np.asarray(tree) if type(tree) in (bool, int, float, complex) else values_of(tree)
    # A separate copy: a function may donate it, and the caller's memory must not change.
    return put(native(array), single_device(device), donated=True)


def make_array_from_single_device_arrays(
    shape: tuple[int, ...], sharding: Sharding, arrays: Sequence[NDArray[Any] | DeviceArray]
) -> DeviceArray:
    """Return an array made from the parts on its devices. The whole array is never in one place.

    As JAX's function of the same name
    (https://docs.jax.dev/en/latest/_autosummary/jax.make_array_from_single_device_arrays.html).

    shape: of the whole array.
    sharding: one of `Function.input_shardings`, or that of another array.
    arrays: the parts, of one dtype, in the order of the sharding's devices: those of this process.

    Raises CallError ("shape", "dtype") if a part does not fit its device.

    >>> import numpy as np
    >>> halves = stagec.load("model.aot", devices=stagec.devices("cpu", 2))["halves"]
    >>> x = np.ones((4, 3), np.float32)
    >>> (sharding,), _ = halves.input_shardings(x)
    >>> array = stagec.make_array_from_single_device_arrays((4, 3), sharding, [x[:2], x[2:]])
    >>> more, total = halves(array)
    """
    shape = tuple(map(int, shape))
    pieces = [contiguous(values_of(array)) for array in arrays]
    parts = sharding.own_parts(shape)
    if len(pieces) != len(parts):
        of = "" if sharding.is_fully_addressable else " of this process"
        raise CallError("shape", f"{len(parts)} devices{of} hold the array, {len(pieces)} parts are given")
    for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        wanted = tuple(where.stop - where.start for where in part.slices)
        given = np.shape(arrays[number])
        if given != wanted:
            raise CallError("shape", f"part {number} has shape {given}, {wanted} is on its device")
        if piece.dtype != pieces[0].dtype:
            raise CallError("dtype", f"part {number} has dtype {piece.dtype}, part 0 has {pieces[0].dtype}")
    return of_pieces(shape, sharding, pieces)


def make_array_from_process_local_data(
    sharding: Sharding, local_data: NDArray[Any], global_shape: tuple[int, ...] | None = None
) -> DeviceArray:
    """Make an array over several processes from the part that each process has.

    As JAX's function of the same name
    (https://docs.jax.dev/en/latest/_autosummary/jax.make_array_from_process_local_data.html).

    sharding: one of `Function.input_shardings`, or that of another array.
    local_data: the parts that the devices of this process hold, put together in the order of the whole array. Along a
        dimension it may also be as long as the whole array; then the process takes its parts out of it.
    global_shape: of the whole array. None: the data is this process's own part, and the other processes have as much.

    Raises CallError ("shape") if the data is neither this process's part nor the whole array. It also does so if the
    parts of the processes overlap: then the shape of the array does not follow from that of the data.

    >>> import numpy as np
    >>> halves = stagec.load("model.aot", devices=stagec.devices("cpu", 2))["halves"]
    >>> (sharding,), _ = halves.input_shardings(np.ones((4, 3), np.float32))
    >>> x = stagec.make_array_from_process_local_data(sharding, np.ones((4, 3), np.float32))
    >>> more, total = halves(x)
    """
    data = native(values_of(local_data))
    shape = global_shape_of(sharding, data.shape) if global_shape is None else tuple(map(int, global_shape))
    if len(shape) != data.ndim:
        raise CallError("shape", f"the data has {data.ndim} dimensions, and global_shape {shape} has {len(shape)}")
    try:
        parts = [part.slices for part in sharding.own_parts(shape)]
    except ValueError as error:
        raise CallError("shape", str(error)) from None
    # For each dimension, the start of this process's parts in the data.
    begins: list[dict[int, int]] = []
    for i, (has, size) in enumerate(zip(data.shape, shape, strict=True)):
        starts = sorted({part[i].start for part in parts})
        length = parts[0][i].stop - parts[0][i].start
        if has not in (size, len(starts) * length):
            held = f"the devices of this process hold {len(starts) * length} of the {size} of the whole array"
            raise CallError("shape", f"dimension {i} of the data has {has} elements; {held}")
        begins.append({start: start if has == size else number * length for number, start in enumerate(starts)})
    pieces = []
    for part in parts:
        firsts = [begin[where.start] for begin, where in zip(begins, part, strict=True)]
        lengths = [where.stop - where.start for where in part]
        piece = data[tuple(slice(first, first + length) for first, length in zip(firsts, lengths, strict=True))]
        pieces.append(np.ascontiguousarray(piece).reshape(piece.shape))
    return of_pieces(shape, sharding, pieces)


def global_shape_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the array if each process holds `shape` of it.

    Raises CallError ("shape") if along a dimension the processes hold different or overlapping parts.
    """
    # Which parts there are does not depend on sizes; these divide into any number of them.
    parts = [part.slices for part in sharding.parts((len(sharding.devices),) * len(shape))]
    sizes = []
    for i, size in enumerate(shape):
        held: dict[int, set[int]] = {}
        for device, part in zip(sharding.devices, parts, strict=True):
            held.setdefault(device.process_index, set()).add(part[i].start)
        alike = {frozenset(starts) for starts in held.values()}
        every = frozenset().union(*alike)
        if len({len(starts) for starts in alike}) > 1 or sum(map(len, alike)) != len(every):
            raise CallError("shape", f"dimension {i}: the parts of the processes differ or overlap; give global_shape")
        sizes.append(size * len(alike))
    return tuple(sizes)


def random_arrays(avals: Sequence[Aval], seed: int) -> list[NDArray[Any]]:
    """Return an array for each of `avals`, which are static; a PRNG key is its words."""
    generator = np.random.default_rng(seed)

    def values(aval: Aval) -> NDArray[Any]:
        shape, dtype = tuple(map(int, physical(aval).shape)), dtype_of(aval)
        if dtype.kind in "biu":
            return generator.integers(0, 2, shape).astype(dtype)
        normal = generator.standard_normal(shape)
        return (normal + 1j * generator.standard_normal(shape) if dtype.kind == "c" else normal).astype(dtype)

    return list(map(values, avals))
