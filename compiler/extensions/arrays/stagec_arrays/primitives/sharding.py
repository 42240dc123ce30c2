"""Primitives of arrays that are split over a mesh: `sharding_constraint`, and `shard_map`, which sees a device's part.

They are lowered to Shardy (https://openxla.org/shardy), as JAX does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from stagec.core.sizes.partitions import Partition
from stagec_arrays import dims, dtypes, meshes, tracing
from stagec_arrays.binding import aval, bind
from stagec_arrays.lowering import IRValue, Rule, sharding, tensor_type
from stagec_arrays.meshes import Axes
from stagec_arrays.primitives import collectives, derivatives as d, elementwise
from stagec_arrays.primitives.derivatives import Derivative
from stagec_arrays.program import Primitive, Program, pruned
from stagec_arrays.values import ShapedArray, shown


def constrained(x: Any, mesh: Axes, partition: Partition) -> Any:
    """Return x, split over a mesh like this if the program runs on several devices.

    Raises ValueError for an axis along which the code sees one device's part.
    """
    for name in meshes.apart(mesh):
        if any(name in axes for axes in partition):
            what = f"shard_map splits arrays along {name!r} here, so a constraint cannot name it"
            raise ValueError(f"{what}; name axes that are not in its axis_names")
    return bind(SHARDING_CONSTRAINT, x, mesh=mesh, partition=partition)


def _constraint_infer(x: ShapedArray, *, mesh: Axes, partition: Partition) -> ShapedArray:
    meshes.part(x.shape, mesh, partition)
    return x


def _constraint_lower(rule: Rule, x: IRValue, *, mesh: Axes, partition: Partition) -> IRValue:
    if not rule.lowering.mesh:  # outside a trace there is one device
        return x
    return sdy.ShardingConstraintOp(x, sharding(partition, rule.inputs[0].ndim)).result


SHARDING_CONSTRAINT: Primitive = Primitive(
    "sharding_constraint",
    _constraint_infer,
    _constraint_lower,
    lambda d, *, mesh, partition: [constrained(d.cotangent, mesh, partition)],
)


def mapped(
    function: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    mesh: Axes,
    in_partitions: Sequence[Partition],
    out_partitions: Callable[[], Sequence[Partition]],
    manual: tuple[str, ...],
) -> list[Any]:
    """Return the results of a function of the parts of arrays, joined again.

    in_partitions: how each array is split. out_partitions: called after the function; how the parts of results are
    joined: along axes that they do not name, all devices have the same. manual: the axes along which arrays are split.
    """
    avals = []
    for value, partition in zip(values, in_partitions, strict=True):
        # jaxlib 0.10.1 refines the shapes in an `sdy.manual_computation` too, but ends with a segmentation fault
        # where it folds a constant there. So ends JAX, where it calls its own artifact of psum(sum(a) * 2).
        if not dims.is_static(value.shape):
            what = f"shard_map takes arrays of known sizes, not of shape {shown(value.shape)}"
            raise ValueError(f"{what}; write numbers, or in_shardings and with_sharding_constraint in its place")
        avals.append(ShapedArray(meshes.part(tuple(value.shape), mesh, partition), aval(value).dtype))

    def within(*parts: Any) -> Sequence[Any]:
        with meshes.use(mesh, manual):
            return function(*parts)

    traced = tracing.trace(within, avals, "the function of shard_map")
    result: list[Any] = bind(
        SHARD_MAP,
        *traced.captured,
        *values,
        body=pruned(traced.program),
        mesh=mesh,
        in_partitions=(*[()] * len(traced.captured), *in_partitions),
        out_partitions=tuple(out_partitions()),
        manual=manual,
    )
    return result


def _map_infer(
    *_: ShapedArray, body: Program, mesh: Axes, out_partitions: tuple[Partition, ...], **__: Any
) -> list[ShapedArray]:
    result = []
    for shaped, partition in zip(body.out_avals, out_partitions, strict=True):
        meshes.check(mesh, partition, shaped.ndim)
        counts = [meshes.size(mesh, names) for names in partition] + [1] * (shaped.ndim - len(partition))
        shape = tuple(size * count for size, count in zip(shaped.shape, counts, strict=True))
        result.append(ShapedArray(shape, shaped.dtype))
    return result


def _map_lower(
    rule: Rule,
    *values: IRValue,
    body: Program,
    mesh: Axes,
    in_partitions: tuple[Partition, ...],
    out_partitions: tuple[Partition, ...],
    manual: tuple[str, ...],
) -> list[IRValue]:
    if not rule.lowering.mesh:
        raise ValueError("shard_map needs the devices of a mesh: call it in a function of stagec.jit, and call that")
    if meshes.size(mesh, manual) == 1:  # as JAX
        return rule.lowering.program(body, values)

    def per_value(partitions: Sequence[Partition], avals: Sequence[ShapedArray]) -> Any:
        pairs = zip(partitions, avals, strict=True)
        return sdy.TensorShardingPerValueAttr.get([sharding(partition, shaped.ndim) for partition, shaped in pairs])

    # The region sees nothing of what is around it.
    names, shared = rule.lowering.shared()
    numbers = [ShapedArray((), dtypes.int32)] * len(shared)
    operation = sdy.ManualComputationOp(
        list(map(tensor_type, rule.outputs)),
        [*shared, *values],
        per_value([*[()] * len(shared), *in_partitions], [*numbers, *rule.inputs]),
        per_value(out_partitions, rule.outputs),
        sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name, _ in mesh if name in manual]),
    )
    block = rule.block(operation, 0, [*numbers, *body.in_avals])
    arguments = list(block.arguments)
    with ir.InsertionPoint(block), rule.lowering.sharing(names, arguments[: len(shared)]):
        sdy.ReturnOp(rule.lowering.program(body, arguments[len(shared) :]))
    return list(operation.results)


def _map_vjp(
    given: Derivative,
    *,
    body: Program,
    mesh: Axes,
    in_partitions: tuple[Partition, ...],
    out_partitions: tuple[Partition, ...],
    manual: tuple[str, ...],
) -> list[Any]:
    wanted = [d.is_differentiable(operand) for operand in given.operands]
    of_results = d.differentiable(given.results)
    own = [partition for partition, want in zip(in_partitions, wanted, strict=True) if want]

    def absent(partition: Partition) -> tuple[str, ...]:
        return tuple(name for name in manual if not any(name in axes for axes in partition))

    def backward(*parts: Any) -> list[Any]:
        operands, cotangents = parts[: len(in_partitions)], parts[len(in_partitions) :]
        full: list[Any] = [None] * len(given.results)
        for i, cotangent in zip(of_results, cotangents, strict=True):
            # All devices along an axis have the whole of it: each takes its share.
            count = meshes.size(mesh, absent(out_partitions[i]))
            full[i] = elementwise.divide(cotangent, count) if count > 1 else cotangent
        result = d.backward(body, d.evaluate(body, operands), full, [True] * len(body.inputs))
        results = []
        for gradient, variable, partition, want in zip(result, body.inputs, in_partitions, wanted, strict=True):
            if want:
                whole = d.zeros_like(variable.aval) if gradient is None else gradient
                names = absent(partition)
                results.append(collectives.psum(whole, names, mesh) if names else whole)
        return results

    cotangents = [given.given(i) for i in of_results]
    partitions = [*in_partitions, *(out_partitions[i] for i in of_results)]
    result = mapped(backward, [*given.operands, *cotangents], mesh, partitions, lambda: own, manual)
    return d.placed(len(given.operands), d.differentiable(given.operands), result)


SHARD_MAP: Primitive = Primitive("shard_map", _map_infer, _map_lower, _map_vjp, several=True)
