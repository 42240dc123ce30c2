"""`Traced` of the JAX frontend, in front of stagec's own stages (https://docs.jax.dev/en/latest/jax.stages.html).

Tracing is JAX's. What comes after it (`Lowered`, `Compiled`, `Exported`) needs no JAX: calls are compiled and run by
jaxlib, with numpy arrays in and numpy arrays out.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax._src import config, core, mesh
from jax.extend import source_info_util

from stagec.core.builds.specs import CompilerOption
from stagec.core.sizes.avals import arrow
from stagec.frontends import callbacks, exporting, forwarding, kernels, updates
from stagec.frontends.jit import Arguments, Run, Wrapped, flatten, static_key
from stagec.frontends.pytrees import check, ours, to_tree
from stagec.frontends.user_code import positional
from stagec.pjrt.static_data import StaticData
from stagec.stages.exported import Exported
from stagec.stages.info import ArgInfo
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported
from stagec.stages.shardings import NamedSharding

_SETTINGS: Any = jax.config
_DEVICES: Any = (vars(config) | vars(mesh))["device_context"]
"""The concrete mesh around a call; in `config` before JAX 0.12."""
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
        static = Arguments.of(fun, options["static_argnums"], options["static_argnames"])
        tracer = _Tracer(fun, options, static, compiler_options, host_callbacks)
        return Wrapped(fun, tracer.jitted, static, tracer)

    return wrap if fun is None else wrap(fun)


class _Tracer:
    """Traces a function with JAX; `jitted` is what `jax.jit` makes of it.

    JAX keeps what it traced, by static values that it compares with `==` below the first level, and without some
    settings. So each of our keys has a function of its own, which JAX has not seen.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        static: Arguments,
        compiler_options: Mapping[str, CompilerOption],
        host_callbacks: str,
    ) -> None:
        self.jitted: Any = jax.jit(fun, **options)
        self._fun = fun
        self._options = options
        self._static = static
        self._compiler_options = compiler_options
        self._host_callbacks = host_callbacks
        names = positional(fun)
        left_out = {*static.names, *(names[i] for i in static.numbers if -len(names) <= i < len(names))}
        self._parameters = tuple(name for name in names if name not in left_out)
        self._apart: dict[Hashable, Any] = {}

    def within(self) -> bool:
        return not core.trace_state_clean() or bool(_SETTINGS.jax_disable_jit)

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with callbacks.handling(self._host_callbacks):
            if not core.trace_state_clean():
                return self._jitted_for(args, kwargs)(*args, **kwargs)
            return jax.tree.map(_from_jax, self._fun(*args, **kwargs))

    def settings(self) -> Hashable:
        return config.trace_context(), _DEVICES.value, _beyond()

    def abstract(self, leaf: Any) -> Hashable:
        aval = jax.typeof(leaf)
        if type(leaf) is not np.ndarray and isinstance(leaf, jax.Array):  # to ask the second takes a microsecond
            return aval, leaf.sharding if leaf.committed else None
        return aval.shape, aval.dtype, aval.weak_type

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        jitted = self._jitted_for(args, kwargs)
        return Traced(jitted, args, kwargs, self._compiler_options, self._host_callbacks, self._parameters)

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[Any]) -> tuple[Run, Any]:
        traced = self.trace(args, kwargs)
        compiled = traced.lower().compile()

        def run(leaves: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            return compiled.call_flat(list(map(_words, leaves)))

        return run, traced.out_structure

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with callbacks.handling(self._host_callbacks):
            return self._jitted_for(args, kwargs).eval_shape(*args, **kwargs)

    def clear(self) -> None:
        self.jitted.clear_cache()
        self._apart.clear()

    def _jitted_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the function under `jax.jit`, for these static values and settings alone."""
        dynamic, static = self._static.split(args, kwargs)
        nodes = StaticData.of(flatten(dynamic)[1]).key()
        key = static_key(self.jitted.__name__, static), nodes, _beyond()
        if key not in self._apart:
            self._apart[key] = jax.jit(_another(self._fun, self.jitted.__name__), **self._options)
        return self._apart[key]


_BEYOND = (
    *("jax_default_prng_impl", "jax_enable_custom_prng", "jax_legacy_prng_key", "jax_bcoo_cusparse_lowering"),
    *("jax_ragged_dot_use_ragged_dot_instruction", "jax_refs_to_pins", "jax_mosaic_allow_hlo"),
    *("jax_pallas_poison_buffers", "jax_pallas_auto_assign_collective_ids", "jax_mosaic_unzip_debug_locations"),
    "jax_use_rgv3",
)
"""Settings that change a program, and that JAX leaves out of its trace context, of all releases."""


_beyond = functools.partial(operator.attrgetter(*filter(functools.partial(hasattr, _SETTINGS), _BEYOND)), _SETTINGS)


def _another(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that does the same, that JAX has not seen, and that refuses an update that is lost."""
    _exclude_our_files()
    another = forwarding.watched(fun, updates.refusal_of(name))
    another.__name__ = name  # a partial has none of its own
    return another


@functools.cache
def _exclude_our_files() -> None:
    """Let JAX pass over these files where it says which line of the user's made an operation."""
    for file in (__file__, updates.__file__):
        source_info_util.register_exclusion(file)


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

    def __repr__(self) -> str:
        avals = self.jaxpr.in_avals, self.jaxpr.out_avals
        inputs, outputs = ([aval.str_short(short_dtypes=True) for aval in side] for side in avals)
        return f"Traced({self.fun_name}{arrow(inputs, outputs)})"

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

    def lower(self, platforms: Sequence[str] = ("cpu",), *, lowering_platforms: Sequence[str] | None = None) -> Lowered:
        """Return the function lowered to StableHLO for one platform: "cpu", "cuda", "rocm" or "tpu".

        lowering_platforms: JAX's name of `platforms`, which it replaces.
        Raises ValueError for several platforms, NotImplementedError for callbacks into Python, and CannotLower where
        dimensions are symbolic: those are bound to sizes when an `Exported` is called or compiled.
        """
        platforms = lowering_platforms or platforms
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
