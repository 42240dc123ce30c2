"""Arrays over several processes, made from the part of each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stagec.core.messages.refusal import CallError
from stagec.pjrt.arrays import DeviceArray, native, of_pieces, values_of
from stagec.pjrt.shardings import Sharding

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
