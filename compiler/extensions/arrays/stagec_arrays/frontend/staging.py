"""The tracer of the arrays frontend: a function of arrays, traced by stagec, through the stages."""

# ruff: noqa: D102 - `jit.Tracing` documents the methods
from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import LEAF, Tree
from stagec.frontends.common import updates, user_code
from stagec.frontends.common.jit import Run, Traced
from stagec.frontends.common.options import Options, unknown
from stagec.frontends.common.parameters import Arguments
from stagec.pjrt import dialects
from stagec.pjrt.arrays import unfit
from stagec.pjrt.calling_convention import NUMBERS
from stagec.stages.compiled import Compiled
from stagec.stages.exported import Exported
from stagec_arrays import (
    dtypes,
    execution,
    meshes,
    modules,
    numpy as _numpy,  # noqa: F401 - it gives arrays their operators
    pytrees,
    tracing,
)
from stagec_arrays.frontend import shardings
from stagec_arrays.modules import NOWHERE, Split
from stagec_arrays.namespace.promotion import numpy_of
from stagec_arrays.primitives import contractions, derivatives
from stagec_arrays.program import Program, constant_bytes, pruned
from stagec_arrays.tracing import Tracer
from stagec_arrays.values import ShapedArray, ShapeDtypeStruct


def tracers(options: Options) -> Callable[[Callable[..., Any]], ArrayTracer]:
    """Return the function that makes the tracer of a function."""
    of_jax = {"inline": options.get("inline"), "host_callbacks": options.get("host_callbacks", "refuse") != "refuse"}
    if given := [*(name for name, is_given in of_jax.items() if is_given), *unknown(options)]:
        raise TypeError(f'jit() does not take {", ".join(given)} with frontend = "arrays"')
    return functools.partial(ArrayTracer, options=options)


class ArrayTracer:
    """Traces a function of arrays with stagec."""

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Options,
        refusal: updates.Refusal | None = None,
    ) -> None:
        """Take the parameters of `staging.jit`; `out_shardings` may be a function of the structure of the result.

        refusal: makes the error for a function that changes its arguments; None: a ValueError.
        Raises ValueError for numbers and names of arguments that the function does not have.
        """
        self.like: Any = fun
        self.static = Arguments.of(fun, options.get("static_argnums"), options.get("static_argnames"))
        self._donated = Arguments.of(fun, options.get("donate_argnums"), options.get("donate_argnames"))
        _check(fun, self.static, "static")
        _check(fun, self._donated, "donate")
        if both := {*self.static.numbers, *self.static.names} & {*self._donated.numbers, *self._donated.names}:
            raise ValueError(f"{_name(fun)}: argument {min(both, key=str)} is static, so it cannot be donated")
        self._in_shardings, self._out_shardings = options.get("in_shardings"), options.get("out_shardings")
        self._keep_unused = options.get("keep_unused", False)
        self._compiler_options = options.get("compiler_options") or {}
        self._watched = updates.watched(
            fun, refusal or updates.refusal_of(_name(fun)), tracing.operand_of, "NAME = copy.deepcopy(NAME)"
        )

    def within(self) -> bool:
        return tracing.current() is not None

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._in_shardings is None and self._out_shardings is None:
            return self.like(*args, **kwargs)
        (dynamic, _), _ = self.static.split(args, kwargs)

        def function(*given: Any) -> Any:  # constraints take the arguments apart
            return self._watched(*self.static.merged(args, given), **kwargs)

        return shardings.constrained(function, self._in_shardings, self._out_shardings)(*dynamic)

    def settings(self) -> Hashable:
        return dtypes.x64(), contractions.default_precision(), meshes.around()

    def abstract(self, leaf: Any) -> ShapedArray:
        return abstract(leaf)

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[FlatFunction, Any, Any]:
        """Return the function traced, with flat arguments and results, and the structures of both."""
        dynamic, _ = self.static.split(args, kwargs)
        leaves, structure = pytrees.flatten(dynamic)
        out: list[Any] = []

        def flat(*values: Tracer) -> list[Any]:
            given, named = structure.unflatten(values)
            called = self._watched(*self.static.merged(args, given), **{**kwargs, **named})
            results, out_structure = pytrees.flatten(called)
            out.append(out_structure)
            return [_result(leaf, self.like) for leaf in results]

        name = _name(self.like)
        program = pruned(tracing.trace(flat, list(map(abstract, leaves)), name, apart=True).program)
        (out_structure,) = out
        wanted = self._out_shardings
        wanted = wanted(out_structure) if isinstance(wanted, types.FunctionType) else wanted
        positional = pytrees.flatten(dynamic[0])[1]
        parameters = self.static.other_parameters(self.like)
        function = FlatFunction(
            program,
            name,
            [updates.named(parameters, path) for path in pytrees.to_tree(structure).paths()],
            [aval.to_aval() for aval in program.in_avals],
            [aval.to_aval() for aval in program.out_avals],
            self._keep_unused,
            self._leaves_donated(dynamic, len(args)),
            shardings.split_of(program, self._in_shardings, wanted, positional, out_structure),
        )
        return function, structure, out_structure

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        return self._traced(*self.flat(args, kwargs))

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[ShapedArray]) -> tuple[Run, Any]:
        dynamic, _ = self.static.split(args, kwargs)
        for leaf, aval in zip(pytrees.flatten(dynamic)[0], known, strict=True):
            _placed(leaf, aval)  # refuses an array without elements before the compilation
        function, structure, out_structure = self.flat(args, kwargs)
        if self._compiler_options or any(function.donated) or function.split.mesh:
            compiled = self._traced(function, structure, out_structure).lower().compile()
            return _compiled(compiled, function.program.out_avals), out_structure
        return _loaded(function.program), out_structure

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.trace(args, kwargs).out_avals

    def clear(self) -> None:
        """Nothing is kept of a trace."""

    def _traced(self, function: FlatFunction, structure: Any, out_structure: Any) -> Traced:
        in_tree, out_tree = pytrees.to_tree(structure), pytrees.to_tree(out_structure)
        out_avals = _structs(function.program.out_avals)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            leaves, given = pytrees.flatten((args, kwargs))
            if given != structure:
                raise TypeError(f"{function.name} was traced for arguments of the structure {structure}, not {given}")
            values = [leaf if isinstance(leaf, Tracer) else _placed(leaf, abstract(leaf)) for leaf in leaves]
            return out_structure.unflatten(derivatives.run(function.program, values))

        def export(platforms: Sequence[str], checks: Sequence[Any], newest: bool) -> Exported:
            if checks:
                raise TypeError("export() does not take disabled_checks: they are checks of jax.export's")
            exported, parameters = function.export(platforms), self.static.other_parameters(self.like)
            return dataclasses.replace(exported, in_tree=in_tree, out_tree=out_tree, _parameters=parameters)

        return Traced(
            fun_name=function.name,
            program=function.program,
            in_tree=in_tree,
            out_tree=out_tree,
            in_structure=structure,
            out_structure=out_structure,
            flat_in_avals=_structs(function.program.in_avals),
            flat_out_avals=out_avals,
            donated=function.donated,
            _compiler_options=self._compiler_options,
            _short=str,
            _out_info=lambda: out_structure.unflatten(out_avals),
            _evaluate=evaluate,
            _export=export,
        )

    def _leaves_donated(self, dynamic: Any, count: int) -> tuple[bool, ...]:
        """Return for each leaf of the arguments that are arrays whether it is donated. count: of positional ones."""
        given, named = dynamic
        static, wanted = self.static.places(count), self._donated.places(count)
        positions = [i for i in range(count) if i not in static]
        donated: list[bool] = []
        for position, tree in zip(positions, given, strict=True):
            donated += [position in wanted] * len(pytrees.flatten(tree)[0])
        for name in sorted(named):
            donated += [name in self._donated.names] * len(pytrees.flatten(named[name])[0])
        return tuple(donated)


_LARGE = 1 << 20
"""With more bytes of constants, a module has a context of its own: a shared context would keep them."""


@dataclasses.dataclass(frozen=True)
class FlatFunction:
    """A traced function whose arguments and results are flat.

    names: of the arguments, as a caller writes them. in_avals, out_avals: of arguments and results; of those that are
    float0, the program's are bools. donated: for each argument, whether the caller gives its buffer away.
    split: how arguments and results are split over devices.
    """

    program: Program
    name: str
    names: Sequence[str]
    in_avals: Sequence[Aval]
    out_avals: Sequence[Aval]
    keep_unused: bool
    donated: Sequence[bool] = ()
    split: Split = NOWHERE

    def module(self, platforms: Sequence[str], *, located: bool = False) -> Any:
        """Return the module of `export`, in the current context.

        located: with the places of its operations in the sources.
        """
        taken = modules.kept(self.program, self.keep_unused)
        return modules.module(
            self.program, taken, platforms, self.names, self.donated, located=located, split=self.split
        )

    def export(self, platforms: Sequence[str]) -> Exported:
        """Return the function as an artifact. The first request for its vector-Jacobian product traces it."""
        with modules.kept_context() if constant_bytes(self.program) < _LARGE else dialects.make_context():
            serialized = modules.portable(self.module(platforms))
        count_in, count_out = len(self.in_avals), len(self.out_avals)
        return Exported(
            fun_name=self.name,
            in_tree=Tree("tuple", (Tree("tuple", (LEAF,) * count_in), Tree("dict"))),
            in_avals=tuple(self.in_avals),
            out_tree=Tree("tuple", (LEAF,) * count_out),
            out_avals=tuple(self.out_avals),
            nr_devices=self.split.nr_devices,
            platforms=tuple(platforms),
            ordered_effects=(),
            unordered_effects=(),
            disabled_safety_checks=(),
            mlir_module_serialized=serialized,
            calling_convention_version=modules.CALLING_CONVENTION,
            module_kept_var_idx=modules.kept(self.program, self.keep_unused),
            uses_global_constants=len(platforms) > 1 or bool(modules.named_sizes(self.program.in_avals)),
            _in_shardings=shardings.named(self.split.mesh, self.split.inputs, count_in),
            _out_shardings=shardings.named(self.split.mesh, self.split.outputs, count_out),
            _vjp=lambda: self._vjp().export(platforms),
        )

    def _vjp(self) -> FlatFunction:
        in_avals, out_avals = ([_cotangent(aval) for aval in avals] for avals in (self.in_avals, self.out_avals))
        return FlatFunction(
            derivatives.vjp_program(self.program),
            f"{self.name}_vjp",
            [*self.names, *(f"cotangents[{i}]" for i in range(len(out_avals)))],
            [*self.in_avals, *out_avals],
            in_avals,
            keep_unused=True,
            split=Split(self.split.mesh, (*self.split.inputs, *self.split.outputs), self.split.inputs),
        )


def _cotangent(aval: Aval) -> Aval:
    """Return the aval of a cotangent: of integers and bools it is float0."""
    floats = aval.dtype[0] in "fc" or aval.dtype == "bf16"
    return Aval(aval.dtype if floats else "f0", aval.shape)


def _structs(avals: Sequence[ShapedArray]) -> list[ShapeDtypeStruct]:
    with dtypes.enable_x64():  # what is there already stays
        return [ShapeDtypeStruct(aval.shape, aval.dtype, aval.weak_type) for aval in avals]


def abstract(leaf: Any) -> ShapedArray:
    """Return the abstract value of an argument. Raises TypeError for anything but an array or a number."""
    if isinstance(leaf, NUMBERS) and type(leaf) in NUMBERS:
        dtype = dtypes.of_python(type(leaf))
        if type(leaf) is int and not dtypes.limits(dtype)[0] <= leaf <= dtypes.limits(dtype)[1]:
            raise OverflowError(f"an argument is {leaf}, which is out of the range of {dtype}")
        return ShapedArray((), dtype, weak_type=type(leaf) is not bool)
    if isinstance(leaf, execution.Array):
        return ShapedArray(leaf.shape, leaf.dtype)
    if hasattr(leaf, "__array__") and (what := unfit(leaf)):  # a placeholder has no elements
        raise TypeError(f"an argument is {what}")
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return ShapedArray(tuple(leaf.shape), _dtype(leaf), bool(getattr(leaf, "weak_type", False)))
    raise TypeError(
        f"an argument is a {type(leaf).__qualname__}, which is not an array: "
        "pass an array or a number, or name the argument in static_argnames"
    )


def _dtype(leaf: Any) -> dtypes.DType:
    if not isinstance(leaf.dtype, np.dtype) and str(leaf.dtype) == dtypes.KEY.name:  # ours, or JAX's
        return dtypes.KEY  # type: ignore[no-any-return]
    dtype = dtypes.canonical(np.dtype(leaf.dtype))
    if dtype not in dtypes.KINDS:
        raise TypeError(f"an argument has dtype {dtype}, which arrays on devices do not have")
    return dtype


def _result(leaf: Any, fun: Callable[..., Any]) -> Any:
    """Return a result of a function as an operand. Raises TypeError for anything but an array or a number."""
    if isinstance(leaf, Tracer | execution.Array):
        return leaf
    if type(leaf) in NUMBERS:
        return np.asarray(leaf).astype(dtypes.of_python(type(leaf)))
    if hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        if array.dtype in dtypes.KINDS:
            return array.astype(dtypes.canonical(array.dtype), copy=False)
    code = getattr(inspect.unwrap(fun), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    what = f"a result is a {type(leaf).__qualname__}, which is not an array"
    raise TypeError(f"{place}{what}: return arrays, numbers, or trees of them")


def _loaded(program: Program) -> Run:
    """Compile for this process's CPU; return a function from leaves of arguments to leaves of the result."""
    taken = modules.kept(program, False)
    used = Program([program.inputs[i] for i in taken], program.equations, program.outputs, program.constants)
    executable = execution.load(used, dialects.make_context())

    def call(leaves: Sequence[Any], avals: Sequence[ShapedArray]) -> list[execution.Array]:
        placed = [_placed(leaves[i], avals[i]) for i in taken]
        return list(map(execution.Array, execution.executed(executable, placed), executable.results))

    return call


def _compiled(compiled: Compiled, results: Sequence[ShapedArray]) -> Run:
    def call(leaves: Sequence[Any], avals: Sequence[ShapedArray]) -> list[execution.Array]:
        placed = [_placed(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
        given = compiled.call_flat(placed)
        arrays = [leaf if isinstance(leaf, execution.Array) else execution.array(np.asarray(leaf)) for leaf in given]
        pairs = zip(arrays, results, strict=True)
        return [array.as_keys() if aval.dtype is dtypes.KEY else array for array, aval in pairs]

    return call


def _placed(leaf: Any, aval: ShapedArray) -> execution.Array:
    if isinstance(leaf, execution.Array):
        return leaf
    if aval.dtype is dtypes.KEY:  # JAX's dtype: a caller who has such an array has imported JAX
        return execution.array(np.asarray(sys.modules["jax"].random.key_data(leaf))).as_keys()
    if isinstance(leaf, ShapeDtypeStruct):
        raise TypeError(f"{leaf} has no elements: a call takes arrays; trace, lower and eval_shape take this")
    return execution.array(numpy_of(leaf).astype(aval.dtype, copy=False))


def _check(fun: Callable[..., Any], given: Arguments, what: str) -> None:
    """Raise ValueError for numbers and names of arguments that the function does not have."""
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return
    kinds, count = {parameter.kind for parameter in parameters.values()}, len(user_code.positional(fun))
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for number in given.numbers:
            if not -count <= number < count:
                raise ValueError(
                    f"{_name(fun)}: {what}_argnums has {number}, and it takes {count} arguments by position"
                )
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in given.names:
            if name not in parameters:
                takes = ", ".join(parameters) or "no arguments"
                raise ValueError(f"{_name(fun)}: {what}_argnames has {name!r}, and it takes {takes}")


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)
