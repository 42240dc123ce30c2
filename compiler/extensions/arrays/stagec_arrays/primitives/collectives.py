"""Primitives between the devices of a mesh, in a `shard_map`: sums, gathering, and exchanges between devices.

Parameters of all: `axes`, names of the mesh axes along which devices take part, and `mesh`, which has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dtypes, meshes
from stagec_arrays.binding import bind
from stagec_arrays.lowering import IRValue, Rule, constant, integer, pairs, tensor_type
from stagec_arrays.meshes import Axes
from stagec_arrays.program import Primitive
from stagec_arrays.values import ShapedArray

Names = tuple[str, ...]


def _devices(mesh: Axes, axes: Names) -> np.ndarray[Any, Any]:
    """Return the numbers of the devices, a row for each group that works together."""
    names = [name for name, _ in mesh]
    grid = np.arange(meshes.size(mesh, names)).reshape([size for _, size in mesh])
    own = [names.index(name) for name in axes]
    others = [i for i in range(len(names)) if i not in own]
    return grid.transpose([*others, *own]).reshape(-1, meshes.size(mesh, axes))


def _groups(mesh: Axes, axes: Names) -> dict[str, Any]:
    """Return the attributes that say which devices work together."""
    rows: Any = np.ascontiguousarray(_devices(mesh, axes), np.int64)
    return {"replica_groups": ir.DenseIntElementsAttr.get(rows), "channel_handle": _channel()}


def _channel() -> Any:
    return hlo.ChannelHandle.get(1, 0)


def _all_reduce(
    name: str, combine: Callable[[IRValue, IRValue], IRValue], vjp: Any, what: str
) -> Callable[[Any, Names, Axes], Any]:
    def lower(rule: Rule, x: IRValue, *, axes: Names, mesh: Axes) -> IRValue:
        groups = _groups(mesh, axes)
        operation = hlo.AllReduceOp([x.type], [x], **groups, use_global_device_ids=True)
        rule.reducer(operation, combine)
        return operation.results[0]

    primitive = Primitive(name, lambda x, *, axes, mesh: ShapedArray(*x[:2]), lower, vjp)

    def reduce(x: Any, axes: Names, mesh: Axes) -> Any:
        return bind(primitive, x, axes=axes, mesh=mesh)

    reduce.__doc__ = f"Return {what} of x over the devices along axes."
    return reduce


_NO_DERIVATIVE = "JAX has none either: use psum, or all_gather and a maximum"
psum: Callable[[Any, Names, Axes], Any] = _all_reduce(
    "psum", hlo.add, lambda d, *, axes, mesh: [psum(d.cotangent, axes, mesh)], "the sum"
)
pmax = _all_reduce("pmax", hlo.maximum, _NO_DERIVATIVE, "the largest elements")
pmin = _all_reduce("pmin", hlo.minimum, _NO_DERIVATIVE, "the smallest elements")


def all_gather(x: Any, axes: Names, mesh: Axes, dimension: int) -> Any:
    """Return the values of all devices along axes, one after another along a dimension."""
    return bind(ALL_GATHER, x, axes=axes, mesh=mesh, dimension=dimension)


def _scaled(aval: ShapedArray, dimension: int, by: int) -> ShapedArray:
    size = aval.shape[dimension] * by
    return ShapedArray((*aval.shape[:dimension], size, *aval.shape[dimension + 1 :]), aval.dtype)


def _split(what: str, aval: ShapedArray, dimension: int, count: int) -> ShapedArray:
    if aval.shape[dimension] % count != 0:
        raise ValueError(f"{what}: dimension {dimension} of {aval} does not have {count} equal parts")
    return ShapedArray(
        (*aval.shape[:dimension], aval.shape[dimension] // count, *aval.shape[dimension + 1 :]), aval.dtype
    )


ALL_GATHER: Primitive = Primitive(
    "all_gather",
    lambda x, *, axes, mesh, dimension: _scaled(x, dimension, meshes.size(mesh, axes)),
    lambda rule, x, *, axes, mesh, dimension: hlo.AllGatherOp(
        [tensor_type(rule.out)],
        [x],
        all_gather_dim=integer(dimension),
        **_groups(mesh, axes),
        use_global_device_ids=True,
    ).results[0],
    lambda d, *, axes, mesh, dimension: [psum_scatter(d.cotangent, axes, mesh, dimension)],
)


def psum_scatter(x: Any, axes: Names, mesh: Axes, dimension: int) -> Any:
    """Return the device's part, along a dimension, of the sum of x over the devices along axes."""
    return bind(PSUM_SCATTER, x, axes=axes, mesh=mesh, dimension=dimension)


def _psum_scatter_lower(rule: Rule, x: IRValue, *, axes: Names, mesh: Axes, dimension: int) -> IRValue:
    operation = hlo.ReduceScatterOp(
        tensor_type(rule.out),
        x,
        scatter_dimension=integer(dimension),
        **_groups(mesh, axes),
        use_global_device_ids=True,
    )
    rule.reducer(operation, hlo.add)
    return operation.results[0]


PSUM_SCATTER: Primitive = Primitive(
    "reduce_scatter",
    lambda x, *, axes, mesh, dimension: _split("psum_scatter", x, dimension, meshes.size(mesh, axes)),
    _psum_scatter_lower,
    lambda d, *, axes, mesh, dimension: [all_gather(d.cotangent, axes, mesh, dimension)],
)


def ppermute(x: Any, axes: Names, mesh: Axes, sends: Sequence[tuple[int, int]]) -> Any:
    """Return the array of another device: each pair is a sender and a receiver. Without a sender it is zeros."""
    return bind(PPERMUTE, x, axes=axes, mesh=mesh, sends=tuple(sends))


def _ppermute_infer(x: ShapedArray, *, axes: Names, mesh: Axes, sends: tuple[tuple[int, int], ...]) -> ShapedArray:
    count = meshes.size(mesh, axes)
    for numbers in zip(*sends, strict=True):
        if len(set(numbers)) < len(numbers) or not all(0 <= number < count for number in numbers):
            raise ValueError(f"ppermute: {sends} must name devices 0 to {count - 1}, each at most once on either side")
    return ShapedArray(*x[:2])


def _ppermute_lower(rule: Rule, x: IRValue, *, axes: Names, mesh: Axes, sends: tuple[tuple[int, int], ...]) -> IRValue:
    between = [(row[source], row[target]) for row in _devices(mesh, axes) for source, target in sends]
    operation = hlo.CollectivePermuteOp(x, pairs(between), channel_handle=_channel())
    return operation.results[0]


PPERMUTE: Primitive = Primitive(
    "ppermute",
    _ppermute_infer,
    _ppermute_lower,
    lambda d, *, axes, mesh, sends: [ppermute(d.cotangent, axes, mesh, [(b, a) for a, b in sends])],
)


def all_to_all(x: Any, axes: Names, mesh: Axes, split: int, concat: int) -> Any:
    """Return the parts that others have for this device: x is split along `split`, and joined along `concat`."""
    return bind(ALL_TO_ALL, x, axes=axes, mesh=mesh, split=split, concat=concat)


def _all_to_all_infer(x: ShapedArray, *, axes: Names, mesh: Axes, split: int, concat: int) -> ShapedArray:
    count = meshes.size(mesh, axes)
    return _scaled(_split("all_to_all", x, split, count), concat, count)


ALL_TO_ALL: Primitive = Primitive(
    "all_to_all",
    _all_to_all_infer,
    lambda rule, x, *, axes, mesh, split, concat: hlo.AllToAllOp(
        [x],
        split_dimension=integer(split),
        concat_dimension=integer(concat),
        split_count=integer(meshes.size(mesh, axes)),
        **_groups(mesh, axes),
    ).results[0],
    lambda d, *, axes, mesh, split, concat: [all_to_all(d.cotangent, axes, mesh, concat, split)],
)


def axis_index(axes: Names, mesh: Axes) -> Any:
    """Return the number of this device along axes, an i32."""
    return bind(AXIS_INDEX, axes=axes, mesh=mesh)


def _axis_index_lower(rule: Rule, *, axes: Names, mesh: Axes) -> IRValue:
    """Return it of the device's number in the mesh, row by row, as JAX does."""
    u32, i32 = np.dtype(np.uint32), tensor_type(ShapedArray((), dtypes.int32))
    number = hlo.partition_id()
    result: IRValue = None
    names = [name for name, _ in mesh]
    for name in axes:
        after = constant(np.asarray(meshes.size(mesh, names[names.index(name) + 1 :]), u32))
        count = constant(np.asarray(dict(mesh)[name], u32))
        own = hlo.remainder(hlo.divide(number, after), count)
        result = own if result is None else hlo.add(hlo.multiply(result, count), own)
    return hlo.convert(i32, result)


AXIS_INDEX = Primitive("axis_index", lambda *, axes, mesh: ShapedArray((), dtypes.int32), _axis_index_lower)
