"""The first two stages of every frontend: `Wrapped` (the result of `jit`) and `Traced`.

A frontend's `Tracing` knows how to trace, and the properties of an array that a program depends on. Everything else is
here, once: the static arguments, the caches of calls, and their keys. The key has static values and static data of
nodes by type and value (`core.trees.same`), structure, arrays, and every setting that changes a program.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, overload

from stagec.core.builds.specs import CompilerOption
from stagec.core.sizes.avals import arrow
from stagec.core.trees.tree import Tree
from stagec.frontends.common.parameters import Arguments, flatten, static_key
from stagec.pjrt.static_data import StaticData
from stagec.stages.exported import Exported
from stagec.stages.info import ArgInfo, donate_argnums
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Run: TypeAlias = "Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]"
"""Takes the leaves of a call and `abstract` of each, and gives the leaves of the result."""


class Tracing(Protocol):
    """How a frontend traces one function, and runs the trace.

    static: the static arguments. like: an object with the function's name and signature.
    """

    static: Arguments
    like: Any

    def within(self) -> bool:
        """Whether a call is part of a trace around it, or runs in a mode without compilation."""

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that is part of something else."""

    def settings(self) -> Hashable:
        """Return everything that changes a program and is neither an argument nor an option."""

    def abstract(self, leaf: Any) -> Hashable:
        """Return the properties of an argument that a program depends on. Raises TypeError for no array or number."""

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        """Return the function traced for arguments like these. Raises the errors of the function."""

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[Any]) -> tuple[Run, Any]:
        """Return a function for calls like this, and the structure of its results. known: `abstract` of the leaves."""

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return shapes and dtypes of the results, in their structure."""

    def clear(self) -> None:
        """Forget all traces."""


class Wrapped(Generic[P, R_co]):
    """A function that can be traced, lowered and compiled. Calling it does all of that, once per signature.

    `jit` makes it. Methods are those of `jax.stages.Wrapped`
    (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Wrapped) and of the result of `jax.jit`. In a class it is
    a method, as in JAX: the instance is the first argument of a call, and you pass it yourself in
    `Class.method.lower(instance, ...)`.

    A signature consists of the structure, shapes and dtypes of the arguments, of the static values by type and value,
    and of all settings that change a program, such as `jax.enable_x64` or a mesh.

    For type checkers it has the function's parameters, and its results with arrays of NumPy or of stagec.
    """

    def __init__(self, fun: Callable[..., Any], tracer: Tracing) -> None:
        # First of all: the function's attributes come along, and may have names of ours.
        functools.update_wrapper(self, tracer.like)
        self.__wrapped__ = fun
        self._static = tracer.static
        self._tracer = tracer
        self._compiled: dict[Hashable, list[tuple[StaticData, Run, Any]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function on this machine's CPU, and return the result in your own types.

        A function of JAX takes numpy or JAX arrays and returns numpy arrays; a PRNG key comes back as its uint32 words.
        A function of `stagec_arrays.numpy` returns its arrays. While JAX traces or transforms a caller, this calls
        `jax.jit`; under `jax.disable_jit` it calls the function itself, with the arguments as they are, as JAX does.
        Under `jax_debug_nans` and `jax_debug_infs` it calls `jax.jit`, which looks at the results. Inside a function
        that stagec traces, it becomes part of that function: its shardings are constraints, and it donates nothing.

        Raises the errors of the function while it is traced, ValueError for a static argument without a hash,
        CannotCompile if XLA refuses the program, and NotImplementedError for callbacks into Python.
        """
        tracer = self._tracer
        if tracer.within():
            within: R_co = tracer.call_within(args, kwargs)
            return within
        dynamic, static = self._static.split(args, kwargs)
        leaves, structure = flatten(dynamic)
        known = tuple(map(tracer.abstract, leaves))
        key = static_key(self, static), structure, known, tracer.settings()
        kept = self._compiled.setdefault(key, [])
        for entry in kept:
            if entry[0].same(structure):
                break
        else:
            entry = StaticData.of(structure), *tracer.runner(args, kwargs, known)
            kept.append(entry)
        _, run, out_structure = entry
        result: R_co = out_structure.unflatten(run(leaves, known))
        return result

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R_co]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an instance; of the class, this function."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Return the function as a `Traced`, for arguments like these: arrays, or `ShapeDtypeStruct`.

        Pass static arguments as values. Raises the errors of the function.

        >>> import numpy as np
        >>> stagec.jit(lambda x: x * 2).trace(stagec_arrays.ShapeDtypeStruct((3,), np.float32)).export()
        Exported(<lambda>(f32[3]) -> (f32[3]), for cpu)
        """
        return self._tracer.trace(args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the function lowered for CPUs: `trace(*args, **kwargs).lower()`, with the same errors."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result's shapes and dtypes for arguments like these, as a tree of `ShapeDtypeStruct`.

        As `jax.eval_shape` (https://docs.jax.dev/en/latest/_autosummary/jax.eval_shape.html); nothing is compiled.
        """
        return self._tracer.eval_shape(args, kwargs)

    def clear_cache(self) -> None:
        """Forget all traces and executables: the next call makes them again."""
        self._tracer.clear()
        self._compiled.clear()

    def __repr__(self) -> str:
        return f"Wrapped({getattr(self, '__name__', self.__wrapped__)})"


@dataclass(frozen=True, eq=False)
class Traced:
    """A function traced for arguments of certain shapes and dtypes.

    Fields and methods are those of `jax.stages.Traced`
    (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Traced), and `export`.

    fun_name: name of the function.
    program: its equations: JAX's closed jaxpr, or a program of stagec.
    in_tree: structure of `(args, kwargs)` without the static ones.
    out_tree: structure of the result.
    in_structure: `in_tree` as jaxlib's PyTreeDef, which knows your own types.
    out_structure: `out_tree` as jaxlib's PyTreeDef.
    flat_in_avals: for each argument JAX's aval or a `ShapeDtypeStruct`, in the order of the tree's leaves.
    flat_out_avals: the same for each result.
    donated: for each argument, whether the caller gives its buffer away.
    """

    fun_name: str
    program: Any
    in_tree: Tree
    out_tree: Tree
    in_structure: Any
    out_structure: Any
    flat_in_avals: Sequence[Any]
    flat_out_avals: Sequence[Any]
    donated: Sequence[bool]
    _compiler_options: Mapping[str, CompilerOption]
    # Writes an aval of the program in one word.
    _short: Callable[[Any], str]
    _out_info: Callable[[], Any]
    # Takes the function's arguments except static ones, and evaluates the program.
    _evaluate: Callable[..., Any]
    # Takes platforms, JAX's checks that are off, and whether the module is for one compiler, in the newest form.
    _export: Callable[[Sequence[str], Sequence[Any], bool], Exported]
    # Raises StagecError for types in the trees that cannot be described; None: all are.
    _check_trees: Callable[[], None] | None = None

    def __repr__(self) -> str:
        inputs, outputs = map(self._short, self.program.in_avals), map(self._short, self.program.out_avals)
        return f"Traced({self.fun_name}{arrow(list(inputs), list(outputs))})"

    @property
    def jaxpr(self) -> Any:
        """JAX's name of `program`."""
        return self.program

    @property
    def in_avals(self) -> Any:
        """The aval of each argument, in the structure `(args, kwargs)` of your own types."""
        return self.in_structure.unflatten(self.flat_in_avals)

    @property
    def out_avals(self) -> Any:
        """The aval of each result, in the structure of the result."""
        return self.out_structure.unflatten(self.flat_out_avals)

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)` of your own types.

        Its dtype is JAX's if numpy has none (PRNG keys).
        """
        pairs = zip(self.flat_in_avals, self.donated, strict=True)
        return self.in_structure.unflatten([ArgInfo(tuple(aval.shape), aval.dtype, given) for aval, given in pairs])

    @property
    def out_info(self) -> Any:
        """A `ShapeDtypeStruct` for each result; JAX's has the requested sharding."""
        return self._out_info()

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return donate_argnums(self.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the program's results, evaluated operation by operation: the frontend's arrays, or its tracers."""
        return self._evaluate(*args, **kwargs)

    def as_text(self) -> str:
        """Return the program as a string: its equations, one a line."""
        return f"{self.program}\n"

    def lower(self, platforms: Sequence[str] = ("cpu",), *, lowering_platforms: Sequence[str] | None = None) -> Lowered:
        """Return the function lowered to StableHLO for one platform: "cpu", "cuda", "rocm" or "tpu".

        lowering_platforms: JAX's name of `platforms`, which it replaces.
        Raises ValueError for several platforms, NotImplementedError for callbacks into Python, and CannotLower if sizes
        are symbolic: calling or compiling an `Exported` binds them.
        """
        platforms = lowering_platforms or platforms
        if len(platforms) != 1:
            raise ValueError(f"lower() takes one platform, not {tuple(platforms)}; for several write export(platforms)")
        lowered = lower_exported(self._export(platforms, (), True), platforms[0], {})
        return replace(lowered, compiler_options=self._compiler_options, _check_trees=self._check_trees)

    def export(self, platforms: Sequence[str] = ("cpu",), disabled_checks: Sequence[Any] = ()) -> Exported:
        """Return the function as an exported artifact for several platforms; sizes may be symbolic.

        disabled_checks: those of `jax.export.export`, for a function that JAX traced.
        Raises StagecError with every type in the trees that cannot be described, and the line to add for each, and
        TypeError for `disabled_checks` if JAX does not export. To read the artifact, JAX wants each of
        your own types registered (`jax.export.register_pytree_node_serialization`, under the name that `in_tree` and
        `out_tree` have).
        """
        return self._export(platforms, disabled_checks, False)
