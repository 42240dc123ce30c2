"""Lowering: a program becomes a function of a StableHLO module, in one pass over its equations.

A primitive's rule is given a `Rule`: what is known of operands and results, and the operations whose form depends on
whether sizes are known: `broadcast`, `reshape`, `iota`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo as hlo

from stagec.core.sizes.partitions import Partition
from stagec.core.sizes.size import Size
from stagec_arrays import dims
from stagec_arrays.dims import Dim, Shape
from stagec_arrays.dtypes import BITS, BOOL, KINDS, NAMED, SIGNED, UNSIGNED, DType
from stagec_arrays.locations import frames_of_user, location_of
from stagec_arrays.meshes import Axes
from stagec_arrays.program import Equation, Operand, Program
from stagec_arrays.values import Literal, ShapedArray, physical

IRValue: TypeAlias = Any
"""MLIR's value of an array. jaxlib's stubs have narrower types than rules for any shape can promise."""

_FLOATS: Mapping[str, Callable[[], ir.Type]] = {
    "bfloat16": ir.BF16Type.get,
    "float16": ir.F16Type.get,
    "float32": ir.F32Type.get,
    "float64": ir.F64Type.get,
    "complex64": lambda: ir.ComplexType.get(ir.F32Type.get()),
    "complex128": lambda: ir.ComplexType.get(ir.F64Type.get()),
    "float4_e2m1fn": ir.Float4E2M1FNType.get,
    "float6_e2m3fn": ir.Float6E2M3FNType.get,
    "float6_e3m2fn": ir.Float6E3M2FNType.get,
    "float8_e3m4": ir.Float8E3M4Type.get,
    "float8_e4m3": ir.Float8E4M3Type.get,
    "float8_e4m3b11fnuz": ir.Float8E4M3B11FNUZType.get,
    "float8_e4m3fn": ir.Float8E4M3FNType.get,
    "float8_e4m3fnuz": ir.Float8E4M3FNUZType.get,
    "float8_e5m2": ir.Float8E5M2Type.get,
    "float8_e5m2fnuz": ir.Float8E5M2FNUZType.get,
    "float8_e8m0fnu": ir.Float8E8M0FNUType.get,
}


def _integer(dtype: DType) -> Callable[[], ir.Type]:
    kind = ir.IntegerType.get_unsigned if KINDS[dtype] == UNSIGNED else ir.IntegerType.get_signless
    return functools.partial(kind, 1 if KINDS[dtype] == BOOL else BITS[dtype])


_ELEMENTS: Mapping[DType, Callable[[], ir.Type]] = {
    dtype: _FLOATS.get(name) or _integer(dtype) for name, dtype in NAMED.items()
}


def element_type(dtype: DType) -> ir.Type:
    """Return MLIR's type of an element, in the current context."""
    return _ELEMENTS[dtype]()


def tensor_type(aval: ShapedArray) -> ir.Type:
    """Return MLIR's type of an array, in the current context; symbolic sizes are `?`."""
    shape, dtype, _ = physical(aval)
    if not dims.is_static(shape):
        dynamic = ir.ShapedType.get_dynamic_size()
        shape = tuple(size if type(size) is int else dynamic for size in shape)
    return ir.RankedTensorType.get(shape, element_type(dtype))


def build(
    operation: type[ir.OpView], *operands: IRValue, out: ir.Type | None = None, **attributes: ir.Attribute
) -> IRValue:
    """Return the result of an operation, of type `out`; None: of that which MLIR infers.

    As jaxlib's function for the operation, in less than half of its time: for the most frequent operations.
    """
    name = operation.OPERATION_NAME  # type: ignore[attr-defined] # jaxlib's stubs leave it out
    results = None if out is None else [out]
    return ir.Operation.create(name, results, operands, attributes, infer_type=out is None).result


def integers(values: Sequence[int]) -> Any:
    """Return numbers as the attribute that operations take."""
    return ir.DenseI64ArrayAttr.get(list(map(int, values)))


def integer(value: int) -> Any:
    """Return a number as the attribute that operations take."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def pairs(values: Any) -> Any:
    """Return numbers in pairs, such as padding before and after, as the attribute that operations take."""
    return ir.DenseIntElementsAttr.get(np.asarray(values, np.int64).reshape(-1, 2))  # type: ignore[call-overload]


def constant(array: np.ndarray[Any, Any]) -> IRValue:
    """Return an array as a constant of the module."""
    kind, shape = element_type(array.dtype), array.shape
    if array.dtype != np.bool_ and BITS.get(array.dtype, 8) < 8:  # MLIR wants whole numbers of bytes, and converts
        wide = np.int8 if KINDS[array.dtype] == SIGNED else np.uint8
        return hlo.convert(tensor_type(ShapedArray(shape, array.dtype)), constant(array.astype(wide)))
    contiguous: Any = np.ascontiguousarray(array)
    attribute = ir.DenseElementsAttr.get(contiguous, type=kind, shape=shape)
    return build(hlo.ConstantOp, value=attribute)


_MESH = "mesh"


def declare_mesh(mesh: Axes) -> None:
    """Write a mesh into the module at the insertion point, under the name that `sharding` refers to."""
    sdy.MeshOp(_MESH, sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in mesh]))


def sharding(partition: Partition, ndim: int) -> Any:
    """Return how an array is split over the module's mesh, as an attribute of Shardy's."""
    names = [*partition, *[()] * (ndim - len(partition))]
    parts = [sdy.DimensionShardingAttr.get(list(map(sdy.AxisRefAttr.get, axes)), is_closed=True) for axes in names]
    return sdy.TensorShardingAttr.get(_MESH, parts)


class Lowering:
    """The state that the rules of one module share.

    platforms: those that the module is for. platform_index: which of them it runs on, an i32; None if there is one.
    sizes: the number of each named size, an i32, where sizes are symbolic.
    mesh: over which arrays are split, as `declare_mesh` has written it; empty if there is one device.
    located: whether operations have their locations in the user's sources.
    """

    def __init__(self, platforms: Sequence[str], located: bool = False) -> None:
        self.platforms = tuple(platforms)
        self.platform_index: IRValue | None = None
        self.sizes: dict[str, IRValue] = {}
        self.mesh: Axes = ()
        self._located = located

    def program(self, program: Program, values: Sequence[IRValue]) -> list[IRValue]:
        """Lower a program at the insertion point, on these arguments, and return its results."""
        known: dict[Operand, IRValue] = dict(zip(program.inputs, values, strict=True))
        literals: dict[tuple[DType, bytes], IRValue] = {}

        def value(operand: Operand) -> IRValue:
            if operand not in known and isinstance(operand, Literal):
                key = operand.dtype, operand.value.tobytes()
                if key not in literals:
                    literals[key] = constant(operand.value)
                known[operand] = literals[key]
            return known[operand]

        for variable, array in program.constants.items():
            known[variable] = constant(array)
        for equation in program.equations:
            primitive = equation.primitive
            with self._at(equation):
                lowered = primitive.lower(Rule(self, equation), *map(value, equation.inputs), **equation.params)
            if primitive.several:
                known.update(zip(equation.outputs, lowered, strict=True))
            else:
                known[equation.outputs[0]] = lowered
        return list(map(value, program.outputs))

    def shared(self) -> tuple[list[str], list[IRValue]]:
        """Return names and values of the module's constants: sizes, and the platform's index as ""."""
        result = {**self.sizes, **({} if self.platform_index is None else {"": self.platform_index})}
        return list(result), list(result.values())

    @contextlib.contextmanager
    def sharing(self, names: Sequence[str], values: Sequence[IRValue]) -> Iterator[None]:
        """Use other values for the names of `shared`, in a region that cannot use the originals."""
        before = self.sizes, self.platform_index
        inside = dict(zip(names, values, strict=True))
        self.platform_index = inside.pop("", None)
        self.sizes = inside
        try:
            yield
        finally:
            self.sizes, self.platform_index = before

    def size(self, size: Any) -> IRValue:
        """Return a size as an i32 of no dimensions."""
        expression = size.size if isinstance(size, Dim) else size
        if not isinstance(expression, Size):
            return constant(np.asarray(expression, np.int32))
        named = {name: _Size(value) for name, value in self.sizes.items()}
        return _Size.of(expression.compute(named, _SIZE_FUNCTIONS)).value

    def shape(self, shape: Sequence[Any]) -> IRValue:
        """Return sizes as an array of i32."""
        if dims.is_static(shape):
            return constant(np.asarray(shape, np.int32).reshape(len(shape)))
        vector = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(32))
        parts = [hlo.reshape(vector, self.size(size)) for size in shape]
        return hlo.concatenate(parts, integer(0))

    def _at(self, equation: Equation) -> Any:
        if not self._located or equation.traceback is None:
            return _NOWHERE
        return location(equation.traceback, equation.primitive.name)


_NOWHERE = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class Rule:
    """The input of a rule: abstract operands and results (for keys, their words), and helpers for sizes."""

    lowering: Lowering
    _equation: Equation

    @property
    def name(self) -> str:
        """Of the primitive."""
        return self._equation.primitive.name

    @property
    def inputs(self) -> list[ShapedArray]:
        """Of the operands."""
        return [physical(operand.aval) for operand in self._equation.inputs]

    @property
    def outputs(self) -> list[ShapedArray]:
        """Of the results."""
        return [physical(variable.aval) for variable in self._equation.outputs]

    @property
    def out(self) -> ShapedArray:
        """Of the only result."""
        return physical(self._equation.outputs[0].aval)

    @property
    def platforms(self) -> Sequence[str]:
        """Those that the operation is for: of a rule that has one for each of them (`primitives.platforms`), one."""
        return self.lowering.platforms

    @property
    def location(self) -> str:
        """FILE:LINE in the user's sources, for messages; "" if it is not known."""
        return location_of(self._equation.traceback)

    def broadcast(self, value: IRValue, aval: ShapedArray, shape: Shape, axes: Sequence[int] | None = None) -> IRValue:
        """Return an array of `aval` broadcast to `shape`; `axes` are those that its own become, None: the last."""
        if axes is None:
            if aval.shape == shape:
                return value
            axes = range(len(shape) - len(aval.shape), len(shape))
        kind = tensor_type(ShapedArray(shape, aval.dtype))
        if dims.is_static(shape):
            return build(hlo.BroadcastInDimOp, value, out=kind, broadcast_dimensions=integers(axes))
        return hlo.dynamic_broadcast_in_dim(kind, value, self.lowering.shape(shape), integers(axes))

    def broadcasts(self, values: Sequence[IRValue]) -> list[IRValue]:
        """Return the operands, each broadcast to the shape of the result."""
        shape = self.out.shape
        return [
            value if aval.shape == shape else self.broadcast(value, aval, shape)
            for value, aval in zip(values, self.inputs, strict=True)
        ]

    def reshape(self, value: IRValue, aval: ShapedArray) -> IRValue:
        """Return an array in another shape: that of `aval`."""
        kind = tensor_type(aval)
        if dims.is_static(aval.shape):
            return build(hlo.ReshapeOp, value, out=kind)
        return hlo.dynamic_reshape(kind, value, self.lowering.shape(aval.shape))

    def full(self, value: Any, aval: ShapedArray) -> IRValue:
        """Return an array of `aval` with one number in every place."""
        scalar = constant(np.asarray(value).astype(aval.dtype))
        return self.broadcast(scalar, ShapedArray((), aval.dtype), aval.shape, ()) if aval.shape else scalar

    def iota(self, aval: ShapedArray, axis: int) -> IRValue:
        """Return an array that counts along an axis."""
        if dims.is_static(aval.shape):
            return hlo.iota(tensor_type(aval), integer(axis))
        return hlo.dynamic_iota(tensor_type(aval), self.lowering.shape(aval.shape), integer(axis))

    def block(self, operation: ir.OpView, number: int, avals: Sequence[ShapedArray]) -> ir.Block:
        """Append to a region of an operation the block that takes arrays of these avals."""
        kinds = [tensor_type(aval) for aval in avals]
        locations = [ir.Location.current] * len(kinds)
        result: ir.Block = operation.operation.regions[number].blocks.append(*kinds, arg_locs=locations)
        return result

    def reducer(self, operation: ir.OpView, combine: Callable[[IRValue, IRValue], IRValue]) -> None:
        """Fill the region of an operation with the code that combines two elements."""
        scalar = ShapedArray((), self.out.dtype)
        with ir.InsertionPoint(block := self.block(operation, 0, [scalar, scalar])):
            hlo.return_([combine(*block.arguments)])

    def subprogram(self, operation: ir.OpView, number: int, program: Program, captured: Sequence[IRValue] = ()) -> None:
        """Fill a region of an operation with a program: the block takes its last inputs, the first are `captured`."""
        block = self.block(operation, number, program.in_avals[len(captured) :])
        with ir.InsertionPoint(block):
            hlo.return_(self.lowering.program(program, [*captured, *block.arguments]))


def compare(first: IRValue, second: IRValue, direction: str, dtype: DType) -> IRValue:
    """Return an array of bools; direction: "EQ", "NE", "LT", "LE", "GT" or "GE"."""
    kind = KINDS[dtype]
    how = "SIGNED" if kind == SIGNED else "UNSIGNED" if kind in ("bool", "unsigned integer") else "FLOAT"
    return hlo.compare(
        first, second, hlo.ComparisonDirectionAttr.get(direction), compare_type=hlo.ComparisonTypeAttr.get(how)
    )


class _Size:
    """The value of a size, an i32 of no dimensions, with the operators of dimension expressions."""

    def __init__(self, value: IRValue) -> None:
        self.value = value

    @staticmethod
    def of(size: _Size | int) -> _Size:
        return size if isinstance(size, _Size) else _Size(constant(np.asarray(size, np.int32)))

    def __add__(self, other: _Size | int) -> _Size:
        return _Size(hlo.add(self.value, _Size.of(other).value))

    def __mul__(self, other: _Size | int) -> _Size:
        return _Size(hlo.multiply(self.value, _Size.of(other).value))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> _Size:
        return self * -1

    def __sub__(self, other: _Size | int) -> _Size:
        return self + -other

    def __rsub__(self, other: _Size | int) -> _Size:
        return -self + other

    def __pow__(self, exponent: int) -> _Size:
        result = self
        for _ in range(exponent - 1):
            result = result * self
        return result


def _divided(left: _Size | int, right: _Size | int) -> tuple[_Size, _Size]:
    """Return quotient and rest as Python has them, which rounds down; XLA's division rounds to zero."""
    first, second = _Size.of(left), _Size.of(right)
    i32, zero = np.dtype(np.int32), _Size.of(0).value
    rest = hlo.remainder(first.value, second.value)
    signs = compare(compare(rest, zero, "LT", i32), compare(second.value, zero, "LT", i32), "NE", np.dtype(bool))
    below = hlo.and_(compare(rest, zero, "NE", i32), signs)
    quotient = _Size(hlo.divide(first.value, second.value))
    return (
        _Size(hlo.select(below, (quotient - 1).value, quotient.value)),
        _Size(hlo.select(below, (_Size(rest) + second).value, rest)),
    )


_SIZE_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda left, right: _divided(left, right)[0],
    "mod": lambda left, right: _divided(left, right)[1],
    "max": lambda left, right: _Size(hlo.maximum(_Size.of(left).value, _Size.of(right).value)),
    "min": lambda left, right: _Size(hlo.minimum(_Size.of(left).value, _Size.of(right).value)),
}


def location(traceback: _jax.Traceback, name: str) -> ir.Location:
    """Return the location of an operation: its name, and the call stack of the user's own code, innermost first."""
    frames = frames_of_user(traceback)
    lines = [
        ir.Location.name(frame.function_name, ir.Location.file(frame.file_name, frame.line_num, 1)) for frame in frames
    ]
    if not lines:
        return ir.Location.name(name)
    stack = lines[0] if len(lines) == 1 else ir.Location.callsite(lines[0], lines[1:])
    return ir.Location.name(name, stack)


def main_function(inputs: Sequence[ir.Type], results: Sequence[ir.Type], locations: Sequence[ir.Location] = ()) -> Any:
    """Return a new public function `main` at the insertion point, with an entry block.

    locations: of of its arguments.
    """
    kind: Any = func.FuncOp  # jaxlib's stubs are those of its base
    function = kind("main", (list(inputs), list(results)), visibility="public")
    function.add_entry_block(list(locations) or None)
    return function
