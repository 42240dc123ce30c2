"""Proofs that each row of a function's results depends on the same row of its inputs, and on no other.

Requests that run together share a call, so a row of one client must not reach the answer of another. A walk over the
StableHLO proves it: of each value it knows along which dimension the rows are, as long as each of them depends on its
own row of the inputs alone. What joins rows, or tells them apart by their place, ends the proof; a value that depends
on both is an `Ending`. Random rows would not find what is rare: experts with a capacity, a scale of all rows, a check
for NaN. Nor does a declaration of padding say it: it is right for a cumulative sum, whose rows depend on each other.
The semantics of each operation: https://openxla.org/stablehlo/spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from stagec.pjrt.dialects import make_context


class Own(NamedTuple):
    """A value that has the rows along `dim`, `each` elements for one: elements of a row depend on that row alone."""

    dim: int
    each: int = 1


class Same(NamedTuple):
    """A value that depends on no row.

    periods: for each dimension; an element at index i of it is the one at i modulo the period. So 1 says that all
    elements along the dimension are equal, and the dimension's size says nothing.
    """

    periods: tuple[int, ...]


class Ending(NamedTuple):
    """A value in which a row may depend on others, or on its place, and why a proof ends.

    The operation that did it first, as `stablehlo.reduce`, the types of its results, and what it does to rows.
    """

    operation: str
    types: str
    what: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.types}) {self.what}"


State: TypeAlias = Own | Same | Ending


class _Ends(Exception):
    """The proof ends at the operation at hand."""


_Map: TypeAlias = Sequence[int | None]
"""For each dimension of an operand the dimension of the result with the same index; None: it has none."""

_ELEMENTWISE = frozenset(
    f"{dialect}.{name}"
    for dialect, names in {
        "stablehlo": "abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide "
        "exponential exponential_minus_one floor imag is_finite log log_plus_one logistic map maximum minimum multiply "
        "negate not or popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select "
        "shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh uniform_dequantize "
        "uniform_quantize xor",
        "chlo": "acos acosh asin asin_acos_kernel asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc "
        "is_inf is_neg_inf is_pos_inf lgamma mulhi next_after polygamma sinh square tan zeta",
        "mhlo": "erf",
        "sdy": "reshard sharding_constraint",
    }.items()
    for name in names.split()
)
_SHARDINGS = {"Sharding", "annotate_device_placement", "mhlo.erf"}
"""Custom calls that do the same to each element."""
_BATCHED = ("lapack_", "cusolver_", "cublas_", "hipsolver_")
"""Libraries whose calls work on the matrices of a batch one by one: all but the last two dimensions are the batch."""
_TOP_K = {"TopK", "mhlo.topk", "stablehlo.dynamic_top_k"}


def why_dependent(module: bytes, count: int, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Ending | None:
    """Return what ends the proof that a function's rows are independent; None: they are.

    module: a StableHLO portable artifact with sizes that are numbers. count: the number of rows, over 1.
    inputs: the number of each of its parameters that has rows -> the dimension of them. outputs: the same of results.
    Raises ValueError for other bytes.
    """
    with make_context() as context:
        try:
            read = stablehlo.deserialize_portable_artifact(context, module)
        except Exception as error:  # jaxlib raises RuntimeError or MLIRError, by version
            raise ValueError(f"not a StableHLO portable artifact: {error}") from error
        return _Proof(read, count).why_dependent(inputs, outputs)


class _Proof:
    """A walk over a module. count: of rows."""

    def __init__(self, module: ir.Module, count: int) -> None:
        self._count = count
        self._functions = {
            ir.StringAttr(function.attributes["sym_name"]).value: function.regions[0].blocks[0]
            for function in module.body.operations
            if function.operation.name == "func.func"
        }
        self._known: dict[tuple[str, tuple[State, ...]], list[State]] = {}

    def why_dependent(self, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Ending | None:
        arguments = self._functions["main"].arguments
        states = [Own(inputs[i]) if i in inputs else _anything(_shape(each)) for i, each in enumerate(arguments)]
        results = self._called("main", states)
        for number, dim in outputs.items():
            state = results[number]
            if isinstance(state, Ending):
                return state
            if state != Own(dim) and not (isinstance(state, Same) and state.periods[dim] == 1):
                what = "has its rows along another dimension, or they differ by their place"
                return Ending("func.return", f"result {number}", what)
        return None

    def _called(self, name: str, states: Sequence[State]) -> list[State]:
        """Return the states of a function's results."""
        key = name, tuple(states)
        if key not in self._known:
            block = self._functions[name]
            self._known[key] = self._block(block, dict(zip(block.arguments, states, strict=True)))
        return self._known[key]

    def _block(self, block: ir.Block, known: dict[ir.Value[Any], State]) -> list[State]:
        """Return the states of what a block returns. known: of values around it, and of its arguments."""
        for view in block.operations:
            operation = view.operation
            operands = [known[value] for value in operation.operands]
            if operation.name in ("func.return", "stablehlo.return", "sdy.return"):
                return operands
            known.update(zip(operation.results, self._results(operation, operands, known), strict=True))
        raise ValueError("a block has no end")

    def _results(
        self, operation: ir.Operation, operands: list[State], known: dict[ir.Value[Any], State]
    ) -> list[State]:
        try:
            match operation.name:
                case "stablehlo.while":
                    return self._while(operation, operands, known)
                case "stablehlo.case" | "stablehlo.if":
                    if isinstance(operands[0], Ending):
                        return operands[:1] * len(operation.results)
                    branches = [self._block(region.blocks[0], dict(known)) for region in operation.regions]
                    return [*map(self._joined, *branches)]
                case "stablehlo.optimization_barrier":
                    return operands
            around = [known[value] for value in _captured(operation) if value in known]
            mixed = next((state for state in (*operands, *around) if isinstance(state, Ending)), None)
            if mixed is not None:
                return [mixed] * len(operation.results)
            if operation.name in ("func.call", "stablehlo.composite"):
                called = "callee" if operation.name == "func.call" else "decomposition"
                return self._called(ir.FlatSymbolRefAttr(operation.attributes[called]).value, operands)
            return self._simple(operation, operands)
        except _Ends as end:
            types = ", ".join(
                str(result.type).removeprefix("tensor<").removesuffix(">") for result in operation.results
            )
            return [Ending(operation.name, types, str(end))] * len(operation.results)

    def _while(self, operation: ir.Operation, states: list[State], known: dict[ir.Value[Any], State]) -> list[State]:
        """Return what holds for a loop's values after any number of turns."""
        condition, body = (region.blocks[0] for region in operation.regions)
        while True:
            (runs,) = self._block(condition, {**known, **dict(zip(condition.arguments, states, strict=True))})
            if isinstance(runs, Ending):
                return [runs] * len(states)
            after = self._block(body, {**known, **dict(zip(body.arguments, states, strict=True))})
            joined = [*map(self._joined, states, after)]
            if joined == states:
                return states
            states = joined

    def _joined(self, *states: State) -> State:
        """Return what holds for a value that is one of several. Raises _Ends."""
        mixed = next((state for state in states if isinstance(state, Ending)), None)
        if mixed is not None:
            return mixed
        rank = max((len(state.periods) for state in states if isinstance(state, Same)), default=0)
        if not any(isinstance(state, Own) for state in states):
            return Same(tuple(math.lcm(*(s.periods[i] for s in states if isinstance(s, Same))) for i in range(rank)))
        return self._own([(state, range(64)) for state in states])

    def _own(self, operands: Sequence[tuple[State, _Map]]) -> Own:
        """Return where the rows of a result are, of operands of which some have rows. Raises _Ends."""
        own = None
        for state, where in operands:
            if isinstance(state, Own):
                dim = where[state.dim]
                if dim is None:
                    raise _Ends("joins rows, or takes some of them")
                if own not in (None, Own(dim, state.each)):
                    raise _Ends("brings rows together with rows at another place")
                own = Own(dim, state.each)
        assert own is not None
        for state, where in operands:
            for period, dim in zip(state.periods, where, strict=False) if isinstance(state, Same) else ():
                if dim == own.dim and own.each % period:
                    raise _Ends("gives a row what depends on its place")
        return own

    def _placed(self, shape: Sequence[int], operands: Sequence[tuple[State, _Map]], *new: int) -> State:
        """Return the state of a result of this shape, each element of which comes from elements of the operands.

        operands: each with where its dimensions are. new: dimensions that hold anything, whatever the operands hold.
        Dimensions that no operand has are copies.
        """
        if any(isinstance(state, Own) for state, _ in operands):
            return self._own(operands)
        periods = [1] * len(shape)
        for state, where in operands:
            assert isinstance(state, Same)
            for period, dim in zip(state.periods, where, strict=True):
                if dim is not None:
                    periods[dim] = math.lcm(periods[dim], period)
        for dim in new:
            periods[dim] = shape[dim]
        return Same(tuple(min(period, size) for period, size in zip(periods, shape, strict=True)))

    def _along(self, shapes: Any, shape: Sequence[int], states: Sequence[State], dims: Collection[int] = ()) -> State:
        """Return the state of a result that has the dimensions of the operands; scalars come to all elements.

        dims: those along which an element may come from all others; along the others it is at the same index.
        """
        where = [dim if dim not in dims else None for dim in range(len(shape))]
        return self._placed(shape, [(state, where) for state, of in zip(states, shapes, strict=True) if len(of)], *dims)

    def _simple(self, operation: ir.Operation, states: list[State]) -> list[State]:
        """Return the states of the results of an operation that has no control flow. Raises _Ends."""
        shapes, results = [*map(_shape, operation.operands)], [*map(_shape, operation.results)]
        name, attributes = operation.name, operation.attributes
        if name in _ELEMENTWISE or (name == "stablehlo.custom_call" and _target(operation) in _SHARDINGS):
            return [self._along(shapes, shape, states) for shape in results]
        if name in _RULES:
            return [_RULES[name](self, states, shapes, results[0], attributes)] * len(results)
        if name in _ALONG:
            most, dims = _ALONG[name]
            count = len(states) // 2 if most == 0.5 else int(min(most, len(states)))
            along = dims(attributes, shapes, results[0])
            return [self._along(shapes[:count], shape, states[:count], along) for shape in results]
        if name == "stablehlo.custom_call":
            return self._custom_call(operation, states, shapes, results)
        if not any(isinstance(state, Own) for state in states):
            return [*map(_anything, results)]
        raise _Ends("may do anything to rows")

    def _custom_call(self, operation: ir.Operation, states: list[State], shapes: Any, results: Any) -> list[State]:
        target = _target(operation)
        if not any(isinstance(state, Own) for state in states):
            return [*map(_anything, results)]
        if target in _TOP_K:
            return [self._along(shapes[:1], shape, states[:1], {len(shape) - 1}) for shape in results]
        if target.startswith(_BATCHED):
            batch = len(shapes[0]) - 2
            own = self._own([(state, [d if d < batch else None for d in range(64)]) for state in states])
            if all(len(each) > own.dim and each[own.dim] == self._count * own.each for each in (*shapes, *results)):
                return [own] * len(results)
        raise _Ends(f"calls {target}, which may do anything to rows")

    # What follows has one method for each operation, as `_RULES` says.

    def _constant(self, _: Any, __: Any, result: Any, attributes: Any) -> State:
        is_splat = getattr(attributes["value"], "is_splat", False)
        return Same((1,) * len(result)) if is_splat else _anything(result)

    def _iota(self, _: Any, __: Any, result: Any, attributes: Any) -> State:
        return self._placed(result, [], _number(attributes["iota_dimension"]))

    def _broadcast(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        return self._placed(result, [(states[0], [*attributes["broadcast_dimensions"]])])

    def _transpose(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        order = [*attributes["permutation"]]
        return self._placed(result, [(states[0], [order.index(dim) for dim in range(len(order))])])

    def _reshape(self, states: Any, shapes: Any, result: Any, _: Any) -> State:
        (state,), (before,), after = states, shapes, result
        if isinstance(state, Same):
            return Same(_reshaped(state.periods, before, after))
        # The elements of a row are a block, of one size in both, in each of as many parts as there are before the rows.
        parts = math.prod(before[: state.dim])
        for dim, size in enumerate(after):
            if math.prod(after[:dim]) == parts and size and size % self._count == 0:
                return Own(dim, size // self._count)
        raise _Ends("puts parts of several rows into one dimension")

    def _bitcast(self, states: Any, shapes: Any, result: Any, _: Any) -> State:
        rank = min(len(shapes[0]), len(result))
        where = [dim if dim < rank else None for dim in range(len(shapes[0]))]
        return self._placed(result, [(states[0], where)], *range(rank, len(result)))

    def _reduce(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        arrays, gone = len(states) // 2, {*attributes["dimensions"]}
        kept = [dim for dim in range(len(shapes[0])) if dim not in gone]
        where = [kept.index(dim) if dim in kept else None for dim in range(len(shapes[0]))]
        return self._placed(result, [(state, where) for state in states[:arrays]])

    def _dot(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        numbers = stablehlo.DotDimensionNumbers(attributes["dot_dimension_numbers"])
        batches = [numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions]
        summed = [numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions]
        placed, next_free = [], len(batches[0])
        for state, shape, batch, gone in zip(states, shapes, batches, summed, strict=True):
            where: list[int | None] = []
            for dim in range(len(shape)):
                if dim in batch:
                    where.append([*batch].index(dim))
                elif dim in gone:
                    where.append(None)
                else:
                    where.append(next_free)
                    next_free += 1
            placed.append((state, where))
        return self._placed(result, placed)

    def _convolution(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        numbers = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
        where: tuple[list[int | None], ...] = tuple([None] * len(shape) for shape in shapes)
        if _number(attributes["batch_group_count"]) == 1:
            where[0][numbers.input_batch_dimension] = numbers.output_batch_dimension
            if _number(attributes["feature_group_count"]) == 1:  # else the place of a kernel says what it is applied to
                where[1][numbers.kernel_output_feature_dimension] = numbers.output_feature_dimension
        return self._placed(result, [*zip(states, where, strict=True)], *range(len(result)))

    def _gather(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        numbers = stablehlo.GatherDimensionNumbers(attributes["dimension_numbers"])
        (operand, indices), sizes = shapes, [*attributes["slice_sizes"]]
        batch = iter(dim for dim in range(len(result)) if dim not in [*numbers.offset_dims])
        of_indices = [None if dim == numbers.index_vector_dim else next(batch) for dim in range(len(indices))]
        batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        offsets = iter(sorted(numbers.offset_dims))
        of_operand, new = [], []
        for dim, size in enumerate(operand):
            if dim in batching:
                of_operand.append(of_indices[batching[dim]])
            elif dim in [*numbers.collapsed_slice_dims]:
                of_operand.append(None)
            else:  # a slice of the whole dimension begins at its start, whatever the index is
                place = next(offsets)
                of_operand.append(place if sizes[dim] == size else None)
                new += [place] if sizes[dim] != size else []
        return self._placed(result, [(states[0], of_operand), (states[1], of_indices)], *new)

    def _scatter(self, states: Any, shapes: Any, result: Any, attributes: Any) -> State:
        numbers = stablehlo.ScatterDimensionNumbers(attributes["scatter_dimension_numbers"])
        arrays = (len(states) - 1) // 2
        operand, indices, updates = shapes[0], shapes[arrays], shapes[arrays + 1]
        batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims, strict=True))
        windows = sorted(numbers.update_window_dims)
        no_window = {*numbers.inserted_window_dims, *batching.values()}
        in_window = [dim for dim in range(len(operand)) if dim not in no_window]
        of_operand: list[int | None] = [dim if dim in batching.values() else None for dim in range(len(operand))]
        of_updates: list[int | None] = [None] * len(updates)
        for dim, place in zip(in_window, windows, strict=True):
            if updates[place] == operand[dim]:  # an update of the whole dimension is at its start, or nowhere
                of_operand[dim] = of_updates[place] = dim
        of_indices = [batching.get(dim) for dim in range(len(indices))]
        others = (dim for dim in range(len(indices)) if dim != numbers.index_vector_dim)
        for dim, place in zip(others, (p for p in range(len(updates)) if p not in windows), strict=True):
            of_updates[place] = of_indices[dim]
        new = [dim for dim, place in enumerate(of_operand) if place is None]
        placed = [(state, of_operand) for state in states[:arrays]] + [(states[arrays], of_indices)]
        placed += [(state, of_updates) for state in states[arrays + 1 :]]
        return self._placed(result, placed, *new)


def _pads(attributes: Any) -> list[int]:
    names = "edge_padding_low", "edge_padding_high", "interior_padding"
    added = zip(*([*attributes[name]] for name in names), strict=True)
    return [dim for dim, sizes in enumerate(added) if any(sizes)]


_RULES: Mapping[str, Callable[[_Proof, Any, Any, Any, Any], State]] = {
    "stablehlo.broadcast_in_dim": _Proof._broadcast,
    "stablehlo.constant": _Proof._constant,
    "stablehlo.convolution": _Proof._convolution,
    "stablehlo.bitcast_convert": _Proof._bitcast,
    "stablehlo.dot_general": _Proof._dot,
    "stablehlo.gather": _Proof._gather,
    "stablehlo.iota": _Proof._iota,
    "stablehlo.reduce": _Proof._reduce,
    "stablehlo.reshape": _Proof._reshape,
    "stablehlo.scatter": _Proof._scatter,
    "stablehlo.transpose": _Proof._transpose,
}
"""The state of each result of an operation, of the states and shapes of its operands, its result's, and attributes."""
_ALONG: Mapping[str, tuple[float, Callable[[Any, Any, Any], Collection[int]]]] = {
    "stablehlo.cholesky": (1, lambda _, shapes, __: _last(shapes, 2)),
    "stablehlo.concatenate": (math.inf, lambda attributes, *_: {_number(attributes["dimension"])}),
    # A slice of a whole dimension begins at its start, whatever the index is.
    "stablehlo.dynamic_slice": (1, lambda _, shapes, result: _changed(shapes[0], result)),
    "stablehlo.dynamic_update_slice": (2, lambda _, shapes, __: _changed(shapes[0], shapes[1])),
    "stablehlo.fft": (1, lambda attributes, shapes, _: _last(shapes, len([*attributes["fft_length"]]))),
    "stablehlo.pad": (1, lambda attributes, *_: _pads(attributes)),
    "stablehlo.reduce_window": (0.5, lambda attributes, shapes, _: _windows(attributes, len(shapes[0]))),
    "stablehlo.reverse": (1, lambda attributes, *_: {*attributes["dimensions"]}),
    "stablehlo.select_and_scatter": (2, lambda attributes, shapes, _: _windows(attributes, len(shapes[0]))),
    "stablehlo.slice": (1, lambda _, shapes, result: _changed(shapes[0], result)),
    "stablehlo.sort": (math.inf, lambda attributes, *_: {_number(attributes["dimension"])}),
    "stablehlo.triangular_solve": (2, lambda _, shapes, __: _last(shapes, 2)),
    "chlo.top_k": (1, lambda _, shapes, __: _last(shapes, 1)),
}
"""How many of an operation's operands have the result's dimensions (0.5: half of them), and along which an element may
come from all others, of attributes, the operands' shapes and the result's."""


def _shape(value: ir.Value[Any]) -> tuple[int, ...]:
    """Return the sizes of an array; none of another value, such as a token. Raises ValueError for a size not known."""
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType):
        return ()
    if not kind.has_static_shape:
        raise ValueError(f"{kind} has a size that varies")
    return tuple(kind.shape)


def _anything(shape: Sequence[int]) -> Same:
    """Return the state of a value that depends on no row, of which nothing else is known."""
    return Same(tuple(shape))


def _target(operation: ir.Operation) -> str:
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _last(shapes: Sequence[Sequence[int]], count: int) -> range:
    return range(len(shapes[0]) - count, len(shapes[0]))


def _changed(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [dim for dim, (size, other) in enumerate(zip(before, after, strict=True)) if size != other]


def _windows(attributes: Any, rank: int) -> list[int]:
    """Return the dimensions of which a window takes several elements, or leaves some out, or adds some."""
    names = "window_dimensions", "window_strides", "base_dilations", "window_dilations"
    changed = {dim for name in names if name in attributes for dim, size in enumerate(attributes[name]) if size != 1}
    if "padding" in attributes:  # two numbers for each dimension
        padding = ir.DenseIntElementsAttr(attributes["padding"])
        changed |= {place // 2 for place in range(2 * rank) if padding[place]}
    return sorted(changed)


def _number(attribute: ir.Attribute) -> int:
    return int(ir.IntegerAttr(attribute).value)


def _captured(operation: ir.Operation) -> Iterator[ir.Value[Any]]:
    """Yield what the operations in the regions of one take; that what they make is among it does no harm."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from inner.operation.operands
                yield from _captured(inner.operation)


def _reshaped(periods: Sequence[int], before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the periods of a reshaped array: of each group of dimensions that has as many elements in both shapes."""
    if all(period == 1 for period in periods):
        return (1,) * len(after)
    if 0 in before:
        return tuple(after)
    reshaped: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):
        olds, news = [*before[i : i + 1]], [*after[j : j + 1]]
        first_i, first_j = i, j
        i, j = i + len(olds), j + len(news)
        while math.prod(olds) != math.prod(news) or (not olds and i < len(before)) or (not news and j < len(after)):
            if math.prod(olds) < math.prod(news) or j == len(after):
                olds.append(before[i])
                i += 1
            else:
                news.append(after[j])
                j += 1
        reshaped += _regrouped(periods[first_i:i], olds, after[first_j:j])
    return tuple(reshaped)


def _regrouped(periods: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
    # One dimension of all of them has a period, too: that of the first which is not a copy, times what follows it.
    varied = next((dim for dim, period in enumerate(periods) if period > 1), None)
    if varied is None:
        return [1] * len(after)
    own = periods[varied] if before[varied] % periods[varied] == 0 else before[varied]
    period = own * math.prod(before[varied + 1 :])
    reshaped = []
    for size in reversed(after):
        if size % period == 0:
            reshaped.append(period)
            period = 1
        elif period % size == 0:
            reshaped.append(size)
            period //= size
        else:
            reshaped.append(size)
            period = math.prod(after)  # nothing is known of those before
    return [min(p, size) for p, size in zip(reversed(reshaped), after, strict=True)]
