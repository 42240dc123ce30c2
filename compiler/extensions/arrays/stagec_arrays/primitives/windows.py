"""Primitives of windows that move over an array: reductions of each, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dims import Shape
from stagec_arrays.dtypes import DType
from stagec_arrays.lowering import IRValue, Rule, compare, constant, integer, integers, pairs, tensor_type
from stagec_arrays.primitives import derivatives as d
from stagec_arrays.primitives.reductions import least, most
from stagec_arrays.primitives.slicing import pad
from stagec_arrays.program import Primitive, Program
from stagec_arrays.values import Literal, ShapedArray, shown


class Window(NamedTuple):
    """A window over an array, for each axis.

    sizes: of the window. strides: steps. padding: elements before and after, which are the reduction's start.
    base_dilation, window_dilation: distance of elements, of the array and of the window.
    """

    sizes: Shape
    strides: tuple[int, ...]
    padding: tuple[tuple[Any, Any], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]


OPERATIONS: dict[str, tuple[Callable[[DType], Any], Callable[[IRValue, IRValue], IRValue]]] = {
    "add": (lambda dtype: 0, hlo.add),
    "multiply": (lambda dtype: 1, hlo.multiply),
    "max": (least, hlo.maximum),
    "min": (most, hlo.minimum),
}
"""Reductions by name: the start value, and the function that combines two elements."""


def dilated(size: Any, by: int) -> Any:
    """Return the size of an axis whose elements are `by` apart."""
    return size if by == 1 else dims.larger((size - 1) * by + 1, 0)


def reduce_window(x: Any, start: Any, how: str | Program, window: Window) -> Any:
    """Return a reduction of each window of an array.

    start: an array of no dimensions, what an empty window gives. how: "add", "multiply", "max" or "min", or a program
    of two scalars. https://openxla.org/stablehlo/spec#reduce_window
    """
    return reduce_windows([x], [start], how, window)[0]


def reduce_windows(xs: Sequence[Any], starts: Sequence[Any], how: str | Program, window: Window) -> list[Any]:
    """Return a reduction of each window of arrays of one shape, together.

    starts: for each what an empty window gives. how: a program that takes a scalar for each array, and then one more
    for each, and gives one for each; of one array also a name, as `reduce_window` has it.
    """
    result: list[Any] = bind(REDUCE_WINDOW, *xs, *starts, how=how, window=window)
    return result


def _sizes(shape: Shape, window: Window) -> Shape:
    result = []
    for size, own, stride, padding, base, apart in zip(shape, *window, strict=True):
        room = dilated(size, base) + padding[0] + padding[1] - dilated(own, apart)
        result.append(dims.larger(room // stride + 1, 0))
    return tuple(result)


def _window_infer(*avals: ShapedArray, how: str | Program, window: Window) -> list[ShapedArray]:
    xs, starts = avals[: len(avals) // 2], avals[len(avals) // 2 :]
    shape = xs[0].shape
    if any(len(part) != len(shape) for part in window):
        raise ValueError(f"reduce_window: expected a window of {len(shape)} axes, as {xs[0]} has")
    for x, start in zip(xs, starts, strict=True):
        if x.shape != shape:
            raise ValueError(f"reduce_window: expected arrays of one shape, not of {shown(shape)} and {shown(x.shape)}")
        if start.shape != () or start.dtype != x.dtype:
            raise TypeError(f"reduce_window: init_value must be one {x.dtype}, not {start}")
    return [ShapedArray(_sizes(shape, window), x.dtype) for x in xs]


def _combined(rule: Rule, how: str | Program, scalars: Sequence[IRValue]) -> list[IRValue]:
    if isinstance(how, Program):
        return rule.lowering.program(how, scalars)
    first, second = scalars
    return [OPERATIONS[how][1](first, second)]


def lower_window(rule: Rule, *values: IRValue, how: str | Program, window: Window) -> list[IRValue]:
    """Lower a reduction of each window. values: of the arrays, and then those to start with."""
    kinds, scalars = (
        list(map(tensor_type, rule.outputs)),
        [ShapedArray((), aval.dtype) for aval in rule.outputs],
    )
    if not all(dims.is_static(part) for part in (window.sizes, *window.padding)):
        return _dynamic_window(rule, values, how, window)
    operation = hlo.ReduceWindowOp(
        kinds,
        list(values[: len(kinds)]),
        list(values[len(kinds) :]),
        integers(window.sizes),
        window_strides=integers(window.strides),
        base_dilations=integers(window.base_dilation),
        window_dilations=integers(window.window_dilation),
        padding=pairs(np.asarray(window.padding, np.int64)),
    )
    block = rule.block(operation, 0, [*scalars, *scalars])
    with ir.InsertionPoint(block):
        hlo.return_(_combined(rule, how, list(block.arguments)))
    return list(operation.results)


def _dynamic_window(rule: Rule, values: Sequence[IRValue], how: str | Program, window: Window) -> list[IRValue]:
    """Lower it with sizes that are values, by the custom call that `jax.export` uses."""
    module = ir.InsertionPoint.current.block.owner
    while module.operation.name != "builtin.module":
        module = module.operation.parent
    body = module.operation.regions[0].blocks[0]
    name = f"reducer_{sum(1 for _ in body.operations)}"
    scalars = [tensor_type(ShapedArray((), aval.dtype)) for aval in rule.outputs]
    kind: Any = func.FuncOp  # jaxlib's stubs are those of its base
    with ir.InsertionPoint.at_block_begin(body):
        reducer = kind(name, ([*scalars, *scalars], scalars), visibility="private")
    with ir.InsertionPoint(reducer.add_entry_block()):
        func.return_(_combined(rule, how, list(reducer.entry_block.arguments)))
    pair = tensor_type(ShapedArray((1, 2), dtypes.int32))
    padding = hlo.concatenate([hlo.reshape(pair, rule.lowering.shape(edges)) for edges in window.padding], integer(0))
    parts = (window.sizes, window.strides, window.base_dilation, window.window_dilation)
    operation = hlo.CustomCallOp(
        list(map(tensor_type, rule.outputs)),
        [*values, *map(rule.lowering.shape, parts), padding],
        ir.StringAttr.get("stablehlo.dynamic_reduce_window"),
        called_computations=ir.ArrayAttr.get([ir.FlatSymbolRefAttr.get(name)]),
    )
    return list(operation.results)


_BY_SLICES = (
    "combine slices of the array, one for each place of the window, such as x[:-1] * x[1:], or write a custom_vjp"
)


def _window_vjp(given: Any, *, how: str | Program, window: Window) -> list[Any]:
    if isinstance(how, Program) or how == "multiply":  # JAX has none in reverse mode either
        what = "reduce_window has a derivative only for sums, maxima and minima that start with 0, -inf and inf"
        raise d.NoDerivative(f"{what}; {_BY_SLICES}")
    x, start = given.operands
    g = given.cotangent
    if how == "add":
        # Each element gets the cotangents of the windows that it is in: a sum over windows of those, far apart.
        before, after = _padding_of_lhs(x.shape, g.shape, window)
        zero = Literal(np.zeros((), g.dtype))
        apart = pad(g, zero, before, after, [stride - 1 for stride in window.strides])
        ones = (1,) * len(x.shape)
        back = Window(window.sizes, window.base_dilation, ((0, 0),) * len(ones), ones, window.window_dilation)
        return [reduce_window(apart, zero, "add", back), None]
    if set(window.window_dilation) - {1}:
        raise d.NoDerivative(f"reduce_window of a dilated window has a derivative only for sums; {_BY_SLICES}")
    if not all(map(dims.is_static, (window.sizes, *window.padding))):
        raise d.NoDerivative(
            f"the derivative of the {how} of windows needs a window and padding that are numbers: {window}"
        )
    if set(window.base_dilation) - {1}:

        def spread(x: Any) -> list[Any]:
            none, by = [0] * len(x.shape), [dilation - 1 for dilation in window.base_dilation]
            wide = pad(x, start, none, none, by)
            return [reduce_window(wide, start, how, window._replace(base_dilation=(1,) * len(x.shape)))]

        _, pull = d.pullback(spread, [x])
        return [pull([g])[0], None]
    return [select_and_scatter(x, g, how, window), None]


def _padding_of_lhs(shape: Shape, result: Shape, window: Window) -> tuple[list[Any], list[Any]]:
    """Return the padding, for each axis, of a convolution's cotangent, of which that of the array comes."""
    before, after = [], []
    for size, out, own, stride, padding, base, apart in zip(shape, result, *window, strict=True):
        wide = dilated(own, apart)
        low = wide - padding[0] - 1
        before.append(low)
        after.append(dilated(size, base) + wide - 1 - dilated(out, stride) - low)
    return before, after


REDUCE_WINDOW = Primitive("reduce_window", _window_infer, lower_window, _window_vjp, several=True)


def select_and_scatter(x: Any, source: Any, how: str, window: Window) -> Any:
    """Return zeros like x, with each element of `source` added where its window's "max" or "min" is, the first of it.

    https://openxla.org/stablehlo/spec#select_and_scatter
    """
    return bind(SELECT_AND_SCATTER, x, source, how=how, window=window)


def _select_lower(rule: Rule, x: IRValue, source: IRValue, *, how: str, window: Window) -> IRValue:
    # What is added around the array may not be chosen: it is there, and is not at the end.
    dtype, scalar = rule.out.dtype, ShapedArray((), rule.out.dtype)
    zero = constant(np.zeros((), dtype))
    outside = constant(np.asarray(OPERATIONS[how][0](dtype)).astype(dtype))
    low, high = zip(*window.padding, strict=True) if window.padding else ((), ())
    padded = tuple(size + a + b for size, a, b in zip(rule.out.shape, low, high, strict=True))
    wide = x if not any((*low, *high)) else hlo.pad(x, outside, integers(low), integers(high), integers([0] * len(low)))
    kind: Any = hlo.SelectAndScatterOp  # jaxlib's stubs want a type that it infers
    operation = kind(
        tensor_type(ShapedArray(padded, dtype)),
        wide,
        source,
        zero,
        window_dimensions=integers(window.sizes),
        window_strides=integers(window.strides),
        padding=pairs(np.zeros((len(low), 2), np.int64)),
    )
    for number in range(2):
        block = rule.block(operation, number, [scalar, scalar])
        with ir.InsertionPoint(block):
            first, second = block.arguments
            chosen = compare(first, second, "GE" if how == "max" else "LE", dtype)
            hlo.return_([chosen if number == 0 else hlo.add(first, second)])
    if not any((*low, *high)):
        return operation.result
    limit, ones = [a + size for a, size in zip(low, rule.out.shape, strict=True)], [1] * len(low)
    if dims.is_static(limit):
        return hlo.slice(operation.result, integers(low), integers(limit), integers(ones))
    ends = map(rule.lowering.shape, (low, limit, ones))
    return hlo.real_dynamic_slice(tensor_type(rule.out), operation.result, *ends)


def _select_vjp(given: Any, *, how: str, window: Window) -> list[Any]:
    x, _ = given.operands
    return [None, bind(SELECT_AND_GATHER, x, given.cotangent, how=how, window=window)]


SELECT_AND_SCATTER = Primitive(
    "select_and_scatter",
    lambda x, source, **_: ShapedArray(x.shape, source.dtype),
    _select_lower,
    _select_vjp,
)


def _gather_lower(rule: Rule, x: IRValue, y: IRValue, *, how: str, window: Window) -> IRValue:
    """Of each window the element of y at the place of the extremum of x."""
    dtype, scalar = rule.out.dtype, ShapedArray((), rule.out.dtype)
    start = [constant(np.asarray(OPERATIONS[how][0](dtype)).astype(dtype)), constant(np.zeros((), dtype))]
    operation = hlo.ReduceWindowOp(
        [tensor_type(rule.out)] * 2,
        [x, y],
        start,
        integers(window.sizes),
        window_strides=integers(window.strides),
        padding=pairs(np.asarray(window.padding, np.int64)),
    )
    block = rule.block(operation, 0, [scalar] * 4)
    with ir.InsertionPoint(block):
        a, of_a, b, of_b = block.arguments
        first = compare(a, b, "GE" if how == "max" else "LE", dtype)
        hlo.return_([hlo.select(first, a, b), hlo.select(first, of_a, of_b)])
    return operation.results[1]


SELECT_AND_GATHER: Primitive = Primitive(
    "select_and_gather",
    lambda x, y, *, how, window: ShapedArray(_sizes(x.shape, window), y.dtype),
    _gather_lower,
    lambda given, *, how, window: [None, select_and_scatter(given.operands[0], given.cotangent, how, window)],
)
