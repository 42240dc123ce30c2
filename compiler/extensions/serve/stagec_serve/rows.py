"""Proofs that each row of a function's results depends on the same row of its inputs, and on no other.

A server runs requests together, and a row of one client must not reach the answer of another. A walk over the StableHLO
proves it: of each value it knows along which dimension the rows are, as long as each of them depends on its
own row of the inputs alone. What joins rows, or tells them apart by their place, ends the proof; a value that depends
on both is an `Ending`. Random rows would not find what is rare: experts with a capacity, a scale of all rows, a check
for NaN. Nor does a declaration of padding say it: it is right for a cumulative sum, whose rows depend on each other.
The semantics of each operation: https://openxla.org/stablehlo/spec.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from stagec.stages import mlir


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
_Placed: TypeAlias = tuple[Sequence[_Map], Iterable[int]]
"""A map for each operand of an operation, and the dimensions of its result that hold anything, whatever those hold.

Dimensions that no operand has are copies.
"""
_Rule: TypeAlias = Callable[[Any, Any, Any], _Placed]
"""Returns it, of an operation's attributes, the shapes of its operands, and that of a result."""


def why_dependent(module: bytes, count: int, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Ending | None:
    """Return what ends the proof that a function's rows are independent; None: they are.

    module: a StableHLO portable artifact with sizes that are numbers. count: the number of rows, over 1.
    inputs: the number of each of its parameters that has rows -> the dimension of them. outputs: the same of results.
    Raises ValueError for other bytes.
    """
    with mlir.make_context() as context:
        results = _Proof(mlir.read_artifact(context, module), count).results(inputs)
    for number, dim in outputs.items():
        state = results[number]
        if isinstance(state, Ending):
            return state
        if state != Own(dim) and not (isinstance(state, Same) and state.periods[dim] == 1):
            what = "has its rows along another dimension, or they differ by their place"
            return Ending("func.return", f"result {number}", what)
    return None


class _Proof:
    """A walk over a module. count: of rows."""

    def __init__(self, module: ir.Module, count: int) -> None:
        self._count = count
        self._module = module  # its blocks live as long as it does
        self._functions = {
            ir.StringAttr(function.attributes["sym_name"]).value: function.regions[0].blocks[0]
            for function in module.body.operations
            if function.operation.name == "func.func"
        }
        self._known: dict[tuple[str, tuple[State, ...]], list[State]] = {}

    def results(self, inputs: Mapping[int, int]) -> list[State]:
        """Return the states of the results of the module's main function. inputs: as of `why_dependent`."""
        arguments = self._functions["main"].arguments
        states = [Own(inputs[i]) if i in inputs else Same(_shape(each)) for i, each in enumerate(arguments)]
        return self._called("main", states)

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
            if ending := _ending([*operands, *around]):
                return [ending] * len(operation.results)
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
        if ending := _ending(states):
            return ending
        if any(isinstance(state, Own) for state in states):
            return self._own(states, [range(64)] * len(states))
        return Same(tuple(map(math.lcm, *(state.periods for state in states if isinstance(state, Same)))))

    def _own(self, states: Sequence[State], maps: Sequence[_Map]) -> Own:
        """Return where the rows of a result are, of operands of which some have rows. Raises _Ends."""
        own = None
        for state, where in zip(states, maps, strict=True):
            if isinstance(state, Own):
                dim = where[state.dim]
                if dim is None:
                    raise _Ends("joins rows, or takes some of them")
                if own not in (None, Own(dim, state.each)):
                    raise _Ends("brings rows together with rows at another place")
                own = Own(dim, state.each)
        assert own is not None
        for state, where in zip(states, maps, strict=True):
            for period, dim in zip(state.periods, where, strict=False) if isinstance(state, Same) else ():
                if dim == own.dim and own.each % period:
                    raise _Ends("gives a row what depends on its place")
        return own

    def _placed(self, shape: Sequence[int], states: Sequence[State], maps: Sequence[_Map], new: Iterable[int]) -> State:
        """Return the state of a result of this shape. states: of the operands. maps, new: `_Placed`. Raises _Ends."""
        if any(isinstance(state, Own) for state in states):
            return self._own(states, maps)
        periods = [1] * len(shape)
        for state, where in zip(states, maps, strict=True):
            assert isinstance(state, Same)
            for period, dim in zip(state.periods, where, strict=True):
                if dim is not None:
                    periods[dim] = math.lcm(periods[dim], period)
        for dim in new:
            periods[dim] = shape[dim]
        return Same(tuple(map(min, periods, shape)))

    def _simple(self, operation: ir.Operation, states: list[State]) -> list[State]:
        """Return the states of the results of an operation that has no control flow. Raises _Ends."""
        shapes, results = [*map(_shape, operation.operands)], [*map(_shape, operation.results)]
        name, rules, does = operation.name, _RULES, "may do anything to rows"
        if name == "stablehlo.custom_call":
            name, rules = ir.StringAttr(operation.attributes["call_target_name"]).value, _CUSTOM_CALLS
            does = f"calls {name}, which {does}"
        if rule := rules.get(name):
            return [self._placed(shape, states, *rule(operation.attributes, shapes, shape)) for shape in results]
        if name == "stablehlo.reshape":
            return [self._reshaped(states[0], shapes[0], results[0])]
        if not any(isinstance(state, Own) for state in states):
            return [*map(Same, results)]  # of which nothing else is known
        if name.startswith(_BATCHED):
            batch = range(len(shapes[0]) - 2)
            own = self._own(states, [[dim if dim in batch else None for dim in range(64)]] * len(states))
            if all(len(each) > own.dim and each[own.dim] == self._count * own.each for each in (*shapes, *results)):
                return [own] * len(results)
        raise _Ends(does)

    def _reshaped(self, state: State, before: Sequence[int], after: Sequence[int]) -> State:
        if isinstance(state, Same):
            return Same(_reshaped(state.periods, before, after))
        assert isinstance(state, Own)
        # The elements of a row are a block, of one size in both, in each of as many parts as there are before the rows.
        parts = math.prod(before[: state.dim])
        for dim, size in enumerate(after):
            if math.prod(after[:dim]) == parts and size and size % self._count == 0:
                return Own(dim, size // self._count)
        raise _Ends("puts parts of several rows into one dimension")


def _along(shapes: Any, dims: Collection[int] = ()) -> _Placed:
    """Return the rule of an operation whose result has the dimensions of its operands; scalars come to all elements.

    dims: those along which an element may come from all others; along the others it is at the same index.
    """
    return [[None if dim in dims else dim for dim in range(len(shape))] for shape in shapes], dims


def _bitcast(_: Any, shapes: Any, result: Any) -> _Placed:
    rank = min(len(shapes[0]), len(result))
    return [[dim if dim < rank else None for dim in range(len(shapes[0]))]], range(rank, len(result))


def _constant(attributes: Any, _: Any, result: Any) -> _Placed:
    try:
        value = attributes["value"]
    except TypeError:  # jaxlib has no class for an array of complex numbers
        value = None
    return [], () if getattr(value, "is_splat", False) else range(len(result))


def _reduce(attributes: Any, shapes: Any, _: Any) -> _Placed:
    kept = iter(range(len(shapes[0])))
    gone = [*attributes["dimensions"]]
    where = [None if dim in gone else next(kept) for dim in range(len(shapes[0]))]
    return [where[: len(shape)] for shape in shapes], ()  # where it starts is a scalar


def _dot(attributes: Any, shapes: Any, _: Any) -> _Placed:
    numbers = stablehlo.DotDimensionNumbers(attributes["dot_dimension_numbers"])
    batches = [*numbers.lhs_batching_dimensions], [*numbers.rhs_batching_dimensions]
    summed = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    free, maps = itertools.count(len(batches[0])), []
    for shape, batch, gone in zip(shapes, batches, summed, strict=True):
        places = {dim: place for place, dim in enumerate(batch)} | dict.fromkeys(gone)
        maps.append([places[dim] if dim in places else next(free) for dim in range(len(shape))])
    return maps, ()


def _convolution(attributes: Any, shapes: Any, result: Any) -> _Placed:
    numbers = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    maps: list[list[int | None]] = [[None] * len(shape) for shape in shapes]
    image, kernel = maps
    if _number(attributes["batch_group_count"]) == 1:
        image[numbers.input_batch_dimension] = numbers.output_batch_dimension
        if _number(attributes["feature_group_count"]) == 1:  # else the place of a kernel says what it is applied to
            kernel[numbers.kernel_output_feature_dimension] = numbers.output_feature_dimension
    return maps, range(len(result))


def _gather(attributes: Any, shapes: Any, result: Any) -> _Placed:
    numbers = stablehlo.GatherDimensionNumbers(attributes["dimension_numbers"])
    operand, indices = shapes
    batch = (dim for dim in range(len(result)) if dim not in [*numbers.offset_dims])
    of_indices = [None if dim == numbers.index_vector_dim else next(batch) for dim in range(len(indices))]
    paired = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    batching = {dim: of_indices[of] for dim, of in paired}
    sliced = [dim for dim in range(len(operand)) if dim not in {*numbers.collapsed_slice_dims, *batching}]
    offsets = dict(zip(sliced, sorted(numbers.offset_dims), strict=True))
    # A slice of a whole dimension begins at its start, whatever the index is.
    parts = [dim for dim in sliced if attributes["slice_sizes"][dim] != operand[dim]]
    where = batching | offsets | dict.fromkeys(parts)
    return [[where.get(dim) for dim in range(len(operand))], of_indices], [offsets[dim] for dim in parts]


def _scatter(attributes: Any, shapes: Any, _: Any) -> _Placed:
    numbers = stablehlo.ScatterDimensionNumbers(attributes["scatter_dimension_numbers"])
    arrays = len(shapes) // 2
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
    return [*[of_operand] * arrays, of_indices, *[of_updates] * arrays], new


def _windows(attributes: Any, shapes: Any, _: Any) -> _Placed:
    names = "window_dimensions", "window_strides", "base_dilations", "window_dilations"
    changed = {dim for name in names if name in attributes for dim, size in enumerate(attributes[name]) if size != 1}
    if "padding" in attributes:  # two numbers for each dimension
        padding = ir.DenseIntElementsAttr(attributes["padding"])
        changed |= {place // 2 for place in range(2 * len(shapes[0])) if padding[place]}
    return _along(shapes, changed)


def _pad(attributes: Any, shapes: Any, _: Any) -> _Placed:
    names = "edge_padding_low", "edge_padding_high", "interior_padding"
    return _along(shapes, {dim for name in names for dim, size in enumerate(attributes[name]) if size})


def _last(count: int) -> _Rule:
    """Return the rule of what works on each vector (1) or matrix (2) of its operands."""
    return lambda _, shapes, __: _along(shapes, range(len(shapes[0]) - count, len(shapes[0])))


def _changed(shapes: Any, before: Sequence[int], after: Sequence[int]) -> _Placed:
    # A slice of a whole dimension begins at its start, whatever the index is.
    return _along(shapes, [dim for dim, (size, other) in enumerate(zip(before, after, strict=True)) if size != other])


_ELEMENTWISE = {
    "stablehlo": "abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide "
    "exponential exponential_minus_one floor imag is_finite log log_plus_one logistic map maximum minimum multiply "
    "negate not or popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select "
    "shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh uniform_dequantize "
    "uniform_quantize xor",
    "chlo": "acos acosh asin asin_acos_kernel asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc "
    "is_inf is_neg_inf is_pos_inf lgamma mulhi next_after polygamma sinh square tan zeta",
    "mhlo": "erf",
    "sdy": "reshard sharding_constraint",
}
_RULES: Mapping[str, _Rule] = {
    **{
        f"{dialect}.{name}": lambda _, shapes, __: _along(shapes)
        for dialect, names in _ELEMENTWISE.items()
        for name in names.split()
    },
    "stablehlo.bitcast_convert": _bitcast,
    "stablehlo.broadcast_in_dim": lambda attributes, *_: ([[*attributes["broadcast_dimensions"]]], ()),
    "stablehlo.cholesky": _last(2),
    "stablehlo.concatenate": lambda attributes, shapes, _: _along(shapes, [_number(attributes["dimension"])]),
    "stablehlo.constant": _constant,
    "stablehlo.convolution": _convolution,
    "stablehlo.dot_general": _dot,
    "stablehlo.dynamic_slice": lambda _, shapes, result: _changed(shapes, shapes[0], result),
    "stablehlo.dynamic_update_slice": lambda _, shapes, __: _changed(shapes, *shapes[:2]),
    "stablehlo.fft": lambda attributes, *more: _last(len([*attributes["fft_length"]]))(attributes, *more),
    "stablehlo.gather": _gather,
    "stablehlo.iota": lambda attributes, *_: ([], [_number(attributes["iota_dimension"])]),
    "stablehlo.pad": _pad,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _windows,
    "stablehlo.reverse": lambda attributes, shapes, _: _along(shapes, [*attributes["dimensions"]]),
    "stablehlo.scatter": _scatter,
    "stablehlo.select_and_scatter": _windows,
    "stablehlo.slice": lambda _, shapes, result: _changed(shapes, shapes[0], result),
    "stablehlo.sort": lambda attributes, shapes, _: _along(shapes, [_number(attributes["dimension"])]),
    "stablehlo.transpose": lambda attributes, shapes, _: (
        [[[*attributes["permutation"]].index(dim) for dim in range(len(shapes[0]))]],
        (),
    ),
    "stablehlo.triangular_solve": _last(2),
    "chlo.top_k": _last(1),
}
"""Where the rows of an operation's results are."""
_CUSTOM_CALLS: Mapping[str, _Rule] = {
    **dict.fromkeys(("Sharding", "annotate_device_placement", "mhlo.erf"), lambda _, shapes, __: _along(shapes)),
    **dict.fromkeys(("TopK", "mhlo.topk", "stablehlo.dynamic_top_k"), _last(1)),
}
"""The same of custom calls, by target."""
_BATCHED = ("lapack_", "cusolver_", "cublas_", "hipsolver_")
"""Libraries whose calls work on the matrices of a batch one by one: all but the last two dimensions are the batch."""


def _ending(states: Iterable[State]) -> Ending | None:
    return next((state for state in states if isinstance(state, Ending)), None)


def _shape(value: ir.Value[Any]) -> tuple[int, ...]:
    """Return the sizes of an array; none of another value, such as a token. Raises ValueError for a size not known."""
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType):
        return ()
    if not kind.has_static_shape:
        raise ValueError(f"{kind} has a size that varies")
    return tuple(kind.shape)


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
    """Return the periods of a reshaped array.

    Its elements stay in their order. So each dimension, the last one first, takes factors of the dimensions before:
    of each the number of its copies, and the period, whose elements differ.
    """
    if 0 in before:
        return tuple(after)
    factors: list[tuple[int, bool]] = []
    for period, size in zip(periods, before, strict=True):
        differ = period if size % period == 0 else size
        factors += [(size // differ, False), (differ, True)]
    reshaped: list[int] = []
    for size in reversed(after):
        period = taken = 1
        while taken < size:
            count, differs = factors.pop()
            part = math.gcd(count, size // taken)
            if part < count:
                factors.append((count // part, differs))
            if part == 1 < count:  # the dimensions have no such factors, and nothing is known
                return tuple(after)
            taken *= part
            period = taken if differs and part > 1 else period
        reshaped.append(period)
    return tuple(reversed(reshaped))
