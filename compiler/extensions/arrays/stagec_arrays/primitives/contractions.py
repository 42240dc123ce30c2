"""Primitives that multiply and add up: `dot_general`, and convolution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec.core.messages.errors import nearest
from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.lowering import IRValue, Rule, build, integer, integers, pairs, tensor_type
from stagec_arrays.primitives.slicing import reverse
from stagec_arrays.primitives.structural import reshape, transpose
from stagec_arrays.primitives.windows import dilated
from stagec_arrays.program import Primitive
from stagec_arrays.values import ShapedArray, shown

Axes = tuple[int, ...]
PRECISIONS = {
    "default": "DEFAULT",
    "bfloat16": "DEFAULT",
    "high": "HIGH",
    "tensorfloat32": "HIGH",
    "highest": "HIGHEST",
    "float32": "HIGHEST",
}
"""StableHLO's precision of products, by JAX's names."""
_DEFAULT: ContextVar[str] = ContextVar("stagec_matmul_precision", default="DEFAULT")


@contextlib.contextmanager
def default_matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of matrix products inside a `with` statement, for products that do not name one.

    As `jax.default_matmul_precision`. It matters on devices that round the factors.

    precision: "default", "high", "highest", "bfloat16", "tensorfloat32" or "float32".

    Raises ValueError for another name.

    >>> import stagec_arrays.numpy as np
    >>> with stagec_arrays.default_matmul_precision("highest"):
    ...     lowered = stagec.jit(np.matmul, frontend="arrays").lower(np.ones((2, 2)), np.ones((2, 2)))
    >>> "HIGHEST" in lowered.as_text()
    True
    """
    if precision not in PRECISIONS:
        raise ValueError(f"{precision!r} is not a precision; {nearest(precision, PRECISIONS)}")
    before = _DEFAULT.set(PRECISIONS[precision])
    try:
        yield
    finally:
        _DEFAULT.reset(before)


def default_precision() -> str:
    """Return StableHLO's precision of products that name none."""
    return _DEFAULT.get()


def dot_general(
    x: Any,
    y: Any,
    contracted: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    precision: str | None = None,
) -> Any:
    """Return the sum of products over the axes `contracted` of both, for each index of the axes `batch` of both.

    The result has the batch axes, then x's others, then y's. As `jax.lax.dot_general`. precision: "DEFAULT", "HIGH",
    "HIGHEST": of the products, on devices that round them; None: that of `default_matmul_precision`.
    """
    numbers = tuple(tuple(map(int, axes)) for axes in (*contracted, *batch))
    return bind(DOT_GENERAL, x, y, numbers=numbers, precision=precision or default_precision())


def _free(x: Any, contracted: Axes, batch: Axes) -> list[int]:
    return [axis for axis in range(len(x.shape)) if axis not in contracted and axis not in batch]


def _dot_infer(x: ShapedArray, y: ShapedArray, *, numbers: tuple[Axes, ...], precision: str) -> ShapedArray:
    x_contracted, y_contracted, x_batch, y_batch = numbers
    if x.dtype != y.dtype:
        raise TypeError(f"dot_general: expected arrays of one dtype, not {x.dtype} and {y.dtype}")
    for a, b in ((x_contracted, y_contracted), (x_batch, y_batch)):
        first, second = tuple(x.shape[axis] for axis in a), tuple(y.shape[axis] for axis in b)
        if first != second:
            where = f"axes {shown(a)} of shape {shown(x.shape)} and {shown(b)} of shape {shown(y.shape)}"
            raise ValueError(f"arrays cannot be multiplied: {where} must have the same sizes")
    sizes = [x.shape[axis] for axis in (*x_batch, *_free(x, x_contracted, x_batch))]
    sizes += [y.shape[axis] for axis in _free(y, y_contracted, y_batch)]
    return ShapedArray(tuple(sizes), x.dtype, x.weak_type and y.weak_type)


def _dot_lower(rule: Rule, x: IRValue, y: IRValue, *, numbers: tuple[Axes, ...], precision: str) -> IRValue:
    x_contracted, y_contracted, x_batch, y_batch = numbers
    dimensions = hlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(x_batch),
        rhs_batching_dimensions=list(y_batch),
        lhs_contracting_dimensions=list(x_contracted),
        rhs_contracting_dimensions=list(y_contracted),
    )
    how = ir.ArrayAttr.get([hlo.PrecisionAttr.get(precision)] * 2)
    kind = tensor_type(rule.out)
    return build(hlo.DotGeneralOp, x, y, out=kind, dot_dimension_numbers=dimensions, precision_config=how)


def _dot_vjp(d: Any, *, numbers: tuple[Axes, ...], precision: str) -> list[Any]:
    x, y = d.operands
    x_contracted, y_contracted, x_batch, y_batch = numbers
    x_free, y_free = _free(x, x_contracted, x_batch), _free(y, y_contracted, y_batch)
    count, between = len(x_batch), len(x_batch) + len(x_free)

    def gradient(other: Any, of_result: Sequence[int], free: Sequence[int], batch: Axes, order: Sequence[int]) -> Any:
        result = dot_general(d.cotangent, other, (of_result, free), (range(count), batch), precision)
        return transpose(result, np.argsort(order).tolist())

    # The axes of what comes out are: batch, the own free ones, and the contracted ones in the order of the other's.
    of_x = [*x_batch, *x_free, *(x_contracted[i] for i in np.argsort(y_contracted))]
    of_y = [*y_batch, *y_free, *(y_contracted[i] for i in np.argsort(x_contracted))]
    return [
        gradient(y, range(between, between + len(y_free)), y_free, y_batch, of_x),
        gradient(x, range(count, between), x_free, x_batch, of_y),
    ]


DOT_GENERAL = Primitive("dot_general", _dot_infer, _dot_lower, _dot_vjp)


class ConvDimensionNumbers(NamedTuple):
    """The roles of the axes of a convolution's arrays, as `jax.lax.ConvDimensionNumbers`.

    lhs_spec, out_spec: the batch axis, the feature axis, and the spatial ones. rhs_spec: of the kernel, the axis of
    output features, that of input features, and the spatial ones.
    """

    lhs_spec: Sequence[int]
    rhs_spec: Sequence[int]
    out_spec: Sequence[int]


class Window(NamedTuple):
    """How the kernel of a convolution moves, for each spatial axis.

    strides: steps. padding: zeros before and after. lhs_dilation, rhs_dilation: distance of elements, of the array and
    the kernel. feature_groups, batch_groups: parts that are convolved apart.
    """

    strides: Axes
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Axes
    rhs_dilation: Axes
    feature_groups: int = 1
    batch_groups: int = 1


def convolve(x: Any, kernel: Any, numbers: ConvDimensionNumbers, window: Window, precision: str | None = None) -> Any:
    """Return the convolution of an array with a kernel, as `jax.lax.conv_general_dilated`: no axis is turned around."""
    return bind(CONVOLUTION, x, kernel, numbers=numbers, window=window, precision=precision or default_precision())


def _convolution_infer(
    x: ShapedArray, kernel: ShapedArray, *, numbers: ConvDimensionNumbers, window: Window, precision: str
) -> ShapedArray:
    if x.dtype != kernel.dtype:
        raise TypeError(f"convolution: expected arrays of one dtype, not {x.dtype} and {kernel.dtype}")
    lhs, rhs, out = numbers
    features, wanted = x.shape[lhs[1]], kernel.shape[rhs[1]]
    if features != wanted * window.feature_groups:
        groups = f" in {window.feature_groups} groups" if window.feature_groups > 1 else ""
        raise ValueError(f"convolution: the array has {features} features, the kernel takes {wanted}{groups}")
    sizes: list[Any] = [0] * len(x.shape)
    sizes[out[0]] = x.shape[lhs[0]] // window.batch_groups
    sizes[out[1]] = kernel.shape[rhs[0]]
    for i, (a, b, c) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        size = dilated(x.shape[a], window.lhs_dilation[i]) + sum(window.padding[i])
        room = size - dilated(kernel.shape[b], window.rhs_dilation[i])
        sizes[c] = dims.larger(room // window.strides[i] + 1, 0)
    return ShapedArray(tuple(sizes), x.dtype, x.weak_type and kernel.weak_type)


def _convolution_lower(
    rule: Rule, x: IRValue, kernel: IRValue, *, numbers: ConvDimensionNumbers, window: Window, precision: str
) -> IRValue:
    lhs, rhs, out = numbers
    dimensions = hlo.ConvDimensionNumbers.get(
        input_batch_dimension=lhs[0],
        input_feature_dimension=lhs[1],
        input_spatial_dimensions=list(lhs[2:]),
        kernel_output_feature_dimension=rhs[0],
        kernel_input_feature_dimension=rhs[1],
        kernel_spatial_dimensions=list(rhs[2:]),
        output_batch_dimension=out[0],
        output_feature_dimension=out[1],
        output_spatial_dimensions=list(out[2:]),
    )
    how: dict[str, Any] = {
        "dimension_numbers": dimensions,
        "feature_group_count": integer(window.feature_groups),
        "batch_group_count": integer(window.batch_groups),
        "window_strides": integers(window.strides),
        "lhs_dilation": integers(window.lhs_dilation),
        "rhs_dilation": integers(window.rhs_dilation),
        "window_reversal": ir.DenseBoolArrayAttr.get([False] * len(window.padding)),
        "precision_config": ir.ArrayAttr.get([hlo.PrecisionAttr.get(precision)] * 2),
    }
    kind = tensor_type(rule.out)
    if all(map(dims.is_static, window.padding)):
        padding = np.asarray(window.padding, np.int64).reshape(len(window.padding), 2)
        return hlo.convolution(kind, x, kernel, padding=pairs(padding), **how)
    pair = tensor_type(ShapedArray((1, 2), dtypes.int32))
    parts = [hlo.reshape(pair, rule.lowering.shape(edges)) for edges in window.padding]
    return hlo.dynamic_conv(kind, x, kernel, hlo.concatenate(parts, integer(0)), **how)


def _swapped(axes: Sequence[int]) -> Axes:
    return (axes[1], axes[0], *axes[2:])


def _split_axis(x: Any, axis: int, parts: int) -> Any:
    return reshape(x, (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :]))


def _joined(x: Any, source: int, target: int) -> Any:
    """Return an array with an axis put before another, counted without it, as one."""
    order = [i for i in range(len(x.shape)) if i != source]
    shape = [x.shape[i] for i in order]
    shape[target] = shape[target] * x.shape[source]
    order.insert(target, source)
    return reshape(transpose(x, order), shape)


def _convolution_vjp(d: Any, *, numbers: ConvDimensionNumbers, window: Window, precision: str) -> list[Any]:
    """Both are convolutions: of the cotangent with the kernel turned around, and of the array with the cotangent."""
    x, kernel = d.operands
    g, (lhs, rhs, out) = d.cotangent, numbers
    sizes = []
    for i, (a, b, c) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        array = dilated(x.shape[a], window.lhs_dilation[i])
        own, result = dilated(kernel.shape[b], window.rhs_dilation[i]), dilated(g.shape[c], window.strides[i])
        sizes.append((array, own, result))
    pairs_ = list(zip(sizes, window.padding, strict=True))
    of_x = tuple((own - low - 1, array - result + low) for (array, own, result), (low, _) in pairs_)
    of_kernel = tuple((low, result - array + own - low - 1) for (array, own, result), (low, _) in pairs_)
    groups = max(window.feature_groups, window.batch_groups)
    turned = kernel
    if groups > 1:
        turned = _joined(_split_axis(kernel, rhs[0], groups), rhs[0], rhs[1])
    of_lhs = convolve(
        g,
        reverse(turned, rhs[2:]),
        ConvDimensionNumbers(out, _swapped(rhs), lhs),
        Window(window.lhs_dilation, of_x, window.strides, window.rhs_dilation, groups),
        precision,
    )
    if window.batch_groups > 1:
        of_lhs = _joined(_split_axis(of_lhs, lhs[1], groups), lhs[1], lhs[0])
    own = convolve(
        x,
        g,
        ConvDimensionNumbers(_swapped(lhs), _swapped(out), _swapped(rhs)),
        Window(
            window.rhs_dilation,
            of_kernel,
            window.lhs_dilation,
            window.strides,
            window.batch_groups,
            window.feature_groups,
        ),
        precision,
    )
    return [of_lhs, own]


CONVOLUTION = Primitive("convolution", _convolution_infer, _convolution_lower, _convolution_vjp)
