"""Convolutions as products of matrices, for GPUs on which nobody has timed a convolution.

cuDNN has some seventy engines for a convolution, and XLA times them on the device to choose one. Without a device, it
takes the first: on an H100 (docs/hardware.md), 29 of 32 convolutions took 5 to 760 times as long so as with the engine
that XLA would have chosen. The engines that are quick there are made for that device, and cuDNN refuses each of them
for other shapes, so no other can be named. cuBLAS needs no times: it chooses a kernel when the program runs.

A convolution is a product over its taps, the positions of the kernel: for each, a slice of the input with the kernel's
strides. Where a kernel has many taps and the result few positions, as in a gradient of the weights, it is one product
for each position. The sum is the same but for its order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    Value: TypeAlias = ir.Value[Any]

_NAMES = ("stablehlo.convolution", "stablehlo.dynamic_conv")
_MOST = 128
"""Slices that one convolution may become: each is an operation that XLA compiles. 5x5x5 taps are 125."""
_ROOM = 256 << 20
"""Bytes of slices that stand beside each other in memory; with more, products of some taps are added up."""


def as_products(module: ir.Module) -> int:
    """Replace the convolutions of `module` by products; return how many are left.

    Those are left that would become more than 128 slices, that have a size that is only known when the program runs or
    is 0, or that have types other than floats, integers and complex numbers.
    """
    from jaxlib.mlir import ir

    convolutions: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in _NAMES:
            convolutions.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return sum(not _replaced(convolution) for convolution in convolutions)


def _replaced(convolution: ir.Operation) -> bool:
    from jaxlib.mlir import ir

    values = *convolution.operands, *convolution.results
    if convolution.name != _NAMES[0] or not all(map(_static, values)):
        return False
    with convolution.location, ir.InsertionPoint(convolution):
        result = _Convolution(convolution).result()
        if result is None:
            return False
    owner: Any = result.owner
    for name in convolution.attributes:
        if name not in _OWN:  # such as a sharding, which is the result's
            owner.attributes[name] = convolution.attributes[name]
    convolution.results[0].replace_all_uses_with(result)
    convolution.erase()
    return True


_OWN = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "window_reversal"),
    *("dimension_numbers", "feature_group_count", "batch_group_count", "precision_config"),
)
"""The attributes of a convolution that say what it computes."""


def _static(value: Value) -> bool:
    from jaxlib.mlir import ir

    plain = ir.FloatType | ir.IntegerType | ir.ComplexType
    made = ir.RankedTensorType(value.type)
    return made.has_static_shape and math.prod(made.shape) > 0 and isinstance(made.element_type, plain)


class _Convolution:
    """A convolution while it is replaced: input [batch, spatial..., feature], kernel [spatial..., in, out].

    groups: of features or of the batch, which share no weights. taps: sizes of the kernel. positions: of the result.
    """

    def __init__(self, operation: ir.Operation) -> None:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        self.operation = operation
        lhs, rhs = operation.operands
        self.x = _transposed(
            lhs,
            [numbers.input_batch_dimension, *numbers.input_spatial_dimensions, numbers.input_feature_dimension],
        )
        self.kernel = _transposed(
            rhs,
            [
                *numbers.kernel_spatial_dimensions,
                numbers.kernel_input_feature_dimension,
                numbers.kernel_output_feature_dimension,
            ],
        )
        order = [numbers.output_batch_dimension, *numbers.output_spatial_dimensions, numbers.output_feature_dimension]
        self.out = ir.RankedTensorType(operation.results[0].type)
        self.order = [order.index(i) for i in range(len(order))]
        self.taps = _shape(self.kernel)[:-2]
        self.positions = [self.out.shape[i] for i in order[1:-1]]
        self.by_feature = ir.IntegerAttr(operation.attributes["feature_group_count"]).value
        self.by_batch = ir.IntegerAttr(operation.attributes["batch_group_count"]).value
        self.groups = self.by_feature * self.by_batch  # one of them is 1

        attributes: Any = operation.attributes

        def sizes(name: str) -> list[int]:
            return list(map(int, attributes.get(name) or [1] * len(self.taps)))

        self.strides, self.spread, self.dilation = map(sizes, ("window_strides", "lhs_dilation", "rhs_dilation"))
        flat = list(map(int, attributes.get("padding") or [0, 0] * len(self.taps)))
        self.padding = list(zip(flat[::2], flat[1::2], strict=True))
        turned = attributes.get("window_reversal") or ()
        self.turned = [i for i, each in enumerate(turned) if each]
        # Products of 16 bits are added up in 32, as inside one product.
        element = self.out.element_type
        narrow = isinstance(element, ir.FloatType) and element.width < 32
        self.sum_type = ir.F32Type.get() if narrow else element

    def result(self) -> Value | None:
        """Return the result with its dimensions in the order of the convolution's; None if it is left as it is."""
        from jaxlib.mlir.dialects import stablehlo

        taps, positions = math.prod(self.taps), math.prod(self.positions)
        if min(taps, positions) > _MOST:
            return None
        by_tap = taps <= positions
        if self.turned:
            self.kernel = stablehlo.reverse(self.kernel, self.turned)
        self.x = self._padded()
        if by_tap and self.by_feature > 1 and _shape(self.kernel)[-2] == 1:
            whole = self._by_element()
        else:
            whole = self._by_tap() if by_tap else self._by_position()
        shape = [_shape(self.x)[0] // self.by_batch, *self.positions, _shape(self.kernel)[-1]]
        whole = _reshaped(_as_type(whole, self.out.element_type), shape)
        return _transposed(whole, self.order)

    def _padded(self) -> Value:
        from jaxlib.mlir.dialects import stablehlo

        if not any(map(any, self.padding)) and set(self.spread) == {1}:
            return self.x
        low, high = zip((0, 0), *self.padding, (0, 0), strict=True)
        interior = [0, *(each - 1 for each in self.spread), 0]
        return stablehlo.pad(self.x, _zeros(self.x.type.element_type), low, high, interior)

    def _by_tap(self) -> Value:
        """Return the product of slices beside each other with the kernel: [batch, positions..., out]."""
        taps = list(itertools.product(*map(range, self.taps)))
        features, out = _shape(self.kernel)[-2:]
        kernel = _reshaped(self.kernel, [len(taps), features, self.groups, out // self.groups])
        each = math.prod([_shape(self.x)[0], *self.positions, _shape(self.x)[-1]]) * _bytes(self.x)
        together = max(1, _ROOM // each)
        element = self.sum_type if len(taps) > together else self.out.element_type
        parts = []
        for first in range(0, len(taps), together):
            some = taps[first : first + together]
            columns = [self._grouped(self._slice(tap, self.positions, self.strides, self.dilation)) for tap in some]
            chosen = _slice(kernel, [first, 0, 0, 0], [first + len(some), *_shape(kernel)[1:]])
            rows = _reshaped(chosen, [len(some) * features, *_shape(kernel)[2:]])
            parts.append(self._product(_beside(columns, -1), rows, element, contracted=1))
        return _added(parts)

    def _by_position(self) -> Value:
        """Return the products of a slice for each position with the whole kernel: [batch, positions..., out]."""
        features, out = _shape(self.kernel)[-2:]
        kernel = _reshaped(self.kernel, [*self.taps, features, self.groups, out // self.groups])
        parts = []
        for position in itertools.product(*map(range, self.positions)):
            window = self._grouped(self._slice(position, self.taps, self.dilation, self.strides))
            if self.by_feature > 1:  # the group of features stands before them
                window = _transposed(window, [0, len(self.taps) + 1, *range(1, len(self.taps) + 1), -1])
            product = self._product(window, kernel, self.out.element_type, contracted=len(self.taps) + 1)
            parts.append(_reshaped(product, [_shape(product)[0], 1, *_shape(product)[1:]]))
        return _beside(parts, 1)

    def _by_element(self) -> Value:
        """Return the sum over taps where each group has one feature of the input: [batch, positions..., group, out]."""
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        out = _shape(self.kernel)[-1] // self.groups
        shape = [_shape(self.x)[0], *self.positions, self.groups, out]
        kernel = _reshaped(self.kernel, [*self.taps, self.groups, out])
        parts = []
        for tap in itertools.product(*map(range, self.taps)):
            piece = _as_type(self._slice(tap, self.positions, self.strides, self.dilation), self.sum_type)
            ends = [*(i + 1 for i in tap), self.groups, out]
            weights = _reshaped(_slice(kernel, [*tap, 0, 0], ends), [self.groups, out])
            weights = _as_type(weights, self.sum_type)
            wide = ir.RankedTensorType.get(shape, self.sum_type)
            last = len(shape) - 2
            pair = (
                stablehlo.broadcast_in_dim(wide, piece, range(last + 1)),
                stablehlo.broadcast_in_dim(wide, weights, [last, last + 1]),
            )
            parts.append(stablehlo.multiply(*pair))
        return _added(parts)

    def _slice(self, start: Sequence[int], sizes: Sequence[int], strides: Sequence[int], scale: Sequence[int]) -> Value:
        """Return every `strides`-th element of the input from `start` times `scale` on, `sizes` of them."""
        first = [i * each for i, each in zip(start, scale, strict=True)]
        last = [i + (size - 1) * step + 1 for i, size, step in zip(first, sizes, strides, strict=True)]
        batch, *_, features = _shape(self.x)
        return _slice(self.x, [0, *first, 0], [batch, *last, features], [1, *strides, 1])

    def _grouped(self, piece: Value) -> Value:
        """Return a slice with its groups: [batch, ..., group, features], or [group, batch, ..., features]."""
        batch, *middle, features = _shape(piece)
        if self.by_feature > 1:
            return _reshaped(piece, [batch, *middle, self.groups, features // self.groups])
        return _reshaped(piece, [self.groups, batch // self.groups, *middle, features]) if self.by_batch > 1 else piece

    def _product(self, x: Value, kernel: Value, element: ir.Type, contracted: int) -> Value:
        """Return a product over the last dimensions of `x` and the first of the kernel, `contracted` of them.

        kernel: [contracted..., group, out]. Returns [batch, ..., group, out], without the group where there is one.
        """
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        rank, shape = len(_shape(x)), _shape(kernel)
        if self.groups == 1:
            kernel, shape = _reshaped(kernel, [*shape[:-2], shape[-1]]), [*shape[:-2], shape[-1]]
        where = rank - contracted - 1 if self.by_feature > 1 else 0
        group = [where] if self.groups > 1 else []
        over = list(range(rank - contracted, rank))
        kept = [size for i, size in enumerate(_shape(x)) if i not in (*group, *over)]
        dims = stablehlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=group,
            rhs_batching_dimensions=[contracted] if group else [],
            lhs_contracting_dimensions=over,
            rhs_contracting_dimensions=list(range(contracted)),
        )
        made = ir.RankedTensorType.get([*(self.groups for _ in group), *kept, shape[-1]], element)
        precision = self.operation.attributes.get("precision_config")
        product = stablehlo.dot_general(made, x, kernel, dims, precision_config=precision)
        # The group comes first in a product.
        return _transposed(product, [*range(1, len(kept) + 1), 0, len(kept) + 1]) if group else product


def _shape(value: Value) -> list[int]:
    return list(value.type.shape)


def _bytes(value: Value) -> int:
    from jaxlib.mlir import ir

    element: Any = value.type.element_type
    is_complex = isinstance(element, ir.ComplexType)
    part: Any = element.element_type if is_complex else element
    return max(1, (1 + is_complex) * int(part.width) // 8)


def _transposed(value: Value, order: Sequence[int]) -> Value:
    from jaxlib.mlir.dialects import stablehlo

    rank = len(_shape(value))
    order = [i % rank for i in order]
    return value if order == list(range(rank)) else stablehlo.transpose(value, order)


def _reshaped(value: Value, shape: Sequence[int]) -> Value:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if _shape(value) == list(shape):
        return value
    return stablehlo.reshape(ir.RankedTensorType.get(shape, value.type.element_type), value)


def _slice(value: Value, start: Sequence[int], end: Sequence[int], strides: Sequence[int] = ()) -> Value:
    from jaxlib.mlir.dialects import stablehlo

    return stablehlo.slice(value, start, end, strides or [1] * len(start))


def _beside(values: Sequence[Value], dimension: int) -> Value:
    from jaxlib.mlir.dialects import stablehlo

    return values[0] if len(values) == 1 else stablehlo.concatenate(values, dimension % len(_shape(values[0])))


def _added(values: Sequence[Value]) -> Value:
    from jaxlib.mlir.dialects import stablehlo

    total = values[0]
    for value in values[1:]:
        total = stablehlo.add(total, value)
    return total


def _as_type(value: Value, element: ir.Type) -> Value:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if value.type.element_type == element:
        return value
    return stablehlo.convert(ir.RankedTensorType.get(_shape(value), element), value)


def _zeros(element: ir.Type) -> Value:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    zero = "0" if isinstance(element, ir.IntegerType) else "0.0"
    zero = f"({zero}, {zero})" if isinstance(element, ir.ComplexType) else zero
    return stablehlo.constant(ir.Attribute.parse(f"dense<{zero}> : tensor<{element}>"))
