"""`Traced` of the arrays frontend: a function of arrays, traced by stagec, through the stages.

`frontends.wrapped` has the same for functions of JAX's.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stagec.arrays import dtypes, execution, exporting, meshes, pytrees, tracing
from stagec.arrays.exporting import NOWHERE, Split
from stagec.arrays.namespace import array_object  # noqa: F401 - it gives arrays their operators
from stagec.arrays.namespace.promotion import numpy_of
from stagec.arrays.primitives import contractions
from stagec.arrays.primitives.derivatives import vjp_program
from stagec.arrays.program import Program, constant_bytes, pruned
from stagec.arrays.tracing import Tracer
from stagec.arrays.values import SCALARS, ShapedArray, ShapeDtypeStruct
from stagec.core.builds.specs import CompilerOption
from stagec.core.sizes.avals import Aval, arrow
from stagec.core.trees.tree import LEAF, Tree
from stagec.frontends import array_shardings, updates
from stagec.frontends.jit import NONE, Arguments, Run, Wrapped
from stagec.pjrt import dialects
from stagec.stages.compiled import Compiled
from stagec.stages.exported import Exported
from stagec.stages.info import ArgInfo
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported


@dataclasses.dataclass(frozen=True)
class Options:
    """What `jit` is given beside the function; as its parameters.

    out_shardings: or a function that gives them for the structure of the result.
    refusal: of a function that changes what it is given; None is a ValueError.
    """

    in_shardings: Any = None
    out_shardings: Any = None
    static: Arguments = NONE
    donated: Arguments = NONE
    keep_unused: bool = False
    compiler_options: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)
    refusal: updates.Refusal | None = None


def jit(
    fun: Callable[..., Any],
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    compiler_options: Mapping[str, CompilerOption] | None = None,
    refusal: updates.Refusal | None = None,
) -> Wrapped:
    """Return a function of arrays as a `Wrapped`. Parameters are those of `jax.jit`, and `refusal` that of `Options`.

    Raises ValueError for numbers and names of arguments that the function does not have.
    """
    static = Arguments.of(fun, static_argnums, static_argnames)
    donated = Arguments.of(fun, donate_argnums, donate_argnames)
    _check(fun, static, "static")
    _check(fun, donated, "donate")
    if both := {*static.numbers, *static.names} & {*donated.numbers, *donated.names}:
        raise ValueError(f"{_name(fun)}: argument {min(both, key=str)} is static, so it cannot be donated")
    options = Options(in_shardings, out_shardings, static, donated, keep_unused, compiler_options or {}, refusal)
    return Wrapped(fun, fun, static, _Tracer(fun, options))


class _Tracer:
    """Traces a function of arrays with stagec."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self._fun = fun
        self._options = options

    def within(self) -> bool:
        return tracing.current() is not None

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        options = self._options
        if options.in_shardings is None and options.out_shardings is None:
            return self._fun(*args, **kwargs)
        (dynamic, _), _ = options.static.split(args, kwargs)
        called = _watched(self._fun, options)  # constraints take the arguments apart

        def function(*given: Any) -> Any:
            return called(*options.static.merged(args, given), **kwargs)

        return array_shardings.constrained(function, options.in_shardings, options.out_shardings)(*dynamic)

    def settings(self) -> Hashable:
        return dtypes.x64(), contractions.default_precision(), meshes.around()

    def abstract(self, leaf: Any) -> ShapedArray:
        return abstract(leaf)

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        return Traced(self._fun, self._options, args, kwargs)

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[ShapedArray]) -> tuple[Run, Any]:
        dynamic, _ = self._options.static.split(args, kwargs)
        for leaf, aval in zip(pytrees.flatten(dynamic)[0], known, strict=True):
            _placed(leaf, aval)  # what has no elements is refused before it is compiled for
        traced = self.trace(args, kwargs)
        return _runnable(traced), traced.out_structure

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.trace(args, kwargs).out_avals

    def clear(self) -> None:
        """Nothing is kept of a trace."""


class Traced:
    """A function traced for arguments of certain shapes and dtypes.

    program: what it does, as equations (`as_text`). fun_name: name of the function.
    in_tree: structure of `(args, kwargs)` without the static ones; out_tree: of the result.
    out_structure: jaxlib's PyTreeDef of the result.
    donated: for each argument, whether the caller gives its buffer away.
    """

    def __init__(
        self, fun: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        dynamic, _ = options.static.split(args, kwargs)
        leaves, structure = pytrees.flatten(dynamic)
        avals = list(map(abstract, leaves))
        out: list[Any] = []
        called = _watched(fun, options)

        def flat(*values: Tracer) -> list[Any]:
            given, named = structure.unflatten(values)
            found, out_structure = pytrees.flatten(called(*options.static.merged(args, given), **{**kwargs, **named}))
            out.append(out_structure)
            return [_result(one, fun) for one in found]

        self.fun_name: str = _name(fun)
        self._options = options
        self._structure = structure
        self.program: Program = pruned(tracing.trace(flat, avals, self.fun_name, apart=True).program)
        self.in_tree = pytrees.to_tree(structure)
        self.out_structure = out[0]
        self.out_tree = pytrees.to_tree(self.out_structure)
        self.donated = _donated(options, dynamic, args)
        wanted = options.out_shardings
        wanted = wanted(self.out_structure) if isinstance(wanted, types.FunctionType) else wanted
        positional = pytrees.flatten(dynamic[0])[1]
        self._split = array_shardings.split_of(
            self.program, options.in_shardings, wanted, positional, self.out_structure
        )
        self._parameters = tuple(_parameters(fun, options, kwargs))

    def __repr__(self) -> str:
        return f"Traced({self.fun_name}{arrow(self.program.in_avals, self.program.out_avals)})"

    @property
    def in_avals(self) -> Any:
        """A `ShapeDtypeStruct` for each argument, in the structure `(args, kwargs)`."""
        return self._structure.unflatten(_structs(self.program.in_avals))

    @property
    def out_avals(self) -> Any:
        """A `ShapeDtypeStruct` for each result, in the structure of the result."""
        return self.out_structure.unflatten(_structs(self.program.out_avals))

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
        pairs = zip(self.program.in_avals, self.donated, strict=True)
        return self._structure.unflatten([ArgInfo(aval.shape, aval.dtype, given) for aval, given in pairs])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return tuple(i for i, given_away in enumerate(self.donated) if given_away)

    def as_text(self) -> str:
        """Return the program as text: its equations, one a line."""
        return f"{self.program}\n"

    def lower(self, platforms: Sequence[str] = ("cpu",), *, lowering_platforms: Sequence[str] | None = None) -> Lowered:
        """Return the function lowered to StableHLO for one platform: "cpu", "cuda", "rocm" or "tpu".

        lowering_platforms: JAX's name of `platforms`, which it replaces.
        Raises ValueError for several platforms, and CannotLower where sizes are symbolic: those are bound when an
        `Exported` is called or compiled.
        """
        platforms = lowering_platforms or platforms
        if len(platforms) != 1:
            raise ValueError(f"lower() takes one platform, not {tuple(platforms)}; for several write export(platforms)")
        lowered = lower_exported(self.export(platforms), platforms[0], {})
        return dataclasses.replace(lowered, compiler_options=self._options.compiler_options)

    def export(self, platforms: Sequence[str] = ("cpu",)) -> Exported:
        """Return the function as an exported artifact for several platforms; sizes may be symbolic.

        Its vector-Jacobian product is traced when it is asked for.
        """
        found = _exported(
            self.program,
            self.fun_name,
            pytrees.names(self._structure, self._parameters),
            (_avals(self.program.in_avals), _avals(self.program.out_avals)),
            platforms,
            self._options.keep_unused,
            self.donated,
            self._split,
        )
        return dataclasses.replace(found, in_tree=self.in_tree, out_tree=self.out_tree, _parameters=self._parameters)

    def module_with_locations(self, platforms: Sequence[str] = ("cpu",)) -> Any:
        """Return the module of `export`, in the current context, with the places of its operations in the sources."""
        taken = exporting.kept(self.program, self._options.keep_unused)
        names = pytrees.names(self._structure, self._parameters)
        return exporting.module(self.program, taken, platforms, names, self.donated, located=True, split=self._split)


def _watched(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    refusal = options.refusal or updates.refusal_of(_name(fun))
    return updates.watched(fun, refusal, tracing.operand_of, "NAME = copy.deepcopy(NAME)")


_LARGE = 1 << 20
"""Bytes of constants from which on a module has a context of its own: one that is kept would keep them."""


def _exported(
    program: Program,
    name: str,
    names: Sequence[str],
    avals: tuple[Sequence[Aval], Sequence[Aval]],
    platforms: Sequence[str],
    keep_unused: bool,
    donated: Sequence[bool] = (),
    split: Split = NOWHERE,
) -> Exported:
    """Return a program as an artifact whose arguments and results are flat.

    names: of the arguments. avals: of arguments and results; of those that are float0, the program's are bools.
    """
    taken = exporting.kept(program, keep_unused)
    with dialects.kept_context() if constant_bytes(program) < _LARGE else dialects.make_context():
        serialized = exporting.portable(exporting.module(program, taken, platforms, names, donated, split=split))

    def vjp() -> Exported:
        derived = vjp_program(program)
        in_avals, out_avals = ([_cotangent(one) for one in some] for some in avals)
        both = [*avals[0], *out_avals], in_avals
        given = [*names, *(f"cotangents[{i}]" for i in range(len(out_avals)))]
        of_derived = Split(split.mesh, (*split.inputs, *split.outputs), split.inputs)
        return _exported(derived, f"{name}_vjp", given, both, platforms, keep_unused=True, split=of_derived)

    return Exported(
        fun_name=name,
        in_tree=Tree("tuple", (Tree("tuple", (LEAF,) * len(avals[0])), Tree("dict"))),
        in_avals=tuple(avals[0]),
        out_tree=Tree("tuple", (LEAF,) * len(avals[1])),
        out_avals=tuple(avals[1]),
        nr_devices=split.nr_devices,
        platforms=tuple(platforms),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=serialized,
        calling_convention_version=exporting.CALLING_CONVENTION,
        module_kept_var_idx=taken,
        uses_global_constants=len(platforms) > 1 or bool(exporting.named_sizes(program.in_avals)),
        _in_shardings=array_shardings.named(split.mesh, split.inputs, len(avals[0])),
        _out_shardings=array_shardings.named(split.mesh, split.outputs, len(avals[1])),
        _vjp=vjp,
    )


def _cotangent(aval: Aval) -> Aval:
    """Return the aval of a cotangent: of integers and bools it is float0."""
    floats = aval.dtype[0] in "fc" or aval.dtype == "bf16"
    return Aval(aval.dtype if floats else "f0", aval.shape)


def _avals(avals: Sequence[ShapedArray]) -> tuple[Aval, ...]:
    return tuple(aval.to_aval() for aval in avals)


def _structs(avals: Sequence[ShapedArray]) -> list[ShapeDtypeStruct]:
    with dtypes.enable_x64():  # what is there already stays
        return [ShapeDtypeStruct(aval.shape, aval.dtype, aval.weak_type) for aval in avals]


def abstract(leaf: Any) -> ShapedArray:
    """Return what is known of an argument. Raises TypeError for what is no array and no number."""
    if isinstance(leaf, SCALARS) and type(leaf) in SCALARS:
        dtype = dtypes.of_python(type(leaf))
        if type(leaf) is int and not dtypes.limits(dtype)[0] <= leaf <= dtypes.limits(dtype)[1]:
            raise OverflowError(f"an argument is {leaf}, which is out of the range of {dtype}")
        return ShapedArray((), dtype, weak_type=type(leaf) is not bool)
    if isinstance(leaf, execution.Array):
        return ShapedArray(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray | np.generic):
        return ShapedArray(tuple(leaf.shape), _dtype(leaf))
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return ShapedArray(tuple(leaf.shape), _dtype(leaf), bool(getattr(leaf, "weak_type", False)))
    raise TypeError(
        f"an argument is a {type(leaf).__qualname__}, which is no array: "
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
    """Return a result of a function as an operand. Raises TypeError for what is no array and no number."""
    if isinstance(leaf, Tracer | execution.Array):
        return leaf
    if type(leaf) in SCALARS:
        return np.asarray(leaf).astype(dtypes.of_python(type(leaf)))
    if hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        if array.dtype in dtypes.KINDS:
            return array.astype(dtypes.canonical(array.dtype), copy=False)
    code = getattr(inspect.unwrap(fun), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    what = f"a result is a {type(leaf).__qualname__}, which is no array"
    raise TypeError(f"{place}{what}: return arrays, numbers, or trees of them")


def _runnable(traced: Traced) -> Callable[[Sequence[Any], Sequence[ShapedArray]], list[execution.Array]]:
    """Compile for this process's CPU, and return what takes leaves of arguments and gives those of the result."""
    if traced._options.compiler_options or any(traced.donated) or traced._split.mesh:
        return _compiled(traced.lower().compile(), traced.program.out_avals)
    program = traced.program
    taken = exporting.kept(program, False)
    used = Program([program.inputs[i] for i in taken], program.equations, program.outputs, program.constants)
    executable = execution.load(used, dialects.make_context())

    def call(leaves: Sequence[Any], avals: Sequence[ShapedArray]) -> list[execution.Array]:
        placed = [_placed(leaves[i], avals[i]) for i in taken]
        return list(map(execution.Array, execution.executed(executable, placed), executable.results))

    return call


def _compiled(
    compiled: Compiled, results: Sequence[ShapedArray]
) -> Callable[[Sequence[Any], Sequence[ShapedArray]], list[execution.Array]]:
    def call(leaves: Sequence[Any], avals: Sequence[ShapedArray]) -> list[execution.Array]:
        placed = [_placed(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
        found = compiled.call_flat(placed)
        arrays = [one if isinstance(one, execution.Array) else execution.array(np.asarray(one)) for one in found]
        pairs = zip(arrays, results, strict=True)
        return [one.as_keys() if aval.dtype is dtypes.KEY else one for one, aval in pairs]

    return call


def _placed(leaf: Any, aval: ShapedArray) -> execution.Array:
    if isinstance(leaf, execution.Array):
        return leaf
    if aval.dtype is dtypes.KEY:  # of JAX's, which whoever has such an array has imported
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
    kinds, count = {parameter.kind for parameter in parameters.values()}, len(_positional(fun))
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


def _positional(fun: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _parameters(fun: Callable[..., Any], options: Options, kwargs: Mapping[str, Any]) -> Iterable[str]:
    positional = _positional(fun)
    numbers = (i for i in options.static.numbers if -len(positional) <= i < len(positional))
    static = {*options.static.names, *(positional[i] for i in numbers)}
    return (name for name in positional if name not in static)


def _donated(options: Options, dynamic: Any, args: tuple[Any, ...]) -> tuple[bool, ...]:
    """Return for each leaf of the arguments that are arrays whether it is donated."""
    given, named = dynamic
    static, wanted = options.static.places(len(args)), options.donated.places(len(args))
    places = [i for i in range(len(args)) if i not in static]
    found: list[bool] = []
    for place, tree in zip(places, given, strict=True):
        found += [place in wanted] * len(pytrees.flatten(tree)[0])
    for name in sorted(named):
        found += [name in options.donated.names] * len(pytrees.flatten(named[name])[0])
    return tuple(found)
