"""Convolutions as products of matrices, for GPUs on which nobody has timed a convolution.

cuDNN has some seventy engines for a convolution, and XLA times them on the device to choose one. Without a device, it
takes the first: on an H100 (docs/hardware.md), 29 of 32 convolutions took 5 to 760 times as long so as with the engine
that XLA would have chosen. The engines that are quick there are made for that device, and cuDNN refuses each of them
for other shapes, so no other can be named. cuBLAS needs no times: it chooses a kernel when the program runs.

A convolution is a product over its taps, the positions of the kernel: for each, a slice of the input with the kernel's
strides. Where a kernel has many taps and the result few positions, as in a gradient of the weights, there is a slice
for each position. Where no two positions share an element of the input, as in the patches of an image, the input itself
is the factor, in another order. The sum is the same but for its order.

The slices lie beside each other in memory, for one product. If they are large, a loop makes products of parts of them.
XLA fuses and merges products that stand one after the other, and then makes the slices of all at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

Value: TypeAlias = "ir.Value[Any]"
_NAMES = ("stablehlo.convolution", "stablehlo.dynamic_conv")
_MOST = 128
"""Slices that one convolution may become: each is an operation that XLA compiles. 5x5x5 taps are 125."""
_ROOM = 256 << 20
"""Bytes of slices that stand beside each other in the memory of a device; with more, there are several products."""
_POSITIONS, _TAPS = "ABCDEHIJKLM", "abcdehijklm"
"""Names of dimensions."""


def as_products(module: ir.Module, devices: int = 1) -> int:
    """Replace the convolutions of `module` by products; return how many are left.

    Those are left that would become more than 128 slices, that have a size that is only known when the program runs or
    is 0, or that have types other than floats, integers and complex numbers.

    devices: over which XLA will split the arrays of `module`.
    """
    convolutions: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        nonlocal devices
        if operation.name in _NAMES:
            convolutions.append(operation)
        elif operation.name == "sdy.manual_computation":
            devices = 1  # what is in it, or called there, has the sizes of one device already
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return sum(not _replaced(convolution, devices) for convolution in convolutions)


def _replaced(convolution: ir.Operation, devices: int) -> bool:
    values = *convolution.operands, *convolution.results
    if convolution.name != _NAMES[0] or not all(map(_static, values)):
        return False
    with convolution.location, ir.InsertionPoint(convolution):
        result = _Convolution(convolution, devices).result()
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
    plain = ir.FloatType | ir.IntegerType | ir.ComplexType
    made = ir.RankedTensorType(value.type)
    return made.has_static_shape and math.prod(made.shape) > 0 and isinstance(made.element_type, plain)


class _Convolution:
    """A convolution while it is replaced: input [batch, spatial..., feature], kernel [spatial..., in, out].

    groups: of features or of the batch, which share no weights. taps: sizes of the kernel. positions: of the result.

    An element of the input with the index `position * stride + tap * dilation` meets that tap in that position.
    Dimensions have names, of one letter: n: batch, f: features of the input, g: groups, o: features of the result of a
    group, A, B, ...: positions, a, b, ...: taps.
    """

    def __init__(self, operation: ir.Operation, devices: int) -> None:
        numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        self.operation = operation
        self.devices = devices
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
        self.features_first = numbers.input_feature_dimension < numbers.input_batch_dimension
        order = [numbers.output_batch_dimension, *numbers.output_spatial_dimensions, numbers.output_feature_dimension]
        self.out = ir.RankedTensorType(operation.results[0].type)
        self.order = [order.index(i) for i in range(len(order))]
        self.taps = _shape(self.kernel)[:-2]
        self.positions = [self.out.shape[i] for i in order[1:-1]]
        self.by_feature = ir.IntegerAttr(operation.attributes["feature_group_count"]).value
        self.by_batch = ir.IntegerAttr(operation.attributes["batch_group_count"]).value
        self.groups = self.by_feature * self.by_batch  # one of them is 1
        features, out = _shape(self.kernel)[-2:]
        self.batch = _shape(self.x)[0] // self.by_batch
        self.rows = [features, self.groups, out // self.groups]  # of a tap, in the kernel

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
        taps, positions = math.prod(self.taps), math.prod(self.positions)
        apart, few = self._apart(), min(taps, positions) <= _MOST
        if not apart and not few:
            return None
        if self.turned:
            self.kernel = stablehlo.reverse(self.kernel, self.turned)
        if taps > positions and not apart:
            # Slices for a gradient of weights would be those of the convolution itself, and XLA would keep them for it.
            self.x = stablehlo.OptimizationBarrierOp([self.x]).results[0]
        self.x = self._padded()
        if few and taps <= positions and self.by_feature > 1 and self.rows[0] == 1:
            whole = self._by_element()
        elif apart:
            whole = self._in_blocks()
        else:
            whole = self._in_slices(taps <= positions)
        shape = [self.batch, *self.positions, self.groups * self.rows[-1]]
        # Always an operation of its own: what it is marked with is not for all results of a loop.
        made = ir.RankedTensorType.get(shape, self.out.element_type)
        whole = stablehlo.reshape(made, _as_type(whole, self.out.element_type))
        return _transposed(whole, self.order)

    def _apart(self) -> list[bool]:
        """Return whether each dimension of the input splits into positions and taps, and not taps and positions.

        Empty if one does neither, because then an element of the input has several taps, or none.
        """
        sizes = list(zip(self.positions, self.taps, self.strides, self.dilation, strict=True))
        major = [stride == taps and dilation == 1 for _, taps, stride, dilation in sizes]
        minor = [dilation == positions and stride == 1 for positions, _, stride, dilation in sizes]
        return major if all(map(max, major, minor)) else []

    def _padded(self) -> Value:
        if not any(map(any, self.padding)) and set(self.spread) == {1}:
            return self.x
        low, high = zip((0, 0), *self.padding, (0, 0), strict=True)
        interior = [0, *(each - 1 for each in self.spread), 0]
        return stablehlo.pad(self.x, _zeros(self.x.type.element_type), low, high, interior)

    def _in_blocks(self) -> Value:
        """Return one product of the input, which splits into blocks that no two positions share."""
        names, sizes = "n", [_shape(self.x)[0]]
        for i, major in enumerate(self._apart()):
            pair = [(_POSITIONS[i], self.positions[i]), (_TAPS[i], self.taps[i])]
            for name, size in pair if major else reversed(pair):
                names, sizes = names + name, [*sizes, size]
        ends = [i * j for i, j in zip(self.positions, self.taps, strict=True)]
        shape = _shape(self.x)
        x = _reshaped(_slice(self.x, [0] * len(shape), [shape[0], *ends, shape[-1]]), [*sizes, shape[-1]])
        names += "f"
        if self.features_first:
            x, names = _transposed(x, [-1, *range(1, len(names) - 1), 0]), f"f{names[1:-1]}n"
        kernel = _reshaped(self.kernel, [*self.taps, *self.rows])
        return self._product(*self._grouped(x, names), kernel, _TAPS[: len(self.taps)] + "fgo", self.out.element_type)

    def _in_slices(self, by_tap: bool) -> Value:
        """Return the product of slices of the input beside each other with the kernel.

        by_tap: a slice for each tap, with all positions. Otherwise one for each position, with all taps.
        Slices that are too large together become several products, in a loop over one dimension of the slices.
        """
        rank = len(self.taps)
        points, sizes, scale, steps = self.taps, self.positions, self.dilation, self.strides
        names, x = f"n{_POSITIONS[:rank]}tf", self.x
        kernel, kernel_names = _reshaped(self.kernel, [math.prod(self.taps), *self.rows]), "tfgo"
        if not by_tap:
            points, sizes, scale, steps = sizes, points, steps, scale
            names, x = f"f{_TAPS[:rank]}Pn", _transposed(x, [-1, *range(1, rank + 1), 0])
            # In the order of memory where this is a gradient.
            kernel = _transposed(self.kernel, [rank, *range(rank), rank + 1])
            kernel, kernel_names = _reshaped(kernel, [self.rows[0], *self.taps, *self.rows[1:]]), f"f{_TAPS[:rank]}go"
        starts = [[i * j for i, j in zip(at, scale, strict=True)] for at in itertools.product(*map(range, points))]
        taken = len(starts) * math.prod([*sizes, _shape(x)[0], _shape(x)[-1]]) * _bytes(x) // self.devices
        # Of two, the last: an image that is split over devices is split in the first.
        axis = max(range(rank), key=lambda i: (sizes[i], i), default=0)
        longest = sizes[axis] if len(starts) > 1 else 1  # one slice is a product of the input as it is
        least = min(longest, max(1, -(-taken // _ROOM)))
        # Parts of one size, if some more of them are: a last one of another size is code of its own.
        parts = next((n for n in range(least, min(2 * least, longest) + 1) if longest % n == 0), least)
        size = -(-longest // parts)

        def product(x: Value, kernel: Value, sizes: Sequence[int], element: ir.Type) -> Value:
            outer, *_, inner = _shape(x)
            slices = []
            for start in starts:
                ends = [first + (size - 1) * step + 1 for first, size, step in zip(start, sizes, steps, strict=True)]
                piece = _slice(x, [0, *start, 0], [outer, *ends, inner], [1, *steps, 1])
                slices.append(_reshaped(piece, [outer, *sizes, 1, inner]))
            # Beside each other in a dimension of their own, which XLA splits over no devices.
            beside = slices[0] if len(slices) == 1 else stablehlo.concatenate(slices, rank + 1)
            return self._product(*self._grouped(beside, names), kernel, kernel_names, element)

        if size == longest:
            return product(x, kernel, sizes, self.out.element_type)
        element = self.out.element_type if by_tap else self.sum_type
        shape = [self.batch, *(sizes if by_tap else [len(starts)]), *self.rows[1:]]

        def add(total: Value, first: Value, size: int, x: Value, kernel: Value) -> Value:
            some = [size if i == axis else each for i, each in enumerate(sizes)]
            extent = (size - 1) * steps[axis] + (points[axis] - 1) * scale[axis] + 1
            x = _part(x, 1 + axis, _times(first, steps[axis]), extent)
            if by_tap:
                return _updated(total, 1 + axis, first, product(x, kernel, some, element))
            kernel = _part(kernel, 1 + axis, first, size)
            return stablehlo.add(total, product(x, kernel, some, element))

        def step(i: Value, total: Value, x: Value, kernel: Value) -> Value:
            return add(total, _times(i, size), size, x, kernel)

        times, rest = divmod(longest, size)
        # XLA would make one array of zeros for all loops with such a result, at the start.
        x, zero = stablehlo.OptimizationBarrierOp([x, _zeros(element)]).results
        first = stablehlo.broadcast_in_dim(ir.RankedTensorType.get(shape, element), zero, [])
        total = _looped(times, step, first, x, kernel)
        return add(total, _index(times * size), rest, x, kernel) if rest else total

    def _by_element(self) -> Value:
        """Return the sum over taps where each group has one feature of the input: [batch, positions..., group, out]."""
        shape = [self.batch, *self.positions, *self.rows[1:]]
        kernel = _reshaped(self.kernel, [*self.taps, *self.rows[1:]])
        parts = []
        for tap in itertools.product(*map(range, self.taps)):
            first = [i * each for i, each in zip(tap, self.dilation, strict=True)]
            sizes = zip(first, self.positions, self.strides, strict=True)
            ends = [i + (size - 1) * step + 1 for i, size, step in sizes]
            piece = _slice(self.x, [0, *first, 0], [shape[0], *ends, self.groups], [1, *self.strides, 1])
            weights = _slice(kernel, [*tap, 0, 0], [*(i + 1 for i in tap), *self.rows[1:]])
            weights = _as_type(_reshaped(weights, self.rows[1:]), self.sum_type)
            wide = ir.RankedTensorType.get(shape, self.sum_type)
            last = len(shape) - 2
            pair = (
                stablehlo.broadcast_in_dim(wide, _as_type(piece, self.sum_type), range(last + 1)),
                stablehlo.broadcast_in_dim(wide, weights, [last, last + 1]),
            )
            parts.append(stablehlo.multiply(*pair))
        return functools.reduce(stablehlo.add, parts)

    def _grouped(self, x: Value, names: str) -> tuple[Value, str]:
        """Return an array with the groups of its features or of its batch, and its names."""
        name = "f" if self.by_feature > 1 else "n"
        if self.groups == 1:
            return x, names
        shape, at = _shape(x), names.index(name)
        shape[at : at + 1] = [self.groups, shape[at] // self.groups]
        return _reshaped(x, shape), names.replace(name, f"g{name}")

    def _product(self, x: Value, names: str, kernel: Value, kernel_names: str, element: ir.Type) -> Value:
        """Return the sum over what both have: [batch, positions..., group, out], with the positions that `x` has."""
        positions = [name for name in names if name.isupper()]
        wanted = ["n", *positions, "g", "o"]
        if self.groups == 1:
            shape = _shape(kernel)
            kernel, kernel_names = _reshaped(kernel, [*shape[:-2], shape[-1]]), kernel_names.replace("g", "")
        group = [name for name in names if name == "g"]
        over = [name for name in names if name in kernel_names and name != "g"]
        made = [*group, *(name for name in names if name not in kernel_names), "o"]
        sizes = {**dict(zip(kernel_names, _shape(kernel), strict=True)), **dict(zip(names, _shape(x), strict=True))}
        product = stablehlo.dot_general(
            ir.RankedTensorType.get([sizes[name] for name in made], element),
            x,
            kernel,
            stablehlo.DotDimensionNumbers.get(
                lhs_batching_dimensions=list(map(names.index, group)),
                rhs_batching_dimensions=list(map(kernel_names.index, group)),
                lhs_contracting_dimensions=list(map(names.index, over)),
                rhs_contracting_dimensions=list(map(kernel_names.index, over)),
            ),
            precision_config=self.operation.attributes.get("precision_config"),
        )
        ordered = _transposed(product, [made.index(name) for name in wanted if name in made])
        return _reshaped(ordered, [sizes.get(name, 1) for name in wanted])


def _shape(value: Value) -> list[int]:
    return list(value.type.shape)


def _bytes(value: Value) -> int:
    element: Any = value.type.element_type
    is_complex = isinstance(element, ir.ComplexType)
    part: Any = element.element_type if is_complex else element
    return max(1, (1 + is_complex) * int(part.width) // 8)


def _transposed(value: Value, order: Sequence[int]) -> Value:
    rank = len(_shape(value))
    order = [i % rank for i in order]
    return value if order == list(range(rank)) else stablehlo.transpose(value, order)


def _reshaped(value: Value, shape: Sequence[int]) -> Value:
    if _shape(value) == list(shape):
        return value
    return stablehlo.reshape(ir.RankedTensorType.get(shape, value.type.element_type), value)


def _slice(value: Value, start: Sequence[int], end: Sequence[int], strides: Sequence[int] = ()) -> Value:
    return stablehlo.slice(value, start, end, strides or [1] * len(start))


def _as_type(value: Value, element: ir.Type) -> Value:
    if value.type.element_type == element:
        return value
    return stablehlo.convert(ir.RankedTensorType.get(_shape(value), element), value)


def _zeros(element: ir.Type, shape: Sequence[int] = ()) -> Value:
    zero = "0" if isinstance(element, ir.IntegerType) else "0.0"
    zero = f"({zero}, {zero})" if isinstance(element, ir.ComplexType) else zero
    return stablehlo.constant(ir.Attribute.parse(f"dense<{zero}> : {ir.RankedTensorType.get(shape, element)}"))


def _index(value: int) -> Value:
    return stablehlo.constant(ir.Attribute.parse(f"dense<{value}> : tensor<i32>"))


def _times(index: Value, factor: int) -> Value:
    return index if factor == 1 else stablehlo.multiply(index, _index(factor))


def _part(value: Value, dimension: int, first: Value, size: int) -> Value:
    """Return `size` elements of a dimension, and all of the others."""
    shape = _shape(value)
    starts = [first if i == dimension else _index(0) for i in range(len(shape))]
    return stablehlo.dynamic_slice(value, starts, [*shape[:dimension], size, *shape[dimension + 1 :]])


def _updated(value: Value, dimension: int, first: Value, part: Value) -> Value:
    starts = [first if i == dimension else _index(0) for i in range(len(_shape(value)))]
    return stablehlo.dynamic_update_slice(value, part, starts)


def _looped(times: int, step: Callable[..., Value], first: Value, *others: Value) -> Value:
    """Return `first` after `step(i, first, *others)` was put in its place for i from 0 to `times`."""
    start = [_index(0), first, *others]
    types = [value.type for value in start]
    loop = stablehlo.WhileOp(types, start)
    condition, body = (
        region.blocks.append(*types, arg_locs=[ir.Location.current] * len(types)) for region in loop.regions
    )
    with ir.InsertionPoint(condition):
        less = stablehlo.ComparisonDirectionAttr.get("LT")
        stablehlo.return_([stablehlo.compare(condition.arguments[0], _index(times), less)])
    with ir.InsertionPoint(body):
        i, value, *same = body.arguments
        stablehlo.return_([stablehlo.add(i, _index(1)), step(i, value, *same), *same])
    last: Value = loop.results[1]
    return last
