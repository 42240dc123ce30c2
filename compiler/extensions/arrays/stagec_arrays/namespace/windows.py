"""Convolutions, reductions of windows and cumulative ones, under the names of `jax.lax`.

https://docs.jax.dev/en/latest/jax.lax.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagec_arrays import binding, dims, pytrees, tracing
from stagec_arrays.dims import Shape
from stagec_arrays.namespace.promotion import array_of, inexact, like, named
from stagec_arrays.primitives import contractions, cumulative, windows
from stagec_arrays.primitives.structural import convert
from stagec_arrays.primitives.windows import dilated
from stagec_arrays.program import Program
from stagec_arrays.values import ShapedArray, axis_of, shown

ConvDimensionNumbers = contractions.ConvDimensionNumbers
Padding = str | Sequence[tuple[Any, Any]]


def pads_of(function: str, padding: Padding, shape: Shape, window: Shape, strides: Sequence[int]) -> Any:
    """Return padding as pairs.

    padding: pairs; or "VALID", none; or "SAME", as much as keeps sizes, an odd element at the end; or "SAME_LOWER", at
    the start.
    shape, window: sizes of the axes, dilated. Raises ValueError.
    """
    if not isinstance(padding, str):
        result = tuple((low, high) for low, high in padding)
        if len(result) != len(shape):
            raise ValueError(f"{function}: padding is a pair for each of {len(shape)} axes, not {len(result)} pairs")
        return result
    how = padding.upper()
    if how not in ("VALID", "SAME", "SAME_LOWER"):
        raise ValueError(f'{function}: padding is "SAME", "SAME_LOWER", "VALID" or pairs, not {padding!r}')
    pairs: list[tuple[Any, Any]] = []
    for size, own, stride in zip(shape, window, strides, strict=True):
        missing: Any = 0
        if how != "VALID":
            missing = ((size + stride - 1) // stride - 1) * stride + own - size
            missing = dims.larger(missing, 0)
        less = missing // 2
        pairs.append((less, missing - less) if how != "SAME_LOWER" else (missing - less, less))
    return tuple(pairs)


def _axes(spec: Any, letters: str, order: str) -> tuple[int, ...]:
    """Return the axes of a layout: the two of `letters`, and the spatial ones in the order of another layout."""
    if not isinstance(spec, str):
        return tuple(map(int, spec))
    rest = sorted((i for i, c in enumerate(spec) if c not in letters), key=lambda i: order.index(spec[i]))
    return (spec.index(letters[0]), spec.index(letters[1]), *rest)


def _numbers(given: Any, rank: int) -> ConvDimensionNumbers:
    if given is None:
        given = (tuple(range(rank)),) * 3
    specs = tuple(given)
    if len(specs) != 3:
        raise ValueError(
            f'conv_general_dilated: dimension_numbers are three, such as ("NHWC", "HWIO", "NHWC"): {given}'
        )
    order = specs[1] if isinstance(specs[1], str) else ""
    try:
        result = [_axes(spec, letters, order) for spec, letters in zip(specs, ("NC", "OI", "NC"), strict=True)]
    except ValueError:
        result = []
    if any(sorted(axes) != list(range(rank)) for axes in result) or not result:
        what = f"conv_general_dilated: dimension_numbers {given} do not name each of {rank} axes once"
        raise ValueError(f'{what}; write layouts such as ("NHWC", "HWIO", "NHWC")')
    return ConvDimensionNumbers(*result)


def precision_of(precision: Any) -> str:
    """Return the name of a precision: None is "DEFAULT"."""
    name = "DEFAULT" if precision is None else str(getattr(precision, "name", precision)).upper()
    if name not in ("DEFAULT", "HIGH", "HIGHEST"):
        raise ValueError(f'precision is "default", "high" or "highest", not {precision!r}')
    return name


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Return the convolution of an array with a kernel, which is not turned around. As `jax.lax.conv_general_dilated`.

    padding: "SAME", "SAME_LOWER", "VALID", or a pair for each spatial axis. dimension_numbers: three layouts, such as
    ("NHWC", "HWIO", "NHWC"), or `ConvDimensionNumbers`; None: ("NCHW", "OIHW", "NCHW").
    precision: None, "default", "high" or "highest". preferred_element_type: dtype of the sums, and of the result.
    """
    x, kernel = array_of(lhs, "conv_general_dilated"), array_of(rhs, "conv_general_dilated")
    rank = len(x.shape)
    if len(kernel.shape) != rank or rank < 2:
        what = f"{shown(x.shape)} and {shown(kernel.shape)}"
        raise ValueError(
            f"conv_general_dilated: expected two arrays of as many dimensions, 2 or more, not of shapes {what}"
        )
    if preferred_element_type is not None:
        x, kernel = (convert(operand, np.dtype(preferred_element_type)) for operand in (x, kernel))
    numbers, spatial = _numbers(dimension_numbers, rank), rank - 2
    by = [
        tuple(steps) if steps is not None else (1,) * spatial for steps in (window_strides, lhs_dilation, rhs_dilation)
    ]
    if any(len(steps) != spatial for steps in by):
        raise ValueError(f"conv_general_dilated: strides and dilations are {spatial} integers, one for each space axis")
    strides, of_x, of_kernel = by
    sizes = tuple(dilated(kernel.shape[i], step) for i, step in zip(numbers.rhs_spec[2:], of_kernel, strict=True))
    shape = tuple(x.shape[i] if isinstance(padding, str) else 0 for i in numbers.lhs_spec[2:])
    pads = pads_of("conv_general_dilated", padding, shape, sizes, strides)
    window = contractions.Window(strides, pads, of_x, of_kernel, feature_group_count, batch_group_count)
    return contractions.convolve(x, kernel, numbers, window, precision_of(precision))


def conv(lhs: Any, rhs: Any, window_strides: Sequence[int], padding: Padding, precision: Any = None) -> Any:
    """Return the convolution of layouts "NCHW" and "OIHW". As `jax.lax.conv`."""
    return conv_general_dilated(lhs, rhs, window_strides, padding, precision=precision)


_NAMES = {"add": "add", "multiply": "multiply", "maximum": "max", "minimum": "min"}
"""The reductions of `windows.OPERATIONS`, by the names of their primitives."""


def _program(computation: Callable[[Any, Any], Any], starts: Sequence[Any], structure: Any) -> Program:
    """Return the program of a function of two trees of scalars, which takes the leaves of both."""
    scalars = [ShapedArray((), start.dtype) for start in starts]

    def flat(*leaves: Any) -> list[Any]:
        both = structure.unflatten(leaves[: len(starts)]), structure.unflatten(leaves[len(starts) :])
        result, given = pytrees.flatten(computation(*both))
        if given != structure:
            raise TypeError(f"reduce_window: the computation takes trees {structure} and gives {given}")
        return [array_of(leaf) for leaf in result]

    try:
        program = tracing.trace(flat, [*scalars, *scalars], "a reduction", apart=True).program
    except tracing.LeakedTracer:
        what = "the computation uses an array that is traced outside it"
        raise tracing.LeakedTracer(f"reduce_window: {what}; it may use only its two arguments") from None
    if [aval[:2] for aval in program.out_avals] != [scalar[:2] for scalar in scalars]:
        taken, given = (", ".join(map(str, avals)) for avals in (scalars, program.out_avals))
        raise TypeError(f"reduce_window: the computation takes two ({taken}) and gives one, not ({given})")
    return program


def _named(program: Program, start: Any) -> str | None:
    """Return the name of a reduction of one array, if it has one and starts where it does."""
    names = [equation.primitive.name for equation in program.equations]
    known = binding.known(start)
    if len(names) != 1 or names[0] not in _NAMES or known is None:
        return None
    name = _NAMES[names[0]]
    identity, _ = windows.OPERATIONS[name]
    of_both = {*map(id, program.equations[0].inputs)} == {*map(id, program.inputs)}
    return name if of_both and known == np.asarray(identity(start.dtype), start.dtype) else None


def reduce_window(
    operand: Any,
    init_value: Any,
    computation: Callable[[Any, Any], Any],
    window_dimensions: Sequence[Any],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Any:
    """Return a reduction of each window of an array, or of arrays of one shape together. As `jax.lax.reduce_window`.

    operand: a tree of arrays. init_value: a tree of that structure: what an empty window gives, which changes nothing
    in the computation. computation: of two elements, such as `add`, `max`, `min` or `mul`; or of two trees of elements.
    Sums, maxima and minima of one array have a derivative, as in JAX, but not extrema of a dilated window.
    """
    leaves, structure = pytrees.flatten(operand)
    values, given = pytrees.flatten(init_value)
    if not leaves or given != structure:
        raise ValueError(f"reduce_window: init_value is a tree as operand is, {structure}, not {given}")
    xs = [array_of(leaf, "reduce_window") for leaf in leaves]
    starts = [like(value, x.dtype, "reduce_window") for value, x in zip(values, xs, strict=True)]
    shape = tuple(xs[0].shape)
    ones = (1,) * len(shape)
    each = (window_strides, base_dilation, window_dilation)
    strides, base, apart = (tuple(numbers) if numbers is not None else ones for numbers in each)
    sizes = tuple(window_dimensions)
    if any(len(numbers) != len(ones) for numbers in (sizes, strides, base, apart)):
        what = f"window, strides and dilations are {len(ones)} integers, one for each axis"
        raise ValueError(f"reduce_window: {what}")
    wide = tuple(dilated(size, by) for size, by in zip(sizes, apart, strict=True))
    pads = pads_of("reduce_window", padding, shape, wide, strides)
    program = _program(computation, starts, structure)
    how = (_named(program, starts[0]) if len(xs) == 1 else None) or program
    result = windows.reduce_windows(xs, starts, how, windows.Window(sizes, strides, pads, base, apart))
    return structure.unflatten(result)


def _cumulative(name: str, how: str, what: str, floating: bool = False) -> Callable[..., Any]:
    def function(operand: Any, axis: int = 0, reverse: bool = False) -> Any:
        x = inexact(operand, name) if floating else array_of(operand, name)
        return cumulative.cumulative(x, axis_of(axis, len(x.shape)), how, bool(reverse))

    return named(
        function, name, f"Return for each element {what} it and all before it along an axis; reverse: all behind it."
    )


cumsum = _cumulative("cumsum", "add", "the sum of")
cumprod = _cumulative("cumprod", "multiply", "the product of")
cummax = _cumulative("cummax", "max", "the largest of")
cummin = _cumulative("cummin", "min", "the smallest of")
cumlogsumexp = _cumulative("cumlogsumexp", "logaddexp", "the logarithm of the sum of the exponentials of", True)


def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Return for each place of an axis what an associative function of two trees makes of all parts up to there.

    As `jax.lax.associative_scan`. reverse: from there on. The size of the axis is a number.
    """
    leaves, structure = pytrees.flatten(elems)
    arrays = [array_of(leaf, "associative_scan") for leaf in leaves]
    where = axis_of(axis, len(arrays[0].shape))
    sizes = {x.shape[where] for x in arrays}
    if len(sizes) != 1 or not dims.is_static(tuple(sizes)):
        what = ", ".join(shown(x.shape) for x in arrays)
        raise ValueError(f"associative_scan: axis {axis} has one size, which is a number; the shapes are {what}")

    def combine(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        result = fn(structure.unflatten(first), structure.unflatten(second))
        return [array_of(leaf) for leaf in pytrees.flatten(result)[0]]

    return structure.unflatten(cumulative.associative_scan(combine, arrays, where, reverse))
