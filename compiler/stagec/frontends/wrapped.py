"""`Wrapped` and `Traced`: JAX's first two stages, in front of stagec's own (https://docs.jax.dev/en/latest/jax.stages.html).

Tracing is JAX's. What comes after it (`Lowered`, `Compiled`, `Exported`) needs no JAX: calls are compiled and run by
jaxlib, with numpy arrays in and numpy arrays out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax._src import core

from stagec.core.specs import CompilerOption
from stagec.frontends import callbacks, exporting, kernels
from stagec.frontends.pytrees import check, ours, to_tree
from stagec.frontends.user_code import positional
from stagec.stages.compiled import Compiled
from stagec.stages.exported import Exported
from stagec.stages.info import ArgInfo
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported
from stagec.stages.shardings import NamedSharding

_SETTINGS: Any = jax.config
_REFUSED = {
    "device": "stagec compiles ahead of time, before there is a device: "
    "write in_shardings and out_shardings over a mesh, or name a target when compiling",
    "backend": "stagec compiles for a platform, not for this process's backend: "
    'write lower(platforms=("tpu",)) or export(platforms=("tpu",))',
    "abstracted_axes": "write symbolic dimensions instead: "
    'trace with jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 64"), dtype) and export',
}


def jit(
    fun: Callable[..., Any] | None,
    options: Mapping[str, Any],
    compiler_options: Mapping[str, CompilerOption],
    host_callbacks: str,
    refused: Iterable[str],
) -> Any:
    """Return `fun` as a `Wrapped`; without `fun`, a decorator. `staging.jit` says what the parameters mean.

    options: those of `jax.jit`, with shardings of ours too. refused: names that were given besides.
    """
    for name in refused:
        if name in _REFUSED:
            raise TypeError(f"jit() does not take {name}: {_REFUSED[name]}")
        raise TypeError(f"jit() got an unexpected keyword argument {name!r}")
    if host_callbacks not in ("refuse", "drop"):
        raise ValueError(f'host_callbacks is {host_callbacks!r}; write "refuse" or "drop"')
    options = dict(options)
    for name in ("in_shardings", "out_shardings"):
        shardings = options.pop(name)
        if shardings is not None:
            options[name] = jax.tree.map(_to_jax, shardings)

    def wrap(fun: Callable[..., Any]) -> Wrapped:
        return Wrapped(fun, options, compiler_options, host_callbacks)

    return wrap if fun is None else wrap(fun)


class Wrapped:
    """A function that is ready to be traced, lowered and compiled; calling it does all of it, once per signature.

    Made by `jit`. Methods are those of `jax.stages.Wrapped`
    (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Wrapped) and of what `jax.jit` returns. In a class it is
    a method, as there: the instance is the first argument of a call, `Class.method.lower(instance, ...)` passes it by
    hand.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        compiler_options: Mapping[str, CompilerOption],
        host_callbacks: str,
    ) -> None:
        jitted: Any = jax.jit(fun, **options)
        # First of all: the function's attributes come along, and may have names of ours.
        functools.update_wrapper(self, jitted)
        self.__wrapped__ = fun
        self._jitted = jitted
        self._compiler_options = compiler_options
        self._host_callbacks = host_callbacks
        self._static_argnums, self._static_argnames = _static(fun, options)
        names = positional(fun)
        static = {*self._static_argnames, *(names[i] for i in self._static_argnums if -len(names) <= i < len(names))}
        self._parameters = tuple(name for name in names if name not in static)
        self._compiled: dict[Any, tuple[Compiled, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on this machine's CPU: numpy or JAX arrays in, numpy arrays out, in the user's own types.

        A PRNG key comes back as its uint32 words. While JAX traces or transforms a caller, `jax.jit` is called; under
        `jax.disable_jit` the function itself, with the arguments as they are, as in JAX. Raises what the function
        raises while it is traced, ValueError for a static argument without a hash, CannotCompile when XLA refuses the
        program, and NotImplementedError for callbacks into Python.
        """
        if not core.trace_state_clean():
            with callbacks.handling(self._host_callbacks):
                return self._jitted(*args, **kwargs)
        if _SETTINGS.jax_disable_jit:
            with callbacks.handling(self._host_callbacks):
                return jax.tree.map(_from_jax, self.__wrapped__(*args, **kwargs))
        dynamic, key = self._split(args, kwargs)
        leaves, structure = jax.tree.flatten(dynamic)
        avals = [jax.typeof(leaf) for leaf in leaves]
        signature = (key, structure, tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals))
        try:
            known = signature in self._compiled
        except TypeError:
            self.trace(*args, **kwargs)  # JAX says which argument has no hash
            raise
        if not known:
            traced = self.trace(*args, **kwargs)
            self._compiled[signature] = traced.lower().compile(), traced.out_structure
        compiled, out_structure = self._compiled[signature]
        return jax.tree.unflatten(out_structure, compiled.call_flat(list(map(_words, leaves))))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an instance; of the class, this function."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Return the function as a jaxpr, for arguments like these: arrays, or `jax.ShapeDtypeStruct`.

        Static arguments are given as values. Raises what the function raises.
        """
        return Traced(self._jitted, args, kwargs, self._compiler_options, self._host_callbacks, self._parameters)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the function lowered for CPUs: `trace(*args, **kwargs).lower()`; it raises what these do."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result's shapes and dtypes for arguments like these, as a tree of `jax.ShapeDtypeStruct`.

        As `jax.eval_shape` (https://docs.jax.dev/en/latest/_autosummary/jax.eval_shape.html); nothing is compiled.
        """
        with callbacks.handling(self._host_callbacks):
            return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget what was traced and compiled: the next call does it again."""
        self._jitted.clear_cache()
        self._compiled.clear()

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments that are no static ones, and those that are, by position and name."""
        numbers = {number % len(args) for number in self._static_argnums if -len(args) <= number < len(args)}
        positional = tuple(value for i, value in enumerate(args) if i not in numbers)
        named = {name: value for name, value in kwargs.items() if name not in self._static_argnames}
        static = (
            tuple((i, args[i]) for i in sorted(numbers)),
            tuple((name, kwargs[name]) for name in sorted(kwargs) if name not in named),
        )
        return (positional, named), static

    def __repr__(self) -> str:
        return f"Wrapped({getattr(self, '__name__', self._jitted)})"


class Traced:
    """A function traced for arguments of certain shapes and dtypes.

    Fields and methods are those of `jax.stages.Traced`
    (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Traced), and `export`.

    jaxpr: JAX's closed jaxpr.
    fun_name: name of the function.
    in_tree: structure of `(args, kwargs)` without the static ones; out_tree: of the result.
    out_structure: JAX's PyTreeDef of the result, which knows the user's own types.
    args_info: an `ArgInfo` for each argument, in the structure `(args, kwargs)` of the user's own types; its dtype is
        JAX's where numpy has none (PRNG keys).
    donate_argnums: indices of the donated arguments, among the leaves of the arguments.
    """

    def __init__(
        self,
        jitted: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compiler_options: Mapping[str, CompilerOption],
        host_callbacks: str,
        parameters: tuple[str, ...],
    ) -> None:
        with callbacks.handling(host_callbacks):
            self._traced = jitted.trace(*args, **kwargs)
        self._host_callbacks = host_callbacks
        self._parameters = parameters
        self._export = functools.partial(_export, _AsTraced(self._traced), host_callbacks, args, kwargs)
        self._compiler_options = compiler_options
        self.jaxpr = self._traced.jaxpr
        self.fun_name: str = self._traced.fun_name
        self.in_tree = to_tree(self._traced.in_tree)
        self.out_structure = self._traced.out_tree
        self.out_tree = to_tree(self.out_structure)
        self.args_info = jax.tree.map(
            lambda info: ArgInfo(tuple(info.shape), info.dtype, info.donated),
            self._traced.args_info,
            is_leaf=lambda info: hasattr(info, "donated"),
        )
        self.donate_argnums: tuple[int, ...] = self._traced.donate_argnums

    @property
    def in_avals(self) -> Any:
        """JAX's aval of each argument, in the structure `(args, kwargs)` of the user's own types."""
        return self._traced.in_avals

    @property
    def out_avals(self) -> Any:
        """JAX's aval of each result, in the structure of the result."""
        return self._traced.out_avals

    @property
    def out_info(self) -> Any:
        """A `jax.ShapeDtypeStruct` for each result, with the sharding that was asked for."""
        return self._traced.out_info

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what JAX gives when it evaluates the jaxpr, operation by operation: JAX's arrays, or its tracers."""
        return self._traced(*args, **kwargs)

    def lower(self, platforms: Sequence[str] = ("cpu",)) -> Lowered:
        """Return the function lowered to StableHLO for one platform: "cpu", "cuda", "rocm" or "tpu".

        Raises ValueError for several platforms, NotImplementedError for callbacks into Python, and CannotLower where
        dimensions are symbolic: those are bound to sizes when an `Exported` is called or compiled.
        """
        if len(platforms) != 1:
            raise ValueError(f"lower() takes one platform, not {tuple(platforms)}; for several write export(platforms)")
        # An executable is for one compiler: nothing needs to be in an older form, or guaranteed.
        with kernels.newest():
            ours = _ours(self._export(platforms, (), any_custom_call=True), self._host_callbacks, self._parameters)
        return dataclasses.replace(lower_exported(ours, platforms[0], {}), compiler_options=self._compiler_options)

    def export(
        self, platforms: Sequence[str] = ("cpu",), disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = ()
    ) -> Exported:
        """Return the function as an exported artifact for several platforms; dimensions may be symbolic.

        disabled_checks: those of `jax.export.export`.
        Raises StagecError with every type in the trees that cannot be described, and the line to add for each. To read
        the artifact, JAX wants each type of the user's own registered (`jax.export.register_pytree_node_serialization`,
        under the name that `in_tree` and `out_tree` have).
        """
        exported = self._export(platforms, disabled_checks)
        check("", self.fun_name, {"the arguments have": exported.in_tree, "the result has": exported.out_tree})
        return _ours(exported, self._host_callbacks, self._parameters)


class _AsTraced:
    """A `jax.stages.Wrapped` that was traced: `jax.export` lowers what it gives, and traces nothing again.

    It would otherwise see other settings of JAX's, of those that are set for a while (`jax.enable_x64`, a mesh).
    """

    def __init__(self, traced: Any) -> None:
        self._traced = traced
        self.__name__ = traced.fun_name

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced

    __call__ = lower = eval_shape = trace


def _export(
    traced: _AsTraced,
    host_callbacks: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    platforms: Sequence[str],
    checks: Sequence[Any],
    any_custom_call: bool = False,
) -> jax.export.Exported:
    """Return JAX's export. any_custom_call: also of calls without a guarantee for later versions of their provider."""
    function: Any = traced
    try:
        with callbacks.handling(host_callbacks):
            if any_custom_call:
                return exporting.export(function, args, kwargs, platforms, checks, lambda _: None)
            return jax.export.export(function, platforms=list(platforms), disabled_checks=list(checks))(*args, **kwargs)
    except Exception as error:
        if found := callbacks.sentences(traced.trace().jaxpr.jaxpr, platforms, traced.__name__):
            raise NotImplementedError("\n".join(found)) from error
        raise


def _ours(exported: jax.export.Exported, host_callbacks: str, parameters: tuple[str, ...] = ()) -> Exported:
    """Return JAX's `Exported` as ours; its vector-Jacobian product is made when it is asked for, once."""

    @functools.cache
    def vjp() -> Exported:
        with callbacks.handling(host_callbacks):
            return _ours(exported.vjp(), host_callbacks)

    return dataclasses.replace(ours(exported), _vjp=vjp if exported.has_vjp() else None, _parameters=parameters)


def _static(fun: Callable[..., Any], options: Mapping[str, Any]) -> tuple[tuple[int, ...], frozenset[str]]:
    """Return numbers and names of the static arguments; as in JAX, one is found from the other."""
    numbers, names = options["static_argnums"], options["static_argnames"]
    numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return numbers, frozenset(names)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in parameters if p.kind in kinds]
    if not numbers:
        numbers = tuple(i for i, name in enumerate(positional) if name in names)
    if not names:
        names = tuple(positional[number] for number in numbers if -len(positional) <= number < len(positional))
    return numbers, frozenset(names)


def _to_jax(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    types = tuple(jax.sharding.AxisType[name] for name in sharding.mesh.axis_types)
    mesh = jax.sharding.AbstractMesh(sharding.mesh.axis_sizes, sharding.mesh.axis_names, types)
    entries = [axes or None for axes in sharding.spec.partitions]
    spec = jax.sharding.PartitionSpec(
        *entries, unreduced=frozenset(sharding.spec.unreduced), reduced=frozenset(sharding.spec.reduced)
    )
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def _words(leaf: Any) -> Any:
    """Return an argument as the compiled function takes it: of a PRNG key its words."""
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf


def _from_jax(leaf: Any) -> Any:
    """Return what a function gave as a call does: JAX's arrays as numpy's."""
    return np.asarray(_words(leaf)) if isinstance(leaf, jax.Array) else leaf


def _is_key(array: jax.Array) -> bool:
    return jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
