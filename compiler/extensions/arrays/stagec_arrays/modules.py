"""A program becomes a module in the form of `jax.export`, and an `Exported`.

`main` takes the arrays that the function uses; before them, of a module for several platforms, the index of the one
that it runs on. Symbolic sizes are read from the shapes of its arguments, and what is promised of them is checked there
(https://docs.jax.dev/en/latest/export/export.html#module-calling-convention).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import func, stablehlo as hlo

from stagec.core.sizes.partitions import Partition
from stagec.core.sizes.size import solutions
from stagec.stages import mlir
from stagec_arrays import dims, lowering
from stagec_arrays.dims import Dim
from stagec_arrays.lowering import IRValue
from stagec_arrays.meshes import Axes
from stagec_arrays.program import Program
from stagec_arrays.values import ShapedArray

CALLING_CONVENTION = 10
"""The version of the module's calling convention, which is the pinned JAX's."""


class Split(NamedTuple):
    """How a function's arrays are split over devices.

    mesh: the devices; empty: one. inputs, outputs: for each array how it is split, None if XLA decides;
    () where it decides for all.
    """

    mesh: Axes = ()
    inputs: tuple[Partition | None, ...] = ()
    outputs: tuple[Partition | None, ...] = ()

    @property
    def nr_devices(self) -> int:
        """How many there are."""
        return math.prod(size for _, size in self.mesh)


NOWHERE = Split()
"""Of a function of one device."""


def kept(program: Program, keep_unused: bool) -> tuple[int, ...]:
    """Return which inputs the module takes: those that are used, and all where sizes are read from their shapes."""
    if keep_unused or not all(dims.is_static(aval.shape) for aval in program.in_avals):
        return tuple(range(len(program.inputs)))
    used = set(program.outputs).union(*(equation.inputs for equation in program.equations))
    return tuple(i for i, variable in enumerate(program.inputs) if variable in used)


def module(
    program: Program,
    taken: Sequence[int],
    platforms: Sequence[str],
    names: Sequence[str] = (),
    donated: Sequence[bool] = (),
    located: bool = False,
    split: Split = NOWHERE,
) -> ir.Module:
    """Return a program as a module of the current context.

    taken: the numbers of the inputs that it takes. names: of all inputs. donated: for each, whether the caller gives
    its buffer away. located: whether operations have their locations in the user's sources. split: over which devices.
    """
    in_avals, out_avals = program.in_avals, program.out_avals
    avals = [in_avals[i] for i in taken]
    several = len(platforms) > 1
    result = ir.Module.create(ir.Location.unknown())
    with ir.Location.unknown(), ir.InsertionPoint(result.body):
        index = [ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))] if several else []
        inputs = [*index, *map(lowering.tensor_type, avals)]
        locations = [ir.Location.name(names[i]) if names else ir.Location.unknown() for i in taken]
        locations = [*[ir.Location.unknown()] * len(index), *locations]
        main = lowering.main_function(inputs, list(map(lowering.tensor_type, out_avals)), locations)
        arguments = list(main.entry_block.arguments)
        attributes: list[dict[str, ir.Attribute]]
        attributes = [{"jax.global_constant": ir.StringAttr.get("_platform_index")}] if several else []
        given_away = [bool(donated) and donated[i] for i in taken]
        attributes += _donations(avals, out_avals, given_away)
        results: list[dict[str, ir.Attribute]] = [{} for _ in program.outputs]
        if split.mesh:
            result.operation.attributes["mhlo.num_partitions"] = _i32(split.nr_devices)
            result.operation.attributes["mhlo.num_replicas"] = _i32(1)
            with ir.InsertionPoint.at_block_begin(result.body):
                lowering.declare_mesh(split.mesh)
            _say_how_split(attributes[len(index) :], avals, [split.inputs[i] for i in taken] if split.inputs else ())
            _say_how_split(results, out_avals, split.outputs)
            main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(attribute) for attribute in results])
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(attribute) for attribute in attributes])
        with ir.InsertionPoint(main.entry_block):
            rules = lowering.Lowering(platforms, located)
            rules.mesh = split.mesh
            if several:
                rules.platform_index = arguments[0]
            arrays = arguments[len(index) :]
            _read_sizes(rules, avals, arrays, names)
            values = dict(zip(taken, arrays, strict=True))
            nothing: Any = None  # for an unused input
            func.return_(rules.program(program, [values.get(i, nothing) for i in range(len(program.inputs))]))
    return result


def _say_how_split(
    attributes: Sequence[dict[str, ir.Attribute]], avals: Sequence[Any], partitions: Sequence[Partition | None]
) -> None:
    for attribute, aval, partition in zip(attributes, avals, partitions, strict=False):
        if partition is not None:
            attribute["sdy.sharding"] = lowering.sharding(partition, aval.ndim)


def _i32(number: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)


def portable(module: ir.Module) -> bytes:
    """Return a module in StableHLO's portable form, of the version that `jax.export` chooses. The module is used up.

    XLA has a function for that, which `jax.export` calls. It runs nine passes first, and verifies the module after each
    (SerializeUsingVersionedStablehlo in xla/pjrt/mlir_to_hlo.cc). All but two are for operations of CHLO, MHLO and the
    shape dialect. We write no operations of the last two; without those of CHLO, the two passes and StableHLO's own
    serialization give the same bytes in half of the time.
    """
    requirement = hlo.StablehloCompatibilityRequirement.WEEK_12
    version = hlo.get_version_from_compatibility_requirement(requirement)
    if mlir.operations(module, "chlo."):
        return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))
    module.operation.verify()
    passes = f"func.func(stablehlo-complex-math-expander),stablehlo-compatibility-expander{{target={version}}}"
    _register_passes()
    expand = passmanager.PassManager.parse(f"builtin.module({passes})")
    expand.enable_verifier(False)
    expand.run(module.operation)
    return bytes(hlo.serialize_portable_artifact(module, version, True))


@functools.cache
def _register_passes() -> None:
    hlo.register_stablehlo_passes()


def _donations(
    avals: Sequence[ShapedArray], out_avals: Sequence[ShapedArray], donated: Sequence[bool]
) -> list[dict[str, ir.Attribute]]:
    """Return the attributes of the inputs: a donated one says which result, of its own aval, takes its buffer."""
    free = list(range(len(out_avals)))
    result: list[dict[str, ir.Attribute]] = []
    for aval, given_away in zip(avals, donated, strict=True):
        attributes: dict[str, ir.Attribute] = {}
        if given_away:
            fits = [i for i in free if out_avals[i][:2] == aval[:2]]
            if fits:
                free.remove(fits[0])
                attributes["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), fits[0])
            else:
                attributes["jax.buffer_donor"] = ir.BoolAttr.get(True)
        result.append(attributes)
    return result


def _read_sizes(
    rules: lowering.Lowering, avals: Sequence[Any], arrays: Sequence[IRValue], names: Sequence[str]
) -> None:
    """Compute the named sizes from the shapes of the arguments, and check the constraints of the symbolic sizes."""
    equations = [
        (size, array, axis, f"{names[number] if names else f'args[{number}]'}.shape[{axis}]")
        for number, (aval, array) in enumerate(zip(avals, arrays, strict=True))
        for axis, size in enumerate(aval.shape)
        if isinstance(size, Dim)
    ]
    origins: list[_Origin] = []
    for position, name, slope, rest in solutions([size.size for size, *_ in equations]):
        size, array, axis, dimension = equations[position]
        value = _dimension(array, axis)
        number = hlo.divide(hlo.subtract(value, rules.size(rest)), rules.size(slope))
        rules.sizes[name] = number
        origins.append(_Origin(name, size, dimension, value))
        _assert(rules, number, "GE", 1, f"Expected value >= 1 for dimension variable '{name}'.", origins)
    unknown = {name for size, *_ in equations for name in size.size.names} - set(rules.sizes)
    if unknown:
        raise ValueError(
            f"the sizes {', '.join(sorted(unknown))} cannot be found from the shapes of the arguments: "
            "one argument must have each size as a dimension, by itself or times a number"
        )
    own = {(origin.name, origin.dimension) for origin in origins}
    for size, array, axis, dimension in equations:
        value, wanted = _dimension(array, axis), rules.size(size)
        differs = f"Found inconsistency between dimension size {dimension}"
        what = f"{differs} (= {{0}}) and the specification '{size}' (= {{1}})."
        if (str(size), dimension) not in own:
            _assert(rules, value, "EQ", wanted, what, origins, [value, wanted])
    for constraint in dict.fromkeys(constraint for size, *_ in equations for constraint in size.constraints):
        direction = {"==": "EQ", ">=": "GE", "<=": "LE"}[constraint.sign]
        what = f"Input shapes do not match the symbolic shape constraint {constraint}."
        _assert(rules, rules.size(constraint.left), direction, rules.size(constraint.right), what, origins)


def _dimension(array: IRValue, axis: int) -> IRValue:
    return hlo.get_dimension_size(array, lowering.integer(axis))


class _Origin(NamedTuple):
    """Where the number of a named size comes from: the `dimension` of an argument; its number is `value`."""

    name: str
    size: Dim
    dimension: str
    value: IRValue


def _assert(
    rules: lowering.Lowering,
    left: IRValue,
    direction: str,
    right: IRValue | int,
    message: str,
    origins: Sequence[_Origin],
    inputs: Sequence[IRValue] = (),
) -> None:
    """Add a check that ends shape refinement with a message; its sentences are those of `jax.export`."""
    second = rules.size(right) if isinstance(right, int) else right
    holds = lowering.compare(left, second, direction, np.dtype(np.int32))
    values, parts = list(inputs), []
    for name, size, dimension, value in origins:
        number = len(values)
        parts.append(
            f"'{name}' = {{{number}}} from specification '{size}' for dimension {dimension} (= {{{number + 1}}}), "
        )
        values += [rules.sizes[name], value]
    if not message.startswith("Input"):
        message = f"Input shapes do not match the polymorphic shapes specification. {message}"
    text = f"{message} Obtained dimension variables: {''.join(parts)}"
    hlo.CustomCallOp(
        [],
        [holds, *values],
        ir.StringAttr.get("shape_assertion"),
        has_side_effect=ir.BoolAttr.get(True),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
    ).attributes["error_message"] = ir.StringAttr.get(text)


def named_sizes(avals: Sequence[Any]) -> Mapping[str, None]:
    """Return the names of the symbolic sizes in avals."""
    sizes = [size.size for aval in avals for size in aval.shape if isinstance(size, Dim)]
    return dict.fromkeys(name for size in sizes for name in sorted(size.names))


class _Kept(threading.local):
    context: ir.Context | None = None
    uses = 0


_KEPT = _Kept()
_MOST_USES = 256


def kept_context() -> ir.Context:
    """Return this thread's context, for modules without large constants: it keeps types, attributes and locations.

    Making a context takes as long as writing a module of a hundred operations, and the first module in one as long
    again. After some hundred uses it is a new one, so that a process does not grow without end.
    """
    if _KEPT.context is None or _KEPT.uses == _MOST_USES:
        _KEPT.context, _KEPT.uses = mlir.make_context(), 0
        _KEPT.context.enable_multithreading(False)  # there is one function in a module
    _KEPT.uses += 1
    return _KEPT.context
